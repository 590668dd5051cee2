"""What `calibrate` and `run --calibrate` share: reading the text, and showing the calibration that is planned."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k2convert.choices import counted
from k2convert.cli import console
from k2convert.cli.forecast import Computer, Forecast, forecast, read_texts
from k2convert.cli.views import conversion_span
from k2convert.job.estimate import Estimate
from k2convert.job.locations import Source
from k2convert.job.prepare import Job
from k2convert.plan.recipe import TextUse
from k2convert.quantize.rules import IMATRIX_NOTE
from k2convert.records.calibration import CalibrationRecord

if TYPE_CHECKING:
    from k2convert.calibrate.calibration import CalibrationPlan, CalibrationText
    from k2convert.calibrate.cost import Time


def read_calibration_text(
    files: Sequence[Path], use: TextUse, source: Source, computer: Computer, *, quiet: bool
) -> "CalibrationText":
    """Read the text of a calibration; raises CalibrationError."""
    from k2convert.calibrate.calibration import CalibrationText
    from k2convert.calibrate.cost import chunk_windows

    windows = read_texts(source, files, tokens=use.tokens, window=use.window, seed=use.seed)
    for note in () if quiet else windows.notes:
        console.print_note(f"note: {note}")
    chunk = chunk_windows(source.checkpoint, window=windows.ids.shape[1], gpu_bytes=computer.gpu_bytes)
    saved = use.save_statistics
    return CalibrationText(windows, use.tokens, use.window, use.seed, chunk, computer.threads, saved)


def layers_left(job: Job, plan: "CalibrationPlan") -> int:
    """Return how many layers the walk of a job has to do, as far as that is known before it starts."""
    if job.calibrated is not None and len(job.finished) == len(job.plan.jobs):
        return 0
    return plan.num_layers - plan.num_finished


def forecast_walk(job: Job, plan: "CalibrationPlan", computer: Computer) -> Forecast:
    """Count what the rest of the walk needs."""
    return forecast(plan, computer, layers=layers_left(job, plan))


def plan_line(plan: "CalibrationPlan") -> str:
    """Return what is walked over, in a line."""
    windows = plan.text.windows
    names = ", ".join(name for name, _ in windows.texts)
    line = (
        f"{plan.num_layers} layers on {windows.ids.size:,} tokens of {names}, in "
        f"{counted(windows.ids.shape[0], 'window')} of {windows.ids.shape[1]:,}"
    )
    if plan.needs is None:
        return line
    return f"calibrates while it converts: {line}; {_held_out(plan.held_out_windows)} is measured"


def smoothing_line(job: Job) -> str:
    """Return whether norms are scaled, in a line."""
    recipe = job.plan.recipe
    return f"smoothing: {'on' if recipe.smoothing else 'off'} (by default on for w4a4, off for w4a16)"


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


def plan_document(plan: "CalibrationPlan", *, finished_layers: int) -> dict[str, Any]:
    """Return what is walked over, as plain data."""
    text, windows = plan.text, plan.text.windows
    return {
        "texts": [{"name": name, "blake3": digest} for name, digest in windows.texts],
        "tokens": windows.ids.size,
        "window": windows.ids.shape[1],
        "windows": windows.ids.shape[0],
        "held_out_windows": plan.held_out_windows,
        "seed": text.seed,
        "layers": plan.num_layers,
        "finished_layers": finished_layers,
        "statistics": None if text.saved is None else str(text.saved),
        "devices": list(plan.devices),
    }


def job_document(job: Job, plan: "CalibrationPlan") -> dict[str, Any]:
    """Return what the walk of a job is, as plain data."""
    done = plan.num_layers - layers_left(job, plan)
    return plan_document(plan, finished_layers=done) | {"smoothing": bool(job.plan.recipe.smoothing)}


def show_outputs(found: CalibrationRecord) -> None:
    """Print what a calibrated conversion made small: the error of outputs, or that of weights by their inputs."""
    if not found.gptq:
        if found.weighted:
            console.print_line(IMATRIX_NOTE)
        return
    if layers := found.held_out:
        worst = max(layers, key=lambda number: layers[number].gptq_error)
        console.print_line(
            f"outputs of the layers, {found.measured_on}: squared error at most {layers[worst].gptq_error:.5f} of "
            f"the INT4 model's (layer {worst}; {layers[worst].mse_error:.5f} with that layer by rule mse)"
        )
    else:
        console.print_line(f"outputs of the layers: {found.measured_on}")
    console.print_line("rule gptq keeps outputs, so its error of weights is larger than that of rule mse")
    if found.warning is not None:
        console.print_note(f"warning: {found.warning}")
