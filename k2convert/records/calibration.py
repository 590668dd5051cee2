"""Calibration of a result: the part `calibration` of the ledger. A result made without a text has none.

Its form is that of the classes below. In results of earlier releases, layers may have no `gptq`. Its `held_out` and the
record's `held_out_windows` are only there if windows were kept out of the fit.
"""

from dataclasses import dataclass, field
from typing import Final

from k2convert.records.document import Count, LayerNumber, Real, Share

MIN_TOKENS: Final = 64
"""With fewer tokens a down projection is converted by rule `mse`. With 64 tokens in all, scales weighted by their
inputs gave those of k2-tiny 12 % more error on other tokens."""


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
class SharedDown:
    """The down projection of the MLP that every token takes: as one of those in GptqLayer."""

    ridge: Real | None
    shrinkage: Share | None


@dataclass(frozen=True, slots=True)
class GptqLayer:
    """Work of rule `gptq` in one layer, and its gain.

    `shrinkage`, 0 to 1, is how far second moments were drawn to their diagonal, None without error feedback: of the
    input of gate and up, and of down of each routed expert. `down_ridges` are the strengths of the ridge that corrected
    down for what was left over, None where that gained nothing. `shared_down` is there if shared experts or the dense
    MLP were converted.
    """

    shrinkage: Share | None
    down_ridges: tuple[Real | None, ...]
    down_shrinkages: tuple[Share | None, ...]
    fitted: OutputErrors  # on tokens that all this was fitted to: they say little
    held_out: OutputErrors | None = None  # on windows that were kept out, None if there were none
    shared_down: SharedDown | None = None

    def __post_init__(self) -> None:
        if len(self.down_ridges) != len(self.down_shrinkages):
            raise ValueError("down_ridges and down_shrinkages have a different number of experts")


@dataclass(frozen=True, slots=True)
class LayerCalibration:
    """The calibration of one MoE layer."""

    tokens: tuple[Count, ...]  # of each routed expert
    exponents: dict[int, Count]  # number of channels by exponent of smoothing, 0 included; empty without
    gptq: GptqLayer | None = None

    def __post_init__(self) -> None:
        if self.gptq is not None and len(self.gptq.down_ridges) != len(self.tokens):
            raise ValueError("gptq and tokens have a different number of experts")


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """Calibration of a result."""

    texts: tuple[tuple[str, str], ...]  # names and digests
    tokens: Count
    window: Count
    windows: Count
    dropped_windows: Count
    seed: Count
    smoothing: bool
    exponents_digest: str | None  # None if no channel was scaled
    layers: dict[LayerNumber, LayerCalibration]  # the MoE layers
    held_out_windows: Count = 0  # more windows, kept out of everything that rule `gptq` fitted
    dense_layers: dict[LayerNumber, GptqLayer] = field(default_factory=dict[LayerNumber, GptqLayer])  # if converted

    def __post_init__(self) -> None:
        if self.exponents_digest is not None and not self.smoothing:
            raise ValueError("exponents_digest without smoothing")
        if len({layer.gptq is None for layer in self.layers.values()}) > 1:
            raise ValueError("some layers have gptq, others have none")

    @property
    def gptq(self) -> bool:
        return any(layer.gptq is not None for layer in self.layers.values())

    @property
    def num_unfitted(self) -> int:
        """Experts with fewer than MIN_TOKENS tokens: rule `mse` converted their down projections."""
        return sum(count < MIN_TOKENS for layer in self.layers.values() for count in layer.tokens)

    @property
    def held_out(self) -> dict[int, OutputErrors]:
        """The errors after each converted layer on windows kept out of the fit, in order; empty if unknown."""
        layers = {number: layer.gptq for number, layer in self.layers.items()} | self.dense_layers
        return {n: g.held_out for n, g in sorted(layers.items()) if g is not None and g.held_out is not None}

    @property
    def measured_on(self) -> str:
        """Which windows `held_out` is of, or why it is empty."""
        if self.held_out:
            total = self.windows + self.held_out_windows
            return f"on the {self.held_out_windows:,} of {total:,} windows that were kept out of the fit"
        if self.windows == 1:
            return "no held-out figure: only one window"
        return "no held-out figure: no window was kept out of the fit"

    @property
    def warning(self) -> str | None:
        """Which layers would have less error by rule `mse`, on the windows that were kept out; None for none."""
        worse = {number: errors for number, errors in self.held_out.items() if errors.is_worse}
        if not worse:
            return None
        layer, errors = max(worse.items(), key=lambda item: item[1].gptq_error - item[1].mse_error)
        count = f"{len(worse):,} of {len(self.held_out):,} layers"
        return (
            f"In {count}, the error of the outputs is larger than by rule mse, {self.measured_on}. Layer {layer} "
            f"is the worst, with {errors.gptq_error:.3g} instead of {errors.mse_error:.3g}. Use more tokens, or "
            "a different text."
        )
