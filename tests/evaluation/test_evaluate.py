"""`evaluate`: the same bytes however it runs, what it says and writes, and what it refuses in one line."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import torch
from command import assert_refused, messages_of, run_here
from conversions import convert
from damaged_files import NAN, damage_file, plant

import k2convert
from k2convert.check.reference_layers import check_layers
from k2convert.check.results import LayersRequest, Variant
from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CheckpointError
from k2convert.evaluation.streamed import evaluate as do_evaluation
from k2convert.forward.decoder import DecoderLayer, embed
from k2convert.forward.weights import WeightReader
from k2convert.hub.client import Hub
from k2convert.job.evaluation import EvaluationOptions, open_evaluation
from k2convert.job.opening import TextFiles
from k2convert.models import read_architecture, vocabulary_size
from k2convert.plan.recipe import Budget, TextUse
from k2convert.records.evaluation import find_evaluation, fresh_evaluation
from k2convert.records.ledger import find_ledger, weights_digest
from k2convert.text.windows import Windows
from scripts.fixture_maker.damage import edit_config, edit_json
from scripts.fixture_maker.folder import read_small, write_small
from tests.job.crash_runs import crash

SMALL = ("--tokens", "128", "--window", "32", "--device", "cpu")


FAMILIES = pytest.mark.parametrize("cut", ["k2_cut", "k3_cut"], indirect=True)


@pytest.fixture(scope="module")
def cut(request: pytest.FixtureRequest) -> Path:
    """A checkpoint of two layers, of Kimi K2, or of K3 in the tests of all FAMILIES."""
    checkpoint: Path = request.getfixturevalue(getattr(request, "param", "k2_cut"))
    return checkpoint


@pytest.fixture(scope="module")
def ids(ids: Path, cut: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids of the vocabulary of the checkpoint."""
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.load(ids) % vocabulary_size(open_checkpoint(cut)))
    return path


@pytest.fixture(scope="module")
def result(cut: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(cut, tmp_path_factory.mktemp("result") / "ours")


@pytest.fixture(scope="module")
def whole(cut: Path, result: Path, ids: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of an evaluation that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "whole.json"
    run_here("evaluate", cut, result, "--text", ids, *SMALL, "--out", out, code=0)
    return out.read_bytes()


def evaluate(*words: object, code: int | None = None) -> CompletedProcess[str]:
    return run_here("evaluate", *words, code=code)


def evaluated(cut: Path, result: Path, ids: Path, out: Path, *, workers: int = 2, chunk: int = 4) -> bytes:
    """The file of an evaluation with these threads and windows at once."""
    text = TextFiles([ids], ("cpu",))
    options = EvaluationOptions("both", "fp8", out)
    with open_evaluation(str(cut), [str(result)], text, TextUse(tokens=128, window=32), options, hub=Hub()) as plan:
        layer_pass = plan.layer_pass
        other = replace(layer_pass.text, chunk=chunk, threads=workers)
        do_evaluation(
            replace(plan, layer_pass=replace(layer_pass, job=replace(layer_pass.job, chunk=chunk), text=other))
        )
    return out.read_bytes()


@FAMILIES
def test_a_layer_alone_has_the_error_of_the_evaluation(cut: Path, result: Path, ids: Path, tmp_path: Path) -> None:
    """No layer before the first MoE layer is converted, so in both ways it reads the same hidden states.

    An evaluation divides by the energy of the layer's output, `validate --layers` by that of what its MLP adds. The
    sums are FP32 in one, FP64 in the other.
    """
    source, converted = open_checkpoint(cut), open_checkpoint(result)
    tokens = np.load(ids)
    windows = Windows(tokens, (), (), tokens.size, tokens.shape[1], 0)
    request = LayersRequest((1,), windows, tokens.size)
    (alone,) = check_layers(request, source=source, converted=converted, budget=Budget()).layers
    with closing(WeightReader(source)) as reader:
        embedded = embed(reader, torch.as_tensor(tokens))
        blocks = [embedded][: read_architecture(source).residual_block]
        hidden = DecoderLayer(reader, 0).run(embedded)
        layer = DecoderLayer(reader, 1)
        before = layer.attend(hidden, blocks)[0]
        after = layer.run(hidden, blocks=blocks).flatten(0, 1)
    share = float((after - before).double().square().sum() / after.double().square().sum())
    out = tmp_path / "both.json"
    evaluate(cut, result, "--text", ids, *SMALL, "--activations", "both", "--out", out, code=0)
    rows = json.loads(out.read_text())["rows"]
    assert [row["model"]["activations"] for row in rows] == ["w4a16", "w4a4"]
    for row, variant in zip(rows, (Variant.CONVERTED, Variant.CONVERTED_W4A4), strict=True):
        assert row["layers"][0]["relative_error"] == 0
        expected = share * 10 ** (-alone.error(variant).sqnr_db / 10)
        assert (expected == 0) == (variant is Variant.CONVERTED and "k3" in cut.name), "a cast changes nothing"
        assert row["layers"][1]["relative_error"] == pytest.approx(expected, rel=1e-4)


@FAMILIES
@pytest.mark.slow
def test_neither_threads_nor_chunks_change_the_figures(cut: Path, result: Path, ids: Path, tmp_path: Path) -> None:
    two = evaluated(cut, result, ids, tmp_path / "two")
    assert evaluated(cut, result, ids, tmp_path / "one", workers=1) == two
    evaluated(cut, result, ids, tmp_path / "narrow", chunk=1)
    wide, narrow = (find_evaluation(tmp_path / name) for name in ("two", "narrow"))
    for row, same in zip(wide.rows, narrow.rows, strict=True):
        assert same.figures.divergence.mean == pytest.approx(row.figures.divergence.mean, rel=1e-3)


@FAMILIES
@pytest.mark.slow
def test_killed_at_every_call_it_goes_on_to_the_same_bytes(cut: Path, result: Path, ids: Path, tmp_path: Path) -> None:
    words = ["evaluate", cut, result, "--text", ids, *SMALL, "--activations", "both", "--out", "OUT/evaluation.json"]
    [report] = crash(tmp_path, words, points="every")
    assert report["wrong"] == []
    assert report["files"] == [".evaluation.json.k2convert", "evaluation.json"]
    assert report["tried"] > len(report["calls"])
    assert report["killed"] == 20
    assert report["interrupted"]["code"] == 130
    assert "of 2 layers are done. The same command resumes" in report["interrupted"]["lines"][-2]


@FAMILIES
def test_it_is_written_into_the_checkpoint_and_shown(cut: Path, result: Path, ids: Path, tmp_path: Path) -> None:
    ours = Path(shutil.copytree(result, tmp_path / "ours"))
    before = {path: path.stat().st_mtime_ns for path in cut.rglob("*")}
    done = evaluate(cut, ours, "--text", ids, *SMALL, code=0)
    evaluation = find_evaluation(ours)
    assert (evaluation.kind, evaluation.reference.name) == ("evaluate", cut.name)
    assert (evaluation.text.windows, evaluation.text.tokens) == (4, 128)
    (row,) = evaluation.rows
    assert (row.model.name, row.model.activations, row.model.kv_cache) == ("ours", "w4a4", None)
    assert f"{row.figures.divergence.mean:.5f}" in done.stdout
    assert messages_of(done.stderr).splitlines()[-1] == f"next: k2convert report {ours} --source {cut}"
    assert str(ours / "evaluation.json") in done.stdout.splitlines()
    assert {path: path.stat().st_mtime_ns for path in cut.rglob("*")} == before, "the reference is not written to"
    assert not (ours / ".k2convert" / "evaluation.work").exists()
    weights = weights_digest(open_checkpoint(ours), find_ledger(ours))
    assert row.model.weights == weights
    assert fresh_evaluation(ours, weights=weights) == evaluation
    with pytest.raises(CheckpointError, match="measures other weights"):
        fresh_evaluation(ours, weights=weights_digest(open_checkpoint(ours), None))
    again = evaluate(cut, ours, "--text", ids, *SMALL)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert f"{ours / 'evaluation.json'}: already complete" in again.stderr
    other = evaluate(cut, ours, "--text", ids, *SMALL, "--activations", "w4a16", code=1)
    assert f"{ours / 'evaluation.json'}: holds another evaluation (ids.npy: W4A4). Delete it" in other.stderr


def test_two_checkpoints_have_their_own_rows(cut: Path, result: Path, ids: Path, tmp_path: Path) -> None:
    ours = Path(shutil.copytree(result, tmp_path / "one"))
    other = convert(cut, tmp_path / "other", rule="max")
    shutil.rmtree(ours / ".k2convert")  # as somebody else's checkpoint
    evaluation = k2convert.evaluate(cut, [ours, other, cut], [ids], tokens=128, window=32, device="cpu")
    assert [row.model.name for row in evaluation.rows] == ["one", "other", "cut"]
    assert evaluation.rows[2].figures.divergence.maximum == 0
    assert not (ours / ".k2convert").exists()
    for folder, row in zip((ours, other), evaluation.rows, strict=False):
        saved = find_evaluation(folder)
        verdicts = tuple(verdict for verdict in evaluation.verdicts if row.model in (verdict.nearer, verdict.farther))
        assert saved == replace(evaluation, rows=(row,), verdicts=verdicts)
    assert not (cut / "evaluation.json").exists()


@FAMILIES
def test_a_dry_run_says_what_it_needs_and_writes_nothing(cut: Path, result: Path, ids: Path) -> None:
    before = sorted(result.rglob("*"))
    done = evaluate(cut, result, "--text", ids, *SMALL, "--dry-run", code=0)
    first, *others = done.stdout.splitlines()
    assert first == "1 model and the reference, 2 layers on 128 tokens of ids.npy, in 4 windows of 32"
    assert [line.split()[0].rstrip(":") for line in others] == ["reads", "disk", "memory", "time"]
    document = json.loads(evaluate(cut, result, "--text", ids, *SMALL, "--dry-run", "--json").stdout)
    assert (document["layers"], document["finished_layers"], document["tokens"]) == (2, 0, 128)
    assert document["bytes_read"] > 0
    assert sorted(result.rglob("*")) == before


def begun(cut: Path, result: Path, ids: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose evaluation stopped before its head."""
    out = folder / "found.json"
    with monkeypatch.context() as patch:
        patch.setattr("k2convert.evaluation.streamed.score_tokens", lambda *_args, **_options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            evaluate(cut, result, "--text", ids, *SMALL, "--out", out, "--quiet")
    assert not out.exists()
    return out


@FAMILIES
@pytest.mark.slow
def test_another_text_is_refused(
    cut: Path, result: Path, ids: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = begun(cut, result, ids, tmp_path, monkeypatch)
    np.save(tmp_path / "ids.npy", np.load(ids)[:, ::-1])
    for change, says in (
        (("--kv-cache", "fp8"), "kv_cache was not set, now 'fp8'"),
        (("--activations", "both"), "models was "),
        (("--text", tmp_path / "ids.npy"), "texts was "),
    ):
        words = ("--text", ids, *SMALL, "--out", out, "--quiet")
        refused = evaluate(cut, result, *words, *change)
        assert_refused(refused, "found.json.work: holds a different evaluation: ")
        assert says in refused.stderr
    done = evaluate(cut, result, "--text", ids, *SMALL, "--out", out)
    assert (done.returncode, "resuming: 2 of 2 layers done" in done.stderr) == (0, True), done.stderr
    assert out.read_bytes() == whole


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("cut", "name", "start"),
    [
        ("k2_cut", "layer-001", "at the beginning"),
        ("k3_cut", "hidden-1-000", "at the beginning"),
        ("k2_cut", "hidden-1-002", "at the beginning"),
        ("k3_cut", "hidden-1-002", "with layer 1"),  # what it reads is kept for the layers after it
    ],
    indirect=["cut"],
)
def test_a_damaged_work_file_is_named_and_computed_again(
    cut: Path,
    name: str,
    start: str,
    result: Path,
    ids: Path,
    whole: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = begun(cut, result, ids, tmp_path, monkeypatch)
    path = Path(f"{out}.work", f"{name}.safetensors")
    damage_file(path, "flipped", foreign=max(cut.glob("*.safetensors")))
    done = evaluate(cut, result, "--text", ids, *SMALL, "--out", out, code=0)
    assert f"{path}: damaged: the evaluation starts again {start}" in done.stderr
    assert out.read_bytes() == whole


def test_windows_that_the_reference_drops_count_nowhere(cut: Path, ids: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(cut, tmp_path / "source"))
    path = tmp_path / "many.npy"
    result = convert(cut, tmp_path / "result")
    plant(source, "model.embed_tokens.weight", 7 * 256, NAN)
    many = np.random.default_rng(1).integers(8, 2048, (16, 32))
    np.save(tmp_path / "kept.npy", many[[n for n in range(16) if n != 5]])
    many[5, 9] = 7
    np.save(path, many)
    options = {"window": 32, "device": "cpu"}
    evaluation = k2convert.evaluate(source, [result], [path], tokens=512, out=tmp_path / "a.json", **options)  # type: ignore[arg-type]
    rest = k2convert.evaluate(cut, [result], [tmp_path / "kept.npy"], tokens=480, out=tmp_path / "b.json", **options)  # type: ignore[arg-type]
    assert (evaluation.text.dropped, rest.text.dropped) == (1, 0)
    (row,), (same,) = evaluation.rows, rest.rows
    assert row.figures.divergence.mean == pytest.approx(same.figures.divergence.mean, rel=1e-4)
    for layer, other in zip(row.layers, same.layers, strict=True):
        assert layer.relative_error == pytest.approx(other.relative_error, rel=1e-4, abs=1e-15)
        assert layer.routing_agreement == other.routing_agreement


def edited(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The checkpoint with other tensors."""
    checkpoint = read_small(source)
    for tensors in checkpoint.shards.values():
        change(tensors)
    return write_small(checkpoint, folder)


def test_checkpoints_that_do_not_compare(cut: Path, short: Path, result: Path, ids: Path, tmp_path: Path) -> None:
    import torch

    def halve(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("embed_tokens.weight", "lm_head.weight"))]:
            tensors[name] = tensors[name][:1024]

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("self_attn.o_proj.weight")]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    def lose(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".mlp.experts.2.up_proj." in name]:
            del tensors[name]

    def behead(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop("lm_head.weight", None)

    tokenizer = Path(shutil.copytree(result, tmp_path / "tokenizer"))
    edit_json(tokenizer / "tokenizer.json", lambda document: document.update(version="1.1"))
    broken = Path(shutil.copytree(result, tmp_path / "broken"))
    plant(broken, "model.layers.1.input_layernorm.weight", 5, NAN)
    small = edited(cut, tmp_path / "vocabulary", halve)
    edit_config(small, vocab_size=1024)
    for other, says in (
        (small, "has 1,024 tokens in its vocabulary, but the reference"),
        (short, "has 3 layers, but the reference"),
        (tokenizer, "tokenizer.json is not that of the reference"),
        (edited(cut, tmp_path / "attention", quantize), "self_attn.o_proj.weight is F8_E4M3"),
        (edited(cut, tmp_path / "lost", lose), "model.layers.1.mlp.experts.2.up_proj is missing"),
        (edited(cut, tmp_path / "headless", behead), "lm_head.weight is missing"),
        (broken, "broken: layer 1: the hidden states are not finite where those of the reference are"),
    ):
        assert_refused(evaluate(cut, other, "--text", ids, *SMALL, "--quiet"), says)
        assert not (other / "evaluation.json").exists()
    assert_refused(evaluate(result, cut, "--text", ids, *SMALL), f"{cut}: is the source of {result}")
    assert not (cut / "evaluation.json").exists()
    assert_refused(evaluate(cut, cut, "--text", ids, *SMALL), "Name a file with --out")
    assert_refused(evaluate(cut, result, "--text", ids, *SMALL, "--out", cut / "x.json"), "is inside the source")


@pytest.mark.slow
def test_the_text_of_the_calibration_is_refused(short: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    use = "calibration={tokens: 320, window: 64}"
    run_here("run", short, out, "--calibrate", text, "--set", use, "--device", "cpu", "--quiet", code=0)
    refused = evaluate(short, out, "--text", text, *SMALL)
    assert_refused(refused, "was calibrated on this text")
    k2convert.evaluate(short, out, text, tokens=64, window=32, device="cpu", any_text=True)
