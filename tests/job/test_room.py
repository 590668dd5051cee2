"""Room for streamed jobs: what is planned suffices, what cannot fit is refused, holes really free blocks."""

import itertools
import os
from pathlib import Path

import pytest

from k2convert.checkpoint.holes import ShrinkingFile, can_punch_holes
from k2convert.cli.options import parse_size
from k2convert.errors import PlanError
from k2convert.job.room import SHRINK_SLACK_BYTES, Item, plan_disk

ITEMS = (Item("a", ("1",), 100), Item("b", ("2",), 300), Item("c", ("3",), 100))
SOURCES = {"1": 100, "2": 290, "3": 100}


def test_room_for_the_largest_shard_and_its_result_is_enough() -> None:
    found = plan_disk(ITEMS, source_bytes=SOURCES, room=590, outputs_leave=True, can_shrink=False)
    assert (found.needed_bytes, found.shrinking) == (590, frozenset())


def test_results_that_stay_are_counted() -> None:
    found = plan_disk(ITEMS, source_bytes=SOURCES, room=1000, outputs_leave=False, can_shrink=False)
    assert found.needed_bytes == 100 + 290 + 300


def test_a_source_that_several_shards_need_stays_until_the_last() -> None:
    items = (Item("a", ("1", "2"), 10), Item("b", ("3",), 10), Item("c", ("1",), 10))
    sources = {"1": 100, "2": 50, "3": 70}
    found = plan_disk(items, source_bytes=sources, room=500, outputs_leave=True, can_shrink=True)
    assert found.needed_bytes == 100 + 70 + 10


def test_tight_room_makes_the_source_shrink_as_the_result_grows() -> None:
    items = tuple(Item(i.name, i.sources, i.output_bytes * 10_000) for i in ITEMS)
    sources = {name: size * 10_000 for name, size in SOURCES.items()}
    room = 3_000_000 + SHRINK_SLACK_BYTES
    tight = plan_disk(items, source_bytes=sources, room=room, outputs_leave=True, can_shrink=True)
    assert (tight.shrinking, tight.needed_bytes) == ({"b"}, room)
    whole = plan_disk(items, source_bytes=sources, room=room, outputs_leave=True, can_shrink=False)
    assert (whole.shrinking, whole.needed_bytes) == (frozenset(), 5_900_000)


@pytest.mark.parametrize("room", [500, 0, -1_134_806])
@pytest.mark.parametrize(("leave", "needed"), [(True, 590), (False, 690)])
def test_the_need_is_the_same_in_any_room(room: int, leave: bool, needed: int) -> None:
    found = plan_disk(ITEMS, source_bytes=SOURCES, room=room, outputs_leave=leave, can_shrink=False)
    assert found.needed_bytes == needed


def test_local_sources_take_no_room() -> None:
    found = plan_disk(ITEMS, source_bytes={}, room=300, outputs_leave=True, can_shrink=False)
    assert found.needed_bytes == 300


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


def test_a_consumed_file_gives_its_blocks_back_in_any_order(tmp_path: Path) -> None:
    if not can_punch_holes(tmp_path):
        pytest.skip("this filesystem cannot punch holes")
    path = tmp_path / "source"
    path.write_bytes(os.urandom(1_000_000))
    file = ShrinkingFile(path)
    bounds = [0, 10, 5000, 5001, 300_000, 700_003, 1_000_000]
    spans = list(itertools.pairwise(bounds))
    for begin, end in [*spans[1::2], *spans[::2]]:
        file.consume(begin, end)
    assert path.stat().st_size == 1_000_000
    assert path.stat().st_blocks * 512 <= 4096
    assert not any(path.read_bytes()[:999_000])


def test_asking_for_holes_leaves_nothing_and_needs_no_right_to_write(tmp_path: Path) -> None:
    can_punch_holes(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not can_punch_holes(Path("/proc"))
