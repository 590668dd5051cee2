"""Checking converted weights: are the written bytes what the recipe's rule makes of the source?

Most rules leave no choice: source, rule and, if the rule uses it, the importance of the columns determine every code,
block scale and global scale. So the bytes are made again and compared, all blocks with the kernels and a sample of them
with the reference arithmetic of quantize/rules, which would find a kernel that is wrong in the same way as the one that
converted. The error is measured by the independent decoder, whatever the rule.

Codes that come from a walk through the layers (`RuleArithmetic.needs_walk`) cannot be made again from one weight. Their
global scale is made again, and their figures are measured: they must be those of the conversion.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.checkpoint.layouts import LayoutNames
from k2convert.checkpoint.reader import Bytes, same_bytes
from k2convert.choices import BLOCK_SIZE, GROUP_SIZE, Rule
from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Bf16Weight, bf16_bits
from k2convert.quantize.formats.int4 import MAX_MAGNITUDE, Int4Weight, SourceWeight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.metrics.measure import measure_quantized
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.native import CPU, create_native_quantizer, has_kernel
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.magnitude import Magnitude, measure
from k2convert.validate.decode import DecodedError, measure_decoded

SAMPLE_STRIDE: Final = 61
"""At least one unit in 64. A prime, so that the sample does not keep to some columns of the matrix."""
ROW_STRIDE: Final = 251
"""One row in 251 of a weight whose columns differ: the reference arithmetic takes ten times as long for them."""
MIN_SAMPLED_UNITS: Final = 256
_MAGNITUDE_BITS: Final = 0x7FFF
_ROUNDED_UP: Final = 1.0 + 2.0**-7  # more than what rounding to BF16 adds


@dataclass(frozen=True, slots=True)
class WrittenWeight:
    """One converted projection: its source weight, and its bytes as the layout stores them, of any shape.

    With smoothing, `source` is the source's weight over the powers of two. `importance` [K] is that of its columns,
    if the rule uses it. `recorded_scale` is the global scale that the journal states. It is used only without a rule,
    if the file has exactly its bytes: a divisor is a rounded 1/g, and the figures of a conversion are measured with g.

    With `is_measured_only`, codes and block scales cannot be made again from the source weight, so only the global
    scale is, and the figures are measured. `codes` are those that a walk through the layers made, if they are here.
    """

    module: str
    source: SourceWeight
    packed: Bytes
    block_scales: Bytes
    global_scale: bytes
    recorded_scale: float | None = None
    importance: NDArray[np.uint8] | None = None
    is_measured_only: bool = False
    codes: Nvfp4Weight | None = None


@dataclass(frozen=True, slots=True)
class CheckedWeight:
    """What was found on one weight. `problems` are empty if it is what the rule gives, or if there is no rule.

    `num_blocks` were made again by the kernels, `sampled_blocks` of them by the reference arithmetic too, none if the
    rule has no kernel; both are zero for a weight that is measured only. `metrics` are the figures that the
    conversion must have recorded; None if the bytes differ or there is no rule. `has_exact_scale` is false if a
    divisor was all there is to tell the global scale from.
    """

    module: str
    error: DecodedError
    num_blocks: int = 0
    sampled_blocks: int = 0
    problems: tuple[str, ...] = ()
    metrics: WeightMetrics | None = None
    has_exact_scale: bool = True


def check_weights(
    weights: Sequence[WrittenWeight], *, partners: Sequence[SourceWeight] = (), names: LayoutNames, rule: Rule | None
) -> list[CheckedWeight]:
    """Check weights that share one global scale (gate and up of an expert; a down projection is alone).

    `partners` are the source weights of the set whose results are not among `weights`. Without a `rule` the weights are
    only decoded and measured. Raises FormatError, naming the weight, if a source value is not usable.
    """
    if rule is None:
        return [_decode(weight, names) for weight in weights]
    quantizer = create_native_quantizer(rule, CPU)
    shared = _merge(
        [quantizer.measure(weight.source, name=weight.module) for weight in weights]
        + [quantizer.measure(partner, name=f"partner of {weights[0].module}") for partner in partners]
    )
    reference = _merge([_measure_by_definition(source) for source in (*(w.source for w in weights), *partners)])
    return [_check(weight, shared, reference, names, rule) for weight in weights]


def _merge(magnitudes: Sequence[Magnitude]) -> Magnitude:
    shared = magnitudes[0]
    for magnitude in magnitudes[1:]:
        shared = shared.merge(magnitude)
    return shared


def _decode(weight: WrittenWeight, names: LayoutNames) -> CheckedWeight:
    recorded = weight.recorded_scale
    is_recorded = recorded is not None and names.stores(recorded, weight.global_scale)
    scale = recorded if is_recorded and recorded is not None else names.decode_scalar(weight.global_scale)
    return CheckedWeight(weight.module, _measure(weight, scale), has_exact_scale=is_recorded or not names.is_divisor)


def _measure(weight: WrittenWeight, global_scale: float) -> DecodedError:
    return measure_decoded(
        weight.source,
        packed=weight.packed,
        block_scales=weight.block_scales,
        global_scale=global_scale,
        importance=weight.importance,
    )


def _check(
    weight: WrittenWeight, shared: Magnitude, reference: Magnitude, names: LayoutNames, rule: Rule
) -> CheckedWeight:
    """Check one weight with the magnitude of its whole set, as the kernels and as the definition measure it."""
    quantizer, is_int4 = create_native_quantizer(rule, CPU), isinstance(weight.source, Int4Weight)
    expected = quantizer.global_scale(shared, is_int4=is_int4)
    has_scale = names.stores(expected, weight.global_scale)
    error = _measure(weight, expected if has_scale else names.decode_scalar(weight.global_scale))
    problems: list[str] = []
    if not has_scale:
        found, wanted = (_fp32(raw) for raw in (weight.global_scale, names.encode_scalar(expected)))
        problems.append(f"{names.global_scale} is {found!r}, the rule gives {wanted!r}")
    scale = RULES[rule].global_scale(reference, is_int4=is_int4)
    if scale != expected:
        problems.append(f"the kernels' global scale is {expected!r}, the reference arithmetic gives {scale!r}")
    if weight.is_measured_only:
        return _check_measured(weight, shared, expected, error, problems)
    again, metrics = quantizer.quantize(
        weight.source, name=weight.module, magnitude=shared, global_scale=expected, importance=weight.importance
    )
    problems += _difference(weight, again)
    sampled, wrong = _check_sample(weight, rule, scale) if has_kernel(rule) else (0, 0)
    if wrong:
        problems.append(f"{wrong:,} of {sampled:,} sampled blocks are not what the reference arithmetic gives")
    return CheckedWeight(
        weight.module,
        error,
        num_blocks=again.block_scales.size,
        sampled_blocks=sampled,
        problems=tuple(problems),
        metrics=None if problems else metrics,
        has_exact_scale=has_scale or not names.is_divisor,
    )


def _check_measured(
    weight: WrittenWeight, shared: Magnitude, global_scale: float, error: DecodedError, problems: list[str]
) -> CheckedWeight:
    """Measure a weight that cannot be made again. `problems` are those of its global scale."""
    if weight.codes is not None:
        problems = problems + _difference(weight, weight.codes)
    rows, columns = weight.source.shape
    written = Nvfp4Weight(
        packed=weight.packed.reshape(rows, columns // 2),
        block_scales=weight.block_scales.reshape(rows, columns // BLOCK_SIZE),
        global_scale=global_scale,
    )
    metrics = None
    if not problems:
        try:
            metrics = measure_quantized(
                weight.source, written, name=weight.module, magnitude=shared, importance=weight.importance
            )
        except FormatError as wrong:
            problems = [str(wrong)]
    return CheckedWeight(weight.module, error, problems=tuple(problems), metrics=metrics)


def _difference(weight: WrittenWeight, expected: Nvfp4Weight) -> list[str]:
    """Return how the written bytes differ from the expected ones; empty if they do not."""
    scales, codes = _count_differences(weight, expected)
    num_blocks, num_weights = expected.block_scales.size, 2 * expected.packed.size
    if not scales and not codes:
        return []
    return [f"{scales:,} of {num_blocks:,} block scales and {codes:,} of {num_weights:,} codes differ"]


def _fp32(raw: bytes) -> float:
    return struct.unpack("<f", raw)[0]


def _count_differences(weight: WrittenWeight, again: Nvfp4Weight) -> tuple[int, int]:
    """Return how many block scales and how many codes differ."""
    scales, packed = again.block_scales.reshape(-1), again.packed.reshape(-1)
    written_scales, written = weight.block_scales.reshape(-1), weight.packed.reshape(-1)
    changed = 0 if same_bytes(scales, written_scales) else int(np.count_nonzero(scales != written_scales))
    if same_bytes(packed, written):
        return changed, 0
    bits = packed ^ written
    return changed, int(np.count_nonzero(bits & 0xF)) + int(np.count_nonzero(bits >> 4))


def _check_sample(weight: WrittenWeight, rule: Rule, global_scale: float) -> tuple[int, int]:
    """Make sampled blocks again by the reference arithmetic; return how many there are, and how many differ.

    A unit is what has one source scale: two blocks of INT4 weights, one of BF16 weights. If the columns of the weight
    differ, a unit is a row.
    """
    if weight.importance is not None or (
        isinstance(weight.source, Int4Weight) and weight.source.channel_exponents is not None
    ):
        return _check_rows(weight, rule, global_scale)
    source, size = weight.source, GROUP_SIZE if isinstance(weight.source, Int4Weight) else BLOCK_SIZE
    num_units = weight.packed.size * 2 // size
    stride = min(SAMPLE_STRIDE, max(1, num_units // MIN_SAMPLED_UNITS))
    chosen = slice(zlib.crc32(weight.module.encode()) % stride, None, stride)
    written = weight.packed.reshape(num_units, size // 2)[chosen]
    scales = weight.block_scales.reshape(num_units, size // BLOCK_SIZE)[chosen]
    if isinstance(source, Int4Weight):
        packed, bits = source.packed.reshape(num_units, size // 2)[chosen], source.scale_bits.reshape(-1, 1)[chosen]
        again = RULES[rule].quantize_int4(Int4Weight(packed, bits), global_scale)
    else:
        again = RULES[rule].quantize_bf16(Bf16Weight(source.bits.reshape(num_units, size)[chosen]), global_scale)
    return scales.size, _wrong_blocks(again, written, scales)


def _check_rows(weight: WrittenWeight, rule: Rule, global_scale: float) -> tuple[int, int]:
    """Make sampled rows again by the reference arithmetic."""
    source, arithmetic = weight.source, RULES[rule]
    rows, columns = source.shape
    if not rows or not columns:
        return 0, 0
    stride = min(ROW_STRIDE, max(1, rows * columns // GROUP_SIZE // MIN_SAMPLED_UNITS))
    chosen = slice(zlib.crc32(weight.module.encode()) % min(stride, rows), None, stride)
    written = weight.packed.reshape(rows, columns // 2)[chosen]
    scales = weight.block_scales.reshape(rows, columns // BLOCK_SIZE)[chosen]
    if isinstance(source, Int4Weight):
        some: SourceWeight = Int4Weight(source.packed[chosen], source.scale_bits[chosen], source.channel_exponents)
    else:
        some = Bf16Weight(source.bits[chosen])
    if weight.importance is not None and arithmetic.quantize_imatrix is not None:
        again = arithmetic.quantize_imatrix(some, global_scale, weight.importance)
    elif isinstance(some, Int4Weight):
        again = arithmetic.quantize_int4(some, global_scale)
    else:
        again = arithmetic.quantize_bf16(some, global_scale)
    return scales.size, _wrong_blocks(again, written, scales)


def _wrong_blocks(again: Nvfp4Weight, written: Bytes, scales: Bytes) -> int:
    in_codes = (again.packed != written).reshape(-1, BLOCK_SIZE // 2).any(axis=1)
    return int(np.count_nonzero(in_codes | (again.block_scales != scales).reshape(-1)))


def _measure_by_definition(source: SourceWeight) -> Magnitude:
    """Measure a weight by the reference arithmetic.

    Groups whose scale is too small to have the largest weight are left out. Those with the largest scale give the
    bound, and scales are compared by their bits, which are in the same order.
    """
    if not isinstance(source, Int4Weight) or not source.scale_bits.size:
        return measure(source)
    if source.channel_exponents is not None:
        return _measure_rows_by_definition(source, source.channel_exponents)
    scale_bits, packed = source.scale_bits.reshape(-1, 1), source.packed.reshape(-1, GROUP_SIZE // 2)
    sizes = (scale_bits & np.uint16(_MAGNITUDE_BITS)).reshape(-1)
    top = np.flatnonzero(sizes == sizes.max())
    bound = measure(Int4Weight(packed[top], scale_bits[top])).amax
    least = bf16_bits(np.array(bound / MAX_MAGNITUDE, dtype=np.float32))
    rest = np.flatnonzero(sizes >= least)
    return measure(Int4Weight(packed[rest], scale_bits[rest]))


def _measure_rows_by_definition(source: Int4Weight, exponents: NDArray[np.int8]) -> Magnitude:
    """Measure a weight with channel exponents. Rows that cannot have the largest weight are left out."""
    least_G = exponents.reshape(-1, GROUP_SIZE).min(axis=1)
    largest_N = np.ldexp(source.scales, -least_G.astype(np.int32)).max(axis=1)
    bound = measure(_some_rows(source, largest_N == largest_N.max())).amax
    return measure(_some_rows(source, largest_N * MAX_MAGNITUDE * _ROUNDED_UP >= bound))


def _some_rows(source: Int4Weight, chosen: NDArray[np.bool_]) -> Int4Weight:
    return Int4Weight(source.packed[chosen], source.scale_bits[chosen], source.channel_exponents)
