"""Measuring written NVFP4 bytes against their source, with a decoder that shares nothing with the code that wrote them.

One pass over source and result, element by element in float64: w' = v * b * g against w = q * s, both exact. Sums run
along each row in a fixed order and are added over rows with math.fsum, so the figures do not depend on threads. The
decoder assumes no rule, so it measures any NVFP4 checkpoint, and it detects a single flipped bit.
"""

import math
from dataclasses import dataclass

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
    """The error of one tensor's written bytes against the source; `max_error_steps` is None for BF16."""

    num_weights: int
    num_nonzero: int
    equal_nonzero: int
    energy: float
    squared_error: float
    max_error_steps: float | None

    @property
    def relative_mse(self) -> float:
        """squared_error / energy; infinite if an all-zero source did not stay zero."""
        return ratio(self.squared_error, self.energy)

    @property
    def sqnr_db(self) -> float | None:
        """Signal-to-noise ratio in dB; infinite if nothing changed, None if source and result are all zero."""
        return None if self.energy == self.squared_error == 0.0 else decibels(self.energy, self.squared_error)


def measure_decoded(
    source: SourceWeight, *, packed: NDArray[np.uint8], block_scales: NDArray[np.uint8], global_scale: float
) -> DecodedError:
    """Decode NVFP4 bytes (packed [N * K/2], block_scales [N * K/16], any shape) and measure them against the source."""
    rows, columns = source.shape
    written = packed.reshape(-1), block_scales.reshape(-1), _E4M3 * global_scale
    sums = np.zeros((rows, 3))
    counts = np.zeros((rows, 2), dtype=np.int64)
    results = sums.reshape(-1), counts.reshape(-1)
    if isinstance(source, Int4Weight):
        _cpu.measure_decoded_int4(source.packed.reshape(-1), _BF16[source.scale_bits.reshape(-1)], *written, *results)
    else:
        _cpu.measure_decoded_bf16(source.bits.reshape(-1), *written, *results)
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
