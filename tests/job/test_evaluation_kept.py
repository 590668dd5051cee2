"""A finished folder's evaluation.json stays as it is when the job runs again; a source's is not copied."""

import json
from pathlib import Path

from command import run_here
from evaluation_makers import evaluation_of, write_evaluation


def test_a_source_with_an_evaluation_gives_a_result_without_one(source: Path, tmp_path: Path) -> None:
    (source / "evaluation.json").write_text('{"of": "the source"}')
    run_here("run", source, tmp_path / "out", code=0)
    assert not (tmp_path / "out" / "evaluation.json").exists()
    done = run_here("validate", tmp_path / "out", "--source", source, "--json", code=0)
    assert json.loads(done.stdout)["passed"]


def test_running_again_keeps_the_evaluation(cut: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_here("run", cut, out, code=0)
    write_evaluation(out, evaluation_of(out))
    before = (out / "evaluation.json").read_bytes()
    next(out.glob("*.safetensors")).unlink()
    assert "resuming" in run_here("run", cut, out, "--verify", code=0).stderr
    assert "already complete" in run_here("run", cut, out, code=0).stderr
    assert (out / "evaluation.json").read_bytes() == before
    assert run_here("validate", out, "--source", cut).returncode == 0


def test_an_evaluation_that_is_a_link_stops_a_run_before_it_begins(cut: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_here("run", cut, out, code=0)
    (tmp_path / "precious").write_text("precious")
    (out / "evaluation.json").symlink_to(tmp_path / "precious")
    done = run_here("run", cut, out)
    assert done.returncode == 1
    assert "evaluation.json: is a link" in done.stderr
    assert (tmp_path / "precious").read_text() == "precious"
