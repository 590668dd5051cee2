"""What the model card says of the calibration."""

from dataclasses import dataclass
from typing import Final

from k2convert.quantize.rules import WEIGHTED_NOTE


@dataclass(frozen=True, slots=True)
class CardFeedback:
    """What rule `feedback` did.

    The errors are those of the hidden states after the last MoE layer: as converted, and with rule `optimal` there, on
    windows that were kept out of the fit; None if there were none.
    """

    layers: int
    measured_layers: int
    better_layers: int
    """Layers of those that were measured with less error than with rule `optimal`."""
    measured_on: str
    """Says which windows were kept out of the fit, or why there is no error."""
    error: float | None
    optimal_error: float | None
    warning: str | None
    """Names the layers that would be better by rule `optimal`, if there are any."""
    plain_experts: int
    """Experts whose down projection was rounded without feedback."""
    experts: int


_FEEDBACK: Final = (
    "Rule `feedback` keeps the outputs of layers, so its weights are further from the source than those of rule "
    "`optimal`."
)


@dataclass(frozen=True, slots=True)
class CardCalibration:
    """What a result was calibrated with: the names of the texts, how many tokens, and what they were used for."""

    texts: tuple[str, ...]
    tokens: int
    is_weighted: bool
    has_norm_scaling: bool
    feedback: CardFeedback | None = None
    """None for every rule but `feedback`."""


def calibration_lines(calibration: CardCalibration | None) -> list[str]:
    """Return the lines of the list about the calibration; empty without one."""
    if calibration is None:
        return []
    texts = ", ".join(f"`{name.replace('`', chr(39))}`" for name in calibration.texts)
    lines = [f"- Calibrated on {calibration.tokens:,} tokens of {texts}"]
    if calibration.feedback is None and calibration.is_weighted:
        lines.append("- Importance: errors are weighted by the mean square of each input column on these tokens")
    if calibration.has_norm_scaling:
        lines.append(
            "- Norm scaling: channels of the norm before the experts are multiplied by powers of two, and everything "
            "that reads them is divided by the same. This is exact: without quantization, the model computes the same "
            "outputs. It makes the error of FP4 activations smaller"
        )
    return lines


def feedback_paragraphs(calibration: CardCalibration | None) -> list[str]:
    """Return the paragraph about rule `feedback`; empty for every other rule."""
    if calibration is None or calibration.feedback is None:
        return []
    found = calibration.feedback
    text = (
        "**Rule `feedback`** converts the layers in order and keeps their outputs, not their weights. Each layer takes "
        "the inputs that the layers converted before it give. Its weights are chosen so that its output is close to "
        "that of the INT4 model: later weights of a row make up for the rounding of earlier ones. Activations are not "
        "quantized in this walk, so the same weights serve W4A16 and W4A4."
    )
    if found.plain_experts:
        text += (
            f" In {found.plain_experts:,} of {found.experts:,} experts, down was rounded without feedback, as rule "
            "`weighted` does: the expert saw too few tokens, or feedback gained nothing."
        )
    return [text]


def outputs_paragraphs(calibration: CardCalibration | None) -> list[str]:
    """Return what a calibrated conversion made small; empty without calibration, or if it only scaled norms."""
    if calibration is None:
        return []
    found = calibration.feedback
    if found is None:
        return [WEIGHTED_NOTE] if calibration.is_weighted else []
    if found.error is None or found.optimal_error is None:
        return [f"Error of the layers' outputs: {found.measured_on}.", _FEEDBACK]
    text = (
        "Error of the layers' outputs: after the last MoE layer, the hidden states have a relative squared error of "
        f"**{found.error:.3g}**, {found.measured_on}. With rule `optimal` in that layer, they would have "
        f"{found.optimal_error:.3g}. The error is smaller than with rule `optimal` after {found.better_layers:,} of "
        f"{found.measured_layers:,} MoE layers."
    )
    return [text, *([f"**Warning:** {found.warning}"] if found.warning else []), _FEEDBACK]
