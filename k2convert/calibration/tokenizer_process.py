"""A checkpoint's tokenizer in a process of its own, with bounds on memory and time.

A tokenizer file is a small program: its normalizer, added tokens and patterns can make any amount of text of a letter.
tokenizers and tiktoken are compiled and bound nothing, and when memory ends they abort. So the operating system bounds
a process (as in chat_process.py), whatever the file does, and its end is one line.

First line out: {} or {"error"}. Then for each text {"text", "special"} in, and {"count"} with the ids as int64, or
{"error"}, out; for {"ids"}, {"text"} out.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from k2convert.calibration.tokenizers import BAD_FILE, open_tokenizer
from k2convert.errors import CalibrationError, K2ConvertError, require_extra

MAX_MEMORY_BYTES: Final = 2 << 30
"""The longest line of a .jsonl file, 16 MiB, took 0.56 GB with k2-tiny's tokenizer.json."""

MAX_SECONDS: Final = 600.0
"""Processor time for a text. The longest line took 40 seconds on a busy core."""

MAX_TOKENS_PER_BYTE: Final = 16
"""A tokenizer gives at most one token a byte; Unicode's normal forms make 11 bytes of one at most."""


class TokenizerProcess:
    """The tokenizer of a checkpoint folder, as `open_tokenizer` opens it. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Start the process; raises CalibrationError if there is no tokenizer or it cannot be used."""
        require_extra("calibrate", purpose="text to calibrate on")
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"},
        )
        try:
            self._answer()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def encode(self, text: str, *, special: bool = False) -> NDArray[np.int64]:
        """Return the ids i64 [tokens] of a text. `special`: names of special tokens become these tokens."""
        count: int = self._ask({"text": text, "special": special})["count"]
        if count > MAX_TOKENS_PER_BYTE * (num_bytes := len(text.encode())) + MAX_TOKENS_PER_BYTE:
            raise CalibrationError(
                f"{self._folder}: the tokenizer makes {count:,} tokens of {num_bytes:,} bytes of text. {BAD_FILE}"
            )
        assert self._process.stdout is not None
        data = self._process.stdout.read(8 * count)
        if len(data) < 8 * count:
            raise self._ended()
        return np.frombuffer(data, dtype=np.int64)

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, special tokens by their names. Bytes that are no text become U+FFFD."""
        return str(self._ask({"ids": ids})["text"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CalibrationError(answer["error"])
        return answer

    def _ended(self) -> CalibrationError:
        if -(code := self._process.wait()) == signal.SIGPROF:
            reason = f"did not finish a text in {MAX_SECONDS:g} seconds"
        elif -code == signal.SIGABRT:
            reason = f"needs more than {MAX_MEMORY_BYTES / 1e9:.1f} GB of memory"
        else:
            reason = f"ended its process (code {code})"
        return CalibrationError(f"{self._folder}: the tokenizer {reason}. {BAD_FILE}")

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """Open the tokenizer of the folder that is named, then answer a text a line until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command that started this process
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # its signal ends the process
    try:
        tokenizer = open_tokenizer(Path(sys.argv[1]))
    except (K2ConvertError, MemoryError) as error:
        _send({"error": _message(error)})
        return
    _send({})
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        question: dict[str, Any] = json.loads(line)
        try:
            if "ids" in question:
                _send({"text": tokenizer.decode(**question)})
            else:
                ids = tokenizer.encode(**question)
                _send({"count": ids.size}, ids.tobytes())
        except (K2ConvertError, MemoryError) as error:
            _send({"error": _message(error)})


def _message(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"{sys.argv[1]}: the tokenizer needs more than {MAX_MEMORY_BYTES / 1e9:.1f} GB of memory. {BAD_FILE}"
    return str(error)


def _send(document: dict[str, Any], data: bytes = b"") -> None:
    sys.stdout.buffer.write(json.dumps(document).encode() + b"\n")
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
