"""`calibrate`: plan a calibration, show what it needs, and do it."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from k2convert.calibration.statistics import open_statistics
from k2convert.choices import parse_size
from k2convert.cli import console
from k2convert.cli.forecast import (
    Forecast,
    check_time,
    expert_tokens_line,
    forecast,
    plan_document,
    show_text,
)
from k2convert.cli.interrupts import say_when_interrupted
from k2convert.cli.options import command_words
from k2convert.cli.progress import Display, Waiting
from k2convert.cli.verbs import CalibrateOptions
from k2convert.errors import format_bytes
from k2convert.hub.client import SCHEME, Hub
from k2convert.job.opening import open_calibration, text_files
from k2convert.machine import peak_bytes
from k2convert.plan.recipe import TextUse
from k2convert.records.command import JobCommand

if TYPE_CHECKING:
    from k2convert.calibration.cost import Time
    from k2convert.calibration.plan import CalibrationPlan
    from k2convert.calibration.statistics import StatisticsHeader


def calibrate(options: CalibrateOptions) -> None:
    """Plan a calibration, then show it (--dry-run) or do it."""
    if options.max_disk is not None and not options.source.startswith(SCHEME):
        raise typer.BadParameter("--max-disk only applies to hf:// sources")
    statistics = options.statistics
    with (
        Waiting(f"reads the headers of {options.source}", quiet=options.quiet) as waiting,
        open_calibration(
            options.source,
            statistics,
            text_files(options.text, device=options.device),
            TextUse(tokens=options.tokens, window=options.window, seed=options.seed, save_statistics=statistics),
            hub=Hub(notify=console.notifier(quiet=options.quiet)),
            max_disk=None if options.max_disk is None else parse_size(options.max_disk),
        ) as plan,
    ):
        waiting.end()
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
    found = forecast(plan, layers=plan.walk.num_layers - plan.walk.num_finished)
    needed = peak_bytes() + found.memory.main  # before anything is measured, which needs memory too
    with Waiting("measures one expert", quiet=options.quiet):
        time = found.time()
    if options.dry_run:
        _show_plan(plan, options, found, needed, time)
    found.check(options.source, needed=needed)
    plan.walk.check_room()
    check_time(time, source=options.source, may_be_long=options.long)
    if not options.dry_run:
        command = JobCommand(command_words("calibrate", options), str(Path.cwd()))
        _do(plan, options, time, command)
    elif not options.as_json:
        console.print_next(console.own_command(without="--dry-run"))


def _show_plan(plan: "CalibrationPlan", options: CalibrateOptions, found: Forecast, needed: int, time: "Time") -> None:
    if options.as_json:
        document = plan_document(plan, finished_layers=plan.walk.num_finished) | {"disk_needed": plan.walk.disk_needed}
        console.print_json(document | found.document(time, needed))
    else:
        show_text(plan)
        needs = format_bytes(plan.walk.disk_needed)
        allowed = format_bytes(plan.walk.disk_allowed)
        console.print_line(f"disk: needs {needs} at once, may use {allowed}")
        for line in (*found.memory_lines(needed), found.time_line(time)):
            console.print_line(line)


def _do(plan: "CalibrationPlan", options: CalibrateOptions, time: "Time", command: JobCommand) -> None:
    if not options.quiet:
        show_text(plan, time)
    extent = plan.walk.extent(plan.walk.num_finished, layer_costs=plan.layer_costs())
    display = Display("calibrate", extent, quiet=options.quiet)
    from k2convert.calibration.accumulate import calibrate as do_calibration

    say_when_interrupted(
        lambda: f"{plan.walk.work.num_finished()} of {plan.walk.num_layers} layers are done. The same command resumes",
        console.own_command(without="--dry-run"),
    )
    with display as events:
        header = do_calibration(plan, command=command, events=events)
    _show_result(plan, header, options)


def _show_result(plan: "CalibrationPlan", header: "StatisticsHeader", options: CalibrateOptions) -> None:
    path = options.statistics
    if options.as_json:
        document = plan_document(plan, finished_layers=plan.walk.num_layers) | {"dropped_windows": header.dropped}
        console.print_json(document | {"bytes": path.stat().st_size})
        return
    dropped = f", {header.dropped:,} windows dropped" if header.dropped else ""
    size = format_bytes(path.stat().st_size)
    console.print_line(f"{path}: {size}, {plan.walk.num_layers} layers, {header.tokens:,} tokens{dropped}")
    statistics = open_statistics(path)
    layers = {number: statistics.layer(number).tokens.tolist() for number in plan.architecture.moe_layers}
    console.print_line(expert_tokens_line(plan, layers, option="--tokens "))
    console.print_next(console.command("k2convert", "run", options.source, "DEST", "--statistics", path))
