"""An MLP in every version that a layer check compares."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from k2convert.forward.mlp import PROJECTIONS, Mlp
from k2convert.forward.weights import CodedWeight, DenseWeight, LinearLayer, WeightReader, exact_weight, nvfp4_weight
from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.int4 import Int4Weight, SourceWeight
from k2convert.quantize.native import NativeQuantizer
from k2convert.validate.layers.result import Variant

MlpOutputs = tuple[Tensor, dict[Variant, Tensor]]
"""The output f32 [T, hidden] with the source's weights, and that of every variant."""


@dataclass(frozen=True, slots=True)
class MlpVersions:
    """An MLP with the source's weights, the converted ones, and those of `max`; all with the same input scales."""

    source: Mlp
    converted: Mlp
    by_max: Mlp

    def run(self, x_TK: Tensor, scaled_TK: Tensor, *, with_fp4_inputs: bool) -> MlpOutputs:
        """Return the source's output f32 [T, hidden] for f32 [T, hidden], and every variant's.

        `scaled_TK` is the input of the converted weights: the same, or with smoothing.
        """
        if not with_fp4_inputs:
            return self.source(x_TK), {Variant.CONVERTED: self.converted(scaled_TK), Variant.MAX: self.by_max(x_TK)}
        reference, activations_only = self.source.on_both_inputs(x_TK)
        converted, converted_w4a4 = self.converted.on_both_inputs(scaled_TK)
        by_max, max_w4a4 = self.by_max.on_both_inputs(x_TK)
        return reference, {
            Variant.CONVERTED: converted,
            Variant.CONVERTED_W4A4: converted_w4a4,
            Variant.MAX: by_max,
            Variant.MAX_W4A4: max_w4a4,
            Variant.ACTIVATIONS_ONLY: activations_only,
        }


def read_mlp(stem: str, *, source: WeightReader, converted: WeightReader) -> MlpVersions:
    """Read the MLP `stem` (a module name without its last part) from both checkpoints; CheckpointError if unusable."""
    raw = {name: source.read_source(f"{stem}.{name}") for name in PROJECTIONS}
    ours = [converted.read_converted(f"{stem}.{name}", shape=_shape(raw[name])) for name in PROJECTIONS]
    exact = [exact_weight(weight) for weight in raw.values()]
    by_max = _max_weights(raw) if converted.is_nvfp4(f"{stem}.{PROJECTIONS[0]}") else exact
    scales = [projection.input_scale for projection in ours]
    return MlpVersions(
        source=Mlp(*map(LinearLayer, exact, scales)),
        converted=Mlp(*ours),
        by_max=Mlp(*map(LinearLayer, by_max, scales)),
    )


def _max_weights(raw: Mapping[str, Int4Weight | Tensor]) -> list[DenseWeight | CodedWeight]:
    by_max = NativeQuantizer("max", "cpu")
    sources = {name: _source_weight(weight) for name, weight in raw.items()}
    measured = {name: by_max.measure(source, name=name) for name, source in sources.items()}
    gate_up = measured["gate_proj"].merge(measured["up_proj"])
    weights: list[DenseWeight | CodedWeight] = []
    for name, source in sources.items():
        magnitude = measured[name] if name == "down_proj" else gate_up
        scale = by_max.global_scale(magnitude, is_int4=isinstance(source, Int4Weight))
        result, _ = by_max.quantize(source, name=name, magnitude=magnitude, global_scale=scale)
        packed, block_scales = torch.as_tensor(result.packed), torch.as_tensor(result.block_scales)
        weights.append(nvfp4_weight(packed, block_scales, result.global_scale))
    return weights


def _source_weight(weight: Int4Weight | Tensor) -> SourceWeight:
    return weight if isinstance(weight, Int4Weight) else Bf16Weight(weight.view(torch.uint16).numpy())


def _shape(weight: Int4Weight | Tensor) -> tuple[int, int]:
    rows, columns = weight.shape
    return rows, columns
