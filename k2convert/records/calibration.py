"""Calibration of a result: the part `calibration` of the ledger. A result made without statistics has none.

Its form is that of the classes below. A layer has `gptq` only with that rule. Its `held_out` and the record's
`held_out_windows` are only there if windows were kept out of the fit.
"""

from dataclasses import dataclass

from k2convert.choices import ImatrixPart
from k2convert.records.document import Count, LayerNumber, Real, Share


@dataclass(frozen=True, slots=True)
class OutputErrors:
    """Errors after a layer: the mean over tokens of |h - h'|^2 / |h|^2, h being the INT4 model's hidden states."""

    inherited_error: Real  # with the layer's experts unconverted: of earlier layers
    mse_error: Real  # with the experts converted by rule `mse`
    gptq_error: Real  # with the experts as they were written

    @property
    def is_worse(self) -> bool:
        """Return whether rule `mse` would have given less error."""
        return self.gptq_error > self.mse_error


@dataclass(frozen=True, slots=True)
class GptqLayer:
    """Work of rule `gptq` in one MoE layer, and its gain.

    `shrinkage`, 0 to 1, is how far second moments were drawn to their diagonal, None without error feedback: of the
    input of gate and up, and of down of each routed expert. `down_ridges` are the strengths of the ridge that corrected
    down for what was left over, None where that gained nothing.
    """

    shrinkage: Share | None
    down_ridges: tuple[Real | None, ...]
    down_shrinkages: tuple[Share | None, ...]
    fitted: OutputErrors  # on tokens that all this was fitted to: they say little
    held_out: OutputErrors | None = None  # on windows that were kept out, None if there were none
    ridge: Real | None = None  # of release 0.2 alone, as the next
    ridge_gain: Share = 0.0

    def __post_init__(self) -> None:
        if len(self.down_ridges) != len(self.down_shrinkages):
            raise ValueError("down_ridges and down_shrinkages have a different number of experts")


@dataclass(frozen=True, slots=True)
class LayerCalibration:
    """The statistics of one MoE layer."""

    tokens: tuple[Count, ...]  # of each routed expert
    fallback: tuple[Count, ...]  # experts with too few tokens: the importance in down was drawn toward an even one
    exponents: dict[int, Count]  # number of channels by exponent of smoothing, 0 included; empty without
    gptq: GptqLayer | None = None  # only with that rule
    without: tuple[ImatrixPart, ...] = ()  # projections in which rule `imatrix` gained nothing and was not used

    def __post_init__(self) -> None:
        if self.gptq is not None and len(self.gptq.down_ridges) != len(self.tokens):
            raise ValueError("gptq and tokens have a different number of experts")


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """Calibration of a result."""

    statistics: str  # digest of the file
    texts: tuple[tuple[str, str], ...]  # names and digests
    tokens: Count
    window: Count
    windows: Count
    dropped_windows: Count
    seed: Count
    imatrix: bool
    smoothing: bool
    exponents_digest: str | None  # None if no channel was scaled
    layers: dict[LayerNumber, LayerCalibration]  # the MoE layers
    statistics_from: str | None = None  # address of the file with its commit, if it came from the Hub
    held_out_windows: Count = 0  # more windows, kept out of everything that rule `gptq` fitted

    def __post_init__(self) -> None:
        if self.exponents_digest is not None and not self.smoothing:
            raise ValueError("exponents_digest without smoothing")
        if len({layer.gptq is None for layer in self.layers.values()}) > 1:
            raise ValueError("some layers have gptq, others have none")

    @property
    def layers_without(self) -> int:
        """Return how many MoE layers do not use rule `imatrix`, at least in part."""
        return sum(bool(layer.without) for layer in self.layers.values())

    @property
    def gptq(self) -> bool:
        return any(layer.gptq is not None for layer in self.layers.values())

    @property
    def held_out(self) -> dict[int, OutputErrors]:
        """The errors after each MoE layer on the windows that were kept out of the fit, in order; empty if unknown."""
        found = {number: layer.gptq for number, layer in sorted(self.layers.items())}
        return {n: layer.held_out for n, layer in found.items() if layer is not None and layer.held_out is not None}

    @property
    def measured_on(self) -> str:
        """Which windows `held_out` is of, or why it is empty."""
        if self.held_out:
            total = self.windows + self.held_out_windows
            return f"on {self.held_out_windows:,} of {total:,} windows that were kept out of the fit"
        if self.windows == 1:
            return "no held-out figure: only one window"
        return "no held-out figure: no window was kept out of the fit"

    @property
    def warning(self) -> str | None:
        """Which layers would have less error by rule `mse`, on the windows that were kept out; None for none."""
        worse = {number: found for number, found in self.held_out.items() if found.is_worse}
        if not worse:
            return None
        layer, found = max(worse.items(), key=lambda item: item[1].gptq_error - item[1].mse_error)
        count = f"{len(worse):,} of {len(self.held_out):,} layers"
        return (
            f"In {count}, the error of the outputs is larger than by rule mse, {self.measured_on}. Layer {layer} "
            f"is the worst, with {found.gptq_error:.3g} instead of {found.mse_error:.3g}. Use more tokens, or "
            "a different text."
        )
