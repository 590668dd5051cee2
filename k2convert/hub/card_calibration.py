"""What the model card says of the calibration."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CardFeedback:
    """What rule `feedback` did.

    The errors are those of the hidden states after the last MoE layer: as converted, and with rule `optimal` there.
    """

    layers: int
    better_layers: int
    """Layers with less error than with rule `optimal`."""
    error: float
    optimal_error: float
    plain_experts: int
    """Experts whose down projection was rounded without feedback."""
    experts: int


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
        "quantized in this walk, so the same weights serve W4A16 and W4A4. After the last MoE layer, the hidden states "
        f"have a relative squared error of {found.error:.3g} on the calibration text; with rule `optimal` in that "
        f"layer, they would have {found.optimal_error:.3g}. The error is smaller than with rule `optimal` after "
        f"{found.better_layers:,} of {found.layers:,} MoE layers."
    )
    if found.plain_experts:
        text += (
            f" In {found.plain_experts:,} of {found.experts:,} experts, down was rounded without feedback, as rule "
            "`weighted` does: the expert saw too few tokens, or feedback gained nothing."
        )
    return [text]
