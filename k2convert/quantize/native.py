"""k2convert's own arithmetic: compiled kernels where there are any, `formats` on the device where there are none."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from k2convert.choices import Rule
from k2convert.errors import MissingDependencyError
from k2convert.quantize.formats.arrays import Int4Arrays, Nvfp4Arrays, SourceArrays, as_arrays
from k2convert.quantize.formats.lazy_torch import torch
from k2convert.quantize.kernels import bf16, cpu
from k2convert.quantize.metrics.int4_error import finish_metrics, measure_error
from k2convert.quantize.metrics.pair_counts import PairCounts
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules.magnitude import Magnitude, measure
from k2convert.quantize.rules.optimal import optimal_global_scale
from k2convert.quantize.rules.optimal_bf16 import quantize_optimal_bf16
from k2convert.quantize.rules.plain import plain_global_scale, quantize_plain

CPU: Final = "cpu"


@dataclass(frozen=True, slots=True)
class NativeQuantizer:
    """Both rules on one device ("cpu", "cuda:0"); holds no state, so threads may share it."""

    rule: Rule
    device: str

    def measure(self, source: SourceArrays, *, name: str) -> Magnitude:
        """Measure one weight; FormatError where a value is not usable."""
        if isinstance(source, Int4Arrays):
            return cpu.measure_int4(source, name=name)
        return measure(source.to_torch(), name=name)

    def global_scale(self, magnitude: Magnitude, *, is_int4: bool) -> float:
        """Choose the global scale of a set of tensors from their merged magnitude."""
        if self.rule == "plain":
            return plain_global_scale(magnitude)
        return optimal_global_scale(magnitude, is_int4=is_int4)

    def quantize(
        self, source: SourceArrays, *, name: str, magnitude: Magnitude, global_scale: float
    ) -> tuple[Nvfp4Arrays, WeightMetrics]:
        """Quantise and measure one weight."""
        seed = zlib.crc32(name.encode())
        if isinstance(source, Int4Arrays):
            result, counts = self._convert_int4(source, global_scale)
            sampled = cpu.sample_int4_error(source, result, rule=self.rule, magnitude=magnitude, sample_seed=seed)
            figures = cpu.figures_of_counts(counts, rule=self.rule, global_scale=global_scale)
            metrics = finish_metrics(
                counts,
                rule=self.rule,
                global_scale=global_scale,
                magnitude=magnitude,
                sampled=sampled,
                figures=figures,
            )
            return result, metrics
        if self.device == CPU:
            result = bf16.quantize_bf16(source, rule=self.rule, global_scale=global_scale)
            metrics = bf16.measure_bf16_error(source, result, rule=self.rule, magnitude=magnitude, sample_seed=seed)
            return result, metrics
        on_device = source.to_torch().to(self.device)
        quantize = quantize_plain if self.rule == "plain" else quantize_optimal_bf16
        result = quantize(on_device, global_scale)
        metrics = measure_error(on_device, result, rule=self.rule, magnitude=magnitude, sample_seed=seed)
        return as_arrays(result), metrics

    def _convert_int4(self, source: Int4Arrays, global_scale: float) -> tuple[Nvfp4Arrays, PairCounts]:
        if self.device == CPU:
            return cpu.convert_int4(source, rule=self.rule, global_scale=global_scale)
        from k2convert.quantize.kernels import cuda

        on_device = source.to_torch().to(torch.device(self.device))
        result, counts = cuda.convert_int4(on_device, rule=self.rule, global_scale=global_scale)
        return as_arrays(result), counts


def create_native_quantizer(rule: Rule, device: str) -> NativeQuantizer:
    """Create the quantizer of a rule on a device; MissingDependencyError if a CUDA device has no triton."""
    if device != CPU and find_spec("triton") is None:
        raise MissingDependencyError(
            f"converting on {device} needs triton, which is not installed. Install it with `pip install triton`, or "
            "use --device cpu."
        )
    return NativeQuantizer(rule=rule, device=device)
