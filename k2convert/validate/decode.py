"""Measuring written NVFP4 bytes against their source, with a decoder that shares nothing with the code that wrote them.

One pass over source and result, element by element in float64: w' = v * b * g against w = q * s, both exact. Sums run
along each row in a fixed order and are added over rows with math.fsum, so the figures do not depend on threads. The
decoder assumes no rule, so it measures any NVFP4 checkpoint, and it detects a single flipped bit.

A weight with column exponents is q * s * 2**-a. Importance w weights the sums a second time, by w / 255 of each column.
"""

import math
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from k2convert.quantize.formats.int4 import Int4Weight, SourceWeight
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.metrics.weight_metrics import decibels, ratio

F64 = NDArray[np.float64]

with np.errstate(invalid="ignore"):  # the table holds every BF16 pattern, NaNs included
    _BF16: F64 = (np.arange(65536, dtype=np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def _e4m3_values() -> F64:
    """All 256 E4M3 numbers by the definition (bias 7, no infinities, 0x7F and 0xFF are NaN)."""
    values = np.empty(256)
    for byte in range(128):
        exponent, mantissa = byte >> 3, byte & 7
        values[byte] = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    values[127] = np.nan
    values[128:] = -values[:128]
    return values


_E4M3 = _e4m3_values()


@dataclass(frozen=True, slots=True)
class DecodedError:
    """The error of one tensor's written bytes against the source; `max_error_steps` is None for BF16.

    `weighted_energy` and `weighted_error` are the sums weighted by importance; None if there is none.
    """

    num_weights: int
    num_nonzero: int
    equal_nonzero: int
    energy: float
    squared_error: float
    max_error_steps: float | None
    weighted_energy: float | None = None
    weighted_error: float | None = None

    @property
    def relative_mse(self) -> float:
        """squared_error / energy; infinite if an all-zero source did not stay zero."""
        return ratio(self.squared_error, self.energy)

    @property
    def sqnr_db(self) -> float | None:
        """Signal-to-noise ratio in dB; infinite if nothing changed, None if source and result are all zero."""
        return None if self.energy == self.squared_error == 0.0 else decibels(self.energy, self.squared_error)

    @property
    def weighted_sqnr_db(self) -> float | None:
        """The same of the weighted sums; None without importance."""
        if self.weighted_energy is None or self.weighted_error is None:
            return None
        return None if self.weighted_energy == 0.0 else decibels(self.weighted_energy, self.weighted_error)

    def to_dict(self) -> dict[str, float | int | None]:
        """Return the stored fields. Without importance, the weighted sums are left out."""
        stored = asdict(self)
        if self.weighted_error is None:
            del stored["weighted_energy"], stored["weighted_error"]
        return stored


def measure_decoded(
    source: SourceWeight,
    *,
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    global_scale: float,
    importance: NDArray[np.uint8] | None = None,
) -> DecodedError:
    """Decode NVFP4 bytes (packed [N * K/2], block_scales [N * K/16], any shape) and measure them against the source.

    `importance` [K] adds the weighted sums.
    """
    exponents = source.column_exponents if isinstance(source, Int4Weight) else None
    if exponents is not None or importance is not None:
        return _measure_columns(source, packed, block_scales, global_scale, exponents, importance)
    rows = source.shape[0]
    written = packed.reshape(-1), block_scales.reshape(-1), _E4M3 * global_scale
    sums = np.zeros((rows, 3))
    counts = np.zeros((rows, 2), dtype=np.int64)
    results = sums.reshape(-1), counts.reshape(-1)
    if isinstance(source, Int4Weight):
        _cpu.measure_decoded_int4(source.packed.reshape(-1), _BF16[source.scale_bits.reshape(-1)], *written, *results)
    else:
        _cpu.measure_decoded_bf16(source.bits.reshape(-1), *written, *results)
    return _total(source, sums, counts)


def _measure_columns(
    source: SourceWeight,
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    global_scale: float,
    exponents: NDArray[np.int8] | None,
    importance: NDArray[np.uint8] | None,
) -> DecodedError:
    rows, columns = source.shape
    written = packed.reshape(-1), block_scales.reshape(-1), _E4M3 * global_scale
    shares = np.ones(columns) if importance is None else importance / 255.0
    sums = np.zeros((rows, 5))
    counts = np.zeros((rows, 2), dtype=np.int64)
    results = sums.reshape(-1), counts.reshape(-1)
    if isinstance(source, Int4Weight):
        powers = np.ldexp(1.0, -(np.zeros(columns, dtype=np.int8) if exponents is None else exponents))
        scales = _BF16[source.scale_bits.reshape(-1)]
        _cpu.measure_columns_int4(source.packed.reshape(-1), scales, *written, powers, 1 / powers, shares, *results)
    else:
        _cpu.measure_columns_bf16(source.bits.reshape(-1), *written, shares, *results)
    found = _total(source, sums, counts)
    if importance is None:
        return found
    return replace(found, weighted_energy=math.fsum(sums[:, 3].tolist()), weighted_error=_sum(sums[:, 4]))


def _total(source: SourceWeight, sums: F64, counts: NDArray[np.int64]) -> DecodedError:
    """Add up the rows: `sums` begin with energy, error and the largest error, `counts` are non-zero and unchanged."""
    rows, columns = source.shape
    return DecodedError(
        num_weights=rows * columns,
        num_nonzero=int(counts[:, 0].sum()),
        equal_nonzero=int(counts[:, 1].sum()),
        energy=math.fsum(sums[:, 0].tolist()),
        squared_error=_sum(sums[:, 1]),
        max_error_steps=float(sums[:, 2].max(initial=0.0)) if isinstance(source, Int4Weight) else None,
    )


def _sum(values: F64) -> float:
    return math.fsum(values.tolist()) if np.isfinite(values).all() else math.nan
