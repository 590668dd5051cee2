"""`calibrate`: plan a pass over the layers, say what it takes, and do it."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from k2convert.calibrate.statistics import StatisticsHeader
from k2convert.calibrate.work import WorkFolder
from k2convert.choices import counted
from k2convert.cli import console
from k2convert.cli.forecast import Computer, Forecast, choose_computer, forecast
from k2convert.cli.options import command_words, parse_size
from k2convert.cli.progress import Display, Waiting
from k2convert.cli.texts import check_time, read_texts
from k2convert.cli.verbs import CalibrateOptions
from k2convert.errors import require_extra
from k2convert.hub.client import Hub
from k2convert.job.layer_pass import (
    CalibrationJob,
    check_calibration_room,
    execute_calibration,
    prepare_calibration,
)
from k2convert.job.places import open_source
from k2convert.job.statistics_file import check_statistics_path
from k2convert.records.command import JobCommand

if TYPE_CHECKING:
    from k2convert.calibrate.cost import Time


def calibrate(options: CalibrateOptions) -> None:
    """Plan a pass, then show it (--dry-run) or do it."""
    require_extra("calibrate", purpose="calibrate")
    computer = choose_computer(options.device, dry_run=options.dry_run)
    from k2convert.calibrate.cost import chunk_windows

    statistics = options.statistics
    check_statistics_path(statistics, source=None)
    hub = Hub(notify=console.notifier(quiet=options.quiet))
    begun = WorkFolder(statistics).job()
    pinned: Any = None if begun is None else begun.identity.get("source_revision")
    with (
        Waiting(f"reads the headers of {options.source}", quiet=options.quiet) as waiting,
        open_source(options.source, hub=hub, pinned=pinned) as source,
    ):
        if source.remote is None and options.max_disk is not None:
            raise typer.BadParameter("--max-disk only applies to hf:// sources")
        windows = read_texts(
            source,
            options.text,
            tokens=options.tokens,
            window=options.window,
            seed=options.seed,
        )
        job = prepare_calibration(
            source=source,
            statistics=statistics,
            windows=windows,
            tokens=options.tokens,
            window=options.window,
            seed=options.seed,
            devices=computer.planned,
            workers=computer.threads,
            chunk=chunk_windows(source.checkpoint, window=windows.ids.shape[1], gpu_bytes=computer.gpu_bytes),
            hub=hub,
            max_disk=None if options.max_disk is None else parse_size(options.max_disk),
        )
        waiting.end()
        for note in () if options.quiet else windows.notes:
            console.print_note(f"note: {note}")
        finished = job.finished_header()
        if finished is not None:
            if not options.dry_run:
                job.remove_leftovers()
            console.print_note(f"{statistics}: already complete")
            _show_result(job, finished, options)
            return
        _check_and_do(job, options, computer)


def _check_and_do(job: CalibrationJob, options: CalibrateOptions, computer: Computer) -> None:
    """Say what the rest of a pass needs, refuse it if that is not there, and do it unless this is a dry run."""
    found = _forecast(job, computer)
    needed = found.main_bytes()
    with Waiting("measures one expert", quiet=options.quiet):
        time = found.time()
    if options.dry_run:
        _show_plan(job, options, found, needed, time)
    found.check(options.source, needed=needed)
    if not computer.elsewhere:
        check_calibration_room(job)
        check_time(time, source=options.source, yes=options.yes)
    if not options.dry_run:
        command = JobCommand(command_words("calibrate", options), str(Path.cwd()))
        _do(replace(job, command=command), options, time)
    elif not options.as_json:
        console.print_next(
            console.own_command(without="--dry-run", options=("--device",) if computer.elsewhere else ())
        )


def _forecast(job: CalibrationJob, computer: Computer) -> Forecast:
    return forecast(
        job.source.checkpoint,
        computer,
        windows=(job.header.windows, job.header.window),
        chunk=job.job.chunk,
        layers=job.num_layers - job.num_finished,
        is_walk=False,
    )


def _show_plan(job: CalibrationJob, options: CalibrateOptions, found: Forecast, needed: int, time: "Time") -> None:
    if options.as_json:
        console.print_json(_document(job) | {"disk_needed": job.disk_needed} | found.document(time, needed))
    else:
        console.print_line(_plan_line(job))
        console.print_line(
            f"disk: needs {console.format_bytes(job.disk_needed)} at one time, "
            f"may use {console.format_bytes(job.disk_allowed)}"
        )
        for line in (*found.memory_lines(needed), found.time_line(time)):
            console.print_line(line)


def _plan_line(job: CalibrationJob) -> str:
    names = ", ".join(name for name, _ in job.header.texts)
    return (
        f"{job.num_layers} layers on {job.header.tokens:,} tokens of {names}, in "
        f"{counted(job.header.windows, 'window')} of {job.header.window:,}"
    )


def _document(job: CalibrationJob) -> dict[str, Any]:
    """Return what a calibration is, as plain data."""
    return {
        "statistics": str(job.work.statistics),
        "layers": job.num_layers,
        "finished_layers": job.num_finished,
        "tokens": job.header.tokens,
        "window": job.header.window,
        "windows": job.header.windows,
        "seed": job.header.seed,
        "texts": [{"name": name, "blake3": digest} for name, digest in job.header.texts],
        "devices": list(job.devices),
    }


def _do(job: CalibrationJob, options: CalibrateOptions, time: "Time") -> None:
    if not options.quiet:
        span = console.format_span(time.least, time.most)
        console.print_event(f"{_plan_line(job)}: {span} (an estimate from one expert on this machine)")
    display = Display("calibrate", job.extent(job.num_finished), quiet=options.quiet)
    display.tally.expected_seconds["calibrate"] = time.middle
    try:
        with display as events:
            header = execute_calibration(job, events=events)
    except BaseException as error:
        error.add_note(f"{job.work.num_finished()} of {job.num_layers} layers are done. The same command resumes")
        error.add_note(console.own_command(without="--dry-run"))  # both are shown after an interrupt
        raise
    _show_result(job, header, options)


def _show_result(job: CalibrationJob, header: StatisticsHeader, options: CalibrateOptions) -> None:
    path = job.work.statistics
    if options.as_json:
        document = _document(job) | {"finished_layers": job.num_layers, "dropped_windows": header.dropped}
        console.print_json(document | {"bytes": path.stat().st_size})
        return
    dropped = f", {header.dropped:,} windows dropped" if header.dropped else ""
    size = console.format_bytes(path.stat().st_size)
    console.print_line(f"{path}: {size}, {job.num_layers} layers, {header.tokens:,} tokens{dropped}")
    console.print_next(console.command("k2convert", "run", options.source, "DEST", "--statistics", path))
