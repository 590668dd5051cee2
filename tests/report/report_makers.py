"""A calibration by rule `gptq`, and how a report is read."""

import html
import re

from k2convert.records.calibration import CalibrationRecord, GptqLayer, LayerCalibration, OutputErrors

HELD_OUT = {
    number: OutputErrors(0.001 * (number - 1), 0.0034567 * number, 0.0012345 * number) for number in range(1, 4)
}
TOKENS = (70, 0, 90, 2_000_000)


def gptq_record(*, held_out: bool = True) -> CalibrationRecord:
    """A calibration of three MoE layers with four experts by rule `gptq`."""
    layers = {}
    for number, errors in HELD_OUT.items():
        gptq = GptqLayer(0.5, (None,) * 4, (0.5,) * 4, OutputErrors(0.5, 0.5, 0.5), errors if held_out else None)
        layers[number] = LayerCalibration(TOKENS, {}, gptq)
    return CalibrationRecord(
        (("texts/emma.txt", "1" * 64),), 8192, 2048, 4 if held_out else 1, 0, 0, False, None, layers,
        held_out_windows=1 if held_out else 0,
    )  # fmt: skip


def as_read(text: str) -> str:
    """Text as it is read: without the tags and escapes of HTML and Markdown, in one line."""
    text = re.sub(r"</?(?:code|strong|td|th|tr|p|li)\b[^>]*>", " ", text)
    return " ".join(html.unescape(re.sub(r"\\(?=[^\sA-Za-z0-9])|[`*]", "", text)).split())
