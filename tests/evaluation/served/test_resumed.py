"""Killed at any moment, a comparison goes on: no answer that came is asked for again, and the result is the same."""

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from asking import WINDOW, Serve
from command import command, run_cli, start_cli

from scripts.engine_checks.model_server import Handler, markov


class Gate:
    """Lets a server answer as many questions as it is told; says when one more was asked."""

    def __init__(self) -> None:
        self.answered: list[tuple[str, tuple[int, ...]]] = []
        self.left = 0
        self.is_asked = threading.Event()
        self.is_open = threading.Event()

    def spoil(self, handler: Handler, _: dict[str, Any]) -> bool:
        if handler.command != "POST":
            return False
        owner = handler.server.owner
        if not self.left and not self.is_open.is_set():
            self.is_asked.set()
            self.is_open.wait(60)
            return True
        self.left -= 1
        self.answered.append((owner.name, tuple(owner.questions[-1])))
        return False


@pytest.mark.slow
@pytest.mark.parametrize("saved", [False, True])
def test_killed_after_every_answer(serve: Serve, text: Path, tmp_path: Path, saved: bool) -> None:
    gate = Gate()
    servers = [serve(markov(1, apart=apart), name=name, spoil=gate.spoil) for name, apart in (("a", 0), ("b", 0.4))]
    save = ["--save", "kept"] if saved else []
    arguments = [*(s.url for s in servers), "--text", text, "--window", WINDOW, "--tokens", 2 * WINDOW, "--top-k", 16]
    arguments = ["compare", *arguments, "--requests", 1, "--json", "--quiet", *save]
    num_questions = 2 * 2 + 2
    for _ in range(num_questions - 1):
        gate.left = 1
        gate.is_asked = threading.Event()
        with start_cli(*arguments, cwd=tmp_path) as process:
            assert gate.is_asked.wait(60), command(*arguments)
            process.send_signal(signal.SIGKILL)
    gate.left = 10**6
    resumed = run_cli(*arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert len(gate.answered) == num_questions, "no answer was asked for again"
    gate.answered.clear()
    for path in tmp_path.glob("kept/*.json"):
        path.unlink()
    at_once = run_cli(*arguments)
    assert resumed.stdout == at_once.stdout
    assert len(gate.answered) == num_questions
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".work"] == []
    gate.is_open.set()


def test_interrupted_while_it_waits_it_ends_at_once_and_says_how_to_go_on(
    serve: Serve, text: Path, tmp_path: Path
) -> None:
    gate = Gate()
    gate.left = 3
    server = serve(markov(1), spoil=gate.spoil)
    arguments = ["compare", server.url, server.url, "--text", text, "--window", WINDOW, "--quiet"]
    with start_cli(*arguments, cwd=tmp_path, stderr=-1) as process:
        assert gate.is_asked.wait(60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    gate.is_open.set()
    assert process.returncode == 130
    assert "every answer that came is kept" in errors
    assert "next: k2convert compare" in errors
    assert list(tmp_path.glob("compare-*.work/a/window-000.json"))


@pytest.mark.slow
def test_a_damaged_answer_is_asked_for_again(serve: Serve, text: Path, tmp_path: Path) -> None:
    gate = Gate()
    gate.left = 5
    server = serve(markov(1), spoil=gate.spoil)
    arguments = ["compare", server.url, server.url, "--text", text, "--window", WINDOW, "--requests", 1, "--quiet"]
    with start_cli(*arguments, cwd=tmp_path) as process:
        assert gate.is_asked.wait(60)
        process.kill()
    (path,) = tmp_path.glob("compare-*.work/b/window-000.json")
    path.write_bytes(path.read_bytes()[:-1])
    gate.left = 10**6
    done = run_cli(*arguments)
    assert done.returncode == 0, done.stderr
    assert "no difference" in done.stdout
    assert len(gate.answered) == 18 + 1
    gate.is_open.set()
