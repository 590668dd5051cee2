"""`run --calibrate`: what it writes, what it says, and what it refuses."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run, run_cli, run_here
from conversions import plan_job, text_of
from damaged_files import damaged_weight
from results import raw_tensors

from k2convert.calibration.conversion import ShardNeeds, shard_needs, waiting_bytes
from k2convert.calibration.layer_files import Calibration, conversion_work
from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CalibrationError, DiskFullError, RecipeError
from k2convert.forward.layer_pass import PassText
from k2convert.job.prepare import Job, check_room
from k2convert.job.run import execute
from k2convert.plan.recipe import build_recipe, resolve_recipe
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.records.command import read_command
from k2convert.records.ledger import read_ledger
from k2convert.text.windows import held_out, read_windows

SMALL = ("--set", "calibration={tokens: 320, window: 64}", "--device", "cpu")


@pytest.fixture(scope="module")
def done(short: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("done")
    assert run("run", short, folder / "out", "--calibrate", text, *SMALL, "--quiet") == 0
    return folder


def planned(source: Path, out: Path, text: PassText, *, max_disk: int | None = None) -> Job:
    return plan_job(source, out, rule="gptq", text=text, max_disk=max_disk)


def test_result_and_ledger(short: Path, text: Path, done: Path) -> None:
    assert "passed" in run_here("validate", done / "out", "--source", short, "--quiet", code=0).stdout
    ledger = read_ledger(done / "out")
    record = ledger.calibration
    assert record is not None
    assert record.gptq
    assert [name for name, _ in record.texts] == ["calibration.txt"]
    assert (record.tokens, record.window, record.windows, record.smoothing) == (256, 64, 4, True)
    assert record.held_out_windows == 1
    assert record.exponents_digest is not None
    assert list(record.layers) == [1, 2]
    for layer in record.layers.values():
        assert layer.gptq is not None
        assert layer.gptq.held_out is not None
        for errors in (layer.gptq.fitted, layer.gptq.held_out):
            assert errors.gptq_error > errors.inherited_error >= 0
    named = {"layer_pass", "texts", "tokens", "window", "seed", "token_ids", "device", "torch"}
    assert named <= ledger.fingerprint.keys()
    assert "torch" in ledger.versions
    assert not conversion_work(done / "out").folder.exists()


@pytest.mark.slow
def test_the_end_begins_with_the_held_out_error(short: Path, text: Path, done: Path, tmp_path: Path) -> None:
    lines = run_here("run", short, done / "out", "--calibrate", text, *SMALL, code=0).stdout.splitlines()
    record = read_ledger(done / "out").calibration
    assert record is not None
    worst, errors = max(record.held_out.items(), key=lambda item: item[1].gptq_error)
    assert lines[0] == (
        "outputs of the layers, on the 1 of 5 windows that were kept out of the fit: squared error at most "
        f"{errors.gptq_error:.5f} of the INT4 model's (layer {worst}; {errors.mse_error:.5f} with that layer "
        "by rule mse)"
    )
    options = ("--calibrate", text, "--set", "calibration={tokens: 256, window: 256}", "--device", "cpu")
    shown = run_here("run", short, tmp_path / "one", *options, code=0).stdout
    assert shown.startswith("outputs of the layers: no held-out figure: only one window\n")


@pytest.mark.slow
def test_a_layer_that_is_worse_than_rule_mse_is_warned_of_when_it_is_done(short: Path, tmp_path: Path) -> None:
    """Fitted to few kinds of tokens, measured on others."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 40, size=(8, 128))
    ids[held_out(8)] = generator.integers(40, 2048, size=(1, 128))
    np.save(tmp_path / "ids.npy", ids)
    options = ("--set", "calibration={tokens: 1024, window: 128}", "--device", "cpu")
    shown = run_here("run", short, tmp_path / "out", "--calibrate", tmp_path / "ids.npy", *options, code=0)
    record = read_ledger(tmp_path / "out").calibration
    assert record is not None
    worse = [layer for layer, errors in record.held_out.items() if errors.is_worse]
    assert worse
    for layer in worse:
        warning = f"warning: layer {layer}: on the windows that were kept out of the fit"
        assert shown.stderr.index(warning) < shown.stderr.index("calibrate: 100 %")
    assert f"warning: {record.warning}" in shown.stderr


@pytest.mark.slow
def test_smoothing_is_on_for_4_bit_activations_alone_unless_asked_for(short: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "scaled.yaml").write_text("name: scaled\nactivations: w4a16\nsmoothing: true\n")
    words = ("run", short, tmp_path / "out", "--calibrate", text, *SMALL, "--dry-run")
    for options, state in (
        ((), "on"),
        (("--activations", "w4a16"), "off"),
        (("--activations", "w4a16", "--set", "smoothing=true"), "on"),
        (("--set", "smoothing=false"), "off"),
        (("--recipe", tmp_path / "scaled.yaml"), "on"),
    ):
        assert f"smoothing: {state} (" in run_here(*words, *options, code=0).stdout


@pytest.mark.slow
def test_partners_in_different_shards_in_the_other_layout(cut: Path, text: Path, tmp_path: Path) -> None:
    options = ("--calibrate", text, *SMALL, "--layout", "compressed-tensors", "--activations", "w4a16")
    words = ("run", cut, tmp_path / "out", *options, "--workers", "3")
    shown = run_here(*words, code=0)
    summary = "2 layers on 320 tokens of calibration.txt, in 5 windows of 64; 1 of them is kept out of the fit"
    assert f"calibrates while it converts: {summary}" in shown.stderr
    assert "calibrate: 100 % (2 of 2 layers)" in shown.stderr
    assert run("validate", tmp_path / "out", "--source", cut, "--quiet") == 0


def test_a_finished_run_is_not_made_again(short: Path, text: Path, done: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (done / "out").glob("*.*") if path.is_file()}
    shown = run_here("run", short, done / "out", "--calibrate", text, *SMALL, code=0).stderr
    assert f"{done / 'out'}: already complete: 4 of 4 shards done" in shown
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.slow
def test_another_text_is_refused(
    short: Path, text: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "calibration.txt").write_text(text.read_text() + "!")

    def check(named: str, *changed: str, text: Path = text) -> None:
        error = run_here("run", short, done / "out", "--calibrate", text, *SMALL, *changed, "--quiet", code=1).stderr
        assert error.count("\n") == 1
        assert "holds a different job: " in error
        assert named in error

    check("seed was 0, now 1", "--set", "calibration.seed=1")
    check("tokens was 320, now 128", "--set", "calibration.tokens=128")
    check("window was 64, now 32", "--set", "calibration.window=32")
    check("smoothing was True, now False", "--set", "smoothing=false")
    check("texts was 'calibration.txt (", text=tmp_path / "calibration.txt")
    other = run_here("run", short, done / "out", "--rule", "mse", "--quiet", code=1).stderr
    assert "holds a different job: rule was 'gptq', now 'mse'. " in other
    monkeypatch.setattr("k2convert.forward.layer_pass.PASS_VERSION", 1)
    check("layer_pass was 4, now 1")


@pytest.mark.slow
def test_settings_of_threads_change_no_byte(short: Path, text: Path, done: Path, tmp_path: Path) -> None:
    settings = {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "4", "MKL_DYNAMIC": "FALSE"}
    settings["OMP_WAIT_POLICY"] = "PASSIVE"  # more threads than cores wait without computing
    options = ("--calibrate", text, *SMALL, "--quiet")
    assert run_cli("run", short, tmp_path / "out", *options, **settings).returncode == 0
    shards = sorted((done / "out").glob("*.safetensors"))
    assert len(shards) == 4
    for shard in shards:
        assert (tmp_path / "out" / shard.name).read_bytes() == shard.read_bytes()


def test_options_that_contradict_are_refused(short: Path, tmp_path: Path) -> None:
    for options, says in (
        (("--calibrate", "text.txt", "--rule", "max"), "--calibrate converts by rule gptq, not max"),
        (("--calibrate", "text.txt", "--set", "target=bf16"), "Leave out --calibrate"),
        (("--set", "calibration.tokens=5"), "Add --calibrate FILE"),
    ):
        assert says in run_here("run", short, tmp_path / "out", *options, code=1).stderr
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_the_layer_pass(short: Path, text: Path, tmp_path: Path) -> None:
    words = ("run", short, tmp_path / "out", "--calibrate", text, *SMALL, "--dry-run")
    shown = run_here(*words, code=0).stdout
    assert "calibrates while it converts: 3 layers on 320 tokens of calibration.txt, in 5 windows of 64" in shown
    calibration = json.loads(run_here(*words, "--json", code=0).stdout)["calibration"]
    assert (calibration["layers"], calibration["finished_layers"], calibration["tokens"]) == (3, 0, 320)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_failed_layer_pass_is_one_line_and_goes_on(short: Path, text: Path, done: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(short, tmp_path / "source"))
    out = tmp_path / "out"
    words = ("run", source, out, "--calibrate", text, *SMALL)
    with damaged_weight(source, "model.layers.2.self_attn.q_a_proj.weight"):
        error = run_here(*words, "--quiet", code=1).stderr
    assert error.startswith("error: layer 2: the hidden states of 4 of 5 windows are not finite.")
    assert error.count("\n") == 1
    assert not (out / "config.json").exists()
    assert "calibrate: 2 of 3 layers are done" in run_here("status", out, code=0).stdout
    refused = run_cli(*words, "--quiet", ATEN_CPU_CAPABILITY="default")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert re.search(r"a different job: device was 'cpu, \w+, \w+ [0-9a-f]{16}', now 'cpu, .* DEFAULT", refused.stderr)
    assert "This machine or this version computes with other instructions" in refused.stderr
    assert "set ATEN_CPU_CAPABILITY=avx2" in refused.stderr
    assert "same options" not in refused.stderr
    assert "resuming: 2 of 3 layers done" in run_here(*words, code=0).stderr
    assert raw_tensors(out) == raw_tensors(done / "out")
    assert json.loads(run_here("status", out, "--json", code=0).stdout)["calibration"] is None


def test_the_room_of_a_layer_pass_is_asked_for_before_it_starts(short: Path, text: Path, tmp_path: Path) -> None:
    few, many = (text_of(short, [text], tokens=tokens) for tokens in (64, 512))
    jobs = [planned(short, tmp_path / "out", of) for of in (few, many)]
    tokens = 512 - 64
    config = open_checkpoint(short).config
    hidden = config["hidden_size"]
    chosen = config["num_experts_per_tok"]
    states = 2 * tokens * hidden
    busy = min(3 * 4 * tokens * chosen // config["n_routed_experts"], chosen * tokens)  # two workers, and one waits
    inner = tokens * chosen * config["moe_intermediate_size"]
    mapped = 4 * (3 * tokens * hidden + inner + busy * hidden)
    expected = 4 * states + mapped  # two streams, two layers
    assert jobs[1].limits.disk_needed - jobs[0].limits.disk_needed == expected
    needed = jobs[1].limits.disk_needed
    check_room(planned(short, tmp_path / "out", many, max_disk=needed))
    with pytest.raises(DiskFullError, match=r"needs at least [\d.]+ MB of disk at once, but may use [\d.]+ MB"):
        check_room(planned(short, tmp_path / "out", many, max_disk=needed - 1))


def test_shards_come_in_the_order_of_their_last_layer(short: Path, text: Path, tmp_path: Path) -> None:
    job = planned(short, tmp_path / "out", text_of(short, [text]))
    assert job.gptq is not None
    last = [job.gptq.needs[item.name].last for item in job.items]
    assert last == [-1, 0, 1, 2], "the last shard of the source has no layer"
    assert job.items[0].name == job.plan.jobs[-1].name
    assert job.gptq.needs == {shard.name: shard_needs(shard) for shard in job.plan.jobs}


def test_the_converted_experts_that_wait() -> None:
    for shards, most in (
        ([ShardNeeds(1, {1: 10}), ShardNeeds(2, {2: 10}), ShardNeeds(3, {3: 10})], 20),  # a layer and the one before
        ([ShardNeeds(3, {1: 10, 3: 1}), ShardNeeds(2, {2: 20}), ShardNeeds(3, {3: 5})], 36),
        ([ShardNeeds(-1, {})], 0),
    ):
        assert waiting_bytes(shards, num_layers=5) == most


@pytest.mark.slow
def test_token_ids_and_the_command_with_every_file(short: Path, text: Path, done: Path, tmp_path: Path) -> None:
    ids = read_windows([text], tokenizer=short, vocab_size=2048, tokens=320, window=64, seed=0).ids
    files = [tmp_path / "first.npy", tmp_path / "second.npy"]
    for path, part in zip(files, (ids[:2], ids[2:]), strict=True):
        np.save(path, part)
    words = [word for path in files for word in ("--calibrate", str(path))]
    assert run("run", short, tmp_path / "out", *words, *SMALL, "--quiet") == 0
    assert raw_tensors(tmp_path / "out") == raw_tensors(done / "out")
    command = read_command(tmp_path / "out")
    assert command is not None
    first = command.words.index("--calibrate")
    assert command.words[first : first + 4] == tuple(words)


def test_weights_of_another_source(cut: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Calibration.converted

    def doubled(calibration: Calibration, module: str) -> Nvfp4Weight:
        weight = read(calibration, module)
        return replace(weight, global_scale=2 * weight.global_scale)

    monkeypatch.setattr(Calibration, "converted", doubled)
    with pytest.raises(CalibrationError, match=r"the quantized weight is .* start again in a different folder"):
        execute(plan_job(cut, tmp_path / "out", text=text_of(cut, [text])))


def test_a_recipe_with_text_is_settled() -> None:
    unset = build_recipe({"name": "a", "activations": "w4a16"}, where="a")
    settled = resolve_recipe(unset, has_text=True)
    assert (settled.rule, settled.smoothing) == ("gptq", False)
    with_fp4 = build_recipe({"name": "a", "activations": "w4a4"}, where="a")
    assert resolve_recipe(with_fp4, has_text=True).smoothing
    off = resolve_recipe(build_recipe({"name": "a", "rule": "gptq", "smoothing": False}, where="a"), has_text=True)
    assert (off.rule, off.smoothing) == ("gptq", False)
    assert settled.budget.tensor_sqnr_db < unset.budget.tensor_sqnr_db, (
        "codes of a layer pass keep outputs, not weights"
    )
    strict = build_recipe({"name": "a", "budget": {"tensor_sqnr_db": 21.0}}, where="a")
    assert resolve_recipe(strict, has_text=True).budget == strict.budget


@pytest.mark.parametrize(
    ("recipe", "has_text", "problem"),
    [
        ({"rule": "gptq"}, False, "rule gptq needs a text. Add --calibrate FILE"),
        ({"smoothing": True}, False, "smoothing is part of rule gptq, which needs a text. Add --calibrate FILE"),
        ({"rule": "mse"}, True, "by rule gptq, not mse"),
        ({"rule": "max", "quantizer": "reference"}, True, "quantizer reference cannot be calibrated"),
        ({"target": "bf16"}, True, "target bf16 cannot be calibrated"),
    ],
)
def test_a_recipe_that_cannot_use_it_is_refused(recipe: dict[str, Any], has_text: bool, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        resolve_recipe(build_recipe({"name": "a"} | recipe, where="a"), has_text=has_text)
