"""Crashes commands at system calls that change a file, and resumes them: run by crash_runs.py.

    LD_PRELOAD=shim.so python crash_driver.py FOLDER POINTS COMMANDS

COMMANDS are lists of words as JSON, in which OUT is the destination, and OUT/NAME a file in a folder that is there.
POINTS is `every` for every call, `spread` for one call of each kind in each part of the job, or `few` for half as many
calls that write, rename or remove. One process imports everything, then forks a child for each run, which takes a
fraction of the time of a new process. Runs are also interrupted, as by Ctrl-C, and a calibration meets a full disk.
Prints one JSON document for each command: the calls and files of a whole run, how many points were tried, what went
wrong, and what an interrupted run said.
"""

import ctypes
import gc
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import k2convert
from k2convert.checkpoint.names import COMMAND_NAME, CONFIG_NAME, WORK_FOLDER
from k2convert.cli import interrupts
from k2convert.cli.app import main

SHIM = ctypes.CDLL(os.environ["LD_PRELOAD"])
KILL, FILL, INTERRUPT = range(3)
NEVER = 0
KINDS = ("mkdir", "open", "allocate", "truncate", "write", "utime", "sync", "rename", "unlink", "link")
FEW_KINDS = ("write", "rename", "unlink")


@dataclass(frozen=True)
class Command:
    words: list[str]
    folder: Path

    @property
    def has_layer_pass(self) -> bool:
        return any(verb in word for word in self.words for verb in ("calibrate", "evaluate"))

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def start(self, fault: int = KILL, at: int = NEVER, *, out: Path | None = None, log: int = -1) -> int:
        """Start a run in a child; returns its number. What it says goes to the file `said`."""
        out = out or self.out
        if any(word.startswith("OUT/") for word in self.words):
            out.mkdir(exist_ok=True)
        child = os.fork()
        if child:
            return child
        sys.argv = ["k2convert", *(word.replace("OUT", str(out)) for word in self.words)]
        os.dup2(os.open(self.folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        interrupts.GRACE_SECONDS = 600  # a busy disk may need longer than a user would wait
        interrupts.catch_interrupts()
        SHIM.crash_arm(fault, ctypes.c_long(at), log)
        code = 99
        try:
            main(sys.argv[1:])
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)

    def run(self, fault: int = KILL, at: int = NEVER) -> int:
        return wait(self.start(fault, at))

    def lines(self) -> list[str]:
        return (self.folder / "said").read_text().splitlines()

    def logged(self) -> list[str]:
        with (self.folder / "calls").open("w+") as log:
            assert wait(self.start(out=self.folder / "whole", log=log.fileno())) == 0, self.lines()
            log.seek(0)
            return log.read().splitlines()


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def finished(folder: Path) -> dict[str, bytes]:
    """The files and folders of a finished job but the command, which names the folder."""
    files = contents(folder) | {f"{path.relative_to(folder)}/": b"" for path in folder.rglob("*") if path.is_dir()}
    files.pop(f"{WORK_FOLDER}/{COMMAND_NAME}", None)
    return files


def problems_after_crash(destination: Path, whole: dict[str, bytes]) -> list[str]:
    """What no crash may leave: a file under its final name that is not whole, or a config before the shards."""
    files = contents(destination)
    final = {name: data for name, data in files.items() if not name.endswith(".tmp") and ".work/" not in name}
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
    return f".k2convert/done/{shard}.json"


def problems_of(fault: int, code: int, lines: list[str]) -> list[str]:
    """A killed run says nothing. A full disk is one line; it is none if only the lock was left to be written."""
    errors = [line for line in lines if line.startswith(("error: ", "Traceback"))]
    is_full = (
        code == 1 and len(errors) == 1 and "the disk is full" in errors[0] and "Finished work is kept" in errors[0]
    )
    allowed = {KILL: code == -signal.SIGKILL, FILL: is_full, INTERRUPT: code == 130 and not errors}
    return [] if code == 0 or allowed[fault] else [f"exit code {code}: {lines[-3:]}"]


def try_points(command: Command, whole: dict[str, bytes], points: list[tuple[int, int]]) -> list[str]:
    """Disturb a run by each fault in turn, then let it finish; returns what went wrong."""
    wrong: list[str] = []
    for fault, at in points:
        wrong += problems_of(fault, command.run(fault, at), command.lines())
        wrong += problems_after_crash(command.out, whole)
    return [f"(fault, call) {points}: {problem}" for problem in wrong + problems_of_resume(command, whole)]


def problems_of_resume(command: Command, whole: dict[str, bytes]) -> list[str]:
    wrong: list[str] = []
    if (code := command.run()) != 0:
        wrong.append(f"resume: exit code {code}: {command.lines()[-1:]}")
    elif (resumed := finished(command.out)) != whole:
        names = sorted(name for name in resumed.keys() | whole.keys() if resumed.get(name) != whole.get(name))
        wrong.append(f"resume: other bytes: {names[:5]}")
    with suppress(FileNotFoundError):
        shutil.rmtree(command.out)
    return wrong


def warm_up(command: Command) -> None:
    """Before the forks: import everything, fill tables by a run, and leave both out of every collection of garbage."""
    subpackages = ["cli", "job", "plan", "records", "check", "quantize"]
    for subpackage in subpackages + (["calibration", "forward", "evaluation"] if command.has_layer_pass else []):
        modules = list((Path(k2convert.__file__).parent / subpackage).glob("*.py"))
        assert modules, f"{subpackage}: no such subpackage"
        for path in modules:
            import_module(f"k2convert.{subpackage}.{path.stem}".removesuffix(".__init__"))
    if command.has_layer_pass:
        import torch
        import transformers.models.deepseek_v3.modeling_deepseek_v3  # noqa: F401

        torch.set_num_threads(1)
    with suppress(SystemExit):
        main(["run", command.words[1], str(command.folder / "warm-up"), "--device", "cpu", "--quiet"])
    gc.collect()
    gc.freeze()


def spread(calls: list[str], kinds: tuple[str, ...]) -> list[int]:
    """One call of each kind for each part of the job: the work of a calibration, shards with records, other files."""
    groups: dict[tuple[str, str], list[int]] = {}
    for number, line in enumerate(calls, 1):
        kind, path = line.split(maxsplit=1)  # a file without a name has " (deleted)" behind its path
        part = re.search(r"\.work|\.safetensors", path)
        if kind in kinds:
            groups.setdefault((kind, part[0] if part else ""), []).append(number)
    return sorted(numbers[len(numbers) // 2] for numbers in groups.values())


def chosen_points(calls: list[str], points: str) -> list[int]:
    return {
        "every": list(range(1, len(calls) + 1)),
        "spread": spread(calls, KINDS),
        "few": spread(calls, FEW_KINDS)[::2],
    }[points]


def crash(command: Command, points: str) -> dict[str, object]:
    begin = time.monotonic()
    calls = command.logged()
    seconds = time.monotonic() - begin
    whole = finished(command.folder / "whole")
    last = len(calls)
    chosen = chosen_points(calls, points)
    every = points == "every"
    tried = [[(KILL, point)] for point in chosen]
    tried += [[(INTERRUPT, point)] for point in chosen[:: -(-len(chosen) // 2)]]
    for point in chosen[:: -(-len(chosen) // 8)] if every else chosen[len(chosen) // 3 :][:1]:
        tried += [[(KILL, point), (KILL, 9), (KILL, last // 3), (KILL, 2 * last // 3)]]
    if command.has_layer_pass:
        full = spread(calls, ("write",))[::2] if points == "few" else chosen
        tried += [[(FILL, point)] for point in full if calls[point - 1].startswith(("write", "allocate"))]
    wrong = [problem for faults in tried for problem in try_points(command, whole, faults)]
    return {
        "calls": calls,
        "files": sorted(name for name in whole if not name.endswith("/")),
        "tried": len(tried),
        "interrupted": interrupt(command, calls, whole, wrong),
        "killed": kill_at_random(command, whole, seconds, wrong) if every else 0,
        "wrong": wrong,
    }


def interrupt(command: Command, calls: list[str], whole: dict[str, bytes], wrong: list[str]) -> dict[str, object]:
    """What an interrupted run said, and what the resumed one says if a shard with experts of layer 1 was lost."""
    last = len(calls)
    code = command.run(INTERRUPT, 2 * last // 3)
    lines = command.lines()
    command.run(INTERRUPT, last // 4)
    lost = [number for number, call in enumerate(calls, 1) if re.match("unlink .*codes-001.safetensors$", call)]
    if lost:  # a kill at a call is exact; an interrupted job may end before the signal arrives
        shutil.rmtree(command.out)
        command.run(KILL, lost[-1] + 3)
    for shard in command.out.glob("model-00002-of-*.safetensors"):
        shard.unlink()
    assert command.run() == 0
    again = command.lines()
    wrong += [f"interrupted: {problem}" for problem in problems_of_resume(command, whole)]
    return {"code": code, "lines": lines, "again": again}


def kill_at_random(command: Command, whole: dict[str, bytes], seconds: float, wrong: list[str]) -> int:
    """Kill 20 runs, each at a random moment of its `seconds`, which are fewer after a run that ended before."""
    draw = random.Random(0)
    kills = 0
    for _ in range(100):
        moment = draw.uniform(0, seconds)
        child = command.start()
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
        was_killed = wait(child) == -signal.SIGKILL
        problems = [*problems_after_crash(command.out, whole), *problems_of_resume(command, whole)]
        wrong += [f"killed after {moment:.3f} s: {problem}" for problem in problems]
        kills += was_killed
        seconds *= 1 if was_killed else 0.9
        if kills == 20:
            break
    return kills


def crash_each(folder: Path, commands: list[list[str]], points: str) -> list[dict[str, object]]:
    reports: list[dict[str, object]] = []
    for number, words in enumerate(commands):
        command = Command(words, folder / str(number))
        command.folder.mkdir()
        if number == 0:
            warm_up(command)
        reports.append(crash(command, points))
    return reports


if __name__ == "__main__":
    result = os.dup(1)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    document = crash_each(Path(sys.argv[1]), json.loads(sys.argv[3]), sys.argv[2])
    with os.fdopen(result, "w") as out:
        json.dump(document, out)
