"""`status`: how far a conversion or a calibration is, and what a path holds that is neither."""

from pathlib import Path
from typing import Any

from k2convert.calibrate.statistics import open_statistics
from k2convert.calibrate.work import PassJob, WorkFolder
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.names import LEDGER_NAME, WORK_SUFFIX
from k2convert.cli import console
from k2convert.cli.feedback import walk_state
from k2convert.cli.published import published_document, show_published, show_repository
from k2convert.cli.views import show_progress, show_status, status_document
from k2convert.errors import CheckpointError, DestinationError, K2ConvertError
from k2convert.hub.client import SCHEME
from k2convert.plan.inspection import inspect_checkpoint
from k2convert.records.command import JobCommand, read_command
from k2convert.records.journal import JobState, Journal
from k2convert.records.lock import read_lock


def status(place: str, *, as_json: bool) -> None:
    """Say how far the work in a folder is, or what a repository or a statistics file holds."""
    path = Path(place)
    if place.startswith(SCHEME):
        show_repository(place, as_json=as_json)
    elif path.is_file():
        _show_statistics(path, as_json=as_json)
    elif (found := _find_pass(path)) is not None:
        _show_pass(*found, as_json=as_json)
    else:
        _show_job(path, as_json=as_json)


def _show_statistics(path: Path, *, as_json: bool) -> None:
    found = open_statistics(path)
    if as_json:
        console.print_json({"complete": True, "layers": len(found.layers), "tokens": found.tokens})
        return
    size, texts = console.format_bytes(path.stat().st_size), ", ".join(name for name, _ in found.texts)
    console.print_line(
        f"{path}: complete statistics: {len(found.layers)} layers, {found.tokens:,} tokens of {texts}, {size}"
    )
    use = console.command("k2convert", "run", "SOURCE", "DEST", "--statistics", path)
    console.print_line(f"to use it: {use}")
    console.print_next(console.command("k2convert", "inspect", path))


def _find_pass(path: Path) -> tuple[WorkFolder, PassJob] | None:
    """Return the unfinished pass of a statistics file, which may be named with or without the suffix of its folder."""
    for statistics in (path, path.with_name(path.name.removesuffix(WORK_SUFFIX)) if path.name else path):
        work = WorkFolder(statistics)
        if (begun := work.job()) is not None:
            return work, begun
    return None


def _show_pass(work: WorkFolder, begun: PassJob, *, as_json: bool) -> None:
    is_running, progress, age = read_lock(work.folder)
    command, here = read_command(work.folder), str(Path.cwd())
    finished, layers, tokens = work.num_finished(), begun.identity.get("layers"), begun.identity.get("tokens")
    if type(layers) is not int or type(tokens) is not int:
        raise CheckpointError(f"{work.folder}: is not of this version. Delete it to start over.")
    if as_json:
        document: dict[str, Any] = {"complete": False, "running": is_running, "layers": layers, "tokens": tokens}
        document |= {"finished_layers": finished, "progress": progress}
        console.print_json(document | {"resume": None if command is None else command.line(here=here)})
        return
    word = "running" if is_running else "not finished"
    amount = f"{finished} of {layers} layers, {tokens:,} tokens at most"
    console.print_line(f"{work.statistics}: calibration {word}: {amount}")
    if progress is not None:
        show_progress(progress, age)
    if is_running:
        return
    if command is not None:
        console.print_next(command.line(here=here))
    else:
        console.print_note("not running: the same `k2convert calibrate` command resumes it")


def _show_job(folder: Path, *, as_json: bool) -> None:
    journal = Journal(folder)
    if journal.job() is None and (other := _say_other(folder)):
        raise DestinationError(other)
    state, walk = journal.state(), walk_state(folder)
    if as_json:
        document = status_document(state) | ({} if walk is None else {"calibration": walk})
        console.print_json(document | published_document(folder))
        return
    show_status(folder, state)
    if walk is not None and state.progress is None:
        console.print_line(f"calibrate: {walk['finished_layers']} of {walk['layers']} layers are done")
    if not show_published(folder):
        _show_next(folder, state)


def _say_other(folder: Path) -> str:
    """Return what a folder without a job is, and the command for it; "" if nothing is known of it."""
    if (folder / LEDGER_NAME).is_file():
        command = console.command("k2convert", "validate", folder)
        return f"{folder}: is a finished result without the records of its job. `{command}` checks it."
    try:
        found = inspect_checkpoint(open_checkpoint(folder), shown_as=str(folder))
    except (K2ConvertError, OSError):
        return ""
    command = console.command("k2convert", "run", folder, "DEST")
    return f"{folder}: is an INT4 source, not a result. `{command}` converts it." if found.int4_projections else ""


def _show_next(folder: Path, state: JobState) -> None:
    command, here = state.command, str(Path.cwd())
    if state.is_complete:
        if state.job.recipe["target"] == "nvfp4":
            console.print_next(console.command("k2convert", "validate", folder, *_made_from(command, here=here)))
    elif not state.is_running:
        if command is not None:
            console.print_next(command.line(here=here))
        else:
            console.print_note("not running: the same `k2convert run` command resumes it")


def _made_from(command: JobCommand | None, *, here: str) -> tuple[str, ...]:
    """Return the options of `validate` that name the source and the statistics of a job."""
    if command is None or len(command.words) < 4:
        return ()
    statistics = command.value("--statistics")
    given = ("--source", command.place(command.words[2], here=here))
    return given if statistics is None else (*given, "--statistics", command.place(statistics, here=here))
