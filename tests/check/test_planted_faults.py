"""A fault that `run` and `validate` have in common is found: each line of the format documents, planted in the code.

The fault is in both while a checkpoint is converted and validated, so ledger, hashes and figures agree with it. Then
the result is validated without the fault.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import plan_job, text_of
from fault_makers import (
    by_definition,
    each,
    flipped,
    floored,
    larger,
    last_byte,
    last_row_zero,
    last_scale,
    minus_zero,
    negated_row,
    next_expert,
    next_scale,
    of_bf16,
    of_dtypes,
    of_gptq,
    of_input_scales,
    of_int4,
    of_layer_pass,
    of_mxfp4,
    of_names,
    of_offsets,
    of_places,
    of_reader,
    of_result,
    of_scalars,
    of_scale,
    of_shapes,
    of_tensors,
    of_ties,
    other_code,
    smaller_code,
    swapped_bytes,
    with_input_scales,
    zero,
)

from k2convert.calibration.layer_files import Calibration
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CalibrationError
from k2convert.forward.layer_pass import PassText
from k2convert.job.run import execute
from k2convert.quantize.formats.bf16 import Magnitude
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.rules import max as max_rule

SCALES: dict[str, Any] = {"activations": "w4a4", "input_scale": {"gate_up": 0.5, "down": 0.125}}
MLP: dict[str, Any] = {"roles": ("experts", "shared_experts", "dense_mlp")}
GPTQ: dict[str, Any] = {"rule": "gptq", "activations": "w4a16"}
K3: dict[str, Any] = {"roles": ("experts",)}
MAX: dict[str, Any] = {"rule": "max"}
W4A16: dict[str, Any] = {"activations": "w4a16"}
DIVISOR: dict[str, Any] = {"layout": "compressed-tensors"}
CHANGES: dict[str, Any] = {
    "nibbles in the other order": lambda c, s: (c >> 4 | c << 4, s),
    "codes a row off": lambda c, s: (np.roll(c, 1, 0), s),
    "scales a row off": lambda c, s: (c, np.roll(s, 1, 0)),
    "scales one column off": lambda c, s: (c, np.roll(s, 1, 1)),
}


def changed(what: str, fixture: str, patch_of: Any, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the changes that any weight may have, planted where it is read or written."""
    return {f"{what} {name}": (fixture, patch_of(change), recipe) for name, change in CHANGES.items()}


FAULTS: dict[str, Any] = {
    **changed("source", "cut", of_int4, {}),
    **changed("result", "cut", of_result, {}),
    **changed("gptq", "passed", of_gptq, GPTQ),
    "source codes a byte off": ("cut", of_int4(lambda c, s: (np.roll(c, 1, 1), s))),
    "source codes as two's complement": ("cut", of_int4(lambda c, s: (c ^ 0x88, s))),
    "source bias 7": ("cut", of_int4(lambda c, s: ((c & 15).clip(1) - 1 | ((c >> 4).clip(1) - 1) << 4, s))),
    "source scales doubled": ("cut", of_int4(lambda c, s: (c, s + np.uint16(128)))),
    "source scale mantissas cut": ("cut", of_int4(lambda c, s: (c, s & np.uint16(0xFFFE)))),
    "last source group of a tensor lost": ("cut", of_int4(lambda c, s: (c, zero(s.copy(), (-1, -1))))),
    "last source row lost": ("cut", of_int4(last_row_zero)),
    "result scales one step up": ("cut", of_result(next_scale)),
    "result scales one step down": ("cut", of_result(lambda c, s: (c, (s - 1).clip(min=8)))),
    "result signs lost": ("cut", of_result(lambda c, s: (c & 0x77, s))),
    "minus zero": ("cut", of_result(minus_zero)),
    "saturation at 4": ("cut", of_result(other_code(7, 6))),
    "saturation at 240": ("cut", of_result(lambda c, s: (c, s.clip(max=0x77)))),
    "one code a row smaller": ("cut", of_result(smaller_code)),
    "last row of a result zero": ("cut", of_result(lambda c, s: (zero(c, -1), s))),
    "last block scale of a tensor": ("cut", of_result(last_scale)),
    "g doubled": ("cut", of_scale(lambda right, m: 2 * right(m))),
    "g a power of two less": ("cut", of_scale(lambda right, m: right(m) / 2)),
    "scalars inverted": ("cut", of_scalars(lambda right, layout, value: right(layout, 1 / value))),
    "last byte of every tensor": ("cut", of_reader(last_byte)),
    "tensors two bytes off": ("cut", of_reader(lambda data, tensor, begin: np.roll(data, 2))),
    "tensors of the next expert": ("cut", of_places(".experts.0.", ".experts.1.")),
    "gate for up": ("cut", of_places("gate_proj", "up_proj")),
    "ties away from zero": ("cut", of_ties(is_up=True)),
    "ties toward zero": ("cut", of_ties(is_up=False)),
    "a bit of a norm": ("cut", of_tensors(r"norm\.weight$", flipped)),
    "rows of the router": ("cut", of_tensors(r"mlp\.gate\.weight$", lambda data: np.roll(data, 128))),
    "bytes of the router's bias": ("cut", of_tensors(r"correction_bias$", swapped_bytes)),
    "dtype of a copy": ("cut", of_dtypes(r"layernorm\.weight$", "BF16", "F16")),
    "down of the next expert": ("cut", of_places(".experts.0.down_proj", ".experts.1.down_proj")),
    "tensors at each other's offsets": (
        "cut",
        of_offsets("model.layers.1.mlp.experts.0.down_proj.weight", "model.layers.1.mlp.experts.1.down_proj.weight"),
    ),
    "shape of a copy": ("cut", of_shapes(r"layernorm\.weight$")),
    "one expert twice": ("cut", of_names(lambda name: name.replace(".experts.0.", ".experts.1."))),
    "g of the formula for BF16": ("zeros", of_scale(lambda right, m: right(replace(m, is_int4=False)))),
    "gate and up do not share g": (
        "cut",
        lambda patch: patch.setattr(Magnitude, "merge", lambda self, other: self),
        MAX,
    ),
    "max: amax over 7": ("cut", by_definition(lambda patch: patch.setattr(max_rule, "E2M1_MAX", 7.0)), MAX),
    "max: block scales rounded down": (
        "cut",
        by_definition(lambda patch: patch.setattr(max_rule, "encode_e4m3", floored)),
        MAX,
    ),
    "max: block scales clipped at 240": (
        "cut",
        by_definition(lambda patch: patch.setattr(max_rule, "E4M3_MAX", 240.0)),
        MAX,
    ),
    "max: weights cut to BF16": (
        "cut",
        by_definition(
            lambda patch: patch.setattr(
                Int4Weight, "bits", property(lambda self: (self.values().view(np.uint32) >> 16).astype(np.uint16))
            )
        ),
        MAX,
    ),
    "max: g of the mse rule": ("cut", of_scale(lambda right, m: 2.0 ** round(np.log2(right(m)))), MAX),
    "max: g for 240": ("cut", of_scale(lambda right, m: float(np.float32(right(m) * 448 / 240))), MAX),
    "max: g of partners in other shards": (
        "split",
        of_scale(lambda right, m: float(np.float32(right(m) * 1.5))),
        MAX | DIVISOR,
    ),
    "input scales inverted": ("cut", of_input_scales(lambda gate, down: (1 / gate, 1 / down)), SCALES),
    "input scale of down for gate": ("cut", of_input_scales(lambda gate, down: (down, gate)), SCALES),
    "input scale of gate for down": ("cut", of_input_scales(lambda gate, down: (gate, gate)), SCALES | DIVISOR),
    "g for 1/g": ("cut", of_scalars(lambda right, layout, value: right(layout, 1 / value)), DIVISOR),
    "tensors of the next layer": ("short", of_places(".layers.1.", ".layers.2.")),
    "MXFP4 exponents with bias 126": ("k3_tiny", of_mxfp4(lambda c, s: (c, s + np.uint8(1))), K3),
    "MXFP4 exponents with bias 128": ("k3_tiny", of_mxfp4(lambda c, s: (c, s - np.uint8(1))), K3),
    "MXFP4 nibbles in the other order": ("k3_tiny", of_mxfp4(lambda c, s: (c >> 4 | c << 4, s)), K3),
    "MXFP4 codes a row off": ("k3_tiny", of_mxfp4(lambda c, s: (np.roll(c, 1, 0), s)), K3),
    "MXFP4 scales a group off": ("k3_tiny", of_mxfp4(lambda c, s: (c, np.roll(s, 1, 1))), K3),
    "MXFP4 codes negated": ("k3_tiny", of_mxfp4(lambda c, s: (c ^ 0x88, s)), K3),
    "MXFP4 signs lost": ("k3_tiny", of_mxfp4(lambda c, s: (c & 0x77, s)), K3),
    "MXFP4 g a power more": ("k3_tiny", of_scale(lambda right, m: 2 * right(m)), K3),
    "MXFP4 g a power less": ("k3_tiny", of_scale(lambda right, m: right(m) / 2), K3),
    "MXFP4 tensors of the next expert": ("k3_tiny", of_names(next_expert), K3),
    "MXFP4 scales a row off": ("k3_edges", of_mxfp4(lambda c, s: (c, np.roll(s, 1, 0))), K3),
    "MXFP4 window a power short": (
        "k3_edges",
        lambda patch: patch.setattr(sys.modules["k2convert.quantize.rules.cast"], "SMALLEST_STEP", -8),
        K3,
    ),
    "MXFP4 by max, exponents with bias 126": ("k3_tiny", of_mxfp4(lambda c, s: (c, s + np.uint8(1))), K3 | MAX),
    "BF16 transposed": ("cut", of_bf16(lambda w: w.reshape(w.shape[::-1]).T), MLP),
    "BF16 a row off": ("cut", of_bf16(lambda w: np.roll(w, 1, 0)), MLP),
    "BF16 a column off": ("cut", of_bf16(lambda w: np.roll(w, 1, 1)), MLP),
    "BF16 low bytes cut": ("cut", of_bf16(lambda w: w & 0xFF80), MLP),
    "BF16 signs lost": ("cut", of_bf16(lambda w: w & 0x7FFF), MLP),
    "BF16 g doubled": ("cut", of_scale(lambda right, m: right(m) * (1 if m.is_int4 else 2)), MLP),
    "BF16 bytes swapped": ("cut", of_bf16(lambda w: w.byteswap() & 0xBFFF), MLP),
    "BF16 by max a row off": ("cut", of_bf16(lambda w: np.roll(w, 1, 0)), MLP | MAX),
    "gptq: weight of the next expert": ("passed", of_gptq(lambda c, s: (c, s), next_expert), GPTQ),
    "gptq: block scales a group off": ("passed", of_gptq(lambda c, s: (c, np.roll(s, 2, 1))), GPTQ),
    "gptq: g doubled": ("passed", each(of_gptq(lambda c, s: (c, s)), of_scale(lambda right, m: 2 * right(m))), GPTQ),
    "gptq: one row zero": ("passed", of_gptq(lambda c, s: (zero(c, 5), s)), GPTQ),
    "gptq: signs of one row": ("passed", of_gptq(lambda c, s: (negated_row(c), s)), GPTQ),
    "gptq: block scales one step up": ("passed", of_gptq(next_scale), GPTQ),
    "gptq: block scales one step down": ("passed", of_gptq(lambda c, s: (c, (s - 1).clip(min=8))), GPTQ),
    "gptq: saturation at 4": ("passed", of_gptq(other_code(7, 6)), GPTQ),
    "gptq: 0.5 is 0": ("passed", of_gptq(other_code(1, 0)), GPTQ),
    "gptq: 1.5 is 2": ("passed", of_gptq(other_code(3, 4)), GPTQ),
    "gptq: minus zero": ("passed", of_gptq(minus_zero), GPTQ),
    "gptq: one code a row smaller": ("passed", of_gptq(smaller_code), GPTQ),
    "gptq: last column lost": ("passed", of_gptq(lambda c, s: (zero(c, (slice(None), -1)), s)), GPTQ),
    "gptq: exponent of one block scale": ("passed", of_gptq(lambda c, s: (c, larger(s))), GPTQ),
    "gptq: source codes a row off": (
        "cut",
        each(of_int4(lambda c, s: (np.roll(c, 1, 0), s)), of_layer_pass(lambda c, s: (np.roll(c, 1, 0), s))),
        GPTQ,
    ),
    "input scales in W4A16": ("cut", with_input_scales, W4A16),
    "K2.5: tensors of the next expert": ("k25", of_names(next_expert)),
}

QUICK = (
    "source scales one column off", "one code a row smaller", "g doubled", "ties away from zero", "max: amax over 7",
    "rows of the router", "input scales in W4A16", "gptq: block scales one step up", "MXFP4 exponents with bias 126",
    "BF16 transposed",
)  # fmt: skip


@pytest.fixture(scope="module")
def windows(cut: Path, tmp_path_factory: pytest.TempPathFactory) -> PassText:
    """320 random tokens."""
    path = tmp_path_factory.mktemp("tokens") / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 2048, size=(5, 64)))
    return text_of(cut, [path])


@pytest.fixture(scope="module")
def passed(cut: Path, windows: PassText, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of rule gptq that stopped after the layer pass, before the first shard with experts."""
    folder = tmp_path_factory.mktemp("passed") / "out"
    job = plan_job(cut, folder, text=windows, **GPTQ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibration, "quantized_weight", stopped)
        with pytest.raises(CalibrationError, match="stopped"):
            execute(job)
    return folder


def stopped(*_: Any, **__: Any) -> None:
    raise CalibrationError("stopped")


@pytest.mark.quick(10)
@pytest.mark.parametrize("name", [*QUICK, *(name for name in FAULTS if name not in QUICK)])
def test_a_fault_of_conversion_and_validation_is_found(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture, patch, *recipe = FAULTS[name]
    source: Path = request.getfixturevalue("cut" if fixture == "passed" else fixture)
    keys = {"rule": "mse"} | (recipe[0] if recipe else {})
    text = request.getfixturevalue("windows") if keys["rule"] == "gptq" else None
    out = tmp_path / "out"
    if fixture == "passed":
        shutil.copytree(request.getfixturevalue("passed"), out)
    patch(monkeypatch)
    execute(plan_job(source, out, text=text, **keys))
    for _ in ("with the fault", "without it"):
        report = validate_checkpoint(folder=out, source=open_checkpoint(source))
        assert report.weights is not None
        assert report.weights.certificate.mismatches
        assert not report.passed
        monkeypatch.undo()


@pytest.mark.slow
def test_a_conversion_that_goes_on_after_the_layer_pass_has_no_fault(
    cut: Path, passed: Path, windows: PassText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(passed, tmp_path / "out")
    of_gptq(lambda c, s: (c, s))(monkeypatch)
    execute(plan_job(cut, out, text=windows, **GPTQ))
    report = validate_checkpoint(folder=out, source=open_checkpoint(cut))
    assert report.weights is not None
    assert report.weights.certificate.tensors == 12
    assert report.passed
