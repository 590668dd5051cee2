"""k2convert's own arithmetic: the kernels of a rule if it has them, else its reference arithmetic in rules/ (slow)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import Rule
from k2convert.errors import MissingDependencyError, require_extra
from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.int4 import Int4Weight, SourceWeight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.kernels import bf16, columns, cpu
from k2convert.quantize.metrics.int4_error import finish_metrics, measure_error
from k2convert.quantize.metrics.pair_counts import PairCounts
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.magnitude import Magnitude, measure

CPU: Final = "cpu"


@dataclass(frozen=True, slots=True)
class NativeQuantizer:
    """A rule on one device ("cpu", "cuda:0"); holds no state, so threads may share it.

    On a CUDA device, INT4 weights are converted there, but not by `plain` if their columns have exponents. All other
    weights are converted on the CPU.
    """

    rule: Rule
    device: str

    def measure(self, source: SourceWeight, *, name: str) -> Magnitude:
        """Measure one weight; FormatError if a value is not usable."""
        if isinstance(source, Bf16Weight):
            return measure(source, name=name)
        if source.column_exponents is not None:
            return columns.measure_columns(source, name=name)
        return cpu.measure_int4(source, name=name)

    def global_scale(self, magnitude: Magnitude, *, is_int4: bool) -> float:
        """Choose the global scale of a set of tensors from their merged magnitude."""
        return RULES[self.rule].global_scale(magnitude, is_int4=is_int4)

    def quantize(
        self,
        source: SourceWeight,
        *,
        name: str,
        magnitude: Magnitude,
        global_scale: float,
        importance: NDArray[np.uint8] | None = None,
    ) -> tuple[Nvfp4Weight, WeightMetrics]:
        """Quantize and measure one weight."""
        seed = zlib.crc32(name.encode())
        if not RULES[self.rule].uses_importance:
            importance = None
        is_bf16 = isinstance(source, Bf16Weight)
        if not has_kernel(self.rule):
            return self._by_definition(source, magnitude, global_scale, seed, importance)
        if not is_bf16 and (source.column_exponents is not None or importance is not None):
            return self._convert_columns(source, magnitude, global_scale, seed, importance)
        if is_bf16:
            result = bf16.quantize_bf16(source, rule=self.rule, global_scale=global_scale, importance=importance)
            return result, bf16.measure_bf16_error(
                source, result, magnitude=magnitude, sample_seed=seed, importance=importance
            )
        result, counts = self._convert_int4(source, global_scale)
        metrics = finish_metrics(
            counts,
            rule=self.rule,
            global_scale=global_scale,
            magnitude=magnitude,
            sampled=cpu.sample_int4_error(source, result, rule=self.rule, magnitude=magnitude, sample_seed=seed),
            figures=cpu.figures_of_counts(counts, rule=self.rule, global_scale=global_scale),
        )
        return result, metrics

    def _by_definition(
        self,
        source: SourceWeight,
        magnitude: Magnitude,
        global_scale: float,
        seed: int,
        importance: NDArray[np.uint8] | None,
    ) -> tuple[Nvfp4Weight, WeightMetrics]:
        arithmetic = RULES[self.rule]
        if importance is not None and arithmetic.quantize_weighted is not None:
            result = arithmetic.quantize_weighted(source, global_scale, importance)
        elif isinstance(source, Int4Weight):
            result = arithmetic.quantize_int4(source, global_scale)
        else:
            result = arithmetic.quantize_bf16(source, global_scale)
        metrics = measure_error(
            source, result, rule=self.rule, magnitude=magnitude, sample_seed=seed, importance=importance
        )
        return result, metrics

    def _convert_columns(
        self,
        source: Int4Weight,
        magnitude: Magnitude,
        global_scale: float,
        seed: int,
        importance: NDArray[np.uint8] | None,
    ) -> tuple[Nvfp4Weight, WeightMetrics]:
        result, counts = self._count_columns(source, global_scale, importance)
        if source.column_exponents is None:
            sampled = cpu.sample_int4_error(source, result, rule=self.rule, magnitude=magnitude, sample_seed=seed)
        else:
            sampled = columns.sample_columns(
                source, result, rule=self.rule, magnitude=magnitude, sample_seed=seed, importance=importance
            )
        metrics = finish_metrics(
            counts,
            rule=self.rule,
            global_scale=global_scale,
            magnitude=magnitude,
            sampled=sampled,
            figures=columns.figures_of_columns(counts, rule=self.rule, global_scale=global_scale),
        )
        return result, metrics

    def _count_columns(
        self, source: Int4Weight, global_scale: float, importance: NDArray[np.uint8] | None
    ) -> tuple[Nvfp4Weight, PairCounts]:
        if self.device != CPU:
            from k2convert.quantize.kernels import cuda_columns

            if self.rule in cuda_columns.RULES_WITH_KERNEL:
                return cuda_columns.convert_columns(
                    source, rule=self.rule, global_scale=global_scale, importance=importance, device=self.device
                )
        return columns.convert_columns(source, rule=self.rule, global_scale=global_scale, importance=importance)

    def _convert_int4(self, source: Int4Weight, global_scale: float) -> tuple[Nvfp4Weight, PairCounts]:
        if self.device == CPU:
            return cpu.convert_int4(source, rule=self.rule, global_scale=global_scale)
        from k2convert.quantize.kernels import cuda

        if self.rule not in cuda.KERNELS:
            return cpu.convert_int4(source, rule=self.rule, global_scale=global_scale)
        return cuda.convert_int4(source, rule=self.rule, global_scale=global_scale, device=self.device)


def has_kernel(rule: Rule) -> bool:
    """Return whether a rule has compiled kernels; without, its reference arithmetic converts."""
    return rule in cpu.KERNELS


def create_native_quantizer(rule: Rule, device: str) -> NativeQuantizer:
    """Create the quantizer of a rule on a device; MissingDependencyError if a CUDA device has no triton."""
    if device != CPU:
        require_extra("torch", purpose=f"converting on {device}")
        if find_spec("triton") is None:
            raise MissingDependencyError(
                f"converting on {device} needs triton, which is not installed. "
                "Install it with `pip install triton`, or use --device cpu."
            )
    return NativeQuantizer(rule=rule, device=device)
