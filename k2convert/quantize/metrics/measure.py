"""Measuring quantized weights against their source: one way for every rule, element by element (cpp/measure.hpp).

Nothing is known of the rule: the error is that of the written values v * b * g against the exact source, q * s or the
BF16 value. Rows are added up in C++, and over rows with math.fsum, so the figures depend on no thread. Rule `max`, the
usual recipe, converts a sample of the rows too, and its error is compared with that of the same rows. Two rules have no
sample: `max` itself, and the cast, which is exact but for groups below its window.

A conversion of INT4 weights whose columns have no factors counts on the way what the figures follow from
(cpp/counts.hpp): the same counts, and the same sums but for their order.
Without them, `run` would need a fifth more CPU time.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, Rule
from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Bf16Weight, Magnitude, SourceWeight
from k2convert.quantize.formats.fp8 import Fp8Weight, decode_fp8
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.mxfp4 import SCALE_BIAS, Mxfp4Weight, look_up
from k2convert.quantize.formats.nvfp4 import BLOCKS_PER_GROUP, MAX_BYTE, Nvfp4Weight, decode_e4m3
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.kernels.cpu import Converted, Fp8Sums, Sums, convert, flat, fp8_sums, mxfp4_counts
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.cast import SMALLEST_NORMAL_STEP, SMALLEST_STEP
from k2convert.quantize.rules.max import max_global_scale
from k2convert.quantize.rules.mse import global_exponent

MAX_SCALE_SPREAD: Final = 2.0**13
SAMPLE_STRIDE: Final = 256
MIN_SAMPLED_BLOCKS: Final = 4096
"""Of a smaller tensor all rows are compared with `max`, of any tensor at least two. A kernel makes a table for each
scale that it meets, so few rows cost much more than their share."""
CHUNK_GROUPS: Final = 1 << 15  # of MXFP4, decoded at once
SCALE_VALUES: Final = np.ldexp(1.0, np.arange(256) - SCALE_BIAS)
"""The number of every MXFP4 scale byte, float64 [256]; the last is refused before."""


def measure_quantized(
    source: SourceWeight,
    result: Nvfp4Weight,
    *,
    name: str,
    magnitude: Magnitude,
    converted: Converted | None = None,
    rule: Rule | None = None,
) -> WeightMetrics:
    """Measure any NVFP4 weight [N, K] against its source; FormatError, naming it, if shape or scales do not fit.

    `magnitude` is that of all tensors that share the global scale. `converted` is what the conversion counted. The name
    decides which rows are sampled. `rule` is None if the codes are not those of one of RULES alone.
    """
    if result.shape != source.shape:
        raise FormatError(f"{name}: an NVFP4 weight {list(result.shape)} for a source {list(source.shape)}")
    if result.block_scales.size and result.block_scales.max() > MAX_BYTE:
        raise FormatError(f"{name}: an NVFP4 block scale is negative or NaN")
    outside, sums = (None, None) if converted is None else (converted.outside_normal, converted.sums)
    if sums is None:
        sums = add_up(source, result.packed, result.block_scales, _E4M3 * result.global_scale)
    counts: dict[str, int | None] = {}
    if isinstance(source, Mxfp4Weight) and rule is not None and RULES[rule].casts_mxfp4:
        counts = _cast_counts(source, result.global_scale)
        sampled, error, error_max = 0, 0.0, 0.0
    elif rule == "max":
        sampled, error, error_max = result.block_scales.size, sums.squared_error, sums.squared_error
    else:
        sampled, error, error_max = _sample(source, result, magnitude=magnitude, seed=zlib.crc32(name.encode()))
    least = sums.least_scale
    return replace(
        metrics_of(sums, result.block_scales),
        blocks_outside_normal=outside,
        scale_spread_exceeded=None if least is None else int(magnitude.scale_max / least > MAX_SCALE_SPREAD),
        sampled_blocks=sampled,
        sampled_error_achieved=error,
        sampled_error_max=error_max,
        **counts,
    )


def measure_fp8(source: SourceWeight | NDArray[np.uint16], weight: Fp8Weight) -> WeightMetrics:
    """Measure an FP8 weight [N, K] against BF16 bits uint16 [N, K], or against a packed weight.

    There are no blocks. The error is NaN if a code or a scale is not finite.
    """
    if isinstance(source, np.ndarray):
        energies, errors, num_nonzero, equal_nonzero = fp8_sums(source, weight)
    else:  # of another tool
        exact = source.values().astype(np.float64)
        difference = decode_fp8(weight, slice(None)) - exact
        energies, errors = ((terms**2).sum(axis=1) for terms in (exact, difference))
        num_nonzero = int(np.count_nonzero(exact))
        equal_nonzero = int(np.count_nonzero((exact != 0) & (difference == 0)))
    return fp8_metrics([(energies, errors, num_nonzero, equal_nonzero)], num_weights=math.prod(source.shape))


def fp8_metrics(parts: Iterable[Fp8Sums], *, num_weights: int) -> WeightMetrics:
    """Return the figures of an FP8 weight from the sums of all its rows, in parts. They do not depend on the parts."""
    energies, errors, num_nonzero, equal_nonzero = zip(*parts, strict=True)
    energy, error = (_sum(np.concatenate(by_row)) for by_row in (energies, errors))
    sums = Sums(energy, error, sum(num_nonzero), sum(equal_nonzero), equal_blocks=0)
    return replace(metrics_of(sums, np.empty(0, dtype=np.uint8)), num_weights=num_weights)


def metrics_of(sums: Sums, block_scales: NDArray[np.uint8]) -> WeightMetrics:
    """Return the figures that follow from the sums of a weight and its block scales: nothing is sampled."""
    histogram = np.zeros(256, dtype=np.int64)
    _cpu.count_bytes(flat(block_scales), histogram)
    used = {byte: int(count) for byte, count in enumerate(histogram) if count}
    num_weights = BLOCK_SIZE * block_scales.size
    return WeightMetrics(
        num_weights=num_weights,
        num_blocks=block_scales.size,
        energy=sums.energy,
        squared_error=sums.squared_error,
        num_nonzero=sums.num_nonzero,
        equal_nonzero=sums.equal_nonzero,
        equal_blocks=sums.equal_blocks,
        num_codes=None if sums.least_scale is None else num_weights,
        max_error_steps=sums.max_error_steps,
        recoverable_codes=sums.recoverable_codes,
        num_five_or_seven=sums.num_five_or_seven,
        num_minus_eight=sums.num_minus_eight,
        blocks_outside_normal=None,
        scale_spread_exceeded=None,
        min_scale_byte=min(used, default=None),
        max_scale_byte=max(used, default=None),
        scale_histogram=used,
        sampled_blocks=0,
        sampled_error_achieved=0.0,
        sampled_error_max=0.0,
    )


_ANY_E4M3: Final = decode_e4m3(np.arange(256, dtype=np.uint8))  # of damaged scales too
_E4M3: Final = np.concatenate([decode_e4m3(np.arange(MAX_BYTE + 1, dtype=np.uint8)), np.zeros(255 - MAX_BYTE)])
"""The number of every byte, float64 [256]; zero for those that are no block scale."""


def add_up(
    source: SourceWeight,
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    block_values: NDArray[np.float64],
) -> Sums:
    """Compare every weight with its written value; `block_values` is b * g for each of the 256 bytes of a scale."""
    if isinstance(source, Mxfp4Weight):
        return _add_up_mxfp4(source, packed, block_scales, block_values)
    written = (flat(packed), flat(block_scales), block_values)
    sums_N2 = np.zeros((source.shape[0], 2))
    if isinstance(source, Int4Weight):
        powers = None
        if source.channel_exponents is not None:
            powers = np.ldexp(1.0, -source.channel_exponents.astype(np.int32))
        codes = flat(source.packed), flat(source.scale_bits)
        counts = _cpu.measure_int4(*codes, *written, source.shape[1], powers, sums_N2.reshape(-1))
        energy, error = map(_sum, sums_N2.T)
        return Sums(energy, error, *counts)
    counts = _cpu.measure_bf16(flat(source.bits), *written, source.shape[1], sums_N2.reshape(-1))
    energy, error = map(_sum, sums_N2.T)
    return Sums(energy, error, *counts[:3])


def _add_up_mxfp4(
    source: Mxfp4Weight,
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    block_values: NDArray[np.float64],
) -> Sums:
    """The same for MXFP4. Where codes are the source's and b * g is its scale, values are equal; others are decoded."""
    counts = mxfp4_counts(source)
    groups = source.groups()
    scales = flat(source.scale_bytes)
    codes = flat(packed).reshape(groups.shape)
    written_scales = flat(block_scales).reshape(-1, BLOCKS_PER_GROUP)
    is_same = SCALE_VALUES[:, None] == block_values  # of each MXFP4 scale byte, every byte of a block scale
    exists_S = is_same.any(axis=1)
    expected = look_up(is_same.argmax(axis=1).astype(np.uint8), scales)
    is_equal = (expected == written_scales[:, 0]) & (expected == written_scales[:, 1])
    if not exists_S[np.flatnonzero(counts[:, 0])].all():
        is_equal &= exists_S[scales]
    if packed is not source.packed and not np.array_equal(groups.view(np.uint64), codes.view(np.uint64)):
        is_equal &= (groups == codes).all(axis=1)
    others = np.flatnonzero(~is_equal)
    rest_counts = np.zeros(3, dtype=np.int64)
    errors = [0.0]
    for start in range(0, others.size, CHUNK_GROUPS):
        some = others[start : start + CHUNK_GROUPS]
        rest = Mxfp4Weight(groups[some], scales[some, None])
        sums = np.zeros(2)
        arrays = flat(rest.bits), flat(codes[some]), flat(written_scales[some])
        rest_counts += _cpu.measure_bf16(*arrays, block_values, 2 * codes[some].size, sums)[:3]
        errors.append(float(sums[1]))
    num_rest, equal_rest, equal_blocks = rest_counts.tolist()
    num_nonzero = int(counts[:, 1].sum())
    exact_blocks = BLOCKS_PER_GROUP * (len(groups) - others.size)
    return Sums(
        energy=_sum(counts[:, 2] * SCALE_VALUES**2 / 4),
        squared_error=_sum(np.array(errors)),
        num_nonzero=num_nonzero,
        equal_nonzero=num_nonzero - num_rest + equal_rest,
        equal_blocks=exact_blocks + equal_blocks,
    )


def _cast_counts(source: Mxfp4Weight, global_scale: float) -> dict[str, int | None]:
    """Return the counts of a cast, by their fields in WeightMetrics."""
    groups_S = mxfp4_counts(source)[:, 0]
    steps_S = np.arange(256) - SCALE_BIAS - global_exponent(global_scale)
    used = np.flatnonzero(groups_S)
    below = int(groups_S[steps_S < SMALLEST_STEP].sum())
    subnormal = int(groups_S[(steps_S >= SMALLEST_STEP) & (steps_S < SMALLEST_NORMAL_STEP)].sum())
    return {
        "empty_groups": source.scale_bytes.size - int(groups_S.sum()),
        "below_window_groups": below,
        "subnormal_groups": subnormal,
        "min_source_byte": int(used[0]) if used.size else None,
        "max_source_byte": int(used[-1]) if used.size else None,
        "cast_tensors": 1,
        "below_window_tensors": int(below > 0),
        "subnormal_tensors": int(subnormal > 0),
    }


def measure_decoded(
    source: SourceWeight,
    *,
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    global_scale: float,
    changed_codes: int | None = None,
) -> WeightMetrics:
    """Decode NVFP4 bytes (packed [N * K/2], block_scales [N * K/16], any shape) and measure them against the source.

    It reads both by the conversion's own code: what that hides the certificate finds (check/certificate.py).
    `changed_codes` are those of a cast; None for other weights. Nothing is sampled. If the global scale is known only
    from a rounded divisor, the figures of the source alone are exact.
    """
    sums = add_up(source, packed, block_scales, _ANY_E4M3 * global_scale)
    lossless = None
    if changed_codes is not None:
        lossless = int(sums.squared_error == 0.0 and sums.equal_nonzero == sums.num_nonzero)
    return replace(metrics_of(sums, block_scales), lossless_tensors=lossless, changed_codes=changed_codes)


def _sum(values: NDArray[np.float64]) -> float:
    # fsum refuses infinity minus infinity, which damaged scales can give.
    if np.isfinite(values).all():
        return math.fsum(values.tolist())
    return math.nan


def _sample(source: SourceWeight, result: Nvfp4Weight, *, magnitude: Magnitude, seed: int) -> tuple[int, float, float]:
    """Return how many blocks are sampled, and on them the squared error and that of `max` at its own global scale."""
    stride = max(1, min(SAMPLE_STRIDE, source.shape[0] // 2, result.block_scales.size // MIN_SAMPLED_BLOCKS))
    rows = slice(seed % stride, None, stride)
    sample = source.select(rows)
    if isinstance(sample, Mxfp4Weight):
        sample = Bf16Weight(sample.bits)  # no faster way to measure groups that are not cast
    scales = result.block_scales[rows]
    achieved = add_up(sample, result.packed[rows], scales, _E4M3 * result.global_scale)
    by_max = convert(sample, rule="max", global_scale=max_global_scale(magnitude))
    sums = by_max.sums
    if sums is None:
        weight = by_max.weight
        sums = add_up(sample, weight.packed, weight.block_scales, _E4M3 * weight.global_scale)
    return scales.size, achieved.squared_error, sums.squared_error
