"""How a refusal is checked: exit code, message, source untouched, nothing half made.

The folders are really damaged and the command is the real one, called in this process to save its start-up.
"""

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from blake3 import blake3
from command import RunCli, messages_of
from safetensors import safe_open

Damage = Callable[[Path], object]
REMEDY = re.compile(
    r"\b([Dd]ownload|[Cc]hoose|Pass|[Nn]ame|[Ss]tart|Use|[Aa]dd|Free|[Rr]emove|[Dd]elete|[Nn]othing to do|[Kk]nown"
    r"|export the model|Run|Merge it|[Ss]et|Keep|Renumber|Shipped|should be|must be|must contain)\b"
)


@pytest.fixture
def source(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "source"))


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "dest"


@pytest.fixture(scope="session")
def result(k2_shaped: Path, run_cli: RunCli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted K2-shaped checkpoint. Read it only; `converted` is a copy."""
    folder = tmp_path_factory.mktemp("result") / "nvfp4"
    assert run_cli("run", k2_shaped, folder, "--device", "cpu", "--json").returncode == 0
    return folder


@pytest.fixture
def converted(result: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(result, tmp_path / "converted"))


def contents(folder: Path) -> dict[str, str]:
    """What a folder holds: a hash of every small file, the size of a large one, the target of a link."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            entries[str(path)] = f"link to {path.readlink()}"
        elif path.is_file():
            size = path.stat().st_size
            entries[str(path)] = blake3(path.read_bytes()).hexdigest() if size < 1 << 28 else f"{size} bytes"
    return entries


def assert_nothing_half_made(dest: Path, existed: dict[str, str]) -> None:
    """What was there is as it was; new shards are whole; nothing new makes the folder look like a checkpoint."""
    entries = contents(dest)
    assert {name: entries.get(name) for name in existed} == existed
    new_paths = [Path(name) for name in entries if name not in existed]
    assert not [path for path in new_paths if path.suffix == ".tmp"]
    assert not [path for path in new_paths if path.parent == dest and path.suffix == ".json"]
    for path in (path for path in new_paths if path.suffix == ".safetensors"):
        with safe_open(path, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (the library's object is no mapping)
                shard.get_tensor(name)


@pytest.fixture
def refuse(run_cli: RunCli) -> Callable[..., str]:
    """`refuse(*options, source=, dest=)` runs the conversion, checks that it is refused well, returns the message.

    The message contains each of the words `says`.
    """

    def run(*options: str | Path, source: Path, dest: Path, says: Sequence[str] = ()) -> str:
        before = contents(source)
        existed = contents(dest)
        done = run_cli("run", source, dest, "--device", "cpu", *options)
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert messages_of(done.stderr).startswith("error: ")
        assert "Traceback" not in done.stderr
        assert messages_of(done.stderr).count("\n") == 1, "one message, one line"
        assert REMEDY.search(done.stderr), f"no remedy: {done.stderr}"
        assert all(word in done.stderr for word in says), done.stderr
        assert contents(source) == before, "the source was touched"
        assert_nothing_half_made(dest, existed)
        return done.stderr

    return run


@pytest.fixture
def refuse_at_once(refuse: Callable[..., str], source: Path, dest: Path) -> Callable[[Damage, Sequence[str]], str]:
    """`refuse_at_once(damage, words)` damages the source; it is refused with these words, before anything is made."""

    def run(damage: Damage, words: Sequence[str]) -> str:
        damage(source)
        message = refuse(source=source, dest=dest, says=words)
        assert not dest.exists()
        return message

    return run
