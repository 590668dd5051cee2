"""Texts whose names are not UTF-8 are used, named and recorded like any other."""

import json
import os
import shutil
from pathlib import Path

import pytest
from command import RunCli

NAME = os.fsdecode(b"t\xe9xt.txt")
STATED = "t\\udce9xt.txt"


@pytest.fixture
def text(cut: Path, tmp_path: Path) -> Path:
    """A text in a folder, neither of which has a name in UTF-8."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    return Path(shutil.copy(cut / "eval.txt", folder / NAME))


@pytest.mark.slow
def test_a_text_of_any_name_is_calibrated_on(text: Path, cut: Path, run_cli: RunCli) -> None:
    out = text.parent / "out"
    more = ("--device", "cpu", "--json")
    commands = [
        ("run", cut, out, "--calibrate", text, "--set", "calibration={tokens: 32, window: 16}", *more),
        ("validate", out, "--source", cut, "--layers", "1", "--text", text, "--tokens", "16", "--json"),
    ]
    for words in commands:
        done = run_cli(*words)
        assert "Traceback" not in done.stderr
        assert json.loads(done.stdout)
        assert done.returncode == 0 or (words[0] == "validate" and done.returncode == 3), done.stderr
    assert STATED in json.loads(done.stdout)["layers"]["hidden_states"]
    assert json.loads((out / "k2convert.json").read_text())["calibration"]["texts"][0][0] == STATED


def test_a_seed_that_no_file_can_hold_is_refused(text: Path, cut: Path, run_cli: RunCli) -> None:
    more = ("--device", "cpu")
    evaluate = ("evaluate", cut, cut, "--out", text.parent / "f.json", "--text", text, "--tokens", "32", "--seed")
    convert = ("run", cut, text.parent / "o", "--calibrate", text, "--set", "calibration.tokens=32", "--set")
    for words, code in (((*evaluate, str(10**18)), 2), ((*convert, f"calibration.seed={10**18}"), 1)):
        done = run_cli(*words, *more, code=code)
        assert "seed" in done.stderr.splitlines()[-1]
    for words in ((*evaluate, str(10**18 - 1)), (*convert, f"calibration.seed={10**18 - 1}")):
        run_cli(*words, *more, code=0)
