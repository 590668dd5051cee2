"""`calibrate` and `run --calibrate` that crash, or run out of disk, at any call are continued to identical bytes."""

from pathlib import Path
from typing import Any

import pytest
from crash_runs import ALL, crash

SIZE = ("--tokens", "128", "--window", "32")
USE = ("--set", "calibration={tokens: 128, window: 32}")
OPTIONS = ("--device", "cpu", "--quiet")
SPREAD = 7


def crashed(command: str, source: Path, folder: Path, most: int) -> dict[str, Any]:
    """What the driver found for a calibration on 128 tokens."""
    text = folder / "text.txt"
    text.write_text((source / "calibration.txt").read_text()[:2000])
    if command == "calibrate":
        return crash(folder, "calibrate", source, "OUT/statistics", "--text", text, *SIZE, *OPTIONS, most=most)
    return crash(folder, "run", source, "OUT", "--calibrate", text, "--workers", "1", *USE, *OPTIONS, most=most)


@pytest.mark.parametrize("command", ["calibrate", "run --calibrate"])
def test_crashes_and_full_disks_at_some_calls_resume_to_identical_bytes(
    command: str, short: Path, tmp_path: Path
) -> None:
    found = crashed(command, short, tmp_path, SPREAD)
    assert found["wrong"] == []
    assert found["tried"] > SPREAD


@pytest.mark.slow
@pytest.mark.parametrize("command", ["calibrate", "run --calibrate"])
def test_a_crash_and_a_full_disk_at_every_call_resume_to_identical_bytes(
    command: str, short: Path, tmp_path: Path
) -> None:
    found = crashed(command, short, tmp_path, ALL)
    assert found["wrong"] == []
    assert found["tried"] > len(found["calls"]) > 80
