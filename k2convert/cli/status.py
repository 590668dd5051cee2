"""`status`: how far a conversion, a calibration or an evaluation is, and what a path holds that is none of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from k2convert.calibration.layer_files import conversion_work
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.names import EVALUATION_NAME, INDEX_NAME, LEDGER_NAME, SHARD_SUFFIX, WORK_FOLDER, WORK_SUFFIX
from k2convert.cli import console
from k2convert.cli.progress import format_layer_rate
from k2convert.cli.verbs import StatusOptions
from k2convert.errors import CheckpointError, DestinationError, HubError, K2ConvertError, counted, format_bytes, remedy
from k2convert.forward.work import WorkFolder
from k2convert.hub.client import SCHEME, Hub, RepoRef, parse_repo
from k2convert.hub.source import RemoteRepo, read_file, resolve_source
from k2convert.job.evaluation import evaluation_works
from k2convert.plan.inspection import inspect_checkpoint
from k2convert.records.command import JobCommand, read_command
from k2convert.records.evaluation import find_evaluation
from k2convert.records.fingerprint import EARLIER_WORK, IDENTITY_VERSION
from k2convert.records.journal import JobState, Journal, find_published, has_left
from k2convert.records.ledger import TOTAL, Ledger, parse_ledger
from k2convert.records.lock import read_lock

STALE_SECONDS: Final = 30.0  # a running process reports every two seconds


def status(options: StatusOptions) -> None:
    """Show how far the work in a folder is, or the contents of a repository or a file."""
    place = options.destination
    path = Path(place)
    if place.startswith(SCHEME):
        show_repository(place)
    elif path.is_file():
        _show_evaluation(path)
    elif (found := _find_evaluation(path)) is not None:
        console.show(found.document(), partial(_show_evaluation, found))
    else:
        _show_job(path)


def _show_evaluation(path: Path) -> None:
    found = find_evaluation(path)
    assert found is not None  # it is a file
    texts = ", ".join(name for name, _ in found.text.texts)
    contents = f"{counted(len(found.rows), 'model')} on {found.text.tokens:,} tokens of {texts}"
    document = {"complete": True, "models": len(found.rows), "tokens": found.text.tokens}
    console.show(document, f"{path}: complete evaluation: {contents}")


@dataclass(frozen=True, slots=True)
class _BegunEvaluation:
    """An evaluation that is not finished, and the file that it is for."""

    place: Path
    work: WorkFolder
    layers: int
    tokens: int
    is_resumable: bool

    @property
    def finished(self) -> int:
        """Return how many layers are done; the head of an evaluation is none."""
        return min(self.work.num_finished(), self.layers)

    @property
    def command(self) -> JobCommand | None:
        return read_command(self.work.folder)

    def document(self) -> dict[str, Any]:
        is_running, progress, _ = read_lock(self.work.folder)
        command = self.command
        return {
            "complete": False,
            "running": is_running,
            "layers": self.layers,
            "tokens": self.tokens,
            "finished_layers": self.finished,
            "progress": progress,
            "resume": None if command is None or not self.is_resumable else command.line(here=str(Path.cwd())),
        }


def _find_evaluation(path: Path) -> _BegunEvaluation | None:
    """Return the unfinished work on an evaluation's file, named with or without its folder's suffix."""
    for place in (path, path.with_name(path.name.removesuffix(WORK_SUFFIX)) if path.name else path):
        if (found := _opened_evaluation(place, evaluation_works(place)[0])) is not None:
            return found
    return None


def _opened_evaluation(place: Path, work: WorkFolder) -> _BegunEvaluation | None:
    begun = work.job()
    if begun is None:
        return None
    layers = begun.identity.get("layers")
    tokens = begun.identity.get("tokens")
    if type(layers) is not int or type(tokens) is not int:
        raise CheckpointError(f"{work.folder}: is not of this version. Delete it to start over.")
    return _BegunEvaluation(place, work, layers, tokens, begun.version == IDENTITY_VERSION)


def _show_evaluation(layer_pass: _BegunEvaluation) -> None:
    is_running, progress, age = read_lock(layer_pass.work.folder)
    word = "running" if is_running else "not finished"
    amount = f"{layer_pass.finished} of {layer_pass.layers} layers, {layer_pass.tokens:,} tokens at most"
    console.print_line(f"{layer_pass.place}: evaluation {word}: {amount}")
    if progress is not None:
        show_progress(progress, age)
    if not is_running:
        _show_resume(layer_pass.command, "evaluate", is_resumable=layer_pass.is_resumable)


def _show_resume(command: JobCommand | None, verb: str, *, is_resumable: bool) -> None:
    if not is_resumable:
        console.print_note(f"not running: {EARLIER_WORK}")
    elif command is not None:
        console.print_next(command.line(here=str(Path.cwd())))
    else:
        console.print_note(f"not running: the same `k2convert {verb}` command resumes it")


def _show_job(folder: Path) -> None:
    journal = Journal(folder)
    evaluation = _opened_evaluation(folder, evaluation_works(folder)[1])
    if journal.job() is None:
        if evaluation is not None:  # of a checkpoint that `run` did not write
            console.show(evaluation.document(), partial(_show_evaluation, evaluation))
            return
        if other := _say_other(folder):
            raise DestinationError(other)
    state = journal.state()
    document = status_document(state)
    work = conversion_work(folder)
    layer_pass = None
    if (begun := work.job()) is not None:
        layer_pass = {"layers": begun.identity.get("layers"), "finished_layers": work.num_finished()}
        document["calibration"] = layer_pass
    if evaluation is not None:
        document["evaluation"] = evaluation.document()
    if _lacks_evaluation(folder, state) and state.command is not None:
        document["resume"] = state.command.line(here=str(Path.cwd()))
    found = find_published(folder)
    document["published"] = None if found is None else {"repo": found.repo, "commit": found.commit}
    console.show(document, partial(_show_state, folder, state, layer_pass, evaluation))


def _show_state(
    folder: Path, state: JobState, layer_pass: dict[str, Any] | None, evaluation: _BegunEvaluation | None
) -> None:
    is_evaluating = evaluation is not None and read_lock(evaluation.work.folder)[0]
    show_status(folder, replace(state, progress=None) if is_evaluating else state)
    if layer_pass is not None and state.progress is None:
        console.print_line(f"calibrate: {layer_pass['finished_layers']} of {layer_pass['layers']} layers are done")
    if evaluation is not None and (is_evaluating or evaluation.command is not None):
        _show_evaluation(evaluation)
        return
    if evaluation is not None:
        console.print_line(f"evaluate: {evaluation.finished} of {evaluation.layers} layers are done")
    if not show_published(folder):
        _show_next(folder, state)


def _lacks_evaluation(folder: Path, state: JobState) -> bool:
    command = state.command
    is_wanted = command is not None and "--evaluate" in command.words
    return is_wanted and state.is_resumable and not has_left(folder) and not (folder / EVALUATION_NAME).is_file()


def _say_other(folder: Path) -> str:
    """Return what a folder without a job is, and the command for it; "" if nothing is known of it."""
    if (folder / LEDGER_NAME).is_file():
        command = console.command("k2convert", "validate", folder)
        return f"{folder}: is a finished result without the records of its job. `{command}` checks it."
    if any(folder.glob(f"*{SHARD_SUFFIX}")) and not (folder / INDEX_NAME).exists():
        return (
            f"{folder}: has shards, but neither {INDEX_NAME} nor {WORK_FOLDER}, which lists finished shards. "
            f"If it is a copy: `cp -r FOLDER/*` leaves {WORK_FOLDER} out, and `cp -a FOLDER/. {folder}` does not."
        )
    try:
        found = inspect_checkpoint(open_checkpoint(folder), shown_as=str(folder))
    except (K2ConvertError, OSError):
        return ""
    command = console.command("k2convert", "run", folder, "DEST")
    forms = {"INT4": found.int4_projections, "MXFP4": found.mxfp4_projections}
    form = next((form for form, count in forms.items() if count), None)
    if form:
        return f"{folder}: is an {form} source, not a result. `{command}` converts it."
    return ""


def _show_next(folder: Path, state: JobState) -> None:
    if not state.is_complete or _lacks_evaluation(folder, state):
        if not state.is_running:
            _show_resume(state.command, "run", is_resumable=state.is_resumable)
    elif state.job.recipe.target == "nvfp4":
        command = state.command
        here = str(Path.cwd())
        given = list[str]()
        if command is not None and command.source:
            given += ["--source", command.place(command.source, here=here)]
        console.print_next(console.command("k2convert", "validate", folder, *given))


def status_document(state: JobState) -> dict[str, Any]:
    resume = None
    if state.command is not None and state.is_resumable and not state.is_complete:
        resume = state.command.line(here=str(Path.cwd()))
    return {
        "complete": state.is_complete,
        "running": state.is_running,
        "shards": len(state.job.shards),
        "finished_shards": len(state.finished),
        "bytes": sum(state.job.shards.values()),
        "finished_bytes": sum(state.job.shards[name] for name in state.finished if name in state.job.shards),
        "pending": [name for name in state.job.shards if name not in state.finished],
        "progress": state.progress,
        "progress_age": round(state.progress_age) if state.progress is not None else None,
        "resume": resume,
        "recipe": state.job.recipe.document(),
        "fingerprint": state.job.fingerprint,
    }


def show_status(destination: Path, state: JobState) -> None:
    document = status_document(state)
    word = "not finished"
    if state.is_complete:
        word = "complete"
    elif state.is_running:
        word = "running"
    shards = f"{destination}: {word}: {document['finished_shards']} of {counted(document['shards'], 'shard')}"
    if state.progress is None:
        shards += ", " + " of ".join(format_bytes(document[key]) for key in ("finished_bytes", "bytes"))
    console.print_line(shards)
    if state.progress is not None:
        show_progress(state.progress, state.progress_age)
    recipe = state.job.recipe
    console.print_line(f"recipe {recipe.name}: rule {recipe.rule}, layout {recipe.layout}")


def show_progress(progress: Mapping[str, Any], age: float) -> None:
    for name, phase in progress["phases"].items():
        done = phase["done"]
        total = phase["total"]
        rate = phase["rate"]
        if unit := phase.get("unit"):
            speed = format_layer_rate(rate or 0)
            amount = f"layer {min(done // unit + 1, total // unit)} of {total // unit} on {unit:,} tokens"
        else:
            speed = console.format_rate(rate or 0)
            amount = f"{format_bytes(min(done, total))} of {format_bytes(total)}"
        console.print_line(f"{name}: {amount}{f', {speed}' if rate and done < total else ''}")
    if age > STALE_SECONDS:
        console.print_line(f"the running process has reported nothing for {console.format_seconds(age)}")
    elif progress["seconds_left"]:
        console.print_line(f"ETA {console.format_seconds(progress['seconds_left'])}")


def show_repository(text: str) -> None:
    """Show the result at hf://owner/name[@revision]; raises HubError if it is not a result of k2convert."""
    hub = Hub(notify=console.print_note)
    ref = parse_repo(text)
    assert ref is not None  # with the scheme it is a repository or an error
    repo = resolve_source(hub, ref)
    ledger = _read_ledger(hub, repo, text)
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
        origin = ("--source", str(RepoRef(ledger.source.repo, ledger.source.revision)))
    if TOTAL in ledger.totals:
        lines.append(f"weight error: SQNR {ledger.totals[TOTAL].sqnr_db:.2f} dB")
    console.show(document, *lines)
    console.print_next(console.command("k2convert", "validate", text, *origin))


def _read_ledger(hub: Hub, repo: RemoteRepo, text: str) -> Ledger:
    file = repo.files.get(LEDGER_NAME)
    if file is None:
        raise HubError(
            f"{text}: has no {LEDGER_NAME} at commit {repo.commit[:12]}, so it holds no result of k2convert. Check the "
            "name and the revision. A job that is not finished leaves main as it is: ask its work folder."
        )
    data = read_file(hub, repo.repo, repo.commit, file)
    with remedy("Choose a different revision, or publish the result again."):
        return parse_ledger(data.decode(errors="replace"), where=f"{text}: {LEDGER_NAME}")


def show_published(folder: Path) -> bool:
    """Say where the result of a folder went; return whether the state's next step was said too."""
    found = find_published(folder)
    left = has_left(folder)
    if found is not None:
        console.print_line(f"published as {found}")
        if left:
            console.print_next(console.command("k2convert", "validate", f"hf://{found.repo}"))
    elif left:
        console.print_note("uploaded, but not known to be on main: the same `k2convert run` command finishes the job")
        if (command := read_command(folder)) is not None:
            console.print_next(command.line(here=str(Path.cwd())))
    return left
