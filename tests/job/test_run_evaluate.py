"""`run --evaluate`: what `evaluate` writes afterwards, in the same folder, and resumed from a kill."""

import json
from pathlib import Path

import pytest
from command import run_here
from evaluation_makers import evaluation_of, full_disk, write_evaluation

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "novel.txt"
    path.write_text("".join(f"In chapter {number} the ship sails on, and nobody knows where. " for number in range(40)))
    return path


def document(folder: Path) -> bytes:
    return (folder / "evaluation.json").read_bytes()


@pytest.fixture(scope="module")
def evaluated(short: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("evaluated") / "out"
    done = run_here("run", short, out, "--evaluate", text, code=0)
    assert "evaluation at the end, on " in done.stderr
    assert "KL" in done.stdout
    return out


def test_it_is_what_evaluate_writes_afterwards(short: Path, text: Path, evaluated: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_here("run", short, out, code=0)
    assert not (out / "evaluation.json").exists()
    run_here("evaluate", short, out, "--text", text, code=0)
    assert document(out) == document(evaluated)
    for folder in (out, evaluated):
        assert json.loads(run_here("validate", folder, "--source", short, "--json", code=0).stdout)["passed"]
    assert not list((evaluated / ".k2convert").glob("evaluation*.work"))


def test_report_shows_it_and_running_again_keeps_it(short: Path, text: Path, evaluated: Path, tmp_path: Path) -> None:
    before = document(evaluated)
    time = (evaluated / "evaluation.json").stat().st_mtime_ns
    done = run_here("run", short, evaluated, "--evaluate", text, "--json", code=0)
    assert json.loads(done.stdout)["evaluation"] == json.loads(before)
    assert (document(evaluated), (evaluated / "evaluation.json").stat().st_mtime_ns) == (before, time)
    report = json.loads(run_here("report", evaluated, "--out", tmp_path, "--json", code=0).stdout)
    assert report["evaluation"] == json.loads(before)
    assert "Evaluation of the whole model" in (tmp_path / "report.html").read_text()


def test_a_source_with_an_evaluation_gives_a_result_without_one(source: Path, tmp_path: Path) -> None:
    (source / "evaluation.json").write_text('{"of": "the source"}')
    run_here("run", source, tmp_path / "out", code=0)
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_a_shard_that_is_made_again_keeps_the_evaluation(cut: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_here("run", cut, out, code=0)
    write_evaluation(out, evaluation_of(out))
    before = document(out)
    next(out.glob("*.safetensors")).unlink()
    assert "resuming" in run_here("run", cut, out, "--verify", code=0).stderr
    assert document(out) == before
    assert run_here("validate", out, "--source", cut).returncode == 0


@pytest.mark.slow
def test_a_pruned_result_and_a_bf16_copy_are_evaluated(tiny: Path, short: Path, text: Path, tmp_path: Path) -> None:
    kept = {str(layer): list(range(layer, layer + 10)) for layer in (1, 2, 3)}
    (tmp_path / "kept.json").write_text(json.dumps({"experts": kept}))
    run_here("prune", tiny, tmp_path / "source", "--keep", tmp_path / "kept.json", code=0)
    run_here("run", tmp_path / "source", tmp_path / "pruned", "--quiet", code=0)
    words = ("--text", text, "--tokens", "512", "--window", "128", "--device", "cpu", "--quiet")
    run_here("evaluate", tiny, tmp_path / "pruned", *words, code=0)
    run_here("run", short, tmp_path / "bf16", "--to", "bf16", "--evaluate", text, code=0)
    pruned, exact = (json.loads(document(tmp_path / name))["rows"][0] for name in ("pruned", "bf16"))
    assert pruned["figures"]["divergence"]["mean"] > 1e-3
    assert all(layer["routing_agreement"] < 1 for layer in pruned["layers"][1:])
    assert exact["figures"]["divergence"]["mean"] < 1e-3
    assert "activations" not in exact["model"]


@pytest.mark.slow
def test_a_declared_fp8_cache_is_evaluated(short: Path, text: Path, tmp_path: Path, evaluated: Path) -> None:
    run_here("run", short, tmp_path / "out", "--set", "kv_cache=fp8", "--evaluate", text, code=0)
    found = json.loads(document(tmp_path / "out"))["rows"][0]
    assert (found["model"]["activations"], found["model"]["kv_cache"]) == ("w4a4", "fp8")
    assert found["figures"] != json.loads(document(evaluated))["rows"][0]["figures"]


def test_a_dry_run_says_what_it_needs_and_writes_nothing(short: Path, text: Path, tmp_path: Path) -> None:
    done = run_here("run", short, tmp_path / "out", "--evaluate", text, "--dry-run", code=0)
    assert "evaluation at the end, on " in done.stdout
    assert "novel.txt" in done.stdout
    assert f"next: k2convert run {short} {tmp_path / 'out'} --evaluate {text}" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a"])
def test_a_wrong_text_is_refused_before_the_conversion(short: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    done = run_here("run", short, tmp_path / "out", "--evaluate", tmp_path / "bad.txt", code=1)
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ") and "bad.txt: " in line]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_text_of_the_calibration_is_refused_before_the_conversion(short: Path, text: Path, tmp_path: Path) -> None:
    words = ("run", short, tmp_path / "out", "--calibrate", text, "--evaluate", text)
    size = ("--set", "calibration.tokens=128", "--set", "calibration.window=64")
    done = run_here(*words, *size, code=1)
    assert "novel.txt: the result is calibrated on this text, so it would look better than it is." in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("words", "problem"), [(("--part", "1/2"), "leave out --part"), (("--ray", "auto"), "--ray")])
def test_options_that_do_not_fit(short: Path, text: Path, tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    done = run_here("run", short, tmp_path / "out", "--evaluate", text, *words, code=2)
    assert problem in done.stderr


@pytest.mark.slow
def test_a_full_disk_in_the_evaluation_keeps_the_result(
    short: Path, text: Path, evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with full_disk(monkeypatch):
        done = run_here("run", short, out, "--evaluate", text, code=1)
    assert "the disk is full" in done.stderr
    assert json.loads(run_here("validate", out, "--source", short, "--json", code=0).stdout)["passed"]
    done = run_here("run", short, out, "--evaluate", text, code=0)
    assert "already complete" in done.stderr
    assert document(out) == document(evaluated)


@pytest.mark.slow
def test_an_interrupted_evaluation_resumes_behind_its_finished_layers(
    short: Path, text: Path, evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("k2convert.evaluation.streamed._score", interrupted)
        assert run_here("run", short, out, "--evaluate", text).returncode == 130
    assert not (out / "evaluation.json").exists()
    done = run_here("run", short, out, "--evaluate", text, code=0)
    assert "resuming: 3 of 3 layers done" in done.stderr
    assert document(out) == document(evaluated)
