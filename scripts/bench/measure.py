"""Measures whole processes: wall seconds, CPU seconds and peak memory as the operating system reports them."""

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}
LAUNCH = """
import json, os, subprocess, sys, time
begin = time.monotonic()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
seconds, cpu_seconds = time.monotonic() - begin, usage.ru_utime + usage.ru_stime
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_rss": usage.ru_maxrss * 1024}))
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Runs a command in a small process of its own, because the system counts a child's peak from its parent's size."""


@dataclass(frozen=True)
class Run:
    """One run of one command: wall and CPU seconds, peak RSS in bytes."""

    seconds: float
    cpu_seconds: float
    peak_rss: int


def run_once(command: Sequence[str | Path], *, one_core: bool) -> Run:
    """Run a command to its end. Raises RuntimeError with its stderr if it fails."""
    prefix = ["taskset", "-c", "0"] if one_core else []
    done = subprocess.run(
        [sys.executable, "-Sc", LAUNCH, *prefix, *map(str, command)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the medians of several runs of one command, the spread of the wall time, and the largest peak."""
    seconds = [run.seconds for run in runs]
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "cpu_seconds": statistics.median(run.cpu_seconds for run in runs),
        "peak_rss": max(run.peak_rss for run in runs),
        "runs": len(runs),
    }


def evict(folder: Path) -> None:
    """Drop a folder's files from the page cache. Dropping clean pages needs no privileges."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def warm(folder: Path) -> None:
    """Read a folder's files into the page cache."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    subprocess.run(["cat", *files], check=True, stdout=subprocess.DEVNULL)


def describe_machine() -> str:
    """Return processor, cores, memory, Python and torch in one line."""
    import torch

    described = Path("/proc/cpuinfo").read_text()
    models = re.findall(r"^model name\s*: (.*)$", described, flags=re.MULTILINE) or ["unknown processor"]
    vector = next((name for flag, name in VECTORS.items() if f" {flag}" in described), "no AVX2")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f", {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    return (
        f"{models[0]}, {os.cpu_count()} cores, {vector}, {memory:.0f} GiB{gpu}, Python {sys.version.split()[0]}, "
        f"torch {torch.__version__}"
    )
