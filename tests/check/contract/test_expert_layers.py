"""Layers whose experts another tool left in BF16, FP8 or INT4: right if an engine is told so, and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from converted import Converted, Kind, copy_of, validate
from other_tools import F8, MODELOPT, PACKED, foreign, in_both, tensors

from k2convert.check.results import ValidationReport, Verdict
from scripts.fixture_maker.folder import read_small

LAYER = ".layers.1.mlp.experts."
Weights = dict[str, torch.Tensor]


def source_weights(folder: Path) -> Weights:
    """The weights of the layer's experts in FP32, as compressed-tensors reads them."""
    stored = {name: t for shard in read_small(folder).shards.values() for name, t in shard.items() if LAYER in name}
    weights = Weights()
    for name, packed in stored.items():
        module, _, parameter = name.rpartition(".")
        if parameter == "weight_packed":
            shape = torch.Size([int(size) for size in stored[f"{module}.weight_shape"]])
            codes = unpack_from_int32(packed, 4, shape).reshape(shape[0], -1, 32).float()
            weights[module] = (codes * stored[f"{module}.weight_scale"].float()[..., None]).reshape(shape)
    return weights


def keep(converted: Converted, form: str, *, only: str = "", excluded: bool = True) -> None:
    """Leave the experts of the layer, or some of them, in a form, and tell engines so."""
    weights = source_weights(converted.source)
    original = {n: t for shard in read_small(converted.source).shards.values() for n, t in shard.items() if LAYER in n}
    plain = {"BF16": torch.bfloat16, "F32": torch.float32}

    def change(name: str, tensor: torch.Tensor) -> Weights | None:
        module, _, parameter = name.rpartition(".")
        if LAYER not in name or only not in name:
            return {name: tensor}
        if parameter != converted.names.weight:
            return {}
        weight = weights[module]
        if form == "INT4":
            return {key: tensor for key, tensor in original.items() if key.startswith(f"{module}.")}
        if form == "FP8":
            scale = weight.abs().amax(dim=1, keepdim=True) / 448
            return {f"{module}.weight": (weight / scale).to(F8), f"{module}.weight_scale": scale}
        return {f"{module}.weight": weight.to(plain[form])}

    tensors(change)(converted.folder)
    pattern = "*layers.1.mlp.experts*" if converted.kind.layout == "modelopt" else r"re:.*layers\.1\.mlp\.experts\..*"
    if excluded:
        in_both(lambda q, excludes: q[excludes].append(pattern))(converted.folder)


def problems(report: ValidationReport, verdict: Verdict) -> str:
    rules = [rule for rule in report.contract.rules if rule.verdict is verdict]
    return " ".join(f"{o.name} {o.problem}" for rule in rules for o in rule.offenders)


@pytest.mark.quick(3)
@pytest.mark.parametrize("form", ["BF16", "F32", "FP8", "INT4"])
@pytest.mark.parametrize("kind", [MODELOPT, PACKED], ids=str)
def test_a_layer_of_experts_in_another_form_is_right(
    kind: Kind, form: str, convert: Callable[[Kind], Converted], tmp_path: Path
) -> None:
    converted = foreign(convert(kind), tmp_path / "other")
    keep(converted, form)
    for with_source in (False, True):
        report = validate(converted, with_source=with_source)
        assert report.passed, (problems(report, Verdict.FAIL), report.weights)
        assert ("experts in" in problems(report, Verdict.WARN)) is (form in ("FP8", "INT4"))


def one_of(converted: Converted) -> None:
    keep(converted, "BF16", only="experts.2.")


def not_excluded(converted: Converted) -> None:
    keep(converted, "BF16", excluded=False)


def excluded_elsewhere(converted: Converted) -> None:
    keep(converted, "BF16")
    in_both(lambda q, key: q[key].append("*mlp.experts*"))(converted.folder)


def another(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the next number of its dtype in one place."""
    tensor.view(torch.int16)[3, 5] += 1
    return tensor


def wrong_number(converted: Converted) -> None:
    keep(converted, "BF16")
    name = f"{converted.expert(1, 2, 'up')}.weight"
    tensors(lambda n, t: {n: another(t)} if n == name else None)(converted.folder)


def transposed(converted: Converted) -> None:
    keep(converted, "BF16")
    name = f"{converted.expert(1, 2, 'up')}.weight"
    tensors(lambda n, t: {n: t.T.contiguous()} if n == name else None)(converted.folder)


def missing(converted: Converted) -> None:
    keep(converted, "BF16")
    name = f"{converted.expert(1, 2, 'up')}.weight"
    tensors(lambda n, _: {} if n == name else None)(converted.folder)


def one_odd(converted: Converted) -> None:
    keep(converted, "BF16")
    name = f"{converted.expert(1, 2, 'up')}.weight"
    tensors(lambda n, t: {n: t.to(F8)} if n == name else None)(converted.folder)


def fp8_not_excluded(converted: Converted) -> None:
    keep(converted, "FP8", excluded=False)


def wrong_scale(converted: Converted) -> None:
    keep(converted, "FP8")
    name = f"{converted.expert(1, 2, 'up')}.weight_scale"
    tensors(lambda n, t: {n: 1.5 * t} if n == name else None)(converted.folder)


def no_scale(converted: Converted) -> None:
    keep(converted, "FP8")
    name = f"{converted.expert(1, 2, 'up')}.weight_scale"
    tensors(lambda n, _: {} if n == name else None)(converted.folder)


FAULTS: dict[str, tuple[Callable[[Converted], None], set[int], str]] = {
    "one expert of the layer": (one_of, {1}, "weight_scale missing"),
    "no entry excludes it": (not_excluded, {14}, "is BF16, but no entry excludes it"),
    "an entry excludes others too": (excluded_elsewhere, {14}, "is quantized, but *mlp.experts* excludes it"),
    "a wrong number": (wrong_number, set(), ""),
    "one odd projection": (one_odd, {1, 14}, ""),
    "another shape": (transposed, {9}, "has the shape"),
    "a missing projection": (missing, {1}, "missing"),
    "FP8 without scales": (no_scale, {1}, "is F8_E4M3, but has no scale"),
    "FP8 that no entry excludes": (fp8_not_excluded, {14}, "is not NVFP4, but no entry excludes it"),
    "a wrong scale of FP8": (wrong_scale, {18}, "is below the budget"),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_such_a_layer_fails(name: str, convert: Callable[[Kind], Converted], tmp_path: Path) -> None:
    converted = foreign(convert(MODELOPT), tmp_path / "other")
    change, rules, words = FAULTS[name]
    change(converted)
    report: Any = validate(converted)
    assert not report.passed
    assert rules <= set(report.contract.failed), report.contract.failed
    assert words in problems(report, Verdict.FAIL)
    missing = [o for o in report.contract.rules[0].offenders if "missing" in o.problem]
    assert len(missing) <= 9, "only what is not as the rest of its layer"
    if not rules:
        assert list(report.weights.certificate.mismatches) == [f"{converted.expert(1, 2, 'up')}.weight"]


def test_every_layer_of_an_own_result_is_converted(convert: Callable[[Kind], Converted], tmp_path: Path) -> None:
    converted = copy_of(convert(MODELOPT), tmp_path / "own")
    keep(converted, "BF16")
    assert {1, 14, 19} <= set(validate(converted).contract.failed)
