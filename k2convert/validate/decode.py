"""Measuring written NVFP4 bytes against their source, with a decoder that shares nothing with the code that wrote them.

metrics/measure.py compares source and result element by element, whatever the rule. Here it gets its own table of E4M3
numbers, and any bytes, those of damaged scales too.

A weight with channel exponents is q * s * 2**-a. Importance w weights the sums a second time, by w / 255 per column.
"""

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from k2convert.quantize.formats.int4 import Int4Weight, SourceWeight
from k2convert.quantize.metrics.measure import add_up
from k2convert.quantize.metrics.weight_metrics import decibels, ratio
from k2convert.quantize.rules.channel_search import MAX_IMPORTANCE

F64 = NDArray[np.float64]


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
    found = add_up(source, packed, block_scales, _E4M3 * global_scale, importance)
    return DecodedError(
        num_weights=source.shape[0] * source.shape[1],
        num_nonzero=found.num_nonzero,
        equal_nonzero=found.equal_nonzero,
        energy=found.energy,
        squared_error=found.squared_error,
        max_error_steps=found.max_error_steps if isinstance(source, Int4Weight) else None,
        weighted_energy=None if importance is None else found.weighted_energy / MAX_IMPORTANCE,
        weighted_error=None if importance is None else found.weighted_error / MAX_IMPORTANCE,
    )
