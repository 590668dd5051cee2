"""Needs of a calibration or an evaluation on this machine, and what its verbs do alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Final

from k2convert.checkpoint.index import Checkpoint
from k2convert.cli import console
from k2convert.errors import format_estimate
from k2convert.job.prepare import Job, memory_bytes
from k2convert.job.resources import check_memory, gpu_memory
from k2convert.machine import available_memory, peak_bytes
from k2convert.records.calibration import CalibrationRecord

if TYPE_CHECKING:
    from k2convert.calibration.conversion import CalibrationPlan
    from k2convert.forward.layer_pass import PassText

TIME_NOTE: Final = "time: estimated once the first layer is done"


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that the rest of a calibration or an evaluation needs on `devices`: of the whole process, and of a GPU."""

    devices: tuple[str, ...]
    memory: int
    gpu_memory: int

    def check(self, address: str) -> None:
        """Refuse what this machine has no memory for; raises PlanError."""
        check_memory(address, needed=self.memory, available=available_memory() + peak_bytes())
        check_memory(address, needed=self.gpu_memory, available=gpu_memory(self.devices)[0], of_gpu=True)

    def lines(self) -> list[str]:
        """Return the memory that is needed and the memory that is there, in lines."""
        lines = [memory_line(self.memory)]
        if self.gpu_memory:
            free = format_estimate(gpu_memory(self.devices)[0])
            lines.append(f"memory of the GPU: needs about {format_estimate(self.gpu_memory)}, free {free}")
        return lines

    def document(self) -> dict[str, object]:
        """Return the memory as plain data."""
        return {"memory_bytes": self.memory, "gpu_memory_bytes": self.gpu_memory}


def memory_line(needed: int) -> str:
    """Return the memory that is needed, and that is available."""
    return f"memory: needs about {format_estimate(needed)}, available {format_estimate(available_memory())}"


def calibration_needs(plan: CalibrationPlan, job: Job) -> Needs:
    """Count what the rest of a calibration needs, next to the conversion of a job."""
    from k2convert.calibration.memory import gptq_memory, read_sizes

    num_layers = layers_left(job, plan)
    memory = gptq_memory(
        read_sizes(plan.source),
        plan.layer_pass.text,
        num_layers,
        shared_width=plan.shared_width,
        fp8_bytes=plan.fp8_bytes,
    )
    return Needs(plan.layer_pass.text.devices, memory_bytes(job, layer_pass=memory.main), memory.gpu)


def evaluation_needs(source: Checkpoint, text: PassText, *, layers: int, models: int) -> Needs:
    """Count what `layers` layers of an evaluation of `models` models need, the reference included."""
    from k2convert.calibration.memory import read_sizes
    from k2convert.evaluation.streamed import evaluation_memory

    memory = evaluation_memory(read_sizes(source), text, layers, models=models)
    return Needs(text.devices, peak_bytes() + memory.main, memory.gpu)


def layers_left(job: Job, plan: CalibrationPlan) -> int:
    """Return how many layers are left to calibrate, as far as that is known before the job starts."""
    if job.calibrated is not None and len(job.finished) == len(job.plan.jobs):
        return 0
    return plan.layer_pass.num_layers - plan.layer_pass.num_finished


def text_document(text: PassText) -> dict[str, object]:
    """Return the text of a layer pass as plain data."""
    windows = text.windows
    return {
        "texts": [{"name": name, "blake3": digest} for name, digest in windows.texts],
        "tokens": windows.ids.size,
        "window": windows.ids.shape[1],
        "windows": windows.ids.shape[0],
        "seed": windows.seed,
    }


def calibration_document(job: Job, plan: CalibrationPlan) -> dict[str, object]:
    """Return layers and text of the calibration of a job, as plain data."""
    text = plan.layer_pass.text
    return text_document(text) | {
        "tokens_asked": text.windows.tokens,
        "tokens_reason": _default_line(plan),
        "held_out_windows": plan.held_out_windows,
        "layers": plan.layer_pass.num_layers,
        "finished_layers": plan.layer_pass.num_layers - layers_left(job, plan),
        "devices": list(text.devices),
        "smoothing": bool(job.plan.recipe.smoothing),
    }


def text_lines(plan: CalibrationPlan) -> list[str]:
    """Return layers and text of a calibration in lines, and why it has its number of tokens if nobody asked for one."""
    line = f"{plan.layer_pass.num_layers} layers on {plan.layer_pass.text.windows}"
    held_out = "with only one window, no error on other tokens"
    if count := plan.held_out_windows:
        verb = "is" if count == 1 else "are"
        held_out = f"{count:,} of them {verb} kept out of the fit, so that its error on other tokens"
    line = f"calibrates while it converts: {line}; {held_out} is measured"
    reason = _default_line(plan)
    return [line] if reason is None else [line, reason]


def _default_line(plan: CalibrationPlan) -> str | None:
    if not plan.layer_pass.text.by_default:
        return None
    from k2convert.text.windows import TOKENS_PER_INPUT, experts_per_token, fitted_tokens

    inputs = plan.architecture.moe_intermediate_size
    text = plan.layer_pass.text.windows
    tokens = text.tokens
    fitted = fitted_tokens(tokens, window=text.window)
    each = fitted * experts_per_token(plan.source) // max(plan.architecture.num_experts, 1)
    return (
        f"default: {tokens:,} tokens, or {each:,} per expert if spread evenly; an expert needs "
        f"{TOKENS_PER_INPUT * inputs:,} ({TOKENS_PER_INPUT} per input)"
    )


def fewest_tokens(layers: Mapping[int, Sequence[int]]) -> tuple[int, int]:
    """Return the layer in which the median expert got the fewest tokens, and how many; `layers` has those of each."""
    medians = {layer: median_low(counts) for layer, counts in layers.items()}
    layer = min(medians, key=lambda layer: medians[layer])
    return layer, medians[layer]


def _expert_tokens_line(plan: CalibrationPlan, layers: Mapping[int, Sequence[int]]) -> str:
    """Return how many tokens the median expert got, in a line; if they are few, with the key that gives more."""
    from k2convert.text.windows import TOKENS_PER_INPUT, tokens_to_fit

    layer, got = fewest_tokens(layers)
    inputs = plan.architecture.moe_intermediate_size
    line = f"the median expert of layer {layer} saw {got:,} tokens, the fewest of all layers"
    if got >= TOKENS_PER_INPUT * inputs:
        return line
    windows = plan.layer_pass.text.windows
    window = windows.ids.shape[1]
    fitted = windows.ids.size - plan.held_out_windows * window
    enough = tokens_to_fit(-(-fitted * TOKENS_PER_INPUT * inputs // max(got, 1)), window=window)
    ways: list[str] = []
    if windows.ids.size < windows.tokens:
        ways.append(f"a longer text than these {windows.ids.size:,} tokens")
    if enough > windows.tokens:
        ways.append(f"--set calibration.tokens={enough}")
    return f"{line}. It needs {TOKENS_PER_INPUT * inputs:,}: use {' and '.join(ways)}"


def show_outputs(record: CalibrationRecord, plan: CalibrationPlan | None) -> None:
    """Print the error of outputs and, with the `plan` of its layer pass, how many tokens the experts got."""
    line = f"outputs of the layers: {record.measured_on}"
    if layers := record.held_out:
        number, worst = max(layers.items(), key=lambda item: item[1].gptq_error)
        line = (
            f"outputs of the layers, {record.measured_on}: squared error at most {worst.gptq_error:.5f} of "
            f"the INT4 model's (layer {number}; {worst.mse_error:.5f} with that layer by rule mse)"
        )
    console.print_line(line)
    console.print_line("rule gptq preserves outputs, so its weight error is usually larger than that of rule mse")
    if plan is not None:
        tokens = {number: layer.tokens for number, layer in record.layers.items()}
        console.print_line(_expert_tokens_line(plan, tokens))
    if record.warning is not None:
        console.print_note(f"warning: {record.warning}")
