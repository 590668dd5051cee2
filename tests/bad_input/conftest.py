"""How a refusal is checked: exit code, message, source untouched, nothing half made.

The folders are really damaged and the command is the real one, called in this process to save its start-up.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from safetensors import safe_open
from said import said

from k2convert.cli.app import main

REMEDY = re.compile(
    r"\b([Dd]ownload|[Cc]hoose|Pass|[Nn]ame|[Ss]tart|Use|[Aa]dd|Free|[Rr]emove|[Dd]elete|[Nn]othing to do|[Kk]nown"
    r"|Shipped|should be|must be|must contain)\b"
)


@pytest.fixture
def source(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, free to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "source"))


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    """A destination that does not exist yet."""
    return tmp_path / "dest"


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """The command installs signal handlers; give pytest its own back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def contents(folder: Path) -> dict[str, str]:
    """What a folder holds: a hash of every small file, the size of a large one, the target of a link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = f"link to {path.readlink()}"
        elif path.is_file():
            size = path.stat().st_size
            found[str(path)] = blake3(path.read_bytes()).hexdigest() if size < 1 << 28 else f"{size} bytes"
    return found


def assert_nothing_half_made(dest: Path, existed: dict[str, str]) -> None:
    """What was there is as it was; new shards are whole; nothing new makes the folder look like a checkpoint."""
    found = contents(dest)
    assert {name: found.get(name) for name in existed} == existed
    made = [Path(name) for name in found if name not in existed]
    assert not [path for path in made if path.suffix == ".tmp"]
    assert not [path for path in made if path.parent == dest and path.suffix == ".json"]
    for path in (path for path in made if path.suffix == ".safetensors"):
        with safe_open(path, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (the library's object is no mapping)
                shard.get_tensor(name)


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`refuse(*options, source=, dest=)` runs the conversion, checks that it is refused well, returns the message."""

    def run(*options: str | Path, source: Path, dest: Path) -> str:
        before, existed = contents(source), contents(dest)
        with pytest.raises(SystemExit) as stopped:
            main(["run", str(source), str(dest), "--device", "cpu", *map(str, options)])
        printed = capsys.readouterr()
        assert stopped.value.code == 1, printed.err
        assert printed.out == ""
        assert said(printed.err).startswith("error: ")
        assert "Traceback" not in printed.err
        assert said(printed.err).count("\n") == 1, "one message, one line"
        assert REMEDY.search(printed.err), f"no remedy: {printed.err}"
        assert contents(source) == before, "the source was touched"
        assert_nothing_half_made(dest, existed)
        return printed.err

    return run
