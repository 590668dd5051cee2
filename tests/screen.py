"""The real command in a terminal of a fixed size, and what is on its screen.

`Terminal` opens a pseudo-terminal, runs the command in it and plays its output on a small emulator: printable text,
line feeds, carriage returns, cursor up and the erasing of lines, which is what rich sends.
"""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from command import ROOT, command

GOLDEN = Path(__file__).parent / "cli" / "golden"
_SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")
_VARIES = [
    (re.compile(r"\d+:\d\d:\d\d|\d+\.\d s\b"), "0:00:00"),
    (re.compile(r"[\d.]+ (?:B|kB|MB|GB)/s"), "0 MB/s"),
    (re.compile(r"http://127\.0\.0\.1:\d+"), "http://hub"),
    (re.compile(r"commit [0-9a-f]{40}"), "commit 0"),
]


def same_as_golden(name: str, text: str) -> None:
    """Compare with the kept text. If it differs, the new text is written next to it, to be looked at and renamed."""
    path = GOLDEN / f"{name}.txt"
    golden = path.read_text() if path.exists() else ""
    if text + "\n" != golden:
        path.with_suffix(".new").write_text(text + "\n")
    assert text + "\n" == golden


@dataclass(slots=True)
class Screen:
    """Every line that was ever shown, the cursor, and whether a line was too long for the terminal."""

    columns: int
    lines: list[str] = field(default_factory=lambda: [""])
    row: int = 0
    column: int = 0
    wrapped: list[str] = field(default_factory=list[str])

    def play(self, text: str) -> None:
        position = 0
        while position < len(text):
            sequence = _SEQUENCE.match(text, position)
            if sequence is not None:
                self._control(sequence[1], sequence[2])
                position = sequence.end()
                continue
            self._put(text[position])
            position += 1

    def _control(self, number: str, kind: str) -> None:
        if kind == "A":
            self.row = max(self.row - int(number or 1), 0)
        elif kind == "K":
            self.lines[self.row] = "" if number == "2" else self.lines[self.row][: self.column]

    def _put(self, character: str) -> None:
        if character == "\n":
            self._down()
        elif character == "\r":
            self.column = 0
        elif character >= " ":
            if self.column == self.columns:
                self.wrapped.append(self.lines[self.row])
                self._down()
                self.column = 0
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")

    @property
    def stable(self) -> str:
        """The text with every duration and rate replaced, because they differ from run to run."""
        text = self.text
        for pattern, same in _VARIES:
            text = pattern.sub(same, text)
        return text


@dataclass(slots=True)
class Ended:
    code: int
    raw: str
    screen: Screen


def in_terminal(
    *words: str | Path,
    columns: int,
    rows: int,
    folder: Path,
    watch: Callable[[Screen, subprocess.Popen[bytes]], None] | None = None,
    **env: str,
) -> Ended:
    """Run `k2convert WORDS` in a terminal and return what it left. `watch` sees the screen after every output."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"} | env
    process = subprocess.Popen(
        command(*words),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    os.close(follower)
    screen = Screen(columns)
    raw = b""
    deadline = time.monotonic() + 1200
    try:
        while time.monotonic() < deadline:
            if not select.select([leader], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(leader, 1 << 16)
            except OSError:  # the last process that had the terminal ended
                break
            if not data:
                break
            raw += data
            screen = Screen(columns)
            screen.play(raw.decode(errors="ignore"))
            if watch is not None:
                watch(screen, process)
        return Ended(process.wait(10), raw.decode(errors="replace"), screen)
    finally:
        process.kill()
        os.close(leader)
