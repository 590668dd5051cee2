"""A checkpoint so small that a run of it takes a tenth of a second, for tests that need hundreds of runs."""

import shutil
from pathlib import Path

import pytest
from command import run
from made_once import made_once
from results import contents


@pytest.fixture(scope="session")
def small(k2_shaped: Path, checkpoints: Path) -> Path:
    """The K2-shaped checkpoint, 4 MB in three shards, with two sidecars, one of them in a subfolder."""

    def make(folder: Path) -> None:
        (folder / "extra").mkdir(parents=True)
        (folder / "extra" / "notes.txt").write_text("a sidecar in a subfolder")
        for name in ("*.safetensors", "config.json", "model.safetensors.index.json", "generation_config.json"):
            for path in k2_shaped.glob(name):
                shutil.copy2(path, folder)

    return made_once(checkpoints / "small", make)


@pytest.fixture(scope="module")
def finished(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished conversion of `small`, shared by the tests of a module: copy it before you change it."""
    folder = tmp_path_factory.mktemp("finished") / "result"
    assert run("run", small, folder, "--json") == 0
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of `finished` that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


@pytest.fixture
def source(cut: Path, tmp_path: Path) -> Path:
    """A copy of `cut` that a test may change."""
    return Path(shutil.copytree(cut, tmp_path / "source"))


@pytest.fixture(scope="session")
def whole(local_result: Path) -> dict[str, bytes]:
    return contents(local_result)
