"""The record of one finished shard: hashes, and what was measured while it was converted."""

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Final

from pydantic import AfterValidator

from k2convert.errors import quoted
from k2convert.quantize.metrics.weight_metrics import WeightMetrics, decibels, ratio
from k2convert.records.document import Count, Real


def _checked(metrics: WeightMetrics) -> WeightMetrics:
    for field in fields(metrics):
        found: Any = getattr(metrics, field.name)
        values: Any = (*found, *found.values()) if isinstance(found, dict) else (found,)
        if not all(value is None or (value >= 0 and math.isfinite(value)) for value in values):
            raise ValueError(f"{field.name} has a figure that is negative or not finite")
    if (metrics.weighted_energy is None) != (metrics.weighted_error is None):
        raise ValueError("weighted_energy and weighted_error belong together")
    if max(metrics.scale_histogram, default=0) > 127:
        raise ValueError("scale_histogram has a byte above 127")
    return metrics


Metrics = Annotated[WeightMetrics, AfterValidator(_checked)]


@dataclass(frozen=True, slots=True)
class ProjectionRecord:
    """Measurements of one converted projection."""

    module: str
    role: str
    global_scale: Real
    metrics: Metrics | None


@dataclass(frozen=True, slots=True)
class DecodedError:
    """The error of one tensor's written bytes against the source."""

    num_weights: Count
    num_nonzero: Count
    equal_nonzero: Count
    energy: Real
    squared_error: Real
    max_error_steps: Real | None  # None for BF16
    weighted_energy: Real | None = None  # weighted by importance; None if there is none
    weighted_error: Real | None = None
    changed_codes: Count | None = None  # bytes of codes in the window of a cast; None without a cast

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


ALL_ZERO: Final = "all weights are zero"
MOST_MINUS_EIGHT: Final = 0.1
"""More codes of -8 than this are a doubt. Even codes have a sixteenth; two's complement makes an eighth of zeros."""
MOST_OF_ZEROS: Final = 0.2  # more codes of -8 than this are a range of zero bytes, not another code


def is_weight(name: str) -> bool:
    """Return whether a tensor that is all zero is a doubt, by its name: a bias may be zero."""
    return name.endswith(".weight")


def doubt_of(metrics: WeightMetrics) -> str:
    """Return what the codes of a source weight make doubtful; empty for most."""
    count = metrics.num_minus_eight
    total = metrics.num_codes
    if count is None or not total or count <= MOST_MINUS_EIGHT * total:
        return ""
    share = f"{100 * count / total:.0f} % of the codes are -8, which Moonshot's training never writes"
    return f"{share}: a range of zeros in the file?" if count > MOST_OF_ZEROS * total else f"{share}: two's complement?"


def proven(metrics: WeightMetrics, decoded: DecodedError | None) -> WeightMetrics:
    """Return the figures of a cast weight with whether every decoded value is the source's, None if not decoded."""
    if metrics.below_window_groups is None:
        return metrics
    if decoded is None:
        return replace(metrics, lossless_tensors=None)
    is_lossless = decoded.squared_error == 0.0 and decoded.equal_nonzero == decoded.num_nonzero
    return replace(metrics, lossless_tensors=int(is_lossless))


def _is_scalar(data: str) -> str:
    if not re.fullmatch("[0-9a-f]{8}", data):
        raise ValueError(f"{quoted(data)} is not four bytes as hex")
    return data


Scalar = Annotated[str, AfterValidator(_is_scalar)]


@dataclass(frozen=True, slots=True)
class ShardFindings:
    """Findings of validation on a shard before its upload, by tensor. All that it compared with the source agreed."""

    blake3: str  # of the file as it was read
    copied: tuple[str, ...]  # tensors with the source's bytes
    scaled: tuple[str, ...]  # those of them that smoothing changes
    decoded: dict[str, DecodedError]  # by module
    sampled_blocks: dict[str, Count]  # that the reference arithmetic regenerated, 0 without a rule
    invalid_scales: dict[str, Count]
    subnormal_scales: dict[str, Count]
    zero_blocks_with_codes: dict[str, Count]
    scalars: dict[str, Scalar]  # as hex


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One finished shard: hashes and size of the file, digests of the source headers it was converted from."""

    shard: str
    fingerprint: str
    blake3: str
    file_bytes: Count
    num_tensors: Count
    source_headers: dict[str, str]
    projections: tuple[ProjectionRecord, ...] = ()
    sha256: str | None = None  # by which the Hub identifies files; set, as `checked`, if written for upload
    zero_copies: tuple[str, ...] = ()  # copied weights that are all zero
    checked: ShardFindings | None = None

    def __post_init__(self) -> None:
        found = self.checked
        modules = {projection.module for projection in self.projections}
        if found is not None and not found.decoded.keys() == found.sampled_blocks.keys() == modules:
            raise ValueError("checked and projections name different modules")

    @property
    def is_checked(self) -> bool:
        """Return whether the bytes with this hash were compared with the source."""
        return self.checked is not None and self.checked.blake3 == self.blake3
