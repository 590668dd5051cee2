"""Crashes `run` at every system call that changes a file, and resumes: run by tests/job/test_crashes.py.

    LD_PRELOAD=shim.so python crash_driver.py SOURCE FOLDER

One process imports everything, then forks a child for each run, which takes a fraction of the time of a new process.
Prints one JSON document: the calls and files of a whole run, how many crash points were tried, and what went wrong.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

from k2convert.checkpoint.names import COMMAND_NAME, CONFIG_NAME, WORK_FOLDER
from k2convert.cli.app import main

SHIM = ctypes.CDLL(os.environ["LD_PRELOAD"])
NEVER = 0


def call(source: Path, destination: Path) -> int:
    """One `run` in this process; returns its exit code."""
    try:
        main(["run", str(source), str(destination), "--workers", "1", "--device", "cpu"])
    except SystemExit as ended:
        return int(ended.code or 0)


def run(source: Path, destination: Path, *, crash_at: int = NEVER, log: int = -1) -> int:
    """One `run` in a child; returns its exit code, or -9 if it was killed."""
    child = os.fork()
    if child == 0:
        SHIM.crash_arm(ctypes.c_long(crash_at), log)
        code = 99
        try:
            code = call(source, destination)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def logged(source: Path, destination: Path) -> list[str]:
    """The calls of a whole run, in order."""
    with (destination.parent / "calls").open("w+") as log:
        assert run(source, destination, log=log.fileno()) == 0
        log.seek(0)
        return log.read().splitlines()


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def finished(folder: Path) -> dict[str, bytes]:
    """The files of a finished job but the command, which names the folder."""
    found = contents(folder)
    del found[f"{WORK_FOLDER}/{COMMAND_NAME}"]
    return found


def problems_after_crash(destination: Path, whole: dict[str, bytes]) -> list[str]:
    """What no crash may leave: a file under its final name that is not whole, or a config before the shards."""
    found = contents(destination)
    final = {name: data for name, data in found.items() if not name.endswith(".tmp")}
    command = final.pop(f"{WORK_FOLDER}/{COMMAND_NAME}", None)  # it names the destination
    wrong = [f"{name} is half-written" for name, data in final.items() if whole.get(name) != data]
    if command is not None and "words" not in json.loads(command):
        wrong.append(f"{COMMAND_NAME} is half-written")
    shards = {name for name in whole if name.endswith(".safetensors")}
    if CONFIG_NAME in final and not shards <= final.keys():
        wrong.append("config.json is there before the shards")
    wrong += [f"{name} has a record but is not there" for name in shards - final.keys() if record_of(name) in final]
    return wrong


def record_of(shard: str) -> str:
    return f".k2convert/shards/{shard}.json"


def try_point(source: Path, destination: Path, whole: dict[str, bytes], crashes: list[int]) -> list[str]:
    """Crash a run at each of the points in turn, then let it finish; returns what went wrong."""
    wrong: list[str] = []
    for crash_at in crashes:
        code = run(source, destination, crash_at=crash_at)
        if code not in (-signal.SIGKILL, 0):
            wrong.append(f"exit code {code}")
        wrong += problems_after_crash(destination, whole)
    if (code := run(source, destination)) != 0:
        wrong.append(f"resume: exit code {code}")
    elif finished(destination) != whole:
        wrong.append("resume: other bytes")
    with suppress(FileNotFoundError):
        shutil.rmtree(destination)
    return [f"crash at {crashes}: {problem}" for problem in wrong]


def crash_everywhere(source: Path, folder: Path) -> dict[str, object]:
    """Crash at every call; for some of them crash during the resume too."""
    call(source, folder / "warm-up")
    calls = logged(source, folder / "whole")
    whole = finished(folder / "whole")
    points = range(1, len(calls) + 1)
    wrong: list[str] = []
    tried = 0
    for point in points:
        tried += 1
        wrong += try_point(source, folder / "out", whole, [point])
    for point in points[:: max(1, len(points) // 8)]:
        for later in (9, len(calls) // 3, 2 * len(calls) // 3):
            tried += 1
            wrong += try_point(source, folder / "out", whole, [point, later])
    return {"calls": calls, "files": sorted(whole), "tried": tried, "wrong": wrong}


if __name__ == "__main__":
    result = os.dup(1)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    document = crash_everywhere(Path(sys.argv[1]), Path(sys.argv[2]))
    with os.fdopen(result, "w") as out:
        json.dump(document, out)
