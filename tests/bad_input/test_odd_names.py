"""Odd but harmless names and words stop nothing, show no control character, and never end in a traceback."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import RunCli, run_here
from test_hostile_json import INDEX, NORM, rename

from k2convert.errors import visible
from scripts.fixture_maker.damage import edit_config, edit_json

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202egnp"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\x7f\\u202egnp"
NAME = os.fsdecode(b"t\xe9xt.txt")
STATED = "t\\udce9xt.txt"

ODDITIES: dict[str, Callable[[Path], object]] = {
    "config_groups a list": lambda s: edit_config(s, quantization_config={"config_groups": [1]}),
    "config_groups of numbers": lambda s: edit_config(s, quantization_config={"config_groups": {"group_0": 1}}),
    "weights a list": lambda s: edit_config(s, quantization_config={"config_groups": {"group_0": {"weights": [1]}}}),
    "quantization_config a string": lambda s: edit_config(s, quantization_config="int4"),
    "architectures a number": lambda s: edit_config(s, architectures=7),
    "architectures missing": lambda s: edit_config(s, architectures=None),
    "text_config a list": lambda s: edit_config(s, text_config=[1]),
    "total_size a string": lambda s: edit_json(s / INDEX, lambda i: i["metadata"].update(total_size="7453760")),
    "total_size wrong": lambda s: edit_json(s / INDEX, lambda i: i["metadata"].update(total_size=1)),
    "total_size missing": lambda s: edit_json(s / INDEX, lambda i: i.update(metadata={})),
    "metadata null": lambda s: edit_json(s / INDEX, lambda i: i.update(metadata=None)),
    "a shard the index does not know": lambda s: (s / "stray.safetensors").write_bytes(b"not even a header"),
    "a folder called like a shard": lambda s: (s / "old.safetensors").mkdir(),
    "a download's leftovers": lambda s: (s / ".cache").mkdir(),
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", ODDITIES)
def test_odd_words_are_shown_or_passed_over(name: str, source: Path, dest: Path) -> None:
    ODDITIES[name](source)
    assert json.loads(run_here("inspect", source, "--json", code=0).stdout)["int4_projections"] == 144
    run_here("inspect", source, code=0)
    run_here("run", source, dest, "--dry-run", code=0)


def raise_in_template(source: Path) -> None:
    (source / "chat_template.jinja").write_text("{{ raise_exception(messages[0].content) }}")
    (source / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": EVIL}]}))


CALIBRATE = ["run", "SOURCE", "out", "--calibrate", "SOURCE/chat.jsonl", "--device", "cpu"]
CASES: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "a tensor's name": (rename(NORM, EVIL), ["run", "SOURCE", "out", "--dry-run"], SHOWN),
    "a tensor's name, fit": (rename(NORM, EVIL), ["fit", "SOURCE"], SHOWN),
    "a config's words": (lambda s: edit_config(s, architectures=[EVIL]), ["inspect", "SOURCE"], SHOWN),
    "a config's value": (lambda s: edit_config(s, hidden_size=EVIL), ["inspect", "SOURCE"], ""),
    "a template's message": (raise_in_template, CALIBRATE, SHOWN),
    "a command": (lambda _: None, [EVIL], SHOWN),
    "an option": (lambda _: None, ["run", "SOURCE", "out", "--rule", EVIL], ""),
    "a name that is not there": (lambda _: None, ["status", EVIL], SHOWN),
    "a recipe's name": (lambda _: None, ["run", "SOURCE", "out", "--recipe", EVIL], ""),
}


@pytest.mark.parametrize("name", CASES)
def test_no_control_is_printed(name: str, k2_shaped: Path, tiny: Path, tmp_path: Path, run_cli: RunCli) -> None:
    change, words, shown = CASES[name]
    source = shutil.copytree(tiny if "--calibrate" in words else k2_shaped, tmp_path / "source")
    change(source)
    paths = {"out": str(tmp_path / "out")}
    done = run_cli(*(paths.get(word, word.replace("SOURCE", str(source))) for word in words))
    printed = done.stdout + done.stderr
    assert "Traceback" not in printed
    assert shown in printed
    assert all(visible(line) == line for line in printed.split("\n")), printed


def test_a_folder_of_any_name_is_shown_and_stays_in_json(k2_shaped: Path, tmp_path: Path, run_cli: RunCli) -> None:
    out = tmp_path / EVIL
    both = [["run", k2_shaped, out], ["status", out], ["validate", out]]
    for words in (*both, *([*words, "--json"] for words in both), ["report", out]):
        done = run_cli(*words, code=0)
        assert all(visible(line) == line for line in (done.stdout + done.stderr).split("\n"))
        if "--json" in words:
            document = json.loads(done.stdout)
            assert words[0] == "status" or EVIL in "".join(map(str, document.values()))


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
        ("validate", out, "--source", cut, "--layers", "1", "--text", text, "--json"),
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
    convert = ("run", cut, text.parent / "o", "--calibrate", text, "--set", "calibration.tokens=32", "--set")
    done = run_cli(*convert, f"calibration.seed={10**18}", *more, code=1)
    assert "seed" in done.stderr.splitlines()[-1]
    run_cli(*convert, f"calibration.seed={10**18 - 1}", *more, code=0)
