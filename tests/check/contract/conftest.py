"""Good checkpoints of every kind, made by real conversions, and copies of them to break."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from converted import GOOD, Converted, Kind, copy_of
from made_once import made_once

from scripts.fixture_maker.folder import SmallCheckpoint, read_small, write_small

KEEP = 4  # experts; as many as a token chooses


def cut_experts(checkpoint: SmallCheckpoint, count: int) -> None:
    """Drop every expert from `count` on, and cut router and config to match."""
    for shard, members in checkpoint.shards.items():
        tensors = {n: t for n, t in members.items() if int(n.partition(".experts.")[2].partition(".")[0] or 0) < count}
        checkpoint.shards[shard] = {n: t[:count] if ".mlp.gate." in n else t for n, t in tensors.items()}
    checkpoint.config.get("text_config", checkpoint.config)["n_routed_experts"] = count


@pytest.fixture(scope="session")
def sources(tiny: Path, k25: Path, reap: Path, checkpoints: Path) -> dict[str, Path]:
    """INT4 sources by name style. Two of them have few experts, to be quick."""

    def make(whole: Path, folder: Path) -> None:
        checkpoint = read_small(whole)
        cut_experts(checkpoint, KEEP)
        write_small(checkpoint, folder)

    few = {"thinking": tiny, "k2.5": k25}
    folders = {name: made_once(checkpoints / f"few-{name}", partial(make, whole)) for name, whole in few.items()}
    return {"reap": reap, "tiny": tiny, **folders}


@pytest.fixture(scope="session")
def convert(convert_source: Callable[..., Path], sources: dict[str, Path]) -> Callable[[Kind], Converted]:
    """Convert by kind, once a session."""
    return lambda kind: Converted(kind, convert_source(sources[kind.source], **kind.recipe), sources[kind.source])


@pytest.fixture(params=GOOD, ids=str)
def good(request: pytest.FixtureRequest, convert: Callable[[Kind], Converted]) -> Converted:
    """A good checkpoint of every kind. Read it only."""
    return convert(request.param)


@pytest.fixture(params=[GOOD[0], GOOD[-1]], ids=str)
def breakable(request: pytest.FixtureRequest, convert: Callable[[Kind], Converted], tmp_path: Path) -> Converted:
    """A copy of a good checkpoint to break: modelopt in K2-Thinking's names, compressed-tensors in K2.5's."""
    return copy_of(convert(request.param), tmp_path / "copy")


@pytest.fixture
def modelopt(convert: Callable[[Kind], Converted], tmp_path: Path) -> Converted:
    """A copy of a good checkpoint in the modelopt layout, to break."""
    return copy_of(convert(GOOD[0]), tmp_path / "copy")


@pytest.fixture
def packed(convert: Callable[[Kind], Converted], tmp_path: Path) -> Converted:
    """A copy of a good checkpoint in the compressed-tensors layout and K2.5's names, to break."""
    return copy_of(convert(GOOD[-1]), tmp_path / "copy")


@pytest.fixture
def weight_only(convert: Callable[[Kind], Converted], tmp_path: Path) -> Converted:
    """A copy of a good W4A16 checkpoint in the modelopt layout, to break."""
    return copy_of(convert(GOOD[1]), tmp_path / "copy")
