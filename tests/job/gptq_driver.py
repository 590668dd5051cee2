"""Kills `run --calibrate` and resumes it: run by test_gptq_kills.py.

    python gptq_driver.py SOURCE TEXT FOLDER NUMBER

One process imports everything, then forks a child for each run, which takes a fraction of the time of a new process.
It kills runs at NUMBER random moments and at every layer boundary. Prints one JSON document: how often a run was
killed, how many layers were done then, what interrupted and restarted runs said, and what went wrong.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers.models.deepseek_v3.modeling_deepseek_v3  # noqa: F401 - imported before the forks

from k2convert.calibrate.layer_files import conversion_work
from k2convert.cli.app import main
from k2convert.forward.work import WorkFolder
from k2convert.records.journal import Journal

OPTIONS = ("--set", "calibration={tokens: 320, window: 64}", "--device", "cpu", "--quiet")
FIRST = "model-00002-of-000005.safetensors"  # with the experts of layer 1
NOT_COMPARED = {".k2convert/lock", ".k2convert/command.json"}


class Driver:
    """Runs of one command."""

    def __init__(self, source: Path, text: Path, folder: Path) -> None:
        self.source, self.text, self.folder = source, text, folder

    def start(self, out: Path, *, file_bytes: int | None = None, log: Path | None = None) -> int:
        """Start a run in a child; returns its number. `file_bytes` is the most that a file of it may have."""
        child = os.fork()
        if child:
            return child
        code = 99
        try:
            stream = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(stream, descriptor)
            if file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
            words = ["run", str(self.source), str(out), "--calibrate", str(self.text), *OPTIONS]
            words = words[:-1] if log is not None else words
            sys.argv = ["k2convert", *words]
            main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)

    def run(self, out: Path, *, file_bytes: int | None = None, log: Path | None = None) -> int:
        """Run to the end; returns the exit code."""
        return wait(self.start(out, file_bytes=file_bytes, log=log))

    def killed(self, out: Path, when: Callable[[], bool]) -> bool:
        """Start a run and kill it when `when` says so; returns whether it was still running."""
        child = self.start(out)
        while not when():
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                break
            time.sleep(0.0005)
        os.kill(child, signal.SIGKILL)
        return wait(child) == -signal.SIGKILL


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(out: Path) -> dict[str, bytes]:
    """Every file of a destination that does not depend on the run."""
    files = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in NOT_COMPARED}


def finished(out: Path) -> bool:
    """Whether a destination looks finished, to `status` or to an engine."""
    if not (out / ".k2convert" / "job.json").exists():
        return False
    return Journal(out).state().is_complete or (out / "config.json").exists()


def drive(driver: Driver, number: int) -> dict[str, object]:
    """Do all runs."""
    whole, out = driver.folder / "whole", driver.folder / "out"
    begin = time.monotonic()
    assert driver.run(whole) == 0
    seconds = time.monotonic() - begin
    expected, work, wrong = contents(whole), conversion_work(out), list[str]()
    kills, done_at_kills = 0, set[int]()

    def kill(name: str, when: Callable[[], bool]) -> None:
        nonlocal kills
        kills += driver.killed(out, when)
        done_at_kills.add(work.num_finished())
        found = {path: data for path, data in contents(out).items() if "calibration.work/" not in path}
        if finished(out) and not all(found.get(path) == data for path, data in expected.items()):
            wrong.append(f"{name}: it looks finished and is not")

    def finish(name: str, log: Path | None = None) -> None:
        code = driver.run(out, log=log)
        found = contents(out)
        if code != 0 or found != expected:
            different = sorted(path for path in found.keys() | expected.keys() if found.get(path) != expected.get(path))
            wrong.append(f"{name}: exit code {code}, other bytes: {different[:5]}")

    def remove() -> None:
        shutil.rmtree(out, ignore_errors=True)

    draw = random.Random(0)
    for moment in [draw.uniform(0, seconds) for _ in range(number)]:
        end = time.monotonic() + moment
        kill(f"after {moment:.3f} s", lambda end=end: time.monotonic() > end)
        finish(f"after {moment:.3f} s")
        remove()
    num_layers = json.loads((driver.source / "config.json").read_text())["num_hidden_layers"]
    for layer in range(num_layers):  # one run, killed at every boundary
        kill(f"after layer {layer}", lambda layer=layer: work.num_finished() > layer)
    finish("at every boundary")
    swept = leave_work(driver, work, out)
    remove()
    log = driver.folder / "full"
    full = {"code": driver.run(out, file_bytes=200_000, log=log), "text": log.read_text()}
    interrupted = interrupt(driver, work, out, driver.folder / "interrupted")
    (out / FIRST).unlink(missing_ok=True)  # its converted experts were removed too
    log = driver.folder / "again"
    finish("after a full disk, an interrupt and the loss of a shard", log)
    return {
        "kills": kills,
        "swept": swept,
        "done": sorted(done_at_kills),
        "full": full,
        "interrupted": interrupted,
        "again": log.read_text(),
        "wrong": wrong,
    }


def interrupt(driver: Driver, work: WorkFolder, out: Path, log: Path) -> dict[str, object]:
    """Interrupt a run after the first shard with converted experts, as Ctrl-C does."""
    child = driver.start(out, log=log)
    while not (recorded(out, FIRST) and not work.path("codes", 1).exists()):
        time.sleep(0.0005)
    os.kill(child, signal.SIGINT)
    return {"code": wait(child), "text": log.read_text(), "done": work.num_finished()}


def recorded(out: Path, shard: str) -> bool:
    return (out / ".k2convert" / "shards" / f"{shard}.json").exists()


def leave_work(driver: Driver, work: WorkFolder, out: Path) -> list[str]:
    """Give a finished run the work folder of one that was killed while it was removed; returns what stays of it."""
    (work.folder / ".k2convert").mkdir(parents=True)
    work.path("layer", 2).write_bytes(b"")
    assert driver.run(out) == 0
    return [str(path) for path in work.folder.rglob("*")]


if __name__ == "__main__":
    torch.set_num_threads(1)
    source, text, folder = map(Path, sys.argv[1:4])
    json.dump(drive(Driver(source, text, folder), int(sys.argv[4])), sys.stdout)
