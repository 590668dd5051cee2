"""The evaluation at the end of a run: the result that was just assembled, against its source.

The shards of a result for the Hub have left the disk by then. They are read back from the work branch, layer by layer,
so `main` gets result and evaluation in one commit. A run that is interrupted here resumes here.
"""

from dataclasses import replace
from pathlib import Path

from k2convert.calibration.plan import WalkText
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.names import EVALUATION_NAME, WORK_FOLDER, model_name
from k2convert.choices import EVALUATION_TOKENS, EVALUATION_WINDOW
from k2convert.errors import CalibrationError
from k2convert.evaluation.checkpoints import EvaluatedCheckpoint, check_computable
from k2convert.evaluation.kept import check_text
from k2convert.hub.client import RepoRef
from k2convert.hub.source import resolve_source
from k2convert.job.evaluation import WORK_NAME, EvaluationOptions, check_windows, opened_decoder, plan_evaluation
from k2convert.job.opening import TextFiles, read_text
from k2convert.job.prepare import Job
from k2convert.job.resources import output_headers
from k2convert.models import check_computed, read_architecture
from k2convert.plan.recipe import TextUse
from k2convert.records.evaluation import Evaluation
from k2convert.records.events import Events
from k2convert.records.fingerprint import Source
from k2convert.records.ledger import Ledger, read_ledger


def with_evaluation(job: Job, files: TextFiles, *, any_text: bool) -> Job:
    """Return a job that evaluates its result at the end. The text is read now: a wrong one is refused before the job.

    Raises CalibrationError, also for a text that the job is calibrated on, unless `any_text`; PlanError for a model
    whose forward pass is not computed; DestinationError if the destination holds an evaluation on a different text.
    """
    check_computed(job.source.checkpoint)
    text = read_text(files, TextUse(tokens=EVALUATION_TOKENS, window=EVALUATION_WINDOW), job.source, job.hub)
    check_windows(text)
    used = [] if job.calibrated is None else list(job.calibrated.texts)
    used += () if job.gptq is None else job.gptq.walk.text.windows.texts
    for name, digest in text.windows.texts:
        if not any_text and digest in {found for _, found in used}:
            raise CalibrationError(
                f"{name}: the result is calibrated on this text, so it would look better than it is. Use a different "
                "text with --evaluate, or repeat the command with --any-text."
            )
    from k2convert.evaluation.streamed import states_bytes

    check_text(job.destination.folder / EVALUATION_NAME, text.windows.described())
    hidden = read_architecture(job.source.checkpoint).hidden_size
    states = states_bytes(text.windows.ids.size, hidden, models=2)
    before = 0  # gone when the evaluation begins
    if job.gptq is not None:
        before = job.gptq.walk.disk_bytes + job.limits.layer_room
    disk_small = job.limits.disk_small + max(states - before, 0)
    return replace(job, evaluation=text, limits=replace(job.limits, disk_small=disk_small))


def evaluate_result(job: Job, text: WalkText, *, branch: str | None, events: Events) -> Evaluation:
    """Evaluate a job's assembled result and write its evaluation.json; `branch` is where the shards are, if not here.

    Raises any K2ConvertError; what was converted stays.
    """
    from k2convert.evaluation.streamed import evaluate

    path = job.destination.folder / EVALUATION_NAME
    reference = _reference(job)
    result = _result(job, branch)
    check_computable(result)
    plan = plan_evaluation(
        (reference, result),
        text,
        EvaluationOptions(kv_cache=job.plan.recipe.kv_cache),
        {path: result.place},
        path.parent / WORK_FOLDER / WORK_NAME,
        hub=job.hub,
        max_disk=None,
    )
    allowed = min(plan.walk.disk_allowed, job.limits.disk_allowed)
    plan = replace(plan, walk=replace(plan.walk, disk_allowed=allowed))
    if (finished := plan.finished()) is not None:
        plan.remove_work()
        return finished
    with opened_decoder(plan) as decode:
        return evaluate(plan, decode=decode, events=events)


def _reference(job: Job) -> EvaluatedCheckpoint:
    """Return the source as it is, with every expert."""
    checkpoint = job.source.whole or job.source.checkpoint
    if (remote := job.source.remote) is None:
        return _local(checkpoint.folder, None)
    place = str(RepoRef(remote.repo, remote.commit))
    return EvaluatedCheckpoint(place, place, Source(checkpoint, remote), None)


def _result(job: Job, branch: str | None) -> EvaluatedCheckpoint:
    folder = job.destination.folder
    ledger = read_ledger(folder)
    if branch is None or job.target is None:
        return _local(folder, ledger)
    headers = output_headers(job.plan)
    checkpoint = open_checkpoint(folder, read=lambda path: headers[path.name])
    remote = resolve_source(job.hub, RepoRef(job.target.repo, branch))
    place = str(job.destination)
    return EvaluatedCheckpoint(place, place, Source(checkpoint, remote), ledger)


def _local(folder: Path, ledger: Ledger | None) -> EvaluatedCheckpoint:
    return EvaluatedCheckpoint(model_name(folder), str(folder), Source(open_checkpoint(folder)), ledger)
