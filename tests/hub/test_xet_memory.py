"""The memory of hf_xet is bounded. Each test uses its own process, because the bounds cannot be undone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k2convert.hub.client import MAX_STREAMS, NUM_HEAPS

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
