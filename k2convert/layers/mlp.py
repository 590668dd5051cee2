"""One MLP of a MoE block, with the weights of every variant.

Gate, up and down are read and converted by `plain` on the fly for one MLP at a time; weights stay coded until used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from k2convert.formats.arrays import Int4Arrays, as_arrays
from k2convert.formats.int4 import Int4Weight
from k2convert.layers.activations import quantize_activations
from k2convert.layers.result import Variant
from k2convert.layers.weights import CodedWeight, DenseWeight, Projection, WeightReader, exact_weight, nvfp4_weight
from k2convert.quantizers.native import NativeQuantizer

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(silu(gate(x)) * up(x)), inputs quantised where a projection has an input scale."""

    gate: Projection
    up: Projection
    down: Projection

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Map f32 [T, hidden] to f32 [T, hidden]."""
        return self._run(x_TK, 0)

    def on_both_inputs(self, x_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The output on FP32 inputs and the output on quantised ones; each weight is decoded once."""
        tokens = x_TK.shape[0]
        outputs = self._run(torch.cat([x_TK, x_TK]), tokens)
        return outputs[:tokens], outputs[tokens:]

    def _run(self, x_TK: Tensor, first: int) -> Tensor:
        """Quantise the inputs of the tokens from `first` on."""
        hidden = torch.nn.functional.silu(_linear(x_TK, self.gate, first)) * _linear(x_TK, self.up, first)
        return _linear(hidden, self.down, first)


def _linear(x_TK: Tensor, projection: Projection, first: int) -> Tensor:
    if projection.input_scale is not None:
        x_TK = torch.cat([x_TK[:first], quantize_activations(x_TK[first:], projection.input_scale)])
    return projection.weight.linear(x_TK)


@dataclass(frozen=True, slots=True)
class MlpVersions:
    """An MLP with the source's weights, the converted ones, and what `plain` makes of the source; same input scales."""

    source: Mlp
    converted: Mlp
    plain: Mlp

    def run(self, x_TK: Tensor, *, with_fp4_inputs: bool) -> tuple[Tensor, dict[Variant, Tensor]]:
        """The source's output f32 [T, hidden] for f32 [T, hidden], and every variant's."""
        if not with_fp4_inputs:
            return self.source(x_TK), {Variant.CONVERTED: self.converted(x_TK), Variant.PLAIN: self.plain(x_TK)}
        reference, activations_only = self.source.on_both_inputs(x_TK)
        converted, converted_w4a4 = self.converted.on_both_inputs(x_TK)
        plain, plain_w4a4 = self.plain.on_both_inputs(x_TK)
        return reference, {
            Variant.CONVERTED: converted,
            Variant.CONVERTED_W4A4: converted_w4a4,
            Variant.PLAIN: plain,
            Variant.PLAIN_W4A4: plain_w4a4,
            Variant.ACTIVATIONS_ONLY: activations_only,
        }


def read_mlp(stem: str, *, source: WeightReader, converted: WeightReader) -> MlpVersions:
    """Read the MLP `stem` (a module name without its last part) from both checkpoints; CheckpointError if it cannot."""
    raw = {name: source.read_source(f"{stem}.{name}") for name in PROJECTIONS}
    ours = [converted.read_converted(f"{stem}.{name}", shape=_shape(raw[name])) for name in PROJECTIONS]
    exact = [exact_weight(weight) for weight in raw.values()]
    plain = _plain_weights(raw) if converted.is_nvfp4(f"{stem}.{PROJECTIONS[0]}") else exact
    scales = [projection.input_scale for projection in ours]
    return MlpVersions(
        source=Mlp(*map(Projection, exact, scales)),
        converted=Mlp(*ours),
        plain=Mlp(*map(Projection, plain, scales)),
    )


def _plain_weights(raw: Mapping[str, Int4Weight | Tensor]) -> list[DenseWeight | CodedWeight]:
    plain = NativeQuantizer("plain", "cpu")
    sources = {name: as_arrays(weight) for name, weight in raw.items()}
    measured = {name: plain.measure(source, name=name) for name, source in sources.items()}
    gate_up = measured["gate_proj"].merge(measured["up_proj"])
    weights: list[DenseWeight | CodedWeight] = []
    for name, source in sources.items():
        magnitude = measured[name] if name == "down_proj" else gate_up
        scale = plain.global_scale(magnitude, is_int4=isinstance(source, Int4Arrays))
        arrays, _ = plain.quantize(source, name=name, magnitude=magnitude, global_scale=scale)
        result = arrays.to_torch()
        weights.append(nvfp4_weight(result.packed, result.block_scales, result.global_scale))
    return weights


def _shape(weight: Int4Weight | Tensor) -> tuple[int, int]:
    rows, columns = weight.shape
    return rows, columns
