"""Every `next:` line of a job for the Hub is a command that works as printed. Commands that serve are only read."""

import shlex
import subprocess
from pathlib import Path

from command import RunCli
from loopback import LoopbackHub
from said import said

SERVE = (
    "vllm serve me/out --tensor-parallel-size 2 --trust-remote-code "
    "--enable-auto-tool-choice --tool-call-parser kimi_k2 --reasoning-parser kimi_k2"
)


def next_line(done: subprocess.CompletedProcess[str]) -> str:
    """The command that the output names as the next one; empty if there is none."""
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("next: ") for line in said(done.stderr).splitlines() if line.startswith("next: ")]
    assert len(lines) <= 1
    return lines[0] if lines else ""


def test_next_commands_of_a_job_for_the_hub(tiny_on_hub: LoopbackHub, hub_cli: RunCli, workplace: Path) -> None:
    def follow(*words: str) -> list[str]:
        lines = [next_line(hub_cli(*words))]
        while lines[-1].startswith("k2convert "):
            lines.append(next_line(hub_cli(*shlex.split(lines[-1])[1:])))
        return lines

    assert follow("run", "hf://moon/tiny", "hf://me/out", "--yes", "--work-dir", "w")[-1] == SERVE
    validated = ["k2convert validate hf://me/out", SERVE]
    assert follow("inspect", "hf://me/out") == validated
    assert follow("status", "hf://me/out") == validated
    assert follow("status", "w") == validated
