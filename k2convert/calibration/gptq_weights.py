"""The projections of a layer's routed experts, as rule `gptq` reads and compares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.forward.weights import LinearLayer, WeightReader, exact_weight, nvfp4_weight
from k2convert.quantize.formats.bf16 import Bf16Weight, SourceWeight
from k2convert.quantize.gptq.curvature import Curvature
from k2convert.quantize.gptq.rounding import SWEEPS, Codes, RoundingKernel, round_gptq
from k2convert.quantize.kernels import cpu
from k2convert.quantize.quantizer import NativeQuantizer

GATE = "gate_proj"
UP = "up_proj"
DOWN = "down_proj"


@dataclass(frozen=True, slots=True, eq=False)
class SourceProjection:
    """One projection: as the source has it, with smoothing, and its values f32 [N, K] on a device."""

    module: str
    source: SourceWeight
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The experts of the block `mlp`. The columns of gate and up are divided by 2**exponents, int8 [K], if given."""

    reader: WeightReader
    mlp: str
    exponents: NDArray[np.int8] | None

    def module(self, expert: int, projection: str) -> str:
        """Return the name of a projection's module."""
        return f"{self.mlp}.experts.{expert}.{projection}"

    def read(self, expert: int, projection: str, device: str) -> SourceProjection:
        """Read a projection; raises what reading the source raises, FormatError if it cannot be divided exactly."""
        module = self.module(expert, projection)
        found = self.reader.read_source(module)
        source = Bf16Weight(found.view(torch.uint16).numpy()) if isinstance(found, Tensor) else found
        values = exact_weight(found).to(device).decode()
        if self.exponents is not None and projection != DOWN:
            source = source.divide_columns(self.exponents, name=module)
            values /= torch.exp2(torch.as_tensor(self.exponents).to(values))
        return SourceProjection(module, source, values)


def shared_scale(weights: Sequence[SourceProjection]) -> float:
    """Return the global scale that projections share."""
    quantizer = NativeQuantizer("mse")
    magnitudes = [quantizer.measure(weight.source, name=weight.module) for weight in weights]
    shared = magnitudes[0]
    for magnitude in magnitudes[1:]:
        shared = shared.merge(magnitude)
    return quantizer.global_scale(shared)


def by_mse(weight: SourceProjection, global_scale: float) -> Codes:
    """Convert a projection by rule `mse`, without data; the codes are on the projection's device."""
    found = cpu.convert(weight.source, rule="mse", global_scale=global_scale).weight
    packed, scales = (torch.as_tensor(p).to(weight.values.device) for p in (found.packed, found.block_scales))
    return Codes(packed, scales, global_scale)


def decoded(codes: Codes) -> LinearLayer:
    """Return a converted projection as a layer, its inputs not quantized."""
    return LinearLayer(nvfp4_weight(codes.packed, codes.block_scales, codes.global_scale))


def round_together(
    weights: Sequence[tuple[SourceProjection, float]],
    curvature: Curvature,
    kernel: RoundingKernel,
    *,
    sweeps: int = SWEEPS,
) -> list[Codes]:
    """Round projections that read one input, each with its global scale."""
    targets = torch.cat([weight.values / global_scale for weight, global_scale in weights])
    codes = round_gptq(targets, 1.0, curvature, kernel, sweeps=sweeps)
    found = list[Codes]()
    done = 0
    for weight, global_scale in weights:
        stop = done + weight.values.shape[0]
        found.append(codes.rows(done, stop, global_scale))
        done = stop
    return found
