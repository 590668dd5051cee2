"""Crashes a command at every system call that changes a file, or at some of them, and resumes: run by crash_runs.py.

    LD_PRELOAD=shim.so python crash_driver.py FOLDER MOST WORD...

OUT in the words is the destination, and OUT/NAME a file in a folder that is there. MOST is how many calls are tried at
most. One process imports everything, then forks a child for each run, which takes a fraction of the time of a new
process. A calibration also meets a full disk from each write on. Prints one JSON document: the calls and files of a
whole run, how many points were tried, and what went wrong.
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


WORDS = sys.argv[3:]
CALIBRATES = any("calibrate" in word for word in WORDS)


def call(destination: Path) -> int:
    """One run in this process; returns its exit code."""
    try:
        main([word.replace("OUT", str(destination)) for word in WORDS])
    except SystemExit as ended:
        return int(ended.code or 0)


def run(destination: Path, *, crash_at: int = NEVER, full_at: int = NEVER, log: int = -1) -> int:
    """One run in a child; returns its exit code, or -9 if it was killed. What it says goes to the file `said`."""
    if any(word.startswith("OUT/") for word in WORDS):
        destination.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        sys.argv = ["k2convert", *WORDS]
        os.dup2(os.open(destination.parent / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        if full_at != NEVER:
            SHIM.crash_fill(ctypes.c_long(full_at))
        else:
            SHIM.crash_arm(ctypes.c_long(crash_at), log)
        code = 99
        try:
            code = call(destination)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def logged(destination: Path) -> list[str]:
    """The calls of a whole run, in order."""
    with (destination.parent / "calls").open("w+") as log:
        assert run(destination, log=log.fileno()) == 0, (destination.parent / "said").read_text()
        log.seek(0)
        return log.read().splitlines()


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def finished(folder: Path) -> dict[str, bytes]:
    """The files of a finished job but the command, which names the folder."""
    found = contents(folder)
    found.pop(f"{WORK_FOLDER}/{COMMAND_NAME}", None)
    return found


def problems_after_crash(destination: Path, whole: dict[str, bytes]) -> list[str]:
    """What no crash may leave: a file under its final name that is not whole, or a config before the shards."""
    found = contents(destination)
    final = {name: data for name, data in found.items() if not name.endswith(".tmp") and ".work/" not in name}
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


def try_point(destination: Path, whole: dict[str, bytes], crashes: list[int], *, full_at: int = NEVER) -> list[str]:
    """Crash a run at each point in turn, or let the disk be full, then let it finish; returns what went wrong."""
    wrong: list[str] = []
    for crash_at in crashes:
        code = run(destination, crash_at=crash_at)
        if code not in (-signal.SIGKILL, 0):
            wrong.append(f"exit code {code}")
        wrong += problems_after_crash(destination, whole)
    if full_at != NEVER:
        wrong += [*problems_of_full_disk(destination, full_at), *problems_after_crash(destination, whole)]
    if (code := run(destination)) != 0:
        wrong.append(f"resume: exit code {code}: {said(destination)[-1:]}")
    elif (found := finished(destination)) != whole:
        names = sorted(name for name in found.keys() | whole.keys() if found.get(name) != whole.get(name))
        wrong.append(f"resume: other bytes: {names[:5]}")
    with suppress(FileNotFoundError):
        shutil.rmtree(destination)
    return [f"crash at {crashes}, full at {full_at}: {problem}" for problem in wrong]


def said(destination: Path) -> list[str]:
    return (destination.parent / "said").read_text().splitlines()


def problems_of_full_disk(destination: Path, full_at: int) -> list[str]:
    """A full disk is one line; it is none if only the lock was left to be written."""
    code = run(destination, full_at=full_at)
    errors = [line for line in said(destination) if line.startswith(("error: ", "Traceback"))]
    if code == 0 or (code == 1 and len(errors) == 1 and "the disk is full" in errors[0]):
        return []
    return [f"exit code {code}: {said(destination)[-3:]}"]


def import_everything(folder: Path) -> None:
    """Before the forks. A calibration leaves threads, so it is not done in this process."""
    if CALIBRATES:
        import torch
        import transformers.models.deepseek_v3.modeling_deepseek_v3  # noqa: F401

        import k2convert.calibrate.gptq_walk  # noqa: F401

        torch.set_num_threads(1)
    else:
        call(folder / "warm-up")


def crash_everywhere(folder: Path, most: int) -> dict[str, object]:
    """Crash at every call; for some of them crash during the resume too."""
    import_everything(folder)
    calls = logged(folder / "whole")
    whole = finished(folder / "whole")
    points = range(1, len(calls) + 1, -(-len(calls) // most))
    wrong: list[str] = []
    tried = 0
    for point in points:
        tried += 1
        wrong += try_point(folder / "out", whole, [point])
    for point in points[:: max(1, len(points) // 8)] if len(points) == len(calls) else ():
        for later in (9, len(calls) // 3, 2 * len(calls) // 3):
            tried += 1
            wrong += try_point(folder / "out", whole, [point, later])
    writes = [point for point, line in enumerate(calls, 1) if line.startswith(("write", "allocate"))]
    for point in writes[:: -(-len(writes) // most)] if CALIBRATES else ():
        tried += 1
        wrong += try_point(folder / "out", whole, [], full_at=point)
    return {"calls": calls, "files": sorted(whole), "tried": tried, "wrong": wrong}


if __name__ == "__main__":
    result = os.dup(1)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    document = crash_everywhere(Path(sys.argv[1]), int(sys.argv[2]))
    with os.fdopen(result, "w") as out:
        json.dump(document, out)
