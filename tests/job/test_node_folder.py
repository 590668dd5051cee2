"""The folder of a task on a node: private, one for each task, and removed, also after a task that was killed."""

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from k2convert.errors import DestinationError, DiskFullError
from k2convert.job.ray import node_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def top(temporary: Path) -> Path:
    return temporary / f"k2convert-ray-{os.geteuid()}"


def link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere, target_is_directory=True)


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def open_to_others(path: Path, _: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def of_another_user(path: Path, _: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives folders away")
    path.mkdir(mode=0o700)
    os.chown(path, 1234, 1234)


@pytest.mark.parametrize("plant", [link, pipe, open_to_others, of_another_user])
def test_what_is_not_ours_is_left_alone(plant: Callable[[Path, Path], None], temporary: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    plant(top(temporary), victim)
    with (
        pytest.raises(DestinationError, match=r"is not a folder that k2convert made for this user alone\. Remove it"),
        node_folder(shard_bytes=1, max_disk=2),
    ):
        pass
    assert os.path.lexists(top(temporary))
    assert not list(victim.iterdir())


def test_folders_are_private_one_for_each_task_and_removed(temporary: Path) -> None:
    with node_folder(shard_bytes=1, max_disk=2) as first:
        assert top(temporary).stat().st_mode & 0o777 == 0o700
        with node_folder(shard_bytes=1, max_disk=2) as second:
            assert first != second
            (second / "shard").write_bytes(b"x")
        assert first.is_dir()
        assert not second.exists()
    with pytest.raises(KeyError), node_folder(shard_bytes=1, max_disk=1) as first:
        raise KeyError
    assert not list(temporary.iterdir())


def test_what_a_killed_task_left_is_removed_by_the_next(temporary: Path) -> None:
    with node_folder(shard_bytes=1, max_disk=1) as folder:
        pass
    (folder / "result").mkdir(parents=True)
    top(temporary).chmod(0o700)
    (folder / "result" / "shard").write_bytes(b"x")
    with node_folder(shard_bytes=1, max_disk=1) as again:
        assert again == folder
        assert not list(again.iterdir())
        descriptor = os.open(again.parent, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
    assert not list(temporary.iterdir())


def test_a_small_disk_is_refused(temporary: Path) -> None:
    with (
        pytest.raises(DiskFullError, match=f"^{temporary}: a shard needs 2 B, but this node may use 1 B"),
        node_folder(shard_bytes=2, max_disk=1),
    ):
        pass
