"""`calibrate`: plan a calibration, show what it needs, and do it."""

from typing import TYPE_CHECKING

import typer

from k2convert.calibration.statistics import open_statistics
from k2convert.cli import console
from k2convert.cli.needs import (
    calibration_needs,
    display_walk,
    expert_tokens_line,
    may_begin,
    needs_lines,
    plan_document,
    show_start,
    text_lines,
)
from k2convert.cli.options import typed_command
from k2convert.cli.progress import waiting
from k2convert.cli.verbs import CalibrateOptions
from k2convert.errors import format_bytes, read_size
from k2convert.hub.client import SCHEME, Hub
from k2convert.job.opening import open_calibration, text_files
from k2convert.plan.recipe import TextUse

if TYPE_CHECKING:
    from k2convert.calibration.plan import CalibrationPlan
    from k2convert.calibration.statistics import StatisticsHeader


def calibrate(options: CalibrateOptions) -> None:
    """Plan a calibration, then show it (--dry-run) or do it."""
    if options.max_disk is not None and not options.source.startswith(SCHEME):
        raise typer.BadParameter("--max-disk only applies to hf:// sources")
    statistics = options.statistics
    with (
        waiting(f"reads the headers of {options.source}") as waits,
        open_calibration(
            options.source,
            statistics,
            text_files(options.text, device=options.device),
            TextUse(tokens=options.tokens, window=options.window, seed=options.seed, save_statistics=statistics),
            hub=Hub(notify=console.notifier()),
            max_disk=read_size("--max-disk", options.max_disk),
        ) as plan,
    ):
        waits.close()
        finished = plan.finished_header()
        if finished is not None:
            if not options.dry_run:
                plan.walk.work.remove_leftovers(plan.walk.job)
            console.print_note(f"{statistics}: already complete")
            _show_result(plan, finished, options)
            return
        _check_and_do(plan, options)


def _check_and_do(plan: "CalibrationPlan", options: CalibrateOptions) -> None:
    """Show what the rest of a calibration needs, refuse it if that is not there, and do it unless this is a dry run."""
    needs = calibration_needs(plan)
    if options.dry_run:
        document = plan_document(plan, finished_layers=plan.walk.num_finished) | {"disk_needed": plan.walk.disk_needed}
        console.show(document | needs.document(), *text_lines(plan), *needs_lines(plan.walk, needs))
    if not may_begin(plan.walk, needs, options.source, options):
        return
    show_start(plan)
    display = display_walk(plan, "calibrate")
    from k2convert.calibration.accumulate import calibrate as do_calibration

    with display as events:
        header = do_calibration(plan, command=typed_command(source=options.source), events=events)
    _show_result(plan, header, options)


def _show_result(plan: "CalibrationPlan", header: "StatisticsHeader", options: CalibrateOptions) -> None:
    path = options.statistics
    num_bytes = path.stat().st_size
    document = plan_document(plan, finished_layers=plan.walk.num_layers)
    dropped = ""
    if header.dropped:
        dropped = f", {header.dropped:,} windows dropped"
    statistics = open_statistics(path)
    layers = {number: statistics.layer(number).tokens.tolist() for number in plan.architecture.moe_layers}
    console.show(
        document | {"dropped_windows": header.dropped, "bytes": num_bytes},
        f"{path}: {format_bytes(num_bytes)}, {plan.walk.num_layers} layers, {header.tokens:,} tokens{dropped}",
        expert_tokens_line(plan, layers, option="--tokens "),
    )
    console.print_next(console.command("k2convert", "run", options.source, "DEST", "--statistics", path))
