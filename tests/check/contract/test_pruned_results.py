"""A pruned result validates against its whole source through the ledger's list, and every kind of wrong one fails."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run, run_here
from converted import Converted, Kind, change, change_tensor, copy_of, validate
from pruned_makers import KEPT, convert_pruned, make_whole
from statistics_makers import random_statistics

from k2convert.calibration.statistics import open_statistics
from k2convert.check.results import ValidationReport
from k2convert.check.validate import LayersRequest, validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CheckpointError
from scripts import fixture_maker as fixtures
from scripts.fixture_maker import damage
from scripts.fixture_maker.folder import SmallCheckpoint, read_small

SWAPPED_PARAMETERS = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale")
LEDGER_LIST = "k2convert.json: pruning"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sources: two MoE layers, the same in K2.5's names, and one layer with partners in different shards."""
    folder = tmp_path_factory.mktemp("whole")
    made = {"thinking": make_whole(folder / "short"), "split": make_whole(folder / "cut", is_split=True)}
    return made | {"k2.5": fixtures.make_k25(folder / "k25", made["thinking"])}


Prune = Callable[[Kind], Converted]


@pytest.fixture(scope="module")
def prune(whole: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Prune:
    """Convert half of the experts, once for each kind."""
    folder = tmp_path_factory.mktemp("pruned")
    made: dict[Kind, Converted] = {}

    def run(kind: Kind) -> Converted:
        if kind not in made:
            destination = convert_pruned(whole[kind.source], folder / str(len(made)), **kind.recipe)
            shutil.rmtree(destination / ".k2convert")
            made[kind] = Converted(kind, destination, whole[kind.source])
        return made[kind]

    return run


MAX = Kind("modelopt", "thinking", "w4a4")
GOOD = [
    MAX,
    Kind("modelopt", "split", "w4a16", "mse"),
    Kind("compressed-tensors", "k2.5", "w4a4"),
    Kind("compressed-tensors", "split", "w4a16"),
]


@pytest.fixture(params=[MAX, GOOD[2]], ids=str)
def pruned(request: pytest.FixtureRequest, prune: Prune, tmp_path: Path) -> Converted:
    """A copy to break."""
    return copy_of(prune(request.param), tmp_path / "copy")


@pytest.fixture
def by_max(prune: Prune, tmp_path: Path) -> Converted:
    """A copy to break, in the modelopt layout."""
    return copy_of(prune(MAX), tmp_path / "copy")


def offenders(report: ValidationReport, number: int) -> dict[str, str]:
    return {o.name: o.problem for o in report.contract.rules[number - 1].offenders}


def mismatches(report: ValidationReport) -> set[str]:
    """The modules that the check by the rule names."""
    return set(report.weights.rule.mismatches)


@pytest.mark.parametrize("kind", GOOD, ids=str)
def test_a_good_result_passes_with_its_whole_source(kind: Kind, prune: Prune) -> None:
    report = validate(prune(kind), layers=LayersRequest((), None, 16) if kind == MAX else None)
    assert report.passed, [(r.number, r.offenders) for r in report.contract.rules if r.offenders]
    assert report.contract.unchecked == []
    assert "2 of 4 kept" in report.contract.rules[8].note
    assert report.weights.rule.tensors == (6 if kind.source == "split" else 12)
    assert report.layers is None or [layer.num_experts for layer in report.layers.layers] == [2, 2]
    alone = validate(prune(kind), with_source=False)
    assert alone.passed
    assert alone.contract.unchecked == [7, 8, 12, 17, 18]


def swap_experts(checkpoint: SmallCheckpoint, layers: str, *, with_router: bool) -> None:
    """Exchange the experts 0 and 1 of layer 2."""
    stem = f"{layers}.2.mlp"
    tensors = checkpoint.tensors()
    for name in tensors:
        if name.startswith(f"{stem}.experts.0.") and name.rpartition(".")[2] in SWAPPED_PARAMETERS:
            other = name.replace(".experts.0.", ".experts.1.")
            checkpoint.replace(name, tensors[other].clone())
            checkpoint.replace(other, tensors[name].clone())
        elif with_router and name.startswith(f"{stem}.gate."):
            checkpoint.replace(name, tensors[name].flip(0))


@pytest.mark.parametrize("with_router", [False, True], ids=["alone", "with their router rows"])
def test_two_swapped_experts_fail(pruned: Converted, with_router: bool) -> None:
    change(pruned, lambda c: swap_experts(c, pruned.layers, with_router=with_router))
    report = validate(pruned)
    router = {f"{pruned.layers}.2.mlp.gate.{name}" for name in ("weight", "e_score_correction_bias")}
    assert set(offenders(report, 7)) == (router if with_router else set())
    modules = {pruned.expert(2, expert, kind) for expert in (0, 1) for kind in ("gate", "up", "down")}
    assert set(offenders(report, 18)) == modules
    assert mismatches(report) == modules
    assert validate(pruned, with_source=False).passed  # nothing in the result alone can tell


@pytest.mark.parametrize("parameter", ["weight", "e_score_correction_bias"])
def test_one_wrong_router_row_fails(pruned: Converted, parameter: str) -> None:
    """The row of an expert that is not kept."""
    name = f"{pruned.layers}.1.mlp.gate.{parameter}"
    dropped = read_small(pruned.source).tensors()[name][1]
    change_tensor(pruned, name, lambda rows: torch.cat([rows[:1], dropped[None]]))
    report = validate(pruned)
    assert report.contract.failed == [7]
    assert list(offenders(report, 7)) == [name]


def test_an_unsliced_bias_fails_with_and_without_the_source(pruned: Converted) -> None:
    name = f"{pruned.layers}.2.mlp.gate.e_score_correction_bias"
    change_tensor(pruned, name, lambda _: read_small(pruned.source).tensors()[name])
    report = validate(pruned)
    assert offenders(report, 7) == {name: "F32 [4], was F32 [2]"}
    assert list(offenders(report, 9)) == [name]
    assert offenders(report, 9)[name].endswith("config.json says [2] (n_routed_experts 2)")
    assert offenders(validate(pruned, with_source=False), 9) == offenders(report, 9)


def test_a_stale_count_fails_with_and_without_the_source(pruned: Converted) -> None:
    damage.edit_json(pruned.folder / "config.json", lambda c: c.get("text_config", c).update(n_routed_experts=4))
    report = validate(pruned)
    place = "text_config.n_routed_experts" if pruned.kind.source == "k2.5" else "n_routed_experts"
    assert offenders(report, 12) == {place: "4, expected 2, which are kept"}
    found = offenders(report, 9)
    assert found[LEDGER_LIST] == "keeps 2 experts, but n_routed_experts is 4"
    router = found[f"{pruned.layers}.1.mlp.gate.weight"]
    assert re.fullmatch(r"has the shape \[2, 256\] .* says \[4, 256\] \(n_routed_experts 4, hidden_size 256\)", router)
    assert offenders(validate(pruned, with_source=False), 9) == found


def test_an_expert_too_many_fails(pruned: Converted) -> None:
    def add(checkpoint: SmallCheckpoint) -> None:
        for name, tensor in checkpoint.tensors().items():
            if name.startswith(f"{pruned.layers}.1.mlp.experts.1."):
                members = checkpoint.shards[checkpoint.shard_of(name)]
                members[name.replace(".experts.1.", ".experts.2.")] = tensor.clone()

    change(pruned, add)
    report = validate(pruned)
    name = f"{pruned.layers}.1.mlp.experts.2"
    assert offenders(report, 9) == {name: "config.json says the experts are 0..1"}
    assert offenders(validate(pruned, with_source=False), 9) == offenders(report, 9)


Edit = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("edit", "number", "place", "words"),
    [
        (lambda p: p.update(experts={"1": [0, 4], "2": [1, 2]}), 19, "k2convert.json", "pruning: layer 1 is not"),
        (lambda p: p.update(experts={"1": [0, 3], "2": [1]}), 19, "k2convert.json", "pruning: experts: not the same"),
        (lambda p: p.clear(), 19, "k2convert.json", "pruning.experts is missing"),
        (lambda p: p.update(of=5), 9, LEDGER_LIST, "has 4 experts per layer, but the list"),
        (lambda p: p.update(experts={"1": [0, 3]}), 9, LEDGER_LIST, "has 1..1 (1), but the MoE layers are 1..2 (2)"),
        (lambda p: p.update(experts={"1": [0], "2": [1]}), 9, LEDGER_LIST, "1 experts, but n_routed_experts is 2"),
    ],
    ids=["out of range", "unequal", "empty", "of another model", "a layer less", "fewer"],
)
def test_a_list_that_is_not_of_this_source_is_a_finding(
    edit: Edit, number: int, place: str, words: str, by_max: Converted
) -> None:
    damage.edit_json(by_max.folder / "k2convert.json", lambda ledger: edit(ledger["pruning"]))
    report = validate(by_max)
    assert report.contract.failed == [number]
    assert words in offenders(report, number)[place]
    assert report.contract.unchecked == [7, 8, 12, 17, 18]
    note = report.contract.rules[6].note
    assert note.startswith("the ledger")
    assert note.endswith(f", see rule {number}")


def test_another_list_fails_the_experts_that_it_names(by_max: Converted) -> None:
    """Expert 2 instead of 3: a list of this model, but not the one that the result was made by."""
    damage.edit_json(
        by_max.folder / "k2convert.json", lambda ledger: ledger["pruning"]["experts"].update({"1": [0, 2]})
    )
    report = validate(by_max)
    assert "its digest is not the fingerprint's" in offenders(report, 19)[LEDGER_LIST]
    assert mismatches(report) == {by_max.expert(1, 1, kind) for kind in ("gate", "up", "down")}
    assert set(offenders(report, 7)) == {
        f"{by_max.layers}.1.mlp.gate.{name}" for name in ("weight", "e_score_correction_bias")
    }


def test_without_the_list_the_result_is_not_of_the_source(by_max: Converted) -> None:
    damage.edit_json(by_max.folder / "k2convert.json", lambda ledger: ledger.pop("pruning"))
    report = validate(by_max)
    missing = "missing, but '2 of 4' experts per layer were kept, by the fingerprint"
    assert offenders(report, 19)[LEDGER_LIST] == missing
    assert offenders(validate(by_max, with_source=False), 19) == {LEDGER_LIST: missing}
    assert offenders(report, 9) == {
        "k2convert.json": "the result has 2 experts per layer, the source 4, and the ledger has no list of kept "
        "experts. Pass the source that it was converted from, or restore the ledger"
    }


def test_a_result_with_other_experts_is_not_compared(prune: Prune, by_max: Converted) -> None:
    same = validate(prune(MAX), against=by_max.folder)
    assert same.comparison.equal == 12
    damage.edit_json(by_max.folder / "k2convert.json", lambda ledger: ledger.pop("pruning"))
    with pytest.raises(CheckpointError, match=r"does not keep the same experts as .* Leave out --against\."):
        validate(prune(MAX), against=by_max.folder)


def test_statistics_of_the_whole_source_make_the_weights_again(whole: dict[str, Path], tmp_path: Path) -> None:
    """Rule imatrix and smoothing: each expert has its own row of the statistics."""
    source = whole["thinking"]
    statistics = random_statistics(tmp_path / "source.stats", source)
    out = convert_pruned(source, tmp_path / "out", statistics=statistics, rule="imatrix", smoothing=True)
    shutil.rmtree(out / ".k2convert")
    report = validate_checkpoint(folder=out, source=open_checkpoint(source), statistics=open_statistics(statistics))
    assert report.passed, [(r.number, r.offenders) for r in report.contract.rules if r.offenders]
    assert (report.weights.rule.tensors, report.weights.rule.measured) == (12, 0)
    assert report.contract.rules[6].note.endswith("of them scaled")


def test_gptq_through_the_pruned_model_is_measured(whole: dict[str, Path], tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    kept = tmp_path / "kept.json"
    text.write_text((tiny / "calibration.txt").read_text()[:2000])
    kept.write_text(json.dumps({"experts": {str(layer): list(experts) for layer, experts in KEPT.items()}}))
    words = ("--calibrate", text, "--set", "calibration={tokens: 64, window: 32}", "--device", "cpu")
    assert run("run", whole["thinking"], tmp_path / "out", *words, "--keep-experts", kept, "--quiet") == 0
    report = validate_checkpoint(folder=tmp_path / "out", source=open_checkpoint(whole["thinking"]))
    assert report.passed, [(r.number, r.offenders) for r in report.contract.rules if r.offenders]
    assert report.weights.rule.measured == 12


@pytest.fixture
def int4(whole: dict[str, Path], tmp_path: Path) -> Converted:
    """A pruned result with the source's own weights."""
    folder = convert_pruned(whole["k2.5"], tmp_path / "int4", target="int4")
    return Converted(Kind("none", "k2.5", "w4a16"), folder, whole["k2.5"])


def test_int4_is_compared_byte_for_byte(int4: Converted) -> None:
    report = validate(int4)
    assert report.contract.failed == []
    assert report.contract.unchecked == [3, 4, 5, 6, 11, 13, 14, 15, 18]
    assert report.contract.layout == "int4"
    assert report.contract.rules[6].note == f"{len(open_checkpoint(int4.folder).tensors)} tensors compared"
    assert validate(int4, with_source=False).passed
    for option in ({"against": int4.folder}, {"layers": LayersRequest((), None, 16)}):
        with pytest.raises(CheckpointError, match=r"own weights .* Leave out --layers and --against\."):
            validate(int4, **option)


def test_int4_with_swapped_experts_and_another_config_fails(int4: Converted) -> None:
    change(int4, lambda c: swap_experts(c, int4.layers, with_router=False))
    damage.edit_json(int4.folder / "config.json", lambda config: config["text_config"].pop("quantization_config"))
    report = validate(int4)
    modules = {name.rpartition(".")[0] for name in offenders(report, 7)}
    assert modules <= {int4.expert(2, expert, kind) for expert in (0, 1) for kind in ("gate", "up", "down")}
    assert report.contract.rules[6].count == 12, "codes and scales"
    assert report.contract.failed == [7, 12]
    assert offenders(report, 12) == {"text_config.quantization_config": "missing"}


def test_int4_has_neither_report_nor_card(int4: Converted) -> None:
    for words, code, message in (
        (("report", int4.folder), 1, "There is no error to report on"),
        (("publish", int4.folder, "--repo", "me/out"), 1, "Publish it with `hf upload`"),
        (("validate", int4.folder, "--source", int4.source), 0, "int4, w4a16"),
    ):
        done = run_here(*words, code=code)
        assert message in done.stdout + done.stderr
        assert "next:" not in done.stderr
