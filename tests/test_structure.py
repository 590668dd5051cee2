"""How many files a reader enters to follow a command, and how many modules a local run loads: see structure.py."""

from pathlib import Path

import pytest
from structure import ROOT, TINY, frames, num_lines, traced

BUDGET = {"k2convert": 38_903, "tests": 31_891, "scripts": 7_390}
"""Lines of code. The test allows 3 % more, so that a small change does not fail for its size."""

FOLLOW = "a reader follows too many files or calls: put the code where its caller is"


@pytest.mark.parametrize("folder", BUDGET)
def test_code_stays_within_its_budget(folder: str) -> None:
    lines = num_lines(ROOT / folder)
    over = lines - round(1.03 * BUDGET[folder])
    assert over <= 0, (
        f"{folder}/ has {lines:,} lines of code, {over:,} more than 3 % above its budget of {BUDGET[folder]:,}. Delete "
        "as many: what repeats, what only one caller passes, what nobody uses (CONTRIBUTING.md, Lines of code). If the "
        "change is worth its lines, raise BUDGET in tests/test_structure.py and say in the commit why."
    )


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """A local run on k2-tiny, and what it entered and loaded."""
    out = tmp_path_factory.mktemp("structure") / "out"
    return out, traced("run", TINY, out, "--quiet")


def test_a_run_enters_few_files_and_loads_few_modules(converted: tuple[Path, dict[str, list[str]]]) -> None:
    _, report = converted
    assert len(report["entered"]) <= 50, f"{FOLLOW}: {report['entered']}"
    loaded = len(report["loaded"])
    assert loaded <= 88, (
        f"a run loads {loaded} modules, {loaded - 88} more than 88. A new rule, layout, format or family adds one: "
        f"raise the number here. Anything else is imported inside the function that needs it: {report['loaded']}"
    )
    assert not {"torch", "ray"} & set(report["loaded"]), "importing one takes seconds, and memory"
    unused = ("text", "calibration", "evaluation", "deploy", "forward", "report", "check")
    assert not [name for name in report["loaded"] if name.split(".")[1:2] and name.split(".")[1] in unused]


def test_few_frames_lead_from_a_run_to_the_kernel(tmp_path: Path) -> None:
    stack = frames("run", TINY, tmp_path / "out", "--quiet")
    assert len(stack) <= 15, f"{FOLLOW}: {stack}"
    names = [name for frame in stack if (name := frame.split()[-1].split(".")[-1]).startswith("_")]
    assert len(set(names)) == len(names), "each has a name of its own"


def test_a_validation_with_the_source_enters_few_files(converted: tuple[Path, dict[str, list[str]]]) -> None:
    report = traced("validate", converted[0], "--source", TINY, "--quiet")
    assert len(report["entered"]) <= 50, f"{FOLLOW}: {report['entered']}"
    assert "torch" not in report["loaded"]


@pytest.mark.slow
def test_a_run_that_calibrates_enters_few_files(cut: Path, text: Path, tmp_path: Path) -> None:
    size = ("--set", "calibration.tokens=128", "--set", "calibration.window=64")
    report = traced("run", cut, tmp_path / "out", "--calibrate", text, "--quiet", *size)
    assert len(report["entered"]) <= 80, f"{FOLLOW}: {report['entered']}"
