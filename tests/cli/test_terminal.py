"""What a person sees: the real command in terminals of 80x24 and 200x50, and the rows in the middle of a job."""

import io
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from screen import Screen, in_terminal, same_as_golden
from test_counts import Clock

from k2convert.cli.progress import Display
from k2convert.records.events import Extent
from scripts import fixture_maker as fixtures

SIZES = [(80, 24), (200, 50)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_run_and_validate_look_as_they_should(columns: int, rows: int, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "k2-tiny").symlink_to(tiny)
    run = in_terminal("run", "k2-tiny", "out", columns=columns, rows=rows, folder=tmp_path)
    assert run.code == 0
    same_as_golden(f"run-{columns}", run.screen.stable)
    validate = in_terminal("validate", "out", "--source", "k2-tiny", columns=columns, rows=rows, folder=tmp_path)
    assert validate.code == 0
    progress, _, tables = validate.screen.stable.partition("servable contract")
    _, _, weights = tables.partition("weight error")
    same_as_golden(f"validate-{columns}", f"{progress}(the rules)\nweight error{weights}")
    assert not [line for line in validate.screen.wrapped if not line.startswith("next:")]
    assert "\x1b[32mpass" in validate.raw, "verdicts are green"
    if columns == 80:
        plain = in_terminal("validate", "out", columns=columns, rows=rows, folder=tmp_path, NO_COLOR="1")
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain.raw)
        assert re.search(r"out: passed, but \d+ rules and the weights need --source", plain.screen.stable)


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_rows_in_the_middle_of_a_hub_job_fit_any_width(columns: int) -> None:
    giga = 1_000_000_000
    clock = Clock()
    whole = (594 * giga, 0)
    extent = Extent({"download": whole, "convert": whole, "upload": whole}, 62)
    out = io.StringIO()
    console = Console(file=out, width=columns, force_terminal=False, legacy_windows=False)
    counts = Display(extent, clock=clock, screen=console)
    counts.begun(extent)
    for second in range(2000):
        clock.now += 1
        counts.transferred(downloaded=118_000_000)
        if second > 90:
            counts.progress(bytes_in=117_000_000, bytes_out=117_000_000, tensors=20)
        if second > 180:
            counts.transferred(uploaded=99_000_000)
    for number in range(21):
        counts.shard_finished(f"model-{number:05}")
    console.print(counts.rows())
    lines = out.getvalue().splitlines()
    assert all(len(line) <= columns for line in lines)
    assert [line.split()[0] for line in lines[:3]] == ["download", "convert", "upload"]
    assert "21 of 62 shards" in lines[3]


@pytest.mark.quick(1)
@pytest.mark.parametrize("words", [("inspect", "k2-tiny"), ("run", "k2-tiny", "out", "--dry-run")])
def test_no_number_is_broken_over_two_lines(words: tuple[str, ...], k2_numbers: Path, tmp_path: Path) -> None:
    (tmp_path / "k2-tiny").symlink_to(k2_numbers)
    done = in_terminal(*words, columns=80, rows=24, folder=tmp_path)
    assert done.code in (0, 1), "a machine may have no room for the result"
    too_long = [line for line in done.screen.wrapped if not line.startswith("next:")]
    assert not too_long
    assert not re.search(r"\d,$", done.screen.text, flags=re.MULTILINE)


def test_ctrl_c_leaves_the_terminal_clean_and_says_how_to_resume(tmp_path: Path) -> None:
    large = replace(fixtures.SMALL_SHAPE, hidden=4096, moe_intermediate=2048, experts=256)  # takes seconds
    fixtures.make_k2_thinking_headers(tmp_path / "a source", shape=large)
    sent: list[int] = []

    def interrupt(screen: Screen, process: "subprocess.Popen[bytes]") -> None:
        if "convert" in screen.text and not sent and process.poll() is None:
            sent.append(1)
            process.send_signal(signal.SIGINT)

    done = in_terminal("run", "a source", "out", columns=80, rows=24, folder=tmp_path, watch=interrupt)
    assert done.code == 130
    *_, message, following = done.screen.text.splitlines()
    assert re.fullmatch(r"interrupted: \d of \d shards are converted\. The same command resumes", message)
    assert following == "next: k2convert run 'a source' out"
    assert done.raw.count("\x1b[?25l") == done.raw.count("\x1b[?25h"), "the cursor is shown again"
