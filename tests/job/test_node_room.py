"""Rooms of tasks on a node: nothing outside them is touched, whatever lies in the folder for temporary files."""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from k2convert.errors import DestinationError, DiskFullError
from k2convert.job.ray import new_rooms, open_room

ROOMS = "k2convert-ray-0123456789abcdef"
EARLIER = "k2convert-ray-fedcba9876543210"


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "victim"
    folder.mkdir(mode=0o700)
    (folder / "lock").write_text("precious")
    return folder


def enter(rooms: str = ROOMS) -> str:
    with open_room(rooms, shard_bytes=1, max_disk=2) as folder:
        (folder / "shard").write_bytes(b"x")
        return str(folder.resolve())


def link_as_room(path: Path, victim: Path) -> None:
    path.symlink_to(victim, target_is_directory=True)


def link_as_lock(path: Path, victim: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "lock").symlink_to(victim / "lock")


def pipe_as_room(path: Path, _: Path) -> None:
    os.mkfifo(path)


def pipe_as_lock(path: Path, _: Path) -> None:
    path.mkdir(mode=0o700)
    os.mkfifo(path / "lock")


def open_to_others(path: Path, _: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def of_another_user(path: Path, _: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives folders away")
    path.mkdir(mode=0o700)
    os.chown(path, 1234, 1234)


FOREIGN = [link_as_room, link_as_lock, pipe_as_room, pipe_as_lock, open_to_others, of_another_user]


@pytest.mark.parametrize("plant", FOREIGN)
def test_what_is_not_ours_is_left_alone(plant: Callable[[Path, Path], None], top: Path, victim: Path) -> None:
    planted = top / f"{ROOMS}-0"
    earlier = top / f"{EARLIER}-0"
    plant(earlier, victim)
    assert enter() == f"{top / ROOMS}-0"
    assert [path.name for path in top.iterdir()] == [earlier.name], "what looks like an earlier room stays"
    plant(planted, victim)
    with pytest.raises(DestinationError, match=rf"^{re.escape(str(planted))}: is not a folder .*Remove it") as refused:
        enter()
    assert "\n" not in str(refused.value)
    assert planted.exists()
    assert (victim / "lock").read_text() == "precious"


def test_rooms_are_private_one_for_each_task_and_removed(top: Path) -> None:
    with open_room(ROOMS, shard_bytes=1, max_disk=2) as first:
        assert first.resolve().stat().st_mode & 0o777 == 0o700
        assert enter() == f"{top / ROOMS}-1"
        assert enter(EARLIER) == f"{top / EARLIER}-0", "another run has rooms of its own"
        assert first.resolve() == top / f"{ROOMS}-0"
    with (
        pytest.raises(DestinationError, match=rf"^{re.escape(f'{top / ROOMS}-0/a')} is bad$"),
        open_room(ROOMS, shard_bytes=1, max_disk=1) as first,
    ):
        raise DestinationError(f"{first / 'a'} is bad")
    assert not list(top.iterdir())


def test_a_room_that_was_moved_away_takes_nothing_else_with_it(top: Path, victim: Path) -> None:
    with open_room(ROOMS, shard_bytes=1, max_disk=1) as folder:
        (top / f"{ROOMS}-0").rename(top / "moved")
        victim.rename(top / f"{ROOMS}-0")
        (folder / "shard").write_bytes(b"x")
    assert not list((top / "moved").iterdir())
    assert (top / f"{ROOMS}-0" / "lock").read_text() == "precious"


def test_the_rooms_of_dead_tasks_are_removed(top: Path) -> None:
    for rooms in (ROOMS, EARLIER):
        (top / f"{rooms}-0" / "result").mkdir(parents=True, mode=0o700)
        (top / f"{rooms}-0").chmod(0o700)
        (top / f"{rooms}-0" / "result" / "shard").write_bytes(b"x")
    (top / "k2convert-abcdefgh").mkdir(mode=0o700)
    enter()
    assert [path.name for path in top.iterdir()] == ["k2convert-abcdefgh"], "and no folder of a different kind"


def test_names_cannot_be_foreseen_and_a_small_disk_is_refused(top: Path) -> None:
    assert new_rooms() != new_rooms()
    with (
        pytest.raises(DiskFullError, match=rf"^{re.escape(str(top))}: a shard needs 2 B, but this node may use 1 B"),
        open_room(ROOMS, shard_bytes=2, max_disk=1),
    ):
        pass
