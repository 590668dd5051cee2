"""The folder of a task on a node: private, one for each task, and removed."""

import shutil
import tempfile
from pathlib import Path

import pytest

from k2convert.errors import DiskFullError
from k2convert.job.ray import node_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_folders_are_private_one_for_each_task_and_removed(temporary: Path) -> None:
    with node_folder(shard_bytes=1) as first:
        assert first.stat().st_mode & 0o777 == 0o700
        with node_folder(shard_bytes=1) as second:
            assert first != second
            (second / "shard").write_bytes(b"x")
        assert first.is_dir()
        assert not second.exists()
    with pytest.raises(KeyError), node_folder(shard_bytes=1) as first:
        raise KeyError
    assert not list(temporary.iterdir())


def test_a_small_disk_is_refused(temporary: Path) -> None:
    more = shutil.disk_usage(temporary).free + (1 << 40)
    with (
        pytest.raises(DiskFullError, match=f"^{temporary}: a shard needs at least .* Set TMPDIR on the node"),
        node_folder(shard_bytes=more),
    ):
        pass
