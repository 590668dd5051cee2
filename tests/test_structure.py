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
    _, found = converted
    assert len(found["entered"]) <= 50, f"{FOLLOW}: {found['entered']}"
    loaded = len(found["loaded"])
    assert loaded <= 88, (
        f"a run loads {loaded} modules, {loaded - 88} more than 88. A new rule, layout, format or family adds one: "
        f"raise the number here. Anything else is imported inside the function that needs it: {found['loaded']}"
    )
    assert not {"torch", "ray"} & set(found["loaded"]), "importing one takes seconds, and memory"
    unused = ("text", "calibration", "evaluation", "deploy", "forward", "report", "check")
    assert not [name for name in found["loaded"] if name.split(".")[1:2] and name.split(".")[1] in unused]


def test_few_frames_lead_from_a_run_to_the_kernel(tmp_path: Path) -> None:
    found = frames("run", TINY, tmp_path / "out", "--quiet")
    assert len(found) <= 15, f"{FOLLOW}: {found}"
    names = [name for frame in found if (name := frame.split()[-1].split(".")[-1]).startswith("_")]
    assert len(set(names)) == len(names), "each has a name of its own"


def test_a_validation_with_the_source_enters_few_files(converted: tuple[Path, dict[str, list[str]]]) -> None:
    found = traced("validate", converted[0], "--source", TINY, "--quiet")
    assert len(found["entered"]) <= 50, f"{FOLLOW}: {found['entered']}"
    assert "torch" not in found["loaded"]


@pytest.mark.slow
def test_a_run_that_calibrates_enters_few_files(cut: Path, text: Path, tmp_path: Path) -> None:
    size = ("--set", "calibration.tokens=128", "--set", "calibration.window=64")
    found = traced("run", cut, tmp_path / "out", "--calibrate", text, "--quiet", *size)
    assert len(found["entered"]) <= 80, f"{FOLLOW}: {found['entered']}"
