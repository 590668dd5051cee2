"""Needs of a calibration or an evaluation on this machine: memory and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k2convert.checkpoint.index import Checkpoint
from k2convert.cli import console
from k2convert.cli.views import conversion_span
from k2convert.errors import CalibrationError, format_bytes
from k2convert.job.estimate import Estimate
from k2convert.job.prepare import Job
from k2convert.job.resources import check_memory, gpu_memory
from k2convert.machine import available_memory, peak_bytes
from k2convert.models import read_architecture
from k2convert.quantize.rules import IMATRIX_NOTE
from k2convert.records.calibration import CalibrationRecord

if TYPE_CHECKING:
    from k2convert.calibration.cost import Time
    from k2convert.calibration.plan import CalibrationPlan, WalkText
    from k2convert.calibration.sizes import Memory, PassSize

MAX_HOURS: Final = 12


@dataclass(frozen=True, slots=True)
class Forecast:
    """The needs of a calibration of `size`, or of an evaluation of `num_models` models on it.

    `memory.main` is that of the whole process.
    """

    source: Checkpoint
    size: PassSize
    is_walk: bool
    memory: Memory
    num_models: int = 0

    def check(self, place: str, *, needed: int) -> None:
        """Refuse if this machine lacks memory; raises PlanError."""
        check_memory(place, needed=needed, available=available_memory() + peak_bytes())
        check_memory(place, needed=self.memory.gpu, available=self._free_of_gpu(), of_gpu=True)

    def _free_of_gpu(self) -> int:
        return gpu_memory(self.size.devices)[0]

    def time(self) -> Time:
        """Measure this machine."""
        from k2convert.calibration.cost import Time, measured_time

        if self.size.num_layers == 0:
            return Time(0.0, 0.0)
        if self.num_models:
            from k2convert.evaluation.needs import evaluation_time

            return evaluation_time(self.source, self.size, models=self.num_models)
        return measured_time(self.source, self.size, is_walk=self.is_walk)

    def memory_lines(self, needed: int) -> list[str]:
        """Return the memory that is needed and the memory that is there, in lines."""
        lines = [f"memory: needs about {format_bytes(needed)}, available {format_bytes(available_memory())}"]
        if self.memory.gpu:
            needs = format_bytes(self.memory.gpu)
            free = format_bytes(self._free_of_gpu())
            lines.append(f"memory of the GPU: needs about {needs}, free {free}")
        return lines

    def time_line(self, time: Time, *, of: str = "") -> str:
        """Return the time in a line, and where the estimate comes from."""
        span = console.format_span(time.least, time.most)
        return f"time{of}: {span}, an estimate from one expert on this machine{self._advice(time)}"

    def _advice(self, time: Time) -> str:
        if not self.size.on_cpu or time.middle <= 24 * 3600:
            return ""
        return "; use a server with many cores" if self.is_walk else "; use a GPU"

    def document(self, time: Time, needed: int) -> dict[str, object]:
        """Return everything as plain data."""
        return {
            "seconds": [round(time.least), round(time.most)],
            "memory_bytes": needed,
            "gpu_memory_bytes": self.memory.gpu,
        }


def forecast(plan: CalibrationPlan, *, layers: int) -> Forecast:
    """Count what the last `layers` layers of a calibration need."""
    from k2convert.calibration.sizes import pass_memory, read_sizes, walk_memory

    size = plan.walk.text.size(layers)
    is_walk = plan.needs is not None
    held = (walk_memory if is_walk else pass_memory)(read_sizes(plan.source), size)
    return Forecast(plan.source, size, is_walk, held)


def forecast_evaluation(source: Checkpoint, text: WalkText, *, layers: int, models: int) -> Forecast:
    """Count what `layers` layers of an evaluation of `models` models need, the reference included."""
    from k2convert.calibration.sizes import read_sizes
    from k2convert.evaluation.needs import evaluation_memory

    size = text.size(layers)
    held = evaluation_memory(read_sizes(source), size, models=models)
    return Forecast(source, size, False, held, num_models=models)


@dataclass(frozen=True, slots=True)
class FinalEvaluation:
    """Needs of the evaluation at the end of a job; `line` says it. `needed` is the memory of the whole process."""

    found: Forecast
    time: Time
    needed: int
    line: str

    def check(self, source: str, *, may_be_long: bool) -> None:
        """Refuse it if it is too long (CalibrationError) or the memory is not there (PlanError)."""
        self.found.check(source, needed=self.needed)
        check_time(self.time, source=source, may_be_long=may_be_long, what="evaluation")


def final_evaluation(job: Job, text: WalkText) -> FinalEvaluation:
    """Count and measure what the evaluation at the end of a job needs."""
    whole = job.source.whole or job.source.checkpoint
    found = forecast_evaluation(whole, text, layers=read_architecture(whole).num_layers, models=2)
    needed = peak_bytes() + found.memory.main
    time = found.time()
    line = f"evaluation at the end, on {text.windows}; {found.memory_lines(needed)[0]}; {found.time_line(time)}"
    return FinalEvaluation(found, time, needed, line)


def check_time(time: Time, *, source: str, may_be_long: bool, what: str = "calibration") -> None:
    """Refuse what would take more than half a day, unless the user asked for it; raises CalibrationError."""
    if time.middle > MAX_HOURS * 3600 and not may_be_long:
        raise CalibrationError(
            f"{source}: the {what} would take {console.format_span(time.least, time.most)} on this machine, more "
            f"than {MAX_HOURS} hours. Use a faster machine, or fewer tokens, or repeat the command with --long."
        )


def layers_left(job: Job, plan: CalibrationPlan) -> int:
    """Return how many layers are left to calibrate, as far as that is known before the job starts."""
    if job.calibrated is not None and len(job.finished) == len(job.plan.jobs):
        return 0
    return plan.walk.num_layers - plan.walk.num_finished


def show_text(plan: CalibrationPlan, time: Time | None = None) -> None:
    """Print layers and text of a calibration, and why there are so many tokens; at the start, with the time."""
    lines = [_plan_line(plan), *filter(None, (_default_line(plan),))]
    if time is not None:
        lines[0] += f": {console.format_span(time.least, time.most)} (an estimate from one expert on this machine)"
    for line in lines:
        (console.print_line if time is None else console.print_event)(line)


def _plan_line(plan: CalibrationPlan) -> str:
    """Return layers and text of a calibration, in a line."""
    line = f"{plan.walk.num_layers} layers on {plan.walk.text.windows}"
    if plan.needs is None:
        return line
    held_out = "with only one window, no error on other tokens"
    if count := plan.held_out_windows:
        verb = "is" if count == 1 else "are"
        held_out = f"{count:,} of them {verb} kept out of the fit, so that its error on other tokens"
    return f"calibrates while it converts: {line}; {held_out} is measured"


def _default_line(plan: CalibrationPlan) -> str | None:
    """Return why a calibration has its number of tokens, in a line; None if it was asked for."""
    if not plan.walk.text.by_default:
        return None
    from k2convert.calibration.token_counts import TOKENS_PER_INPUT, experts_per_token

    experts = plan.architecture.num_experts
    inputs = plan.architecture.moe_intermediate_size
    tokens = plan.walk.text.windows.tokens
    each = tokens * experts_per_token(plan.source) // max(experts, 1)
    return (
        f"{tokens:,} tokens are the default: if all experts get the same, each gets {each:,} for its "
        f"{inputs:,} inputs, and {TOKENS_PER_INPUT} for each input are enough"
    )


def expert_tokens_line(plan: CalibrationPlan, layers: Mapping[int, Sequence[int]], *, option: str) -> str:
    """Return how many tokens the median expert got, in a line; if they are few, with what to give for `option`."""
    from k2convert.calibration.token_counts import TOKENS_PER_INPUT, fewest_tokens, tokens_for

    (layer, got), inputs = fewest_tokens(layers), plan.architecture.moe_intermediate_size
    line = f"tokens of the median expert: {got:,}, in layer {layer}, where they are fewest"
    if got >= TOKENS_PER_INPUT * inputs:
        return line
    used = plan.walk.num_tokens
    window = plan.walk.text.windows.ids.shape[1]
    enough = tokens_for(plan.architecture, used=used, got=got, window=window)
    text = ", and a longer text" if used < plan.walk.text.windows.tokens else ""
    return f"{line}. It needs {TOKENS_PER_INPUT} for each of its {inputs:,} inputs: use {option}{enough}{text}"


def show_walk(walk: Forecast, time: Time, converting: Estimate, *, needed: int) -> None:
    """Print the memory and the time of a calibration, of converting beside it, and of both."""
    for line in walk.memory_lines(needed):
        console.print_line(line)
    if not walk.size.num_layers:
        console.print_line("time of the calibration: every layer is done")
    else:
        console.print_line(walk.time_line(time, of=" of the calibration"))
    console.print_line(f"time of the conversion: {conversion_span(converting)}")
    least, most = converting.seconds or (0.0, 0.0)
    console.print_line(f"time in all: {console.format_span(max(time.least, least), time.most + most)}")


def plan_document(plan: CalibrationPlan, *, finished_layers: int) -> dict[str, object]:
    """Return layers and text of a calibration, as plain data."""
    text = plan.walk.text
    windows = plan.walk.text.windows
    return {
        "texts": [{"name": name, "blake3": digest} for name, digest in windows.texts],
        "tokens": windows.ids.size,
        "tokens_asked": text.windows.tokens,
        "tokens_reason": _default_line(plan),
        "window": windows.ids.shape[1],
        "windows": windows.ids.shape[0],
        "held_out_windows": plan.held_out_windows,
        "seed": text.windows.seed,
        "layers": plan.walk.num_layers,
        "finished_layers": finished_layers,
        "statistics": None if text.saved is None else str(text.saved),
        "devices": list(plan.walk.text.devices),
    }


def job_document(job: Job, plan: CalibrationPlan) -> dict[str, object]:
    """Return the calibration of a job, as plain data."""
    done = plan.walk.num_layers - layers_left(job, plan)
    return plan_document(plan, finished_layers=done) | {"smoothing": bool(job.plan.recipe.smoothing)}


def show_outputs(found: CalibrationRecord, plan: CalibrationPlan | None) -> None:
    """Print what a calibrated conversion made small: the error of outputs, or that of weights by their inputs.

    With the `plan` of its walk, also how many tokens the experts got.
    """
    if not found.gptq:
        if found.imatrix:
            console.print_line(IMATRIX_NOTE)
        return
    line = f"outputs of the layers: {found.measured_on}"
    if layers := found.held_out:
        number, worst = max(layers.items(), key=lambda item: item[1].gptq_error)
        line = (
            f"outputs of the layers, {found.measured_on}: squared error at most {worst.gptq_error:.5f} of "
            f"the INT4 model's (layer {number}; {worst.mse_error:.5f} with that layer by rule mse)"
        )
    console.print_line(line)
    console.print_line("rule gptq keeps outputs, so its error of weights is larger than that of rule mse")
    if plan is not None:
        tokens = {number: layer.tokens for number, layer in found.layers.items()}
        console.print_line(expert_tokens_line(plan, tokens, option="--set calibration.tokens="))
    if found.warning is not None:
        console.print_note(f"warning: {found.warning}")
