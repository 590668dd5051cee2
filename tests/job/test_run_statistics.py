"""`run --statistics`: every tensor is what the reference arithmetic makes of the statistics, in every kind of job."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from command import run, run_here, said
from forked_runs import send, start
from numpy.typing import NDArray
from results import files_of, raw_tensors
from statistics_makers import HEADER, layers_of, moe_layer, random_statistics, rewrite

from k2convert.calibration.channels import digest_of_exponents
from k2convert.calibration.statistics import LayerStatistics, open_statistics
from k2convert.checkpoint.index import Checkpoint, open_checkpoint
from k2convert.choices import Rule
from k2convert.job import shard
from k2convert.quantize.formats.bf16 import Bf16Weight, SourceWeight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.rules import RULES
from k2convert.records.command import read_command
from k2convert.records.ledger import read_ledger
from scripts.fixture_maker import make_k25
from scripts.fixture_maker.folder import read_small, write_small

MLP = "kimi-k2-thinking-nvfp4-mlp"
Result = dict[str, bytes]  # the bytes of every tensor of a result by name


def importance(mean_square: NDArray[Any]) -> NDArray[np.uint8]:
    blocks = mean_square.astype(np.float64).reshape(-1, 16)
    return np.maximum(1, np.rint(255 * blocks / blocks.max(axis=1, keepdims=True))).astype(np.uint8).reshape(-1)


class Expected:
    """The tensors of a result, computed from the source's bytes and the statistics with the reference arithmetic."""

    def __init__(
        self, source: Path, statistics: Path, *, rule: Rule = "imatrix", is_scaled: bool, prefix: str = "model."
    ) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(source)
        self.raw = raw_tensors(source)
        self.prefix = prefix
        self.rule = RULES[rule]
        self.is_scaled = is_scaled
        found = open_statistics(statistics)
        self.layers = {number: found.layer(number) for number in found.layers}

    def weight(self, module: str) -> SourceWeight:
        if f"{module}.weight" in self.raw:
            rows, columns = self.checkpoint.tensors[f"{module}.weight"].shape
            return Bf16Weight(np.frombuffer(self.raw[f"{module}.weight"], np.uint16).reshape(rows, columns))
        rows, words = self.checkpoint.tensors[f"{module}.weight_packed"].shape
        packed = np.frombuffer(self.raw[f"{module}.weight_packed"], np.uint8).reshape(rows, words * 4)
        return Int4Weight(packed, np.frombuffer(self.raw[f"{module}.weight_scale"], np.uint16).reshape(rows, -1))

    def mlp(self, module: str) -> dict[str, Nvfp4Weight]:
        layer = self.layers[int(module.removeprefix(f"{self.prefix}layers.").split(".")[0])]
        sources = {kind: self.weight(f"{module}.{kind}_proj") for kind in ("gate", "up", "down")}
        if self.is_scaled and layer.num_experts > 1:
            for kind in ("gate", "up"):
                sources[kind] = sources[kind].divide_columns(layer.smoothing_exponents, name=module)
        shared = sources["gate"].magnitude().merge(sources["up"].magnitude())
        found: dict[str, Nvfp4Weight] = {}
        for kind, source in sources.items():
            magnitude = source.magnitude() if kind == "down" else shared
            scale = self.rule.global_scale(magnitude)
            found[kind] = self.rule.quantize(source, scale, self.importance(module, kind, layer))
        return found

    def importance(self, module: str, kind: str, layer: LayerStatistics) -> NDArray[np.uint8]:
        if kind != "down":
            exponents = layer.smoothing_exponents.astype(np.int32) if self.is_scaled else 0
            return importance(np.ldexp(layer.gate_up_mean_square, 2 * exponents))
        if module.endswith("shared_experts"):
            assert layer.shared_down_mean_square is not None
            return importance(layer.shared_down_mean_square)
        expert = int(module.rsplit(".", 1)[1]) if ".experts." in module else 0
        row = layer.down_mean_square[expert]
        tokens = int(layer.tokens[expert])
        if layer.num_experts == 1 or tokens >= 64:
            return importance(row)
        blocks = row.astype(np.float64).reshape(-1, 16)
        steadied = (tokens * blocks + 8 * blocks.mean(axis=1, keepdims=True)) / (tokens + 8)
        return importance(steadied.astype(np.float32).reshape(-1))

    def copied(self, name: str) -> bytes:
        raw, (layer, _, rest) = self.raw[name], name.removeprefix(f"{self.prefix}layers.").partition(".")
        signs = {"post_attention_layernorm": 1, "mlp.gate": -1}
        signs |= {f"mlp.shared_experts.{kind}_proj": -1 for kind in ("gate", "up")}
        sign = signs.get(rest.removesuffix(".weight"), 0) if rest.endswith(".weight") else 0
        if not (sign and self.is_scaled and layer.isdecimal()):
            return raw
        steps = sign * self.layers[int(layer)].smoothing_exponents.astype(np.int32)
        if self.checkpoint.tensors[name].dtype == "F32":
            return np.ldexp(np.frombuffer(raw, np.float32).reshape(-1, steps.size), steps).tobytes()
        values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(-1, steps.size)
        return (np.ldexp(values, steps).view(np.uint32) >> 16).astype(np.uint16).tobytes()

    def mlps(self, *, roles: str) -> dict[str, dict[str, Nvfp4Weight]]:
        modules = {name.rpartition(".")[0].rpartition(".")[0] for name in self.raw if "_proj.weight" in name}
        found = sorted(module for module in modules if module.startswith(self.prefix) and ".mlp" in module)
        return {module: self.mlp(module) for module in found if roles == "all" or ".experts." in module}

    def result(self, mlps: dict[str, dict[str, Nvfp4Weight]], *, layout: str, activations: str) -> Result:
        names = ("weight", "weight_scale", "weight_scale_2", "input_scale")
        if layout == "compressed-tensors":
            names = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
        found: Result = {}
        for name in self.raw:
            module, _, parameter = name.rpartition(".")
            mlp, _, kind = module.rpartition(".")
            if mlp not in mlps or not kind.endswith("_proj"):
                found[name] = self.copied(name)
            elif parameter in ("weight", "weight_packed"):
                weight = mlps[mlp][kind.removesuffix("_proj")]
                scale = weight.global_scale if layout == "modelopt" else 1 / weight.global_scale
                scalars = [np.float32(scale).tobytes(), np.float32(1).tobytes()][: 2 if activations == "w4a4" else 1]
                values = (weight.packed.tobytes(), weight.block_scales.tobytes(), *scalars)
                found |= {f"{module}.{n}": v for n, v in zip(names, values, strict=False)}
        return found


Weights = Callable[[bool], tuple[Expected, dict[str, dict[str, Nvfp4Weight]]]]


@pytest.fixture(scope="module")
def weights(cut: Path, statistics: Path) -> Weights:
    """What `imatrix` makes of every MLP of the small checkpoint, with and without smoothing; computed once."""

    @cache
    def compute(is_scaled: bool) -> tuple[Expected, dict[str, dict[str, Nvfp4Weight]]]:
        maker = Expected(cut, statistics, is_scaled=is_scaled)
        return maker, maker.mlps(roles="all")

    return compute


def assert_equal(found: Result, expected: Result) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def unconverted(raw: Result) -> Result:
    return {name: data for name, data in raw.items() if ".mlp.experts." not in name}


@pytest.mark.quick(1)
@pytest.mark.parametrize("activations", ["w4a4", "w4a16"])
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_every_tensor_is_what_the_reference_gives(
    layout: str, activations: str, cut: Path, statistics: Path, weights: Weights, tmp_path: Path
) -> None:
    """Experts, shared experts and the dense layer, partners in different shards; smoothing is on for w4a4 alone."""
    maker, mlps = weights(activations == "w4a4")
    words = ["run", cut, tmp_path / "out", "--recipe", MLP, "--layout", layout, "--activations", activations]
    assert run(*words, "--statistics", statistics, "--quiet") == 0
    assert_equal(raw_tensors(tmp_path / "out"), maker.result(mlps, layout=layout, activations=activations))


def test_unconverted_shared_experts_are_scaled_and_workers_do_not_matter(
    cut: Path, statistics: Path, weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, mlps = weights(True)
    experts = {module: mlp for module, mlp in mlps.items() if ".experts." in module}
    for workers in (1, 2):
        words = ["run", cut, tmp_path / str(workers), "--workers", workers, "--statistics", statistics]
        assert run(*words, "--quiet") == 0
        monkeypatch.setattr(shard, "COPY_BYTES", 1100)  # the second time tensors are copied in parts: two rows at once
    assert_equal(raw_tensors(tmp_path / "1"), maker.result(experts, layout="modelopt", activations="w4a4"))
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")
    raw = unconverted(raw_tensors(tmp_path / "1"))
    source = raw_tensors(cut)
    changed = sorted(name for name in raw if raw[name] != source[name])
    stem = "model.layers.1."
    assert changed == [
        f"{stem}mlp.gate.weight",
        f"{stem}mlp.shared_experts.gate_proj.weight",
        f"{stem}mlp.shared_experts.up_proj.weight",
        f"{stem}post_attention_layernorm.weight",
    ]


@pytest.mark.parametrize("rule", ["mse", "max"])
def test_smoothing_serves_rules_without_weights(rule: Rule, cut: Path, statistics: Path, tmp_path: Path) -> None:
    maker = Expected(cut, statistics, rule=rule, is_scaled=True)
    words = ["run", cut, tmp_path / "out", "--rule", rule, "--activations", "w4a16", "--set", "smoothing=true"]
    assert run(*words, "--statistics", statistics, "--quiet") == 0
    expected = maker.result(maker.mlps(roles="experts"), layout="modelopt", activations="w4a16")
    assert_equal(raw_tensors(tmp_path / "out"), expected)
    calibration = read_ledger(tmp_path / "out").calibration
    assert calibration is not None
    assert (calibration.imatrix, calibration.smoothing) == (False, True)
    assert all(layer.fallback == () for layer in calibration.layers.values())


def test_k25_with_an_fp32_router(cut: Path, tmp_path: Path) -> None:
    changed = read_small(cut)
    changed.replace("model.layers.1.mlp.gate.weight", changed.tensors()["model.layers.1.mlp.gate.weight"].float())
    source = make_k25(tmp_path / "k25", write_small(changed, tmp_path / "fp32"))
    statistics = random_statistics(tmp_path / "stats", source)
    assert run("run", source, tmp_path / "out", "--statistics", statistics, "--quiet") == 0
    maker = Expected(source, statistics, is_scaled=True, prefix="language_model.model.")
    expected = maker.result(maker.mlps(roles="experts"), layout="modelopt", activations="w4a4")
    assert_equal(raw_tensors(tmp_path / "out"), expected)


def test_ledger_fingerprint_and_next_command_name_the_statistics(cut: Path, statistics: Path, tmp_path: Path) -> None:
    shown = run_here("run", cut, tmp_path / "out", "--statistics", statistics, code=0)
    line = f"next: k2convert validate {tmp_path / 'out'} --source {cut} --statistics {statistics}"
    assert line in shown.stderr
    explicit = ["--rule", "imatrix", "--set", "smoothing=true"]  # the same job
    assert run("run", cut, tmp_path / "out", "--statistics", statistics, *explicit, "--quiet") == 0
    ledger = read_ledger(tmp_path / "out")
    found = open_statistics(statistics)
    digest = blake3(statistics.read_bytes()).hexdigest()
    assert ledger.fingerprint["statistics"] == digest
    assert (ledger.recipe.rule, ledger.recipe.smoothing) == ("imatrix", True)
    record = ledger.calibration
    layer = found.layer(1)
    assert record is not None
    assert (record.statistics, record.texts, record.tokens, record.seed) == (digest, found.texts, 8192, 3)
    assert (record.window, record.windows, record.dropped_windows) == (2048, 4, 1)
    assert list(record.layers) == [1], "the MoE layers"
    assert record.layers[1].tokens == tuple(layer.tokens.tolist())
    assert record.layers[1].fallback == (2, 3), "fewer than 64 tokens"
    assert record.layers[1].exponents == {a: int((layer.smoothing_exponents == a).sum()) for a in range(-4, 5)}
    assert record.exponents_digest == digest_of_exponents({1: layer.smoothing_exponents})


def test_exponents_of_zero_change_no_copied_byte(cut: Path, statistics: Path, tmp_path: Path) -> None:
    layers = layers_of(statistics)
    zero = [replace(layer, smoothing_exponents=np.zeros_like(layer.smoothing_exponents)) for layer in layers]
    rewrite(statistics, zero, tmp_path / "zero")
    for name, extra in (("on", ["--set", "smoothing=true"]), ("off", ["--set", "smoothing=false"])):
        words = ["run", cut, tmp_path / name, "--statistics", tmp_path / "zero", *extra]
        assert run(*words, "--quiet") == 0
    on = raw_tensors(tmp_path / "on")
    off = raw_tensors(tmp_path / "off")
    assert_equal(on, off)
    assert_equal(unconverted(on), unconverted(raw_tensors(cut)))


def test_a_dry_run_says_what_is_scaled_and_writes_nothing(cut: Path, statistics: Path, tmp_path: Path) -> None:
    words = ["run", cut, tmp_path / "out", "--statistics", statistics, "--dry-run"]
    shown = run_here(*words, code=0)
    channels = int((open_statistics(statistics).layer(1).smoothing_exponents != 0).sum())
    assert f"smoothing: {channels} channels of 1 layer" in shown.stdout
    assert "2 experts have fewer than 64 tokens" in shown.stdout
    assert "rule imatrix" in shown.stdout
    document = json.loads(run_here(*words, "--json", code=0).stdout)
    assert document["actions"]["scale"]["source_tensors"] == 4
    assert document["actions"]["copy"]["source_tensors"] == 25
    assert document["calibration"] == {
        "file": str(statistics),
        "statistics": document["fingerprint"]["statistics"],
        "texts": [name for name, _ in HEADER.texts],
        "tokens": 8192,
        "imatrix": True,
        "smoothing": True,
        "fallback_experts": 2,
        "layers_without_imatrix": 0,
        "scaled_layers": 1,
        "scaled_channels": channels,
    }
    assert not (tmp_path / "out").exists()


def error_of(*words: object) -> str:
    """Run a command that must fail without writing; returns its error, which is one line."""
    shown = run_here("run", *words, "--quiet", code=1)
    assert shown.stdout == ""
    assert said(shown.stderr).startswith("error: ")
    assert said(shown.stderr).count("\n") == 1
    assert not Path(str(words[1])).exists(), "nothing is written"
    return shown.stderr


def test_statistics_that_do_not_fit_are_refused(cut: Path, statistics: Path, tmp_path: Path) -> None:
    dense, layer = layers_of(statistics)
    experts = replace(moe_layer(1, experts=5, hidden=256, width=128), norm_digest=layer.norm_digest)
    shared = replace(layer, shared_down_mean_square=np.ones(64, np.float32))
    shard = "model-00002-of-000005.safetensors"
    for layers, message in (
        (
            [dense, replace(layer, norm_digest="0" * 64)],
            f"source with other norms: {shard}: model.layers.1.post_attention_",
        ),
        ([dense], "has no layer 1"),
        ([dense, experts], "layer 1 is of 5 experts of 256 x 128, but the source has 4 of 256 x 128"),
        ([dense, shared], "has 64 columns for model.layers.1.mlp.shared_experts.down_proj, which has 128"),
    ):
        wrong = rewrite(statistics, layers, tmp_path / "wrong")
        error = error_of(cut, tmp_path / "out", "--recipe", MLP, "--statistics", wrong)
        assert message in error
        assert "k2convert calibrate" in error


def test_foreign_statistics_are_refused_in_one_line(cut: Path, tiny: Path, statistics: Path, tmp_path: Path) -> None:
    assert "was made from a source with other shard headers" in error_of(
        tiny, tmp_path / "out", "--statistics", statistics
    )
    assert "no such file" in error_of(cut, tmp_path / "out", "--statistics", tmp_path / "none")
    assert "a folder" in error_of(cut, tmp_path / "out", "--statistics", tmp_path)
    (tmp_path / "short").write_bytes(statistics.read_bytes()[:-1])
    assert str(tmp_path / "short") in error_of(cut, tmp_path / "out", "--statistics", tmp_path / "short")


def test_options_that_contradict_statistics_are_refused(cut: Path, statistics: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ("--statistics", statistics)
    assert "rule imatrix needs statistics. Add --statistics FILE" in error_of(cut, out, "--rule", "imatrix")
    assert "needs statistics" in error_of(cut, out, "--set", "smoothing=true")
    assert "Leave out --statistics" in error_of(cut, out, "--to", "bf16", *given)
    assert "Leave out --statistics" in error_of(cut, out, "--set", "quantizer=reference", *given)
    unused = ("--rule", "mse", "--activations", "w4a16")
    assert "rule mse without smoothing uses no statistics" in error_of(cut, out, *unused, *given)
    for name, text, message in (
        ("imatrix", "rule: imatrix", "rule imatrix needs statistics"),
        ("scaled", "smoothing: true", "smoothing needs statistics"),
        ("reference", "rule: imatrix\nquantizer: reference", "does not support rule imatrix"),
        ("both", "smoothing: true\nquantizer: reference\nrule: max", "smoothing needs statistics"),
        ("bf16", "smoothing: true\ntarget: bf16", "Leave out smoothing"),
    ):
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(f"name: {name}\n{text}\n")
        assert message in error_of(cut, out, "--recipe", recipe)
    recipe.write_text("name: copy\ntarget: bf16\n")
    assert "Leave out --statistics" in error_of(cut, out, "--recipe", recipe, "--rule", "max", *given)


def test_no_smoothing_without_statistics_is_the_run_of_always(cut: Path, tmp_path: Path) -> None:
    assert run("run", cut, tmp_path / "with", "--set", "smoothing=false", "--quiet") == 0
    assert run("run", cut, tmp_path / "without", "--quiet") == 0
    assert files_of(tmp_path / "with") == files_of(tmp_path / "without")
    assert b"smoothing" not in (tmp_path / "with" / "k2convert.json").read_bytes()


HOSTILE = {
    "model.layers.1.post_attention_layernorm.weight": 2.0**127,
    "model.layers.1.mlp.gate.weight": 129 * 2.0**-133,  # the last bit is lost if it is halved
    "model.layers.1.mlp.shared_experts.up_proj.weight": 2.0**127,
    "model.layers.1.mlp.experts.0.gate_proj.weight_scale": 2.0**-133,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_exponents_that_no_bf16_holds_name_tensor_and_remedy(name: str, cut: Path, tmp_path: Path) -> None:
    changed = read_small(cut)
    changed.replace(name, changed.tensors()[name].clone().fill_(HOSTILE[name]))
    source = write_small(changed, tmp_path / "source")
    statistics = random_statistics(tmp_path / "stats", source)
    words = ["run", source, tmp_path / "out", "--statistics", statistics, "--quiet"]
    shown = run_here(*words, code=1).stderr
    assert shown.count("\n") == 1
    assert name.removesuffix(".weight_scale") in shown
    assert "smoothing=false" in shown
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_killed_run_resumes_with_its_kept_command(cut: Path, statistics: Path, tmp_path: Path) -> None:
    words = ["run", cut, tmp_path / "whole", "--statistics", statistics, "--set", "smoothing=false", "--quiet"]
    assert run(*words) == 0
    assert read_ledger(tmp_path / "whole").recipe.smoothing is False
    assert_equal(unconverted(raw_tensors(tmp_path / "whole")), unconverted(raw_tensors(cut)))
    words[2] = tmp_path / "out"
    for _ in range(40):  # on a busy machine a job may end before it is killed
        process = start(*words)
        while process.is_alive() and not list((tmp_path / "out").glob(".k2convert/shards/*.json")):
            time.sleep(0.001)
        send(process, signal.SIGKILL)
        process.join()
        if not (tmp_path / "out" / "config.json").exists():
            break
        shutil.rmtree(tmp_path / "out")
    kept = read_command(tmp_path / "out")
    assert kept is not None
    assert set(kept.words[4:]) == {"--statistics", str(statistics), "--set", "smoothing=false", "--quiet"}
    other = rewrite(statistics, layers_of(statistics), tmp_path / "other", seed=4)
    shown = run_here(*(other if word == statistics else word for word in words), code=1).stderr
    assert "holds a different job: statistics was" in shown
    refusal = run_here("run", cut, tmp_path / "out", "--quiet", code=1).stderr
    assert "rule was 'imatrix', now 'mse'; " in refusal
    assert "; statistics was " in refusal
    assert run(*kept.words[1:]) == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.slow
def test_where_imatrix_gained_nothing_the_result_is_that_of_mse(tiny: Path, tmp_path: Path) -> None:
    """Gate, up and down of two layers: each marked projection has the bytes of mse, each other one those of imatrix."""
    whole = random_statistics(tmp_path / "whole", tiny)
    marks = {1: (0, 1), 2: (1, 0), 3: (0, 0)}
    layers = [replace(layer, imatrix=np.array(marks.get(layer.layer, (1, 1)), np.uint8)) for layer in layers_of(whole)]
    marked = rewrite(whole, layers, tmp_path / "marked")
    imatrix = ("--set", "smoothing=false", "--quiet")
    for name, options in (("whole", ("--statistics", whole, *imatrix)), ("marked", ("--statistics", marked, *imatrix))):
        assert run("run", tiny, tmp_path / f"{name}-out", *options) == 0
    assert run("run", tiny, tmp_path / "mse-out", "--rule", "mse", "--quiet") == 0
    ours, of_imatrix, of_mse = (raw_tensors(tmp_path / f"{name}-out") for name in ("marked", "whole", "mse"))
    assert any(of_imatrix[name] != of_mse[name] for name in ours if ".down_proj." in name)
    for name, data in ours.items():
        layer = int(name.split(".")[2]) if ".experts." in name else 0
        is_down = ".down_proj." in name
        gains = marks.get(layer, (1, 1))[int(is_down)]
        assert data == (of_imatrix if gains else of_mse)[name], name
    record = read_ledger(tmp_path / "marked-out").calibration
    assert record is not None
    assert [layer.without for layer in record.layers.values()] == [("gate_up",), ("down",), ("gate_up", "down")]
    assert record.layers_without == 3
    words = ("validate", tmp_path / "marked-out", "--source", tiny, "--statistics", marked)
    assert run_here(*words, code=0).returncode == 0
