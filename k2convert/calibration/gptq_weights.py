"""The projections of a layer's routed experts, as rule `gptq` reads and compares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.forward.weights import LinearLayer, WeightReader, exact_weight, nvfp4_weight
from k2convert.quantize.formats.bf16 import Bf16Weight, Magnitude, SourceWeight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.gptq.curvature import Curvature
from k2convert.quantize.gptq.rounding import RoundingKernel, round_gptq
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


def shared_scale(weights: Sequence[SourceProjection]) -> tuple[Magnitude, float]:
    """Return the magnitude and the global scale that projections share."""
    quantizer = NativeQuantizer("mse")
    magnitudes = [quantizer.measure(weight.source, name=weight.module) for weight in weights]
    shared = magnitudes[0]
    for magnitude in magnitudes[1:]:
        shared = shared.merge(magnitude)
    return shared, quantizer.global_scale(shared)


def by_mse(weight: SourceProjection, magnitude: Magnitude, global_scale: float) -> Nvfp4Weight:
    """Convert a projection by rule `mse`, without data."""
    quantizer = NativeQuantizer("mse")
    return quantizer.quantize(weight.source, name=weight.module, magnitude=magnitude, global_scale=global_scale)[0]


def decoded(weight: Nvfp4Weight, device: str) -> LinearLayer:
    """Return a converted projection as a layer on a device, its inputs not quantized."""
    packed = torch.as_tensor(weight.packed)
    scales = torch.as_tensor(weight.block_scales)
    return LinearLayer(nvfp4_weight(packed, scales, weight.global_scale)).to(device)


@dataclass(frozen=True, slots=True, eq=False)
class GateUpRule:
    """Rounding of a layer's gate and up, on one device: the curvature, and what is added first, f32 [K, K]."""

    correction: Tensor | None
    curvature: Curvature

    def to(self, device: str) -> GateUpRule:
        """Return this on a device."""
        correction = None if self.correction is None else self.correction.to(device)
        return GateUpRule(correction, self.curvature.to(device))

    def round(
        self, weights: list[tuple[SourceProjection, Magnitude, float]], kernel: RoundingKernel
    ) -> list[Nvfp4Weight]:
        """Round gates and ups, given the magnitude and the global scale that gate and up of an expert share."""
        targets = torch.cat([weight.values / global_scale for weight, _, global_scale in weights])
        if self.correction is not None:
            targets += targets @ self.correction
        codes = round_gptq(targets, 1.0, self.curvature, kernel)
        found = list[Nvfp4Weight]()
        done = 0
        for weight, _, global_scale in weights:
            rows = slice(done, done + weight.values.shape[0])
            found.append(Nvfp4Weight(codes.packed[rows], codes.block_scales[rows], global_scale))
            done = rows.stop
        return found
