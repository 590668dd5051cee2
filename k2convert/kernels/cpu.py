"""The CPU kernels as functions over tensors: what `formats` defines, compiled, one thread a call.

A call releases the interpreter's lock and works in buffers of its own thread, so callers bring as many threads as they
like, with a tensor or a range of rows each. Results do not depend on the split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.buffers import BUFFERS
from k2convert.formats.blocks import sampled_blocks
from k2convert.formats.int4 import NUM_MAGNITUDES, Int4Weight, check_int4_scales
from k2convert.formats.magnitude import Magnitude
from k2convert.formats.nvfp4 import BLOCK_SIZE, Nvfp4Weight, check_global_scale
from k2convert.formats.optimal import global_exponent
from k2convert.formats.pair_counts import PairCounts, merge_counts
from k2convert.formats.plain import plain_global_scale
from k2convert.formats.rule import Rule
from k2convert.formats.sampled_error import SampledError
from k2convert.formats.weight_error import PairFigures
from k2convert.kernels import cpu_measure, cpu_optimal, cpu_plain
from k2convert.kernels.search_tables import BOUND_ASSIGNMENTS, search_tables
from k2convert.kernels.tally import take_counts, thread_tally

MAX_GROUPS: Final = 1 << 26
"""Groups counted before the 32-bit counters are emptied: each can hold 2**27 blocks of 16."""

NUM_EXPONENTS: Final = 2047
"""Exponents of finite float64 numbers."""

LARGEST_OF_SET: Final = np.array([members.bit_length() for members in range(256)], dtype=np.uint8)
"""The largest |q| of a set of magnitudes, which bit k - 1 says to hold k."""

_DOUBLED = np.array(BOUND_ASSIGNMENTS, dtype=np.float64)[:, 1:].T
_BOUND_ASSIGNMENTS = np.ascontiguousarray(
    np.concatenate([np.arange(1.0, NUM_MAGNITUDES)[:, None] * _DOUBLED, _DOUBLED * _DOUBLED], axis=1)
)

_convert_optimal = cast(Callable[..., int], cpu_optimal.convert_groups)
_convert_plain = cast(Callable[..., int], cpu_plain.convert_groups)
_measure_groups = cast(Callable[..., tuple[int, float, bool]], cpu_measure.measure_groups)
_gather_sample = cast(Callable[..., None], cpu_measure.gather_sample)
_use_plain_scales = cast(Callable[..., None], cpu_measure.use_plain_scales)
_count_sample = cast(Callable[..., int], cpu_measure.count_sample)
_figures_of_pairs = cast(Callable[..., tuple[int, int, int, float]], cpu_measure.figures_of_pairs)
_add_exactly = cast(Callable[..., None], cpu_measure.add_exactly)
_sample_bounds = cast(Callable[..., None], cpu_measure.sample_bounds)


def measure_int4(weight: Int4Weight, *, name: str) -> Magnitude:
    """Measure an INT4 weight as `formats.magnitude.measure` does; FormatError, naming it, on unusable scales."""
    packed, scale_bits = _int4_arrays(weight)
    largest_bits, amax, usable = _measure_groups(packed, scale_bits, LARGEST_OF_SET)
    if not usable:
        check_int4_scales(weight.scales, name=name)
    scale_max = float(np.array(largest_bits << 16, dtype=np.uint32).view(np.float32))
    return Magnitude(scale_max=scale_max, amax=float(amax))


def convert_int4(
    weight: Int4Weight, *, rule: Rule, global_scale: float, out: Nvfp4Weight | None = None
) -> tuple[Nvfp4Weight, PairCounts]:
    """Quantise an INT4 weight and count its pairs; byte for byte what `formats` makes of it.

    `out` brings contiguous tensors to write into; without it they are allocated.
    """
    check_global_scale(global_scale)
    result = allocate_nvfp4(*weight.shape, global_scale=global_scale) if out is None else out
    assert result.packed.is_contiguous()
    assert result.block_scales.is_contiguous()
    packed, scale_bits = _int4_arrays(weight)
    target, target_scales = _flat(result.packed), _flat(result.block_scales)
    tally = thread_tally()
    parts: list[PairCounts] = []
    done = 0
    while done < scale_bits.size or not parts:
        scales = scale_bits[: done + MAX_GROUPS]
        if rule == "optimal":
            exponent = global_exponent(global_scale)
            done = _convert_optimal(packed, scales, done, exponent, target, target_scales, search_tables(), tally)
        else:
            g = np.float32(global_scale)
            done = _convert_plain(packed, scales, done, g, target, target_scales, LARGEST_OF_SET, tally)
        parts.append(take_counts(tally, rule=rule))
    return result, parts[0] if len(parts) == 1 else merge_counts(parts)


def sample_int4_error(
    source: Int4Weight, result: Nvfp4Weight, *, rule: Rule, magnitude: Magnitude, sample_seed: int
) -> SampledError:
    """Compare with plain and with the bound on sampled blocks, as `formats.sampled_error.sample_error` does."""
    scale_bytes = _flat(result.block_scales)
    chosen = sampled_blocks(scale_bytes.size, sample_seed=sample_seed, device=source.packed.device).numpy()
    words, keys = np.empty(chosen.size, dtype=np.uint64), np.empty(chosen.size, dtype=np.int64)
    _gather_sample(*_int4_arrays(source), scale_bytes, chosen, words, keys)
    bounds = np.empty(chosen.size, dtype=np.float64)
    _sample_bounds(words, keys, _BOUND_ASSIGNMENTS, bounds)
    achieved = _sample_error(words, keys, rule=rule, global_scale=result.global_scale)
    plain_scale = plain_global_scale(magnitude)
    plain = achieved
    if rule != "plain" or plain_scale != result.global_scale:
        _use_plain_scales(words, keys, np.float32(plain_scale))
        plain = _sample_error(words, keys, rule="plain", global_scale=plain_scale)
    return SampledError(num_blocks=chosen.size, achieved=achieved, plain=plain, bound=exact_sum(bounds))


def figures_of_counts(counts: PairCounts, *, rule: Rule, global_scale: float) -> PairFigures:
    """Evaluate a table of pairs, as `formats.weight_error.pair_figures` does."""
    energies, errors = np.empty(counts.keys.size), np.empty(counts.keys.size)
    nonzero, equal, recoverable, most = _figures_of_pairs(
        counts.keys, counts.magnitude_counts, rule == "plain", global_scale, energies, errors
    )
    return PairFigures(
        energy=exact_sum(energies),
        squared_error=exact_sum(errors),
        num_nonzero=nonzero,
        equal_nonzero=equal,
        recoverable_codes=recoverable,
        max_error_steps=most,
    )


def exact_sum(values: NDArray[np.float64]) -> float:
    """Return the sum of finite, non-negative values rounded once, which is what math.fsum returns."""
    low, high = np.zeros(NUM_EXPONENTS, dtype=np.int64), np.zeros(NUM_EXPONENTS, dtype=np.int64)
    _add_exactly(values, low, high)
    # A value of exponent e counts units of 2**(e - 1075); division of integers is rounded once.
    total = sum(((int(high[e]) << 26) + int(low[e])) << int(e) for e in np.flatnonzero(low | high))
    return total / (1 << 1075)


def allocate_nvfp4(rows: int, columns: int, *, global_scale: float) -> Nvfp4Weight:
    """Return an NVFP4 weight [rows, columns] whose bytes are yet to be written; large ones in memory used before."""
    return Nvfp4Weight(
        packed=_empty_bytes(rows, columns // 2),
        block_scales=_empty_bytes(rows, columns // BLOCK_SIZE),
        global_scale=global_scale,
    )


def _empty_bytes(rows: int, columns: int) -> Tensor:
    return torch.as_tensor(BUFFERS.empty(rows * columns)).view(rows, columns)


def _sample_error(words: NDArray[np.uint64], keys: NDArray[np.int64], *, rule: Rule, global_scale: float) -> float:
    """Return the squared error of blocks with these histograms and keys, summed by pair as `formats` sums it."""
    tally = thread_tally()
    parts: list[PairCounts] = []
    done = 0
    while done < words.size or not parts:
        done = _count_sample(words, keys, done, tally)
        parts.append(take_counts(tally, rule=rule))
    counts = parts[0] if len(parts) == 1 else merge_counts(parts)
    return figures_of_counts(counts, rule=rule, global_scale=global_scale).squared_error


def _int4_arrays(weight: Int4Weight) -> tuple[NDArray[Any], NDArray[Any]]:
    return _flat(weight.packed), _flat(weight.scales.view(torch.uint16))


def _flat(tensor: Tensor) -> NDArray[Any]:
    """A contiguous CPU tensor as a flat array over the same memory."""
    return tensor.contiguous().view(-1).numpy()
