"""Room for streamed jobs: what is planned suffices, and sizes are read as people write them."""

import pytest

from k2convert.cli.options import parse_size
from k2convert.errors import PlanError
from k2convert.job.resources import Item, least_room

ITEMS = (Item("a", ("1",), 100), Item("b", ("2",), 300), Item("c", ("3",), 100))
SOURCES = {"1": 100, "2": 290, "3": 100}


def test_the_least_room() -> None:
    assert least_room(ITEMS, source_bytes=SOURCES, outputs_leave=True) == 590, "the largest shard and its result"
    assert least_room(ITEMS, source_bytes=SOURCES, outputs_leave=False) == 100 + 290 + 300, "results that stay"
    assert least_room(ITEMS, source_bytes={}, outputs_leave=True) == 300, "local sources need none"
    items = (Item("a", ("1", "2"), 10), Item("b", ("3",), 10), Item("c", ("1",), 10))
    needed = least_room(items, source_bytes={"1": 100, "2": 50, "3": 70}, outputs_leave=True)
    assert needed == 100 + 70 + 10, "a source that several shards need stays until the last"


@pytest.mark.parametrize(
    ("text", "count"),
    [("200GB", 200 * 10**9), ("1.5TB", 1_500_000_000_000), ("64GiB", 64 << 30), ("12345", 12345), ("3 mb", 3_000_000)],
)
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", "all", "9" * 400 + "GB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a size"):
        parse_size(text)
