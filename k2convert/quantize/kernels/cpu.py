"""The CPU kernels as functions over arrays: what `formats` defines, compiled, one thread a call.

A call releases the interpreter's lock and works in buffers of its own thread, so callers bring as many threads as they
like, with a tensor or a range of rows each. Results do not depend on the split.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.buffers import BUFFERS
from k2convert.choices import BLOCK_SIZE, Rule
from k2convert.quantize.formats.arrays import Int4Arrays, Nvfp4Arrays
from k2convert.quantize.formats.blocks import sampled_range
from k2convert.quantize.formats.int4 import NUM_MAGNITUDES, check_int4_scales
from k2convert.quantize.formats.nvfp4 import check_global_scale
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.kernels.search_tables import BOUND_ASSIGNMENTS, search_tables
from k2convert.quantize.metrics.int4_error import PairFigures
from k2convert.quantize.metrics.pair_counts import PairCounts
from k2convert.quantize.metrics.sampled_error import SampledError
from k2convert.quantize.rules.magnitude import Magnitude
from k2convert.quantize.rules.optimal import global_exponent
from k2convert.quantize.rules.plain import plain_global_scale

_DOUBLED = np.array(BOUND_ASSIGNMENTS, dtype=np.float64)[:, 1:].T
_ASSIGNMENTS: Final = np.concatenate(
    [np.arange(1.0, NUM_MAGNITUDES)[:, None] * _DOUBLED, _DOUBLED * _DOUBLED], axis=1
).reshape(-1)
"""For each |q| = 1..8 the products k * v of the six assignments, then their v * v."""


def measure_int4(weight: Int4Arrays, *, name: str) -> Magnitude:
    """Measure an INT4 weight as `formats.magnitude.measure` does; FormatError, naming it, on unusable scales."""
    largest_bits, amax, usable = _cpu.measure(*_flat_int4(weight))
    if not usable:
        check_int4_scales(weight.to_torch().scales, name=name)
    scale_max = float(np.array(largest_bits << 16, dtype=np.uint32).view(np.float32))
    return Magnitude(scale_max=scale_max, amax=float(amax))


def convert_int4(weight: Int4Arrays, *, rule: Rule, global_scale: float) -> tuple[Nvfp4Arrays, PairCounts]:
    """Quantize an INT4 weight and count its pairs; byte for byte the result of `rules`."""
    check_global_scale(global_scale)
    result = allocate_nvfp4(*weight.shape, global_scale=global_scale)
    source, target = _flat_int4(weight), (flat(result.packed), flat(result.block_scales))
    if rule == "optimal":
        counted = _cpu.convert_optimal(*source, global_exponent(global_scale), search_tables(), *target)
    else:
        counted = _cpu.convert_plain(*source, global_scale, *target)
    return result, PairCounts(*counted)


def sample_int4_error(
    source: Int4Arrays, result: Nvfp4Arrays, *, rule: Rule, magnitude: Magnitude, sample_seed: int
) -> SampledError:
    """Compare with plain and with the bound on sampled blocks, as `formats.sampled_error.sample_error` does."""
    scale_bytes = flat(result.block_scales)
    chosen = sampled_range(scale_bytes.size, sample_seed=sample_seed)
    achieved, plain, bound = _cpu.sample(
        *_flat_int4(source),
        scale_bytes,
        chosen.start,
        chosen.step,
        rule == "plain",
        result.global_scale,
        plain_global_scale(magnitude),
        _ASSIGNMENTS,
    )
    return SampledError(num_blocks=len(chosen), achieved=achieved, plain=plain, bound=bound)


def figures_of_counts(counts: PairCounts, *, rule: Rule, global_scale: float) -> PairFigures:
    """Evaluate a table of pairs, as `formats.weight_error.pair_figures` does."""
    return PairFigures(
        *_cpu.figures_of_pairs(counts.keys, counts.magnitude_counts.reshape(-1), rule == "plain", global_scale)
    )


def allocate_nvfp4(rows: int, columns: int, *, global_scale: float) -> Nvfp4Arrays:
    """Return an NVFP4 weight [rows, columns] whose bytes are yet to be written; large ones in memory used before."""
    return Nvfp4Arrays(
        packed=_empty_bytes(rows, columns // 2),
        block_scales=_empty_bytes(rows, columns // BLOCK_SIZE),
        global_scale=global_scale,
    )


def _empty_bytes(rows: int, columns: int) -> NDArray[np.uint8]:
    return BUFFERS.empty(rows * columns).reshape(rows, columns)


def _flat_int4(weight: Int4Arrays) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    return flat(weight.packed), flat(weight.scale_bits)


def flat(array: NDArray[Any]) -> NDArray[Any]:
    """An array as a flat one, over the same memory where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1)
