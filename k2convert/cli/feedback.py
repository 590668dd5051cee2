"""`run --calibrate`: read its text, say what its walk through the layers takes, and refuse what would take too long."""

import os
from pathlib import Path
from typing import Any

from k2convert.calibrate.feedback_work import FeedbackWork
from k2convert.cli import console
from k2convert.cli.options import TOKENS, WINDOW, RunOptions
from k2convert.cli.progress import Waiting
from k2convert.cli.texts import check_time, read_texts
from k2convert.job.feedback_plan import CalibrationText, FeedbackPlan
from k2convert.job.machine import choose_devices
from k2convert.job.places import Source
from k2convert.job.prepare import Job
from k2convert.quantize.rules import WEIGHTED_NOTE
from k2convert.records.calibration import CalibrationRecord
from k2convert.report.formatting import counted


def read_calibration_text(options: RunOptions, source: Source) -> CalibrationText:
    """Read the text of a run; raises CalibrationError."""
    from k2convert.calibrate.cost import chunk_windows

    tokens, window, seed = options.tokens or TOKENS, options.window or WINDOW, options.seed or 0
    windows = read_texts(
        source, text=options.calibrate, token_ids=options.token_ids, tokens=tokens, window=window, seed=seed
    )
    for note in () if options.quiet else windows.notes:
        console.print_note(f"note: {note}")
    devices = choose_devices(options.device)
    return CalibrationText(
        windows=windows,
        tokens=tokens,
        window=window,
        seed=seed,
        chunk=chunk_windows(source.checkpoint, window=windows.ids.shape[1], devices=devices),
        threads=len(os.sched_getaffinity(0)),
        saved=options.save_statistics,
    )


def layers_left(job: Job, plan: FeedbackPlan) -> int:
    """Return how many layers the walk has to do, as far as that is known before it starts."""
    if job.calibrated is not None and len(job.finished) == len(job.plan.jobs):
        return 0
    return plan.num_layers - plan.num_finished


def estimate_walk(job: Job, plan: FeedbackPlan, options: RunOptions) -> float:
    """Return about how many seconds the rest of the walk takes."""
    from k2convert.calibrate.cost import PassSize, walk_seconds

    if (num_layers := layers_left(job, plan)) == 0:
        return 0.0
    size = PassSize(
        num_windows=plan.header.windows,
        window=plan.header.window,
        chunk=plan.text.chunk,
        devices=job.limits.devices,
        parallel=plan.text.threads if job.limits.devices == ("cpu",) else 1,
        num_layers=num_layers,
    )
    with Waiting("measures one expert", quiet=options.quiet):
        return walk_seconds(job.source.checkpoint, size)


def check_walk_time(seconds: float, options: RunOptions) -> None:
    """Refuse a walk of more than half a day, unless the user agreed; raises CalibrationError."""
    check_time(seconds, source=options.source, yes=options.yes)


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
