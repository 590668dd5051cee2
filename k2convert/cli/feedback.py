"""`run --calibrate`: read its text, and say what its walk through the layers takes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from k2convert.calibrate.feedback_work import FeedbackWork
from k2convert.choices import counted
from k2convert.cli import console
from k2convert.cli.forecast import Computer, Forecast, forecast
from k2convert.cli.texts import read_texts
from k2convert.cli.verbs import RunOptions
from k2convert.cli.views import conversion_span
from k2convert.job.estimate import Estimate
from k2convert.job.feedback_plan import CalibrationText, FeedbackPlan
from k2convert.job.places import Source
from k2convert.job.prepare import Job
from k2convert.plan.recipe import TextUse
from k2convert.quantize.rules import WEIGHTED_NOTE
from k2convert.records.calibration import CalibrationRecord

if TYPE_CHECKING:
    from k2convert.calibrate.cost import Time


def read_calibration_text(options: RunOptions, use: TextUse, source: Source, computer: Computer) -> CalibrationText:
    """Read the text of a run; raises CalibrationError."""
    from k2convert.calibrate.cost import chunk_windows

    windows = read_texts(source, options.calibrate or (), tokens=use.tokens, window=use.window, seed=use.seed)
    for note in () if options.quiet else windows.notes:
        console.print_note(f"note: {note}")
    return CalibrationText(
        windows=windows,
        tokens=use.tokens,
        window=use.window,
        seed=use.seed,
        chunk=chunk_windows(source.checkpoint, window=windows.ids.shape[1], gpu_bytes=computer.gpu_bytes),
        threads=computer.threads,
        saved=None if use.save_statistics is None else Path(use.save_statistics),
    )


def layers_left(job: Job, plan: FeedbackPlan) -> int:
    """Return how many layers the walk has to do, as far as that is known before it starts."""
    if job.calibrated is not None and len(job.finished) == len(job.plan.jobs):
        return 0
    return plan.num_layers - plan.num_finished


def forecast_walk(job: Job, plan: FeedbackPlan, computer: Computer) -> Forecast:
    """Count what the rest of the walk needs."""
    return forecast(
        job.source.checkpoint,
        computer,
        windows=(plan.header.windows, plan.header.window),
        chunk=plan.text.chunk,
        layers=layers_left(job, plan),
        is_walk=True,
    )


def walk_line(plan: FeedbackPlan) -> str:
    """Return what is walked over, in a line."""
    header, names = plan.header, ", ".join(name for name, _ in plan.header.texts)
    return (
        f"calibrates while it converts: {plan.num_layers} layers on {header.tokens:,} tokens of {names}, in "
        f"{counted(header.windows, 'window')} of {header.window:,}; {_held_out(plan.held_out_windows)} is measured"
    )


def norm_scaling_line(job: Job) -> str:
    """Return whether norms are scaled, in a line."""
    recipe = job.plan.recipe
    return f"norm scaling: {'on' if recipe.norm_scaling else 'off'} (by default on for w4a4, off for w4a16)"


def _held_out(count: int) -> str:
    if not count:
        return "with only one window, no error on other tokens"
    return f"{count:,} of them {'is' if count == 1 else 'are'} kept out of the fit, so that its error on other tokens"


def show_walk(walk: Forecast, time: "Time", converting: Estimate, *, needed: int) -> None:
    """Print the memory and the time of a walk, of converting next to it, and of both."""
    for line in walk.memory_lines(needed):
        console.print_line(line)
    if not walk.size.num_layers:
        console.print_line("time of the calibration: every layer is done")
    elif walk.computer.elsewhere:
        console.print_line(walk.time_line(time))
        return
    else:
        console.print_line(walk.time_line(time, of=" of the calibration"))
    console.print_line(f"time of the conversion: {conversion_span(converting)}")
    least, most = converting.seconds or (0.0, 0.0)
    console.print_line(f"time in all: {console.format_span(max(time.least, least), time.most + most)}")


def walk_document(job: Job, plan: FeedbackPlan) -> dict[str, Any]:
    """Return what is walked over, as plain data."""
    header = plan.header
    return {
        "texts": [name for name, _ in header.texts],
        "tokens": header.tokens,
        "window": header.window,
        "windows": header.windows,
        "held_out_windows": plan.held_out_windows,
        "seed": header.seed,
        "layers": plan.num_layers,
        "finished_layers": plan.num_layers - layers_left(job, plan),
        "norm_scaling": bool(job.plan.recipe.norm_scaling),
        "statistics": None if plan.text.saved is None else str(plan.text.saved),
    }


def show_outputs(found: CalibrationRecord | None) -> None:
    """Print what a calibrated conversion made small: the error of outputs, or that of weights by their inputs."""
    if found is None:
        return
    if not found.feedback:
        if found.weighted:
            console.print_line(WEIGHTED_NOTE)
        return
    if layers := found.held_out:
        worst = max(layers, key=lambda number: layers[number].feedback_error)
        console.print_line(
            f"outputs of the layers, {found.measured_on}: squared error at most {layers[worst].feedback_error:.5f} of "
            f"the INT4 model's (layer {worst}; {layers[worst].optimal_error:.5f} with that layer by rule optimal)"
        )
    else:
        console.print_line(f"outputs of the layers: {found.measured_on}")
    console.print_line("rule feedback keeps outputs, so its error of weights is larger than that of rule optimal")
    if found.warning is not None:
        console.print_note(f"warning: {found.warning}")


def walk_state(destination: Path) -> dict[str, Any] | None:
    """Return how far the walk of an unfinished job is, as plain data; None if there is none."""
    work = FeedbackWork(destination)
    begun = work.job()
    if begun is None:
        return None
    return {"layers": begun.identity.get("layers"), "finished_layers": work.num_finished()}
