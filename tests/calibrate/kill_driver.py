"""Kills `calibrate` and resumes it: run by test_kills.py.

    python kill_driver.py SOURCE TEXT FOLDER NUMBER

One process imports everything, then forks a child for each run, which takes a fraction of the time of a new process.
It kills runs at NUMBER random moments and at every layer boundary. Prints one JSON document: how often a run was
killed, how many layers were done then, what a run without room said, and what went wrong.
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

from k2convert.calibrate.layer_files import statistics_work
from k2convert.cli.app import main
from k2convert.forward.work import WorkFolder

OPTIONS = ("--tokens", "256", "--window", "64", "--device", "cpu", "--quiet")


class Driver:
    """Runs of one command."""

    def __init__(self, source: Path, text: Path, folder: Path) -> None:
        self.source, self.text, self.folder = source, text, folder

    def start(self, statistics: Path, *, file_bytes: int | None = None, log: Path | None = None) -> int:
        """Start a run in a child; returns its number. `file_bytes` is the most that a file of it may have."""
        child = os.fork()
        if child:
            return child
        code = 99
        try:
            stream = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT)
            for descriptor in (1, 2):
                os.dup2(stream, descriptor)
            if file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
            words = ["calibrate", str(self.source), str(statistics), "--text", str(self.text), *OPTIONS]
            sys.argv = ["k2convert", *words]
            main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)

    def run(self, statistics: Path, *, file_bytes: int | None = None, log: Path | None = None) -> int:
        """Run to the end; returns the exit code."""
        return wait(self.start(statistics, file_bytes=file_bytes, log=log))

    def killed(self, statistics: Path, when: Callable[[], bool]) -> bool:
        """Start a run and kill it when `when` says so; returns whether it was still running."""
        child = self.start(statistics)
        while not when():
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                break
            time.sleep(0.0005)
        os.kill(child, signal.SIGKILL)
        return wait(child) == -signal.SIGKILL


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def remove(statistics: Path) -> None:
    statistics.unlink(missing_ok=True)
    shutil.rmtree(statistics_work(statistics).folder, ignore_errors=True)


def drive(driver: Driver, number: int) -> dict[str, object]:
    """Do all runs."""
    whole, out = driver.folder / "whole.safetensors", driver.folder / "out.safetensors"
    begin = time.monotonic()
    assert driver.run(whole) == 0
    seconds = time.monotonic() - begin
    work, wrong = statistics_work(out), list[str]()
    kills, done_at_kills = 0, set[int]()

    def kill(name: str, when: Callable[[], bool]) -> None:
        nonlocal kills
        kills += driver.killed(out, when)
        done_at_kills.add(work.num_finished())
        if out.exists() and out.read_bytes() != whole.read_bytes():
            wrong.append(f"{name}: the file is there, with other bytes")

    def finish(name: str) -> None:
        code = driver.run(out)
        if code != 0 or out.read_bytes() != whole.read_bytes():
            wrong.append(f"{name}: exit code {code}, or other bytes")
        if work.folder.exists():
            wrong.append(f"{name}: the work folder is still there")
        remove(out)

    draw = random.Random(0)
    for moment in [draw.uniform(0, seconds) for _ in range(number)]:
        end = time.monotonic() + moment
        kill(f"after {moment:.3f} s", lambda end=end: time.monotonic() > end)
        finish(f"after {moment:.3f} s")
    for layer in range(4):  # one run, killed at every boundary
        kill(f"after layer {layer}", lambda layer=layer: work.num_finished() > layer)
    finish("at every boundary")
    log = driver.folder / "full"
    full = {"code": driver.run(out, file_bytes=200_000, log=log), "text": log.read_text()}
    interrupted = interrupt(driver, work, out, driver.folder / "interrupted")
    finish("after a full disk and an interrupt")
    return {
        "kills": kills,
        "done": sorted(done_at_kills),
        "full": full,
        "interrupted": interrupted,
        "wrong": wrong,
    }


def interrupt(driver: Driver, work: WorkFolder, out: Path, log: Path) -> dict[str, object]:
    """Interrupt a run after its first layer, as Ctrl-C does."""
    child = driver.start(out, log=log)
    while work.num_finished() == 0:
        time.sleep(0.0005)
    os.kill(child, signal.SIGINT)
    return {"code": wait(child), "text": log.read_text()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    source, text, folder = map(Path, sys.argv[1:4])
    json.dump(drive(Driver(source, text, folder), int(sys.argv[4])), sys.stdout)
