"""Results of `run --statistics`: exact smoothing and weighted scales hold, and one changed exponent is found."""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import conversions
import numpy as np
import pytest
import torch
from converted import seal
from numpy.typing import NDArray
from statistics_makers import random_statistics

from k2convert.calibration.channels import Calibration
from k2convert.calibration.statistics import Statistics, open_statistics
from k2convert.check.results import ValidationReport, Verdict
from k2convert.check.validate import LayersRequest, validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.reader import ShardReader
from k2convert.errors import CalibrationError
from k2convert.models import locate_module, parse_tensor_name
from k2convert.models.kimi import K2_THINKING
from k2convert.models.projections import load_projection, projection_of
from k2convert.quantize.quantizer import NativeQuantizer
from k2convert.records.calibration import GptqLayer, OutputErrors
from k2convert.records.document import plain
from scripts.fixture_maker import make_k25
from scripts.fixture_maker.damage import edit_json, edit_tensor
from scripts.fixture_maker.folder import read_small, write_small

LAYER = "model.layers.1"
NORM = f"{LAYER}.post_attention_layernorm.weight"
ROUTER = f"{LAYER}.mlp.gate.weight"
SHARED_GATE, SHARED_UP = (f"{LAYER}.mlp.shared_experts.{kind}_proj.weight" for kind in ("gate", "up"))
GATE, UP = (f"{LAYER}.mlp.experts.2.{kind}_proj" for kind in ("gate", "up"))
CHANNEL = 37


@pytest.fixture(scope="module")
def statistics(cut: Path, tmp_path_factory: pytest.TempPathFactory) -> Statistics:
    return open_statistics(random_statistics(tmp_path_factory.mktemp("statistics") / "cut.stats", cut))


Convert = Callable[..., Path]


@pytest.fixture(scope="module")
def convert(cut: Path, statistics: Statistics, convert_source: Convert) -> Convert:
    """Convert the small checkpoint with the statistics, once for each set of options. Read it only."""
    return lambda **options: convert_source(cut, statistics=statistics, **{"rule": "imatrix"} | options)


@pytest.fixture
def damaged(convert: Convert, tmp_path: Path) -> Path:
    """A copy of a W4A4 result, to be changed."""
    return Path(shutil.copytree(convert(), tmp_path / "damaged"))


def validate(folder: Path, source: Path, statistics: Statistics | None = None, **options: Any) -> ValidationReport:
    return validate_checkpoint(folder=folder, source=open_checkpoint(source), statistics=statistics, **options)


def offenders(report: ValidationReport) -> dict[int, dict[str, str]]:
    """What each rule that failed says, by name."""
    failed = (rule for rule in report.contract.rules if rule.verdict is Verdict.FAIL)
    return {rule.number: {o.name: o.problem for o in rule.offenders} for rule in failed}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("recipe", "tensors"),
    [
        ({"layout": "modelopt", "activations": "w4a4"}, 12),
        ({"layout": "compressed-tensors", "activations": "w4a4"}, 12),
        ({"layout": "modelopt", "activations": "w4a16"}, 12),
        ({"roles": ("experts", "shared_experts", "dense_mlp")}, 18),
    ],
)
def test_a_result_with_statistics_keeps_all_rules(
    recipe: dict[str, Any], tensors: int, cut: Path, statistics: Statistics, convert: Convert
) -> None:
    report = validate(convert(**recipe), cut, statistics)
    assert report.passed, offenders(report)
    assert [rule.number for rule in report.contract.rules if rule.verdict is Verdict.SKIPPED] == []
    title = report.contract.rules[6].title
    note = report.contract.rules[6].note
    if recipe.get("activations") == "w4a16":
        assert title.endswith("byte-identical to the source")
    elif tensors == 12:
        assert "scaled exactly by the norm's powers of two" in title
        assert note.endswith("4 of them scaled")
    assert report.weights.certificate.tensors == tensors


@pytest.mark.parametrize("rule", ["mse", "max"])
def test_data_free_rules_with_smoothing_are_made_again_without_the_file(
    rule: str, cut: Path, statistics: Statistics, convert: Convert
) -> None:
    folder = convert(rule=rule)
    for found in (None, statistics):
        report = validate(folder, cut, found)
        assert report.passed, offenders(report)
        assert (report.weights.certificate.rule, report.weights.certificate.tensors) == (rule, 12)


def test_k25_with_an_fp32_router_keeps_all_rules(cut: Path, tmp_path: Path) -> None:
    small = read_small(cut)
    small.replace(ROUTER, small.tensors()[ROUTER].float())
    source = make_k25(tmp_path / "k25", write_small(small, tmp_path / "fp32"))
    statistics = open_statistics(random_statistics(tmp_path / "stats", source))
    conversions.convert(source, tmp_path / "out", statistics=statistics, rule="max")
    assert validate(tmp_path / "out", source).passed
    edit_tensor(tmp_path / "out", f"language_model.{ROUTER}", times(2.0))
    assert list(offenders(validate(tmp_path / "out", source))[7]) == [f"language_model.{ROUTER}"]


def test_layers_get_the_scaled_input(cut: Path, convert: Convert) -> None:
    """The shared experts are BF16: scaled columns and a scaled input give their output without any error."""
    request = LayersRequest((1,), None, tokens=32)
    found = validate(convert(rule="mse"), cut, layers=request).layers
    (layer,) = found.layers
    assert layer.router_unchanged
    assert next(e for e in layer.errors if e.variant == "converted").shared_experts_sqnr_db == float("inf")


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Multiply one channel of a tensor."""

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        tensor[..., CHANNEL] *= factor
        return tensor

    return apply


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "factor", "words"),
    [
        (NORM, 2.0, f"first channel {CHANNEL}"),
        (NORM, 2.0**9, "smoothing uses 2^-4 to 2^4"),
        (NORM, 1.5, "not a power of two times it"),
        (ROUTER, 0.5, f"first in column {CHANNEL}"),
        (SHARED_GATE, 2.0, f"first in column {CHANNEL}"),
        (SHARED_UP, 0.5, f"first in column {CHANNEL}"),
    ],
)
def test_one_changed_exponent_is_found_by_name(
    name: str, factor: float, words: str, cut: Path, statistics: Statistics, damaged: Path
) -> None:
    edit_tensor(damaged, name, times(factor))
    seal(damaged)
    report = validate(damaged, cut, statistics)
    found = offenders(report)
    assert not report.passed
    assert list(found) == [7]
    assert list(found[7]) == [name], "no other tensor"
    assert words in found[7][name]
    without = offenders(validate(damaged, cut))[7][name]
    assert ("but the ledger states" if words.startswith("first channel") else words.partition(",")[0]) in without


def written_again(
    module: str,
    folder: Path,
    source: Path,
    calibration: Calibration,
    *,
    exponents: Mapping[str, NDArray[Any]] | None = None,
) -> None:
    """Convert one expert's gate or up again, and replace its bytes. `exponents` replace those of a module."""
    checkpoint = open_checkpoint(source)
    quantizer = NativeQuantizer("imatrix")
    weights = {}
    with ShardReader(checkpoint.path) as reader:
        for name in (GATE, UP):
            parts = parse_tensor_name(f"{name}.weight_packed", family=K2_THINKING)
            steps = (exponents or {}).get(name, calibration.exponents(1))
            assert steps is not None
            weights[name] = load_projection(reader.read, projection_of(checkpoint, parts)).divide_columns(
                steps, name=name
            )
    shared = quantizer.measure(weights[GATE], name=GATE).merge(quantizer.measure(weights[UP], name=UP))
    place = locate_module(module)
    assert place is not None
    result, _ = quantizer.quantize(
        weights[module],
        name=module,
        magnitude=shared,
        global_scale=quantizer.global_scale(shared),
        importance=calibration.importance(place),
    )
    for parameter, data in (("weight", result.packed), ("weight_scale", result.block_scales)):
        edit_tensor(folder, f"{module}.{parameter}", partial(set_bytes, data=data))
    seal(folder)


def set_bytes(tensor: torch.Tensor, data: NDArray[np.uint8]) -> torch.Tensor:
    tensor.view(torch.uint8).copy_(torch.from_numpy(data).reshape(tensor.shape))
    return tensor


def test_a_changed_digest_of_the_exponents_is_found(cut: Path, statistics: Statistics, damaged: Path) -> None:
    edit_json(damaged / "k2convert.json", lambda d: d["calibration"].update(exponents_digest="0" * 64))
    for found in (None, statistics):
        assert list(offenders(validate(damaged, cut, found))[7]) == ["k2convert.json: calibration.exponents_digest"]


def test_a_ledger_without_smoothing_allows_no_change(cut: Path, damaged: Path) -> None:
    edit_json(damaged / "k2convert.json", lambda d: d["calibration"].update(smoothing=False, exponents_digest=None))
    assert set(offenders(validate(damaged, cut))[7]) == {NORM, ROUTER, SHARED_GATE, SHARED_UP}
    edit_json(damaged / "k2convert.json", lambda d: d.pop("calibration"))
    found = offenders(validate(damaged, cut))
    assert set(found[7]) == {NORM, ROUTER, SHARED_GATE, SHARED_UP}
    assert next(iter(found[19])) == "k2convert.json: calibration.statistics"


def test_other_statistics_are_refused_in_one_line(
    cut: Path, statistics: Statistics, convert: Convert, damaged: Path, tmp_path: Path, tiny: Path
) -> None:
    other = open_statistics(random_statistics(tmp_path / "tiny.stats", tiny))
    with pytest.raises(CalibrationError, match=r"tiny\.stats: not the statistics of this result") as refused:
        validate(convert(), cut, other)
    assert "\n" not in str(refused.value)
    edit_json(damaged / "k2convert.json", lambda d: d["calibration"].update(statistics="0" * 64))
    with pytest.raises(CalibrationError, match="not the statistics of this result"):
        validate(damaged, cut, statistics)
    assert list(offenders(validate(damaged, cut))[19]) == ["k2convert.json: calibration.statistics"]
    edit_json(damaged / "k2convert.json", lambda d: d.pop("calibration"))
    with pytest.raises(CalibrationError, match="Leave out --statistics"):
        validate(damaged, cut, statistics)


def test_rule_gptq_has_statistics_that_do_not_identify_it(cut: Path, damaged: Path) -> None:
    def feed_back(document: dict[str, Any]) -> None:
        for layer in document["calibration"]["layers"].values():
            none = (None,) * len(layer["tokens"])
            layer["gptq"] = plain(GptqLayer(None, none, none, OutputErrors(0.0, 0.0, 0.0)))

    edit_json(damaged / "k2convert.json", feed_back)
    assert list(offenders(validate(damaged, cut))[19]) == ["k2convert.json: calibration.statistics"]
    edit_json(damaged / "k2convert.json", lambda d: d["fingerprint"].pop("statistics"))
    assert 19 not in offenders(validate(damaged, cut))


def test_statistics_need_the_source(convert: Convert, statistics: Statistics, run_cli: Any) -> None:
    assert "need --source" in run_cli("validate", convert(), "--statistics", statistics.path, code=2).stderr
