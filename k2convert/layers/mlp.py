"""One MLP of a MoE block, with the weights of every variant.

Gate, up and down are read, converted by `plain` on the fly and decoded for one MLP at a time: 0.5 GB at K2's size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from k2convert.formats.int4 import Int4Weight
from k2convert.formats.magnitude import measure
from k2convert.formats.plain import plain_global_scale, quantize_plain
from k2convert.layers.activations import quantize_activations
from k2convert.layers.result import Variant
from k2convert.layers.weights import Projection, WeightReader, decode_nvfp4, exact_values

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(silu(gate(x)) * up(x)), inputs quantised where a projection has an input scale."""

    gate: Projection
    up: Projection
    down: Projection

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Map f32 [T, hidden] to f32 [T, hidden]."""
        return _linear(torch.nn.functional.silu(_linear(x_TK, self.gate)) * _linear(x_TK, self.up), self.down)


def _linear(x_TK: Tensor, projection: Projection) -> Tensor:
    if projection.input_scale is not None:
        x_TK = quantize_activations(x_TK, projection.input_scale)
    return torch.nn.functional.linear(x_TK, projection.weight)


@dataclass(frozen=True, slots=True)
class MlpVariants:
    """An MLP of the source in FP32, and the same MLP in each variant."""

    source: Mlp
    variants: Mapping[Variant, Mlp]


def read_mlp(stem: str, *, source: WeightReader, converted: WeightReader) -> MlpVariants:
    """Read the MLP `stem` (a module name without its last part) from both checkpoints; CheckpointError if it cannot."""
    raw = {name: source.read_source(f"{stem}.{name}") for name in PROJECTIONS}
    ours = {name: converted.read_converted(f"{stem}.{name}", shape=_shape(raw[name])) for name in PROJECTIONS}
    exact = {name: exact_values(weight) for name, weight in raw.items()}
    weights = {name: projection.weight for name, projection in ours.items()}
    plain = _plain_weights(raw) if converted.is_nvfp4(f"{stem}.{PROJECTIONS[0]}") else exact
    scales = {name: projection.input_scale for name, projection in ours.items()}
    return MlpVariants(
        source=_mlp(exact),
        variants={
            Variant.CONVERTED: _mlp(weights),
            Variant.CONVERTED_W4A4: _mlp(weights, scales),
            Variant.PLAIN: _mlp(plain),
            Variant.PLAIN_W4A4: _mlp(plain, scales),
            Variant.ACTIVATIONS_ONLY: _mlp(exact, scales),
        },
    )


def _mlp(weights: Mapping[str, Tensor], scales: Mapping[str, float | None] | None = None) -> Mlp:
    return Mlp(*(Projection(weights[name], scales[name] if scales else None) for name in PROJECTIONS))


def _plain_weights(raw: Mapping[str, Int4Weight | Tensor]) -> dict[str, Tensor]:
    gate_up = measure(raw["gate_proj"]).merge(measure(raw["up_proj"]))
    magnitudes = {"gate_proj": gate_up, "up_proj": gate_up, "down_proj": measure(raw["down_proj"])}
    weights: dict[str, Tensor] = {}
    for name, weight in raw.items():
        result = quantize_plain(weight, plain_global_scale(magnitudes[name]))
        weights[name] = decode_nvfp4(result.packed, result.block_scales, result.global_scale)
    return weights


def _shape(weight: Int4Weight | Tensor) -> tuple[int, int]:
    rows, columns = weight.shape
    return rows, columns
