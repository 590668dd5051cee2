"""Names and messages of a checkpoint show their control characters as escapes: they cannot command the terminal."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import RunCli
from test_hostile_json import NORM, rename

from k2convert.errors import visible
from scripts.fixture_maker.damage import edit_config

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202egnp"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\x7f\\u202egnp"


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
def test_no_control_character_reaches_the_terminal(
    name: str, k2_shaped: Path, tiny: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    change, words, shown = CASES[name]
    source = shutil.copytree(tiny if "--calibrate" in words else k2_shaped, tmp_path / "source")
    change(source)
    places = {"out": str(tmp_path / "out")}
    done = run_cli(*(places.get(word, word.replace("SOURCE", str(source))) for word in words))
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
