"""The view of `status`: how far a conversion or an evaluation is, and what else a path holds."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from k2convert.calibration.layer_files import conversion_work
from k2convert.checkpoint.index import check_level, open_checkpoint
from k2convert.checkpoint.names import (
    CONFIG_NAME,
    EVALUATION_NAME,
    INDEX_NAME,
    LEDGER_NAME,
    PRUNE_NAME,
    SHARD_SUFFIX,
    WORK_FOLDER,
    WORK_SUFFIX,
)
from k2convert.cli import console
from k2convert.cli.progress import format_layer_rate
from k2convert.errors import CheckpointError, DestinationError, HubError, K2ConvertError, counted, format_bytes, remedy
from k2convert.forward.work import WorkFolder
from k2convert.hub.client import SCHEME, Hub, RepoRef
from k2convert.hub.source import resolve_source
from k2convert.job.evaluation import evaluation_works
from k2convert.job.locations import fetch_ledger, named_source, repo_at
from k2convert.plan.inspection import inspect_checkpoint
from k2convert.records.command import JobCommand, read_command
from k2convert.records.evaluation import find_evaluation
from k2convert.records.fingerprint import EARLIER_WORK, IDENTITY_VERSION, JobDescription, earlier_result
from k2convert.records.journal import Journal, find_published, has_left, is_current
from k2convert.records.ledger import TOTAL, find_ledger, totals_by_format
from k2convert.records.work_log import read_lock

STALE_SECONDS: Final = 30.0  # a running process reports every two seconds


@dataclass(frozen=True, slots=True)
class EvaluationStatus:
    """An evaluation that is not finished. `destination` is its file or the checkpoint that it is of."""

    destination: str
    running: bool
    layers: int
    tokens: int
    finished_layers: int  # the head of an evaluation is none
    progress: dict[str, Any] | None  # what the running process wrote last
    progress_age: float  # seconds since then
    resumable: bool  # by this version
    command: str | None  # that began or last resumed it, if it is known
    resume: str | None  # the command, if it is known and this version resumes it
    complete: bool = False


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A conversion, and the evaluation and the publication of its result."""

    destination: str
    complete: bool
    running: bool
    shards: int
    finished_shards: int
    bytes: int
    finished_bytes: int
    pending: list[str]
    progress: dict[str, Any] | None
    progress_age: int | None  # seconds since the running process wrote `progress`
    resumable: bool  # by this version
    resume: str | None  # the command, if it is known and there is anything left to do
    recipe: dict[str, Any]
    fingerprint: dict[str, Any]
    calibration: dict[str, Any] | None  # how many layers of rule gptq are done
    evaluation: EvaluationStatus | None
    published: dict[str, str] | None
    published_is_current: bool | None  # whether what was published is what the folder has now


def show_status_of(address: str) -> None:
    """Show how far the work in a folder is, or the contents of a repository or a file."""
    path = Path(address)
    if address.startswith(SCHEME):
        show_repository(address)
    elif path.is_file():
        _show_finished_evaluation(path)
    elif path.exists() and not path.is_dir():
        raise DestinationError(f"{path}: is neither a folder nor a file of an evaluation.")
    elif (evaluation := _find_evaluation(path)) is not None:
        console.show(evaluation, partial(_show_evaluation, evaluation))
    elif path.suffix == ".json" and not path.exists():
        raise CheckpointError(f"{path}: there is no such evaluation, and none was begun. {_ASK}")
    else:
        _show_job(path)


_ASK: Final = "Pass the DEST of `k2convert run`, or the FILE of `k2convert evaluate --out FILE`."


def _show_finished_evaluation(path: Path) -> None:
    with remedy(f"It is no evaluation. {_ASK}"):
        evaluation = find_evaluation(path)
    assert evaluation is not None  # it is a file
    text = evaluation.text
    contents = f"{counted(len(evaluation.rows), 'model')} on {text.tokens:,} tokens of {', '.join(dict(text.texts))}"
    document = {"complete": True, "models": len(evaluation.rows), "tokens": text.tokens}
    console.show(document, f"{path}: complete evaluation: {contents}")


def _find_evaluation(path: Path) -> EvaluationStatus | None:
    """Return the unfinished evaluation for a file, which is named with or without the suffix of its work folder."""
    for file in (path, path.with_name(path.name.removesuffix(WORK_SUFFIX)) if path.name else path):
        if (status := _evaluation_status(file, evaluation_works(file)[0])) is not None:
            return status
    return None


def _evaluation_status(destination: Path, work: WorkFolder) -> EvaluationStatus | None:
    begun = work.job()
    if begun is None:
        return None
    layers = begun.identity.get("layers")
    tokens = begun.identity.get("tokens")
    if type(layers) is not int or type(tokens) is not int:
        raise CheckpointError(f"{work.folder}: is not of this version. Delete it to start over.")
    is_running, progress, age = read_lock(work.folder)
    is_resumable = begun.version == IDENTITY_VERSION
    command = _line(read_command(work.folder))
    return EvaluationStatus(
        destination=str(destination),
        running=is_running,
        layers=layers,
        tokens=tokens,
        finished_layers=min(work.num_finished(), layers),
        progress=progress,
        progress_age=age,
        resumable=is_resumable,
        command=command,
        resume=command if is_resumable else None,
    )


def _line(command: JobCommand | None) -> str | None:
    return None if command is None else command.line(here=str(Path.cwd()))


def _word(*, running: bool, complete: bool = False) -> str:
    if running:
        return "running"
    return "complete" if complete else "not finished"


def _show_evaluation(status: EvaluationStatus) -> None:
    word = _word(running=status.running)
    amount = f"{status.finished_layers} of {status.layers} layers, {status.tokens:,} tokens at most"
    console.print_line(f"{status.destination}: evaluation {word}: {amount}")
    if status.progress is not None:
        show_progress(status.progress, status.progress_age)
    if not status.running:
        _show_resume(status.command, "evaluate", is_resumable=status.resumable)


def _show_resume(command: str | None, verb: str, *, is_resumable: bool) -> None:
    if not is_resumable:
        console.print_note(f"not running: {EARLIER_WORK}")
    elif command is not None:
        console.print_next(command)
    else:
        console.print_note(f"not running: the same `k2convert {verb}` command resumes it")


def _show_job(folder: Path) -> None:
    if (folder / WORK_FOLDER / PRUNE_NAME).is_file():
        _show_copy(folder)
        return
    job = Journal(folder).job()
    evaluation = _evaluation_status(folder, evaluation_works(folder)[1])
    if job is None:
        if evaluation is not None:  # of a checkpoint that `run` did not write
            console.show(evaluation, partial(_show_evaluation, evaluation))
            return
        if other := _other_contents(folder):
            raise DestinationError(other)
        check_level(folder)
        begin = console.command("k2convert", "run", "SOURCE", folder)
        raise DestinationError(f"{folder}: no conversion has begun. `{begin}` starts one.")
    if earlier := earlier_result(job.version, folder):
        raise DestinationError(earlier)
    command = read_command(folder)
    status = _job_status(folder, job, command, evaluation)
    console.show(status, partial(_show_state, status))


def _show_copy(folder: Path) -> None:
    """Show how far the copy is that `prune` makes in a folder. config.json is its last file."""
    is_complete = (folder / CONFIG_NAME).is_file()
    is_running, _, _ = read_lock(folder)
    shards = sorted(folder.glob(f"*{SHARD_SUFFIX}"))
    num_bytes = sum(path.stat().st_size for path in shards)
    command = _line(read_command(folder))
    document = {
        "destination": str(folder),
        "complete": is_complete,
        "running": is_running,
        "finished_shards": len(shards),
        "finished_bytes": num_bytes,
        "resume": None if is_complete else command,
    }
    word = _word(running=is_running, complete=is_complete)
    console.show(document, f"{folder}: pruned copy {word}: {counted(len(shards), 'shard')}, {format_bytes(num_bytes)}")
    if is_complete:
        prefix = folder.resolve() if folder.name in ("", "..") else folder
        console.print_next(console.command("k2convert", "run", folder, f"{prefix}-NVFP4"))
    elif not is_running:
        _show_resume(command, "prune", is_resumable=True)


def _job_status(
    folder: Path, job: JobDescription, command: JobCommand | None, evaluation: EvaluationStatus | None
) -> JobStatus:
    finished = Journal(folder).finished_or_sent(job)
    is_assembled = all((folder / name).is_file() for name in (CONFIG_NAME, INDEX_NAME, LEDGER_NAME))
    is_complete = is_assembled and finished.keys() >= job.shards.keys()
    is_running, progress, age = read_lock(folder)
    is_resumable = job.version == IDENTITY_VERSION
    calibration = None
    work = conversion_work(folder)
    if (begun := work.job()) is not None:
        calibration = {"layers": begun.identity.get("layers"), "finished_layers": work.num_finished()}
    published = find_published(folder)
    return JobStatus(
        destination=str(folder),
        complete=is_complete,
        running=is_running,
        shards=len(job.shards),
        finished_shards=len(finished),
        bytes=sum(job.shards.values()),
        finished_bytes=sum(job.shards[name] for name in finished if name in job.shards),
        pending=[name for name in job.shards if name not in finished],
        progress=progress,
        progress_age=None if progress is None else round(age),
        resumable=is_resumable,
        resume=_line(command) if is_resumable and not is_complete else None,
        recipe=job.recipe.document(),
        fingerprint=job.fingerprint,
        calibration=calibration,
        evaluation=evaluation,
        published=None if published is None else {"repo": published.repo, "commit": published.commit},
        published_is_current=None if published is None else is_current(folder, published),
    )


def _show_state(status: JobStatus) -> None:
    folder = Path(status.destination)
    progress = status.progress
    word = _word(running=status.running, complete=status.complete)
    shards = f"{status.destination}: {word}: {status.finished_shards} of {counted(status.shards, 'shard')}"
    if progress is None:
        shards += f", {format_bytes(status.finished_bytes)} of {format_bytes(status.bytes)}"
        if not (status.running or status.complete or status.pending):
            shards += "; index and config.json are missing"
    console.print_line(shards)
    if progress is not None:
        show_progress(progress, status.progress_age or 0)
    recipe = status.recipe
    console.print_line(f"recipe {recipe['name']}: rule {recipe['rule']}, layout {recipe['layout']}")
    if status.calibration is not None and progress is None:
        done = f"{status.calibration['finished_layers']} of {status.calibration['layers']}"
        console.print_line(f"calibrate: {done} layers are done")
    old = folder / WORK_FOLDER / EVALUATION_NAME
    if old.is_file() and not (folder / EVALUATION_NAME).exists():
        console.print_note(f"{old}: measured another config.json, so it is not a part of the result")
    if status.evaluation is not None:
        _show_evaluation(status.evaluation)
    elif not status.running and not _show_published(folder, is_complete=status.complete):
        _show_next(status)


def _other_contents(folder: Path) -> str:
    """Return what a folder without a job holds, and the command for it; "" if nothing is known of it."""
    if (folder / LEDGER_NAME).is_file():
        command = console.command("k2convert", "validate", folder, *_source_words(folder))
        return f"{folder}: is a finished result without the records of its job. `{command}` checks it."
    if any(folder.glob(f"*{SHARD_SUFFIX}")) and not (folder / INDEX_NAME).exists():
        return (
            f"{folder}: has shards, but neither {INDEX_NAME} nor {WORK_FOLDER}, which lists finished shards. "
            f"If it is a copy: `cp -r FOLDER/*` leaves {WORK_FOLDER} out, and `cp -a FOLDER/. {folder}` does not."
        )
    try:
        inspection = inspect_checkpoint(open_checkpoint(folder), shown_as=str(folder))
    except (K2ConvertError, OSError):
        return ""
    command = console.command("k2convert", "run", folder, "DEST")
    forms = {"INT4": inspection.int4_projections, "MXFP4": inspection.mxfp4_projections}
    form = next((form for form, count in forms.items() if count), None)
    if form:
        return f"{folder}: is an {form} source, not a result. `{command}` converts it."
    return ""


def _show_next(status: JobStatus) -> None:
    folder = Path(status.destination)
    if not status.complete:
        _show_resume(status.resume, "run", is_resumable=status.resumable)
    elif status.recipe["target"] == "nvfp4":
        console.print_next(console.command("k2convert", "validate", folder, *_source_words(folder)))


def _source_words(folder: Path) -> tuple[str, ...]:
    """Return the option for the source of a finished result."""
    ledger = None
    with suppress(CheckpointError):
        ledger = find_ledger(folder)
    return named_source(folder, ledger)


def show_progress(progress: Mapping[str, Any], age: float) -> None:
    for name, phase in progress["phases"].items():
        done = phase["done"]
        total = phase["total"]
        rate = phase["rate"]
        if unit := phase.get("unit"):
            speed = format_layer_rate(rate or 0)
            amount = f"layer {min(done // unit + 1, total // unit)} of {total // unit} on {unit:,} tokens"
        else:
            speed = f"{format_bytes(rate or 0)}/s"
            amount = f"{format_bytes(min(done, total))} of {format_bytes(total)}"
        console.print_line(f"{name}: {amount}{f', {speed}' if rate and done < total else ''}")
    if age > STALE_SECONDS:
        console.print_line(f"the running process has reported nothing for {console.format_seconds(age)}")
    elif progress["seconds_left"]:
        console.print_line(f"ETA {console.format_seconds(progress['seconds_left'])}")


def show_repository(text: str) -> None:
    """Show the result at hf://owner/name[@revision]; raises HubError if it is not a result of k2convert."""
    hub = Hub(notify=console.print_note, outages_pass=False)
    ref = repo_at(text)
    assert ref is not None  # with the scheme it is a repository or an error
    repo = resolve_source(hub, ref)
    with remedy("Choose a different revision, or publish the result again."):
        ledger = fetch_ledger(hub, repo.repo, repo.commit, repo.files, where=f"{text}: {LEDGER_NAME}")
    if ledger is None:
        raise HubError(
            f"{text}: has no {LEDGER_NAME} at commit {repo.commit[:12]}, so it holds no result of k2convert. Check the "
            "name and the revision. A job that is not finished leaves main as it is: ask its work folder."
        )
    missing = [n for n, s in ledger.shards.items() if n not in repo.files or repo.files[n].num_bytes != s.num_bytes]
    is_complete = bool(ledger.shards) and not missing
    document = {
        "complete": is_complete,
        "published": {"repo": repo.repo, "commit": repo.commit},
        "private": repo.private,
        "shards": len(ledger.shards),
        "bytes": ledger.num_bytes,
        "missing": missing,
        "source": {"repo": ledger.source.repo, "revision": ledger.source.revision},
        "recipe": ledger.recipe.document(),
        "fingerprint": ledger.fingerprint,
    }
    kind = "private" if repo.private else "public"
    count = len(ledger.shards)
    size = format_bytes(ledger.num_bytes)
    word = "complete" if is_complete else "not complete"
    lines = [f"{text} ({kind}) at commit {repo.commit}: {word}: {counted(count, 'shard')}, {size}"]
    if missing:
        lines.append(f"shards missing or of a wrong size: {len(missing)} of {count}, first {missing[0]}")
    recipe = ledger.recipe
    lines.append(f"recipe {recipe.name}: rule {recipe.rule}, layout {recipe.layout}")
    origin: tuple[str, ...] = ()
    if ledger.source.repo is not None:
        lines.append(f"converted from {ledger.source.repo} at commit {ledger.source.revision}")
        origin = ("--source", str(RepoRef(ledger.source.repo)))
    for name, metrics in totals_by_format(ledger.totals).items():
        form = "" if name == TOTAL else f" of {name}"
        lines.append(f"weight error{form}: SQNR {metrics.sqnr_db:.2f} dB")
    console.show(document, *lines)
    console.print_next(console.command("k2convert", "validate", text, *origin))


def _show_published(folder: Path, *, is_complete: bool) -> bool:
    """Say where the result of a folder went; return whether the state's next step was said too."""
    published = find_published(folder)
    left = has_left(folder)
    if published is not None:
        is_behind = not is_current(folder, published)
        console.print_line(f"published as {published}{', and the folder has changed since' if is_behind else ''}")
        if is_behind and is_complete and not left:
            console.print_next(console.command("k2convert", "publish", folder, "--repo", published.repo))
            return True
        if left:
            address = f"{SCHEME}{published.repo}"
            console.print_next(console.command("k2convert", "validate", address, *_source_words(folder)))
    elif left:
        console.print_note("uploaded, but not known to be on main: the same `k2convert run` command finishes the job")
        if (command := _line(read_command(folder))) is not None:
            console.print_next(command)
    return left
