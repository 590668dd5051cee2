"""Both quantizers on the trained tiny checkpoint, and the requests that they refuse."""

import subprocess
import sys
from contextlib import closing
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from weight_makers import bf16_weight, total_metrics

from k2convert.checkpoint.index import open_checkpoint
from k2convert.choices import Rule
from k2convert.errors import FormatError, MissingDependencyError, RecipeError
from k2convert.forward.weights import WeightReader
from k2convert.quantize.formats.bf16 import Magnitude, SourceWeight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.metrics.measure import measure_quantized
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.quantizer import Quantizer, create_quantizer
from k2convert.quantize.rules import RULES

ONE_BITS = 0x3F80
NAN_BITS = 0x7FC0
Converted = dict[str, tuple[Nvfp4Weight, WeightMetrics]]


@pytest.fixture(scope="module")
def projections(tiny: Path) -> dict[str, Int4Weight]:
    """All 144 INT4 projections of the tiny checkpoint."""
    checkpoint = open_checkpoint(tiny)
    names = [name.removesuffix(".weight_packed") for name in checkpoint.tensors if name.endswith(".weight_packed")]
    with closing(WeightReader(checkpoint)) as reader:
        return {name: reader.read_source(name) for name in names}


def partner_of(name: str) -> str:
    return name.replace("gate_proj", "up_proj") if "gate_proj" in name else name.replace("up_proj", "gate_proj")


def quantized(quantizer: Quantizer, weight: SourceWeight, magnitude: Magnitude) -> tuple[Nvfp4Weight, WeightMetrics]:
    scale = quantizer.global_scale(magnitude)
    return quantizer.quantize(weight, name="w", magnitude=magnitude, global_scale=scale)


def convert(quantizer: Quantizer, projections: dict[str, Int4Weight]) -> Converted:
    """Convert everything, gate and up of an expert sharing their global scale."""
    magnitudes = {name: quantizer.measure(weight, name=name) for name, weight in projections.items()}
    return {
        name: quantized(quantizer, weight, magnitudes[name].merge(magnitudes[partner_of(name)]))
        for name, weight in projections.items()
    }


@pytest.fixture(scope="module")
def mse(projections: dict[str, Int4Weight]) -> Converted:
    return convert(create_quantizer("native", rule="mse"), projections)


@pytest.fixture(scope="module")
def by_max(projections: dict[str, Int4Weight]) -> Converted:
    return convert(create_quantizer("native", rule="max"), projections)


def assert_same_bytes(weight: Nvfp4Weight, other: Nvfp4Weight, name: str) -> None:
    assert np.array_equal(weight.packed, other.packed), name
    assert np.array_equal(weight.block_scales, other.block_scales), name


def assert_same_figures(figures: WeightMetrics, other: WeightMetrics) -> None:
    """Sums may differ by the order of their terms, and only kernels count blocks outside the normal range."""
    for field in fields(figures):
        a = getattr(figures, field.name)
        b = getattr(other, field.name)
        if field.name != "blocks_outside_normal":
            assert a == (pytest.approx(b, rel=1e-12) if isinstance(b, float) else b), field.name


def total(converted: Converted) -> WeightMetrics:
    return total_metrics(metrics for _, metrics in converted.values())


def test_the_tiny_checkpoint_has_its_known_error_under_both_rules(mse: Converted, by_max: Converted) -> None:
    assert len(mse) == 144
    assert total(by_max).sqnr_db == pytest.approx(19.655, abs=0.005)
    assert total(mse).sqnr_db == pytest.approx(22.617, abs=0.005)


@pytest.mark.quick(2)
@pytest.mark.parametrize("rule", get_args(Rule))
def test_the_definition_gives_the_same_bytes_and_figures(rule: Rule, projections: dict[str, Int4Weight]) -> None:
    converted = convert(create_quantizer("native", rule=rule), projections)
    for name, weight in islice(projections.items(), 0, None, 5):  # of all layers and kinds
        result, metrics = converted[name]
        defined = RULES[rule].quantize(weight, result.global_scale)
        assert_same_bytes(defined, result, name)
        magnitude = weight.magnitude().merge(projections[partner_of(name)].magnitude())
        assert_same_figures(measure_quantized(weight, defined, name="w", magnitude=magnitude), metrics)


def test_mse_halves_the_error_of_max(mse: Converted, by_max: Converted) -> None:
    ours = total(mse)
    assert ours.squared_error <= 0.56 * total(by_max).squared_error
    assert ours.sampled_blocks == ours.num_blocks
    assert ours.sampled_error_max == pytest.approx(total(by_max).squared_error, rel=1e-12)
    for _, metrics in mse.values():
        assert metrics.sampled_error_achieved < 0.6 * metrics.sampled_error_max


def test_native_plain_equals_the_two_library_pipeline_byte_for_byte(
    by_max: Converted, projections: dict[str, Int4Weight]
) -> None:
    reference = convert(create_quantizer("reference", rule="max"), projections)
    for name, (result, metrics) in by_max.items():
        theirs, their_metrics = reference[name]
        assert result.global_scale == theirs.global_scale, name
        assert_same_bytes(result, theirs, name)
        assert_same_figures(metrics, their_metrics)


def test_the_reference_quantizer_writes_zeros_where_modelopt_writes_nan() -> None:
    weight = Int4Weight(np.full((2, 32), 0x88, dtype=np.uint8), np.full((2, 2), ONE_BITS, dtype=np.uint16))
    result, _ = quantized(create_quantizer("reference", rule="max"), weight, weight.magnitude())
    assert result.global_scale == 1.0
    assert (result.block_scales == 0x38).all()
    assert not result.packed.any()


def test_bf16_weights_are_the_same_from_both() -> None:
    weight = bf16_weight((torch.randn(16, 128, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16))
    quantizers = [create_quantizer(kind, rule="max") for kind in ("reference", "native")]
    ((theirs, their_metrics), (ours, metrics)) = (quantized(q, weight, q.measure(weight, name="w")) for q in quantizers)
    assert_same_bytes(theirs, ours, "w")
    assert_same_figures(their_metrics, metrics)


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_a_bad_scale_is_refused_naming_the_tensor(kind: str) -> None:
    weight = Int4Weight(np.zeros((1, 16), dtype=np.uint8), np.array([[NAN_BITS]], dtype=np.uint16))
    quantizer = create_quantizer(kind, rule="max")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=r"experts\.3\.down_proj"):
        quantizer.measure(weight, name="model.layers.1.mlp.experts.3.down_proj.weight")


def test_the_reference_quantizer_offers_only_plain() -> None:
    with pytest.raises(RecipeError, match="max"):
        create_quantizer("reference", rule="mse")


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelopt.torch.quantization.qtensor.nvfp4_tensor", None)
    with pytest.raises(MissingDependencyError, match=r"-m pip install .*nvidia-modelopt"):
        create_quantizer("reference", rule="max")


def test_the_native_quantizer_imports_no_library_and_no_torch() -> None:
    program = (
        "import sys; from k2convert.quantize.quantizer import create_quantizer; "
        "create_quantizer('native', rule='mse'); "
        "assert not {'modelopt', 'compressed_tensors', 'llmcompressor', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
