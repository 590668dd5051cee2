"""A tokenizer runs in a process with bounds: it gives the same tokens, and a hostile one is one line."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k2convert.calibration import tokenizers
from k2convert.calibration.text import read_windows
from k2convert.calibration.tokenizers import TokenizerProcess, open_tokenizer
from k2convert.errors import CalibrationError
from tests.calibration.kimi_files import write_kimi_files


def test_the_process_gives_the_tokens_of_the_tokenizer(tiny: Path, tmp_path: Path) -> None:
    kimi = write_kimi_files(tmp_path, [b"ab", b" a"])
    for folder in (tiny, kimi):
        plain = open_tokenizer(folder)
        with TokenizerProcess(folder) as tokenizer:
            for text in ("", "ab\n ab \u2028 \u4f60\u597d \U0001f642", "<|im_end|><|endoftext|>", "long " * 5_000):
                for special in (False, True):
                    found = tokenizer.encode(text, special=special)
                    assert found.dtype == np.int64
                    assert (found == plain.encode(text, special=special)).all()


def replace_e(count: int) -> Callable[[dict[str, Any]], object]:
    """The normalizer that makes `count` letters of each e."""
    normalizer = {"type": "Replace", "pattern": {"String": "e"}, "content": "x" * count}
    return lambda document: document.update(normalizer=normalizer)


def hostile(tiny: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A folder with a tokenizer.json of this change."""
    document = json.loads((tiny / "tokenizer.json").read_text())
    change(document)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (replace_e(10_000), "needs more than 2.1 GB of memory"),
        (replace_e(100), r"makes [0-9,]+ tokens of 20,000 bytes"),
        (lambda d: d.update(normalizer={"type": "Sequence", "normalizers": [7]}), "the tokenizer failed"),
    ],
)
def test_a_hostile_tokenizer_is_one_line(
    change: Callable[[dict[str, Any]], object], complaint: str, tiny: Path, tmp_path: Path
) -> None:
    hostile(tiny, tmp_path, change)
    (tmp_path / "text.txt").write_text("e" * 20_000)
    with pytest.raises(CalibrationError, match=complaint) as failure:
        read_windows([tmp_path / "text.txt"], tokenizer=tmp_path, vocab_size=2048, tokens=64, window=8, seed=0)
    assert "\n" not in str(failure.value)
    assert str(tmp_path) in str(failure.value)
    assert "Download the checkpoint's tokenizer files again" in str(failure.value)


def test_the_process_makes_text_of_tokens_too(tiny: Path, tmp_path: Path) -> None:
    """A byte that is no text of its own becomes U+FFFD; an id that is no token is one line, and the process goes on."""
    kimi = write_kimi_files(tmp_path, [b"ab", b" a"])
    text = "ab aé<|im_end|>\n"
    for folder in (tiny, kimi):
        with TokenizerProcess(folder) as process:
            ids = process.encode(text)
            assert process.decode(ids.tolist()) == text
            assert process.decode([]) == ""
    with TokenizerProcess(kimi) as process:
        assert process.decode([0xC3]) == "\ufffd"
        assert process.decode(process.encode("a<|im_end|>", special=True).tolist()) == "a<|im_end|>"
        with pytest.raises(CalibrationError, match="the tokenizer failed"):
            process.decode([5000])
        assert process.decode([97]) == "a"


@pytest.mark.slow
def test_a_tokenizer_cannot_take_the_machines_memory(tiny: Path, tmp_path: Path) -> None:
    hostile(tiny, tmp_path, replace_e(10_000))
    (tmp_path / "text.txt").write_text("e" * 200_000)
    code = (
        "import sys, resource\nfrom pathlib import Path\nfrom k2convert.calibration.text import read_windows\n"
        "from k2convert.errors import CalibrationError\nfolder = Path(sys.argv[1])\n"
        "try: read_windows([folder / 'text.txt'], tokenizer=folder, vocab_size=2048, tokens=64, window=8, seed=0)\n"
        "except CalibrationError: print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < tokenizers.MAX_MEMORY_BYTES * 1.2


def test_a_tokenizer_that_takes_too_long_is_stopped(tiny: Path) -> None:
    program = "from k2convert.calibration import tokenizers as t; t.MAX_SECONDS = 0.3; t.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny)],
        input=json.dumps({"text": "long " * 2_000_000, "special": False}).encode() + b"\n",
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGPROF, b"{}\n")
