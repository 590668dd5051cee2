"""Needs of a calibration or an evaluation on this machine, memory and time, and what its verbs do alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Final

from k2convert.checkpoint.index import Checkpoint
from k2convert.cli import console
from k2convert.cli.interrupts import say_when_interrupted
from k2convert.cli.progress import Display, waiting
from k2convert.cli.verbs import CalibrateOptions, EvaluateOptions
from k2convert.cli.views import conversion_span
from k2convert.errors import CalibrationError, format_bytes
from k2convert.job.estimate import Estimate
from k2convert.job.prepare import Job, memory_bytes
from k2convert.job.resources import check_memory, gpu_memory
from k2convert.machine import available_memory, peak_bytes
from k2convert.models import read_architecture
from k2convert.quantize.rules import IMATRIX_NOTE
from k2convert.records.calibration import CalibrationRecord

if TYPE_CHECKING:
    from k2convert.calibration.cost import PassSize, Time
    from k2convert.calibration.plan import CalibrationPlan, WalkPlan, WalkText
    from k2convert.evaluation.streamed import EvaluationPlan

MAX_HOURS: Final = 12


@dataclass(frozen=True, slots=True)
class Forecast:
    """Needs of the rest of a calibration or an evaluation (`what`): bytes of the whole process and of a GPU, time."""

    what: str
    size: PassSize
    is_walk: bool
    memory: int
    gpu_memory: int
    time: Time

    def check(self, place: str, *, may_be_long: bool) -> None:
        """Refuse what this machine has no memory for (PlanError), and more than half a day that nobody asked for
        (CalibrationError).
        """
        check_memory(place, needed=self.memory, available=available_memory() + peak_bytes())
        check_memory(place, needed=self.gpu_memory, available=gpu_memory(self.size.devices)[0], of_gpu=True)
        if self.time.middle > MAX_HOURS * 3600 and not may_be_long:
            raise CalibrationError(
                f"{place}: the {self.what} would take {self.span} on this machine, more than {MAX_HOURS} hours. Use a "
                "faster machine, or fewer tokens, or repeat the command with --long."
            )

    @property
    def span(self) -> str:
        """The time as people say it."""
        return console.format_span(self.time.least, self.time.most)

    def memory_lines(self) -> list[str]:
        """Return the memory that is needed and the memory that is there, in lines."""
        lines = [f"memory: needs about {format_bytes(self.memory)}, available {format_bytes(available_memory())}"]
        if self.gpu_memory:
            free = format_bytes(gpu_memory(self.size.devices)[0])
            lines.append(f"memory of the GPU: needs about {format_bytes(self.gpu_memory)}, free {free}")
        return lines

    def time_line(self, *, of: str = "") -> str:
        """Return the time in a line, and where the estimate comes from."""
        advice = ""
        if self.size.on_cpu and self.time.middle > 24 * 3600:
            advice = "; use a GPU"
            if self.is_walk:
                advice = "; use a server with many cores"
        return f"time{of}: {self.span}, an estimate from one expert on this machine{advice}"

    def document(self) -> dict[str, object]:
        """Return everything as plain data."""
        return {
            "seconds": [round(self.time.least), round(self.time.most)],
            "memory_bytes": self.memory,
            "gpu_memory_bytes": self.gpu_memory,
        }


def forecast(plan: CalibrationPlan, job: Job | None = None) -> Forecast:
    """Count and measure what the rest of a calibration needs, alone or next to the conversion of a job."""
    from k2convert.calibration.cost import measured_time, pass_memory, read_sizes, walk_memory

    is_walk = plan.needs is not None
    model = read_sizes(plan.source)
    size = plan.walk.text.size(layers_left(job, plan))
    main, gpu = (walk_memory if is_walk else pass_memory)(model, size)
    memory = peak_bytes() + main if job is None else memory_bytes(job, walk=main)  # before measuring, which needs some
    with waiting("measures one expert"):
        time = measured_time(model, size, is_walk=is_walk)
    return Forecast("calibration", size, is_walk, memory, gpu, time)


def forecast_evaluation(source: Checkpoint, text: WalkText, *, layers: int, models: int) -> Forecast:
    """Count and measure what `layers` layers of an evaluation of `models` models need, the reference included."""
    from k2convert.calibration.cost import measured_time, read_sizes
    from k2convert.evaluation.streamed import evaluation_memory, head_flops

    model = read_sizes(source)
    size = text.size(layers)
    main, gpu = evaluation_memory(model, size, models=models)
    memory = peak_bytes() + main
    with waiting("measures one expert"):
        time = measured_time(model, size, models=models, head_flops=head_flops(source, size))
    return Forecast("evaluation", size, False, memory, gpu, time)


def final_evaluation(job: Job, text: WalkText) -> Forecast:
    """Count and measure what the evaluation at the end of a job needs."""
    whole = job.source.whole or job.source.checkpoint
    return forecast_evaluation(whole, text, layers=read_architecture(whole).num_layers, models=2)


def final_line(found: Forecast, text: WalkText) -> str:
    """Return what the evaluation at the end of a job needs, in a line."""
    return f"evaluation at the end, on {text.windows}; {found.memory_lines()[0]}; {found.time_line()}"


def layers_left(job: Job | None, plan: CalibrationPlan) -> int:
    """Return how many layers are left to calibrate, as far as that is known before the job starts."""
    if job is not None and job.calibrated is not None and len(job.finished) == len(job.plan.jobs):
        return 0
    return plan.walk.num_layers - plan.walk.num_finished


def needs_lines(walk: WalkPlan, found: Forecast) -> list[str]:
    """Return disk, memory and time in lines."""
    needs = format_bytes(walk.disk_needed)
    allowed = format_bytes(walk.disk_allowed)
    return [f"disk: needs {needs} at once, may use {allowed}", *found.memory_lines(), found.time_line()]


def may_begin(walk: WalkPlan, found: Forecast, place: str, options: CalibrateOptions | EvaluateOptions) -> bool:
    """Refuse a walk that this machine cannot do; return whether to do it: a dry run ends here."""
    found.check(place, may_be_long=options.long)
    walk.check_room()
    if options.dry_run:
        console.print_next(console.own_command())
    return not options.dry_run


def display_walk(plan: CalibrationPlan | EvaluationPlan, verb: str) -> Display:
    """Return the display of a walk that begins now, and prepare what is said if it is interrupted."""
    walk = plan.walk
    display = Display(verb, walk.extent(walk.num_finished, layer_costs=plan.layer_costs()))
    say_when_interrupted(
        lambda: (
            f"{min(walk.work.num_finished(), walk.num_layers)} of {walk.num_layers} layers are done. "
            "The same command resumes"
        ),
        console.own_command(),
    )
    return display


def text_document(text: WalkText) -> dict[str, object]:
    """Return the text of a walk as plain data."""
    windows = text.windows
    return {
        "texts": [{"name": name, "blake3": digest} for name, digest in windows.texts],
        "tokens": windows.ids.size,
        "window": windows.ids.shape[1],
        "windows": windows.ids.shape[0],
        "seed": windows.seed,
    }


def plan_document(plan: CalibrationPlan, *, finished_layers: int) -> dict[str, object]:
    """Return layers and text of a calibration, as plain data."""
    text = plan.walk.text
    return text_document(text) | {
        "tokens_asked": text.windows.tokens,
        "tokens_reason": _default_line(plan),
        "held_out_windows": plan.held_out_windows,
        "layers": plan.walk.num_layers,
        "finished_layers": finished_layers,
        "statistics": None if text.saved is None else str(text.saved),
        "devices": list(text.devices),
    }


def job_document(job: Job, plan: CalibrationPlan) -> dict[str, object]:
    """Return the calibration of a job, as plain data."""
    done = plan.walk.num_layers - layers_left(job, plan)
    return plan_document(plan, finished_layers=done) | {"smoothing": bool(job.plan.recipe.smoothing)}


def text_lines(plan: CalibrationPlan) -> list[str]:
    """Return layers and text of a calibration in lines, and why it has its number of tokens if nobody asked for one."""
    line = f"{plan.walk.num_layers} layers on {plan.walk.text.windows}"
    if plan.needs is not None:
        held_out = "with only one window, no error on other tokens"
        if count := plan.held_out_windows:
            verb = "is" if count == 1 else "are"
            held_out = f"{count:,} of them {verb} kept out of the fit, so that its error on other tokens"
        line = f"calibrates while it converts: {line}; {held_out} is measured"
    reason = _default_line(plan)
    return [line] if reason is None else [line, reason]


def show_start(plan: CalibrationPlan, found: Forecast) -> None:
    """Print layers, text and time of a calibration that begins."""
    line, *reason = text_lines(plan)
    for event in (f"{line}: {found.span} (an estimate from one expert on this machine)", *reason):
        console.print_event(event)


def _default_line(plan: CalibrationPlan) -> str | None:
    if not plan.walk.text.by_default:
        return None
    from k2convert.calibration.text import TOKENS_PER_INPUT, experts_per_token

    inputs = plan.architecture.moe_intermediate_size
    tokens = plan.walk.text.windows.tokens
    each = tokens * experts_per_token(plan.source) // max(plan.architecture.num_experts, 1)
    return (
        f"{tokens:,} tokens are the default: if all experts get the same, each gets {each:,} for its "
        f"{inputs:,} inputs, and {TOKENS_PER_INPUT} for each input are enough"
    )


def fewest_tokens(layers: Mapping[int, Sequence[int]]) -> tuple[int, int]:
    """Return the layer in which the median expert got the fewest tokens, and how many; `layers` has those of each."""
    medians = {layer: median_low(counts) for layer, counts in layers.items()}
    layer = min(medians, key=lambda layer: medians[layer])
    return layer, medians[layer]


def expert_tokens_line(plan: CalibrationPlan, layers: Mapping[int, Sequence[int]], *, option: str) -> str:
    """Return how many tokens the median expert got, in a line; if they are few, with what to give for `option`."""
    from k2convert.calibration.text import TOKENS_PER_INPUT

    layer, got = fewest_tokens(layers)
    inputs = plan.architecture.moe_intermediate_size
    line = f"tokens of the median expert: {got:,}, in layer {layer}, where they are fewest"
    if got >= TOKENS_PER_INPUT * inputs:
        return line
    windows = plan.walk.text.windows
    window = windows.ids.shape[1]
    enough = -(-windows.ids.size * TOKENS_PER_INPUT * inputs // max(got, 1))
    enough = -(-enough // window) * window
    text = ""
    if windows.ids.size < windows.tokens:
        text = ", and a longer text"
    return f"{line}. It needs {TOKENS_PER_INPUT} for each of its {inputs:,} inputs: use {option}{enough}{text}"


def show_walk(walk: Forecast, converting: Estimate) -> None:
    """Print the memory and the time of a calibration, of converting beside it, and of both."""
    for line in walk.memory_lines():
        console.print_line(line)
    if not walk.size.num_layers:
        console.print_line("time of the calibration: every layer is done")
    else:
        console.print_line(walk.time_line(of=" of the calibration"))
    console.print_line(f"time of the conversion: {conversion_span(converting)}")
    least, most = converting.seconds or (0.0, 0.0)
    console.print_line(f"time in all: {console.format_span(max(walk.time.least, least), walk.time.most + most)}")


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
