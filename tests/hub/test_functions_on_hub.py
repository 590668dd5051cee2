"""The functions of the package with the Hub: nothing becomes public by accident, and the library stays as it was."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import Fault
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from loopback import LoopbackHub

import k2convert
from k2convert.errors import ArgumentError, HubError
from k2convert.hub.client import MAX_STREAMS, NUM_HEAPS


@pytest.mark.parametrize("private", [None, 0, "", "no", "False", [], 1, "yes"])
def test_only_false_makes_a_repository_public(tiny_hub: LoopbackHub, private: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^private .*: expected True or False\.$"):
        k2convert.convert("hf://moon/tiny", "hf://me/out", private=private)
    assert "me/out" not in tiny_hub.store.repos


@pytest.mark.slow
def test_private_is_the_default(tiny_hub: LoopbackHub, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cwd)
    k2convert.convert("hf://moon/tiny", "hf://me/out")
    assert tiny_hub.store.repos["me/out"].private
    k2convert.convert("hf://moon/tiny", "hf://me/open", private=False)
    assert not tiny_hub.store.repos["me/open"].private
    with pytest.raises(HubError, match="is public, but a private repository was requested"):
        k2convert.convert("hf://moon/tiny", "hf://me/open")


@pytest.mark.usefixtures("hub")
def test_a_program_is_told_of_an_outage(tiny_hub: LoopbackHub, tmp_path: Path) -> None:
    notes: list[str] = []

    class Listener(k2convert.Events):
        def note(self, text: str) -> None:
            notes.append(text)

    for function, paths in (
        (k2convert.convert, ("hf://moon/tiny", tmp_path / "out")),
        (k2convert.validate, (tmp_path / "out", "hf://moon/tiny")),
    ):
        tiny_hub.traffic.inject(Fault("GET", "/api/models/moon/tiny"))
        notes.clear()
        function(*paths, events=Listener())
        assert any("503" in note and "trying again in" in note for note in notes), (function, notes)


@pytest.fixture
def bars() -> Iterator[None]:
    yield
    enable_progress_bars()


@pytest.mark.slow
@pytest.mark.usefixtures("bars")
@pytest.mark.parametrize("setting", ["as imported", "off", "one is off"])
def test_progress_bars_of_the_library_are_as_before(tiny_hub: LoopbackHub, tmp_path: Path, setting: str) -> None:
    enable_progress_bars()
    if setting == "off":
        disable_progress_bars()
    elif setting == "one is off":
        disable_progress_bars("my.bars")
    before = [are_progress_bars_disabled(name) for name in (None, "my.bars")]
    k2convert.inspect("hf://moon/tiny")
    assert [are_progress_bars_disabled(name) for name in (None, "my.bars")] == before
    with pytest.raises(HubError):
        k2convert.inspect("hf://moon/missing")
    k2convert.convert("hf://moon/tiny", tmp_path / "out")
    k2convert.validate(tmp_path / "out", "hf://moon/tiny")
    assert [are_progress_bars_disabled(name) for name in (None, "my.bars")] == before


STREAMS = "HF_XET_CLIENT_AC_MAX_UPLOAD_CONCURRENCY"
COUNT_HEAPS = """
import ctypes, re, sys, threading
from pathlib import Path
from k2convert.hub.client import bound_memory
libc = ctypes.CDLL(None)
if not hasattr(libc, "malloc_info"):
    sys.exit("another C library")
if sys.argv[2] == "bounded":
    bound_memory()
together = threading.Barrier(32)
def allocate():
    together.wait()
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(32)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(len(re.findall("<heap nr=", Path(sys.argv[1]).read_text())))
"""


def output_of(script: str, *arguments: str | Path, **changes: str) -> str:
    unset = {key: value for key, value in os.environ.items() if key not in (STREAMS, "MALLOC_ARENA_MAX")}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, env=unset | changes, check=False
    )
    if "another C library" in done.stderr:
        pytest.skip("only the heaps of glibc are counted and bounded")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_threads_share_heaps(tmp_path: Path) -> None:
    assert int(output_of(COUNT_HEAPS, tmp_path / "heaps.xml", "bounded")) <= NUM_HEAPS
    assert int(output_of(COUNT_HEAPS, tmp_path / "heaps.xml", "as it comes")) > NUM_HEAPS


def test_what_the_user_allows_is_left_alone(tmp_path: Path) -> None:
    script = f"import os; from k2convert.hub.client import bound_memory; bound_memory(); print(os.environ['{STREAMS}'])"
    assert output_of(script) == str(MAX_STREAMS)
    assert output_of(script, **{STREAMS: "32"}) == "32"
    assert int(output_of(COUNT_HEAPS, tmp_path / "heaps.xml", "bounded", MALLOC_ARENA_MAX="12")) > NUM_HEAPS
