"""The CPU kernels as functions over arrays, compiled, one thread a call.

A call releases the interpreter's lock and uses the buffers of its thread. So callers may use any number of threads,
with a tensor or a range of rows each. Results do not depend on the split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.buffers import BUFFERS
from k2convert.choices import BLOCK_SIZE, Rule
from k2convert.quantize.formats.bf16 import bf16_values
from k2convert.quantize.formats.blocks import sampled_range
from k2convert.quantize.formats.int4 import NUM_MAGNITUDES, Int4Weight, check_int4_scales
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.kernels.search_tables import BOUND_ASSIGNMENTS, search_tables
from k2convert.quantize.metrics.int4_error import PairFigures
from k2convert.quantize.metrics.pair_counts import PairCounts
from k2convert.quantize.metrics.sampled_error import SampledError
from k2convert.quantize.rules import check_rule_scale
from k2convert.quantize.rules.magnitude import Magnitude
from k2convert.quantize.rules.optimal import global_exponent
from k2convert.quantize.rules.plain import plain_global_scale

_DOUBLED = np.array(BOUND_ASSIGNMENTS, dtype=np.float64)[:, 1:].T
_ASSIGNMENTS: Final = np.concatenate(
    [np.arange(1.0, NUM_MAGNITUDES)[:, None] * _DOUBLED, _DOUBLED * _DOUBLED], axis=1
).reshape(-1)
"""For each |q| = 1..8 the products k * v of the six assignments, then their v * v."""

_Flat = NDArray[Any]


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The compiled functions of a rule.

    convert_int4   (packed, scale_bits, global_scale, packed result, block scales) -> the fields of PairCounts
    quantize_bf16  (bits, global_scale, packed result, block scales)
    largest_scale  above this global scale, quantize_bf16 does not equal the rule
    is_plain       which of the two rules that the compiled metrics know
    """

    convert_int4: Callable[[_Flat, _Flat, float, _Flat, _Flat], tuple[_Flat, _Flat, _Flat, int, int]]
    quantize_bf16: Callable[[_Flat, float, _Flat, _Flat], None]
    largest_scale: float
    is_plain: bool


def _convert_optimal(
    packed: _Flat, scale_bits: _Flat, global_scale: float, out: _Flat, scale_bytes: _Flat
) -> tuple[_Flat, _Flat, _Flat, int, int]:
    return _cpu.convert_optimal(packed, scale_bits, global_exponent(global_scale), search_tables(), out, scale_bytes)


KERNELS: Final[dict[Rule, CpuKernels]] = {
    # Above 2**118 the steps of `optimal` exceed FP32; no weight leads to such a global scale.
    "optimal": CpuKernels(_convert_optimal, _cpu.quantize_optimal_bf16, largest_scale=2.0**118, is_plain=False),
    # Columns of equal importance; kernels/columns.py has the others.
    "weighted": CpuKernels(_convert_optimal, _cpu.quantize_optimal_bf16, largest_scale=2.0**118, is_plain=False),
    "feedback": CpuKernels(_convert_optimal, _cpu.quantize_optimal_bf16, largest_scale=2.0**118, is_plain=False),
    "plain": CpuKernels(_cpu.convert_plain, _cpu.quantize_plain_bf16, largest_scale=np.inf, is_plain=True),
}
"""The rules that have kernels on the CPU."""


def measure_int4(weight: Int4Weight, *, name: str) -> Magnitude:
    """Measure an INT4 weight as `magnitude.measure` does; FormatError, naming it, if a scale is not usable."""
    largest_bits, amax, usable = _cpu.measure(*_flat_int4(weight))
    if not usable:
        check_int4_scales(weight.scale_bits, name=name)
    return Magnitude(scale_max=float(bf16_values(np.array(largest_bits, dtype=np.uint16))), amax=float(amax))


def convert_int4(weight: Int4Weight, *, rule: Rule, global_scale: float) -> tuple[Nvfp4Weight, PairCounts]:
    """Quantize an INT4 weight and count its pairs, by a rule of KERNELS."""
    check_rule_scale(rule, global_scale)
    result = allocate_nvfp4(*weight.shape, global_scale=global_scale)
    targets = flat(result.packed), flat(result.block_scales)
    return result, PairCounts(*KERNELS[rule].convert_int4(*_flat_int4(weight), global_scale, *targets))


def sample_int4_error(
    source: Int4Weight, result: Nvfp4Weight, *, rule: Rule, magnitude: Magnitude, sample_seed: int
) -> SampledError:
    """Compare with plain and with the bound on sampled blocks, as `sampled_error.sample_error` does."""
    scale_bytes = flat(result.block_scales)
    chosen = sampled_range(scale_bytes.size, sample_seed=sample_seed)
    achieved, plain, bound = _cpu.sample(
        *_flat_int4(source),
        scale_bytes,
        chosen.start,
        chosen.step,
        KERNELS[rule].is_plain,
        result.global_scale,
        plain_global_scale(magnitude),
        _ASSIGNMENTS,
    )
    return SampledError(num_blocks=len(chosen), achieved=achieved, plain=plain, bound=bound)


def figures_of_counts(counts: PairCounts, *, rule: Rule, global_scale: float) -> PairFigures:
    """Evaluate a table of pairs, as `int4_error.pair_figures` does."""
    magnitude_counts = counts.magnitude_counts.reshape(-1)
    return PairFigures(*_cpu.figures_of_pairs(counts.keys, magnitude_counts, KERNELS[rule].is_plain, global_scale))


def allocate_nvfp4(rows: int, columns: int, *, global_scale: float) -> Nvfp4Weight:
    """Return an NVFP4 weight [rows, columns] with arbitrary bytes; large ones come from the buffer pool."""
    return Nvfp4Weight(
        packed=_empty_bytes(rows, columns // 2),
        block_scales=_empty_bytes(rows, columns // BLOCK_SIZE),
        global_scale=global_scale,
    )


def _empty_bytes(rows: int, columns: int) -> NDArray[np.uint8]:
    return BUFFERS.empty(rows * columns).reshape(rows, columns)


def _flat_int4(weight: Int4Weight) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    return flat(weight.packed), flat(weight.scale_bits)


def flat(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as a flat one, over the same memory if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1)
