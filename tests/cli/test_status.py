"""`status` of what is no unfinished conversion: a source, parts, a finished job."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import RunCli, messages_of, run_here
from evaluation_makers import evaluation_of, write_evaluation

from k2convert.cli import interrupts


def following(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("next: "))
    return line.removeprefix("next: ")


def test_status_of_a_source_says_that_it_is_one(run_cli: RunCli, tiny: Path, tmp_path: Path) -> None:
    done = run_cli("status", tiny)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {tiny}: is an INT4 source, not a result. `k2convert run {tiny} DEST` converts it.\n"
    )
    (tmp_path / "empty").mkdir()
    assert "no conversion" in run_cli("status", tmp_path / "empty").stderr


def test_a_finished_job(run_cli: RunCli, cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("source").symlink_to(cut)
    done = run_cli("run", "source", "out")
    assert following(done) == "k2convert validate out --source source"
    assert following(run_cli("status", "out")) == "k2convert validate out --source source"
    assert json.loads(run_cli("status", "out", "--json").stdout)["resume"] is None
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert following(run_cli("status", "../out")) == f"k2convert validate ../out --source {tmp_path}/source"


def test_other_options_are_refused_with_the_command_of_the_job(run_cli: RunCli, cut: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_cli("run", cut, out, "--layout", "compressed-tensors", "--part", "1/2").returncode == 0
    done = run_cli("run", cut, out, code=1)
    assert messages_of(done.stderr) == (
        f"error: {out}: holds a different job: layout was 'compressed-tensors', now 'modelopt'. Its own command is "
        f"`k2convert run {cut} {out} --layout compressed-tensors`. Choose a different destination, or delete this one "
        "to start over.\n"
    )


def test_status_of_a_moved_or_copied_job_names_no_command_that_works_elsewhere(
    run_cli: RunCli, cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("source").symlink_to(cut)
    assert run_cli("run", "source", "half", "--part", "1/2").returncode == 0
    assert json.loads(run_cli("status", "half", "--json").stdout)["resume"] == "k2convert run source half"
    shutil.copytree("half", "copied")
    Path("half").rename("moved")
    for name in ("moved", "copied"):
        assert "the same `k2convert run` command resumes it" in run_cli("status", name).stderr
        assert json.loads(run_cli("status", name, "--json").stdout)["resume"] is None
        assert "Its own command" not in run_cli("run", "source", name, "--rule", "max").stderr
    assert "resuming: 2 of 3 shards done" in run_cli("run", "source", "moved").stderr


def test_status_of_a_json_file_says_what_it_is_and_never_converts_it(
    run_cli: RunCli, tiny: Path, local_result: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(local_result, tmp_path / "out"))
    write_evaluation(out, evaluation_of(out))
    shown = run_cli("status", out / "evaluation.json", code=0)
    assert re.match(rf"{out}/evaluation\.json: complete evaluation: \d models? on [\d,]+ tokens of ", shown.stdout)
    files = {
        "validation.json": run_cli("validate", out, "--json", "--quiet", code=0).stdout,
        "inspection.json": run_cli("inspect", tiny, "--json", code=0).stdout,
        "list.json": "[1, 2]",
        "text.json": "no JSON",
        "empty.json": "",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    for path in (
        *(tmp_path / name for name in files),
        out / "k2convert.json",
        out / "config.json",
        tmp_path / "no.json",
    ):
        refused = run_cli("status", path, code=1)
        assert refused.stdout == ""
        assert refused.stderr.startswith(f"error: {path}: ")
        assert "Pass the DEST of `k2convert run`, or the FILE of `k2convert evaluate --out FILE`." in refused.stderr
        assert "converts it" not in refused.stderr


def test_status_and_an_interrupt_say_the_same_of_what_has_not_begun_or_ended(
    run_cli: RunCli, cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said_at(step: str) -> str:
        states: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(
                step, lambda *_arguments, **_options: states.append(interrupts._command.state()) or sys.exit(130)
            )
            run_here("run", cut, tmp_path / "out", code=130)
        return states[0]

    assert said_at("k2convert.job.run.lock_destination") == "no conversion has begun. The same command starts it"
    assert "no conversion has begun" in run_cli("status", tmp_path / "out", code=1).stderr
    run_here("run", cut, tmp_path / "out", code=0)
    (tmp_path / "out" / "config.json").unlink()
    assert "3 of 3 shards are converted" in said_at("k2convert.job.run.assemble")
    assert "; index and config.json are missing" in run_cli("status", tmp_path / "out", code=0).stdout


def interrupted(*_arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_status_knows_evaluations(short: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "result"
    rows = tmp_path / "all.json"
    run_here("run", short, result, code=0)
    with monkeypatch.context() as patch:
        patch.setattr("k2convert.evaluation.streamed._score", interrupted)
        run_here("evaluate", short, result, "--text", text, "--out", rows, code=130)
        run_here("evaluate", short, result, "--text", text, code=130)
    for path in (rows, f"{rows}.work"):
        shown = run_here("status", path, code=0)
        assert re.match(rf"{rows}: evaluation not finished: 3 of 3 layers, [\d,]+ tokens at most\n", shown.stdout)
        assert f"evaluate {short} {result} " in following(shown)
    of_result = run_here("status", result, code=0)
    assert f"{result}: complete: " in of_result.stdout
    assert f"{result}: evaluation not finished: 3 of 3 layers" in of_result.stdout
    assert f"evaluate {short} {result} " in following(of_result)
    document = json.loads(run_here("status", result, "--json", code=0).stdout)
    assert (document["complete"], document["evaluation"]["finished_layers"]) == (True, 3)
    run_here("evaluate", short, result, "--text", text, "--out", rows, code=0)
    shown = run_here("status", rows, code=0)
    assert re.fullmatch(rf"{rows}: complete evaluation: 1 model on [\d,]+ tokens of calibration\.txt\n", shown.stdout)


def test_status_of_a_copy_without_its_work_folder(run_cli: RunCli, cut: Path, tmp_path: Path) -> None:
    run_cli("run", cut, tmp_path / "half", "--part", "1/2", "--quiet", code=0)
    copied = Path(shutil.copytree(tmp_path / "half", tmp_path / "copied"))
    shutil.rmtree(copied / ".k2convert")
    for errors in (run_cli("status", copied, code=1).stderr, run_cli("run", cut, copied, code=1).stderr):
        assert f"`cp -a FOLDER/. {copied}`" in errors


@pytest.mark.parametrize(("dry", "words"), [((), "finished work is kept"), (("--dry-run",), "")])
def test_dry_runs(dry: tuple[str, ...], words: str, cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[str] = []

    def look(*_: object) -> list[object]:
        states.append(interrupts._command.state())
        return []

    monkeypatch.setattr("k2convert.cli.job_view.missing_sidecars", look)
    run_here("run", cut, tmp_path / "out", *dry, code=0)
    assert states[0].startswith(words)
    assert bool(states[0]) == bool(words)
