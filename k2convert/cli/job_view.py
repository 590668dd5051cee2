"""Jobs as tables and plain data: their plan, what they need, how far they are, what they made. And the question before
publishing.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import typer

from k2convert.checkpoint.files import is_there
from k2convert.checkpoint.index import missing_sidecars
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.names import EVALUATION_NAME
from k2convert.cli import console
from k2convert.cli.console import format_duration, print_line, print_table
from k2convert.cli.interrupts import say_when_interrupted
from k2convert.cli.needs import (
    TIME_NOTE,
    Needs,
    calibration_document,
    calibration_needs,
    layers_left,
    memory_line,
    show_outputs,
    text_lines,
)
from k2convert.cli.options import typed_command
from k2convert.cli.progress import Display, waiting
from k2convert.errors import HubError, UnservableError, counted, exact_zero, format_bytes, format_decibels
from k2convert.hub.branch import branch_name
from k2convert.hub.client import Hub
from k2convert.hub.request_errors import redacted
from k2convert.job.locations import Destination
from k2convert.job.prepare import Job, check_job_memory, check_room, memory_bytes
from k2convert.job.resources import Item, own_process
from k2convert.job.run import Outcome, Part, execute
from k2convert.machine import available_memory
from k2convert.models import find_family
from k2convert.models.config import FP8, find_quantization_config, kv_cache_form
from k2convert.plan.plan import action_counts
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.records.command import JobCommand
from k2convert.records.events import Extent
from k2convert.records.journal import Journal
from k2convert.records.ledger import TOTAL, below_budget, check_budget, metrics_document, shown_totals, source_warnings

if TYPE_CHECKING:
    from k2convert.calibration.conversion import CalibrationPlan
    from k2convert.hub.preflight import Target
    from k2convert.job.ray import Cluster

_DISK_RATE: Final = 1e9  # bytes a second
_NOT_BEGUN: Final = "no conversion has begun. The same command starts it"


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """A shard of the result: its tensors, the bytes that are read and written for it."""

    name: str
    tensors: int
    bytes_in: int
    bytes_out: int
    finished: bool


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Plan of a job, and its needs. The fields from `work_folder` to `notices` are of jobs with the Hub."""

    source: str
    destination: str
    family: str
    recipe: dict[str, Any]
    fingerprint: dict[str, Any]
    workers: int
    actions: dict[str, dict[str, int]]
    tensor_bytes_in: int
    tensor_bytes_out: int
    num_tensors_out: int
    disk_needed: int
    disk_free: int
    exclude_modules: list[str]
    shards: list[PlannedShard]
    bytes_to_read: int
    bytes_to_write: int
    minutes_at_1_gb_s: int
    work_folder: str | None
    source_commit: str | None
    max_disk: int | None
    branch: str | None
    private: bool | None
    notices: list[str]
    memory_needed: int | None = None  # on this machine; None for a cluster
    memory_available: int | None = None
    calibration: dict[str, object] | None = None
    cluster: dict[str, int] | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job: the shards of the result and their error, by role. `repo` and `commit` are where it went."""

    destination: str
    shards: int
    resumed_shards: int
    seconds: float
    tensor_bytes_out: int
    totals: dict[str, dict[str, Any]]
    warnings: list[str]
    below_budget: dict[str, Any] | None
    repo: str | None
    commit: str | None
    contract: dict[str, Any] | None


def show_notices(job: Job, source: str) -> None:
    """Print what is to be known of a job before it is shown or done."""
    for notice in () if job.target is None else job.target.notices:
        console.print_note(f"note: {notice}")
    _, quantization = find_quantization_config(job.source.checkpoint.config) or ("", {})
    recipe = job.plan.recipe
    cache = kv_cache_form(quantization)
    if cache and recipe.kv_cache is None:
        is_kept = recipe.target == "nvfp4" and LAYOUTS[recipe.layout].vllm_reads_kv_cache
        way = "no option keeps it"
        if cache == FP8:
            keeps = is_kept and find_family(job.plan.family).has_kv_scheme
            way = "--set kv_cache=fp8 keeps it" if keeps else "serve with --kv-cache-dtype fp8"
        console.print_note(f"note: {source} declares a KV cache in {cache}, and the result will not: {way}")
    for name, problem in missing_sidecars(job.source.checkpoint.folder):
        console.print_note(f"warning: {source}: {name}: {problem}")


def show_plan_of(job: Job, source: str, cluster: "AbstractContextManager[Cluster] | None") -> None:
    """Show what a job would do, and what it needs; raises PlanError, DiskFullError if this machine has too little."""
    plan = _plan(job, source)
    views: list[str | Callable[[], None]] = []
    needs: list[Needs] = []
    if cluster is not None:
        with waiting("looking at the cluster"), cluster as connected:
            capacity = connected.capacity
        plan = replace(plan, cluster=capacity)
        left = f"{capacity['shards_at_a_time']:,} shards at a time; the time is not estimated"
        views.append(f"cluster: {counted(capacity['nodes'], 'node')}, {counted(capacity['cpus'], 'CPU')}; {left}")
    elif job.gptq is not None:
        needs.append(calibration_needs(job.gptq, job))
        plan = replace(plan, calibration=calibration_document(job, job.gptq) | needs[0].document())
        smoothing = "on" if job.plan.recipe.smoothing else "off"
        views += [*text_lines(job.gptq), f"smoothing: {smoothing} (by default on for w4a4, off for w4a16)"]
        views += [*needs[0].lines(), f"{TIME_NOTE}. Times of some machines: k2convert guide calibrate"]
    else:
        views += [memory_line(memory_bytes(job)), _left_line(plan)]
    if job.uses_hub and cluster is None:
        views.append(partial(_show_network, job, plan))
    if cluster is None:
        memory = max([memory_bytes(job), *(need.memory for need in needs)])
        plan = replace(plan, memory_needed=memory, memory_available=available_memory())
    console.show(plan, partial(_show_plan, job, plan), *views)
    check_room(job)
    if cluster is None:
        check_job_memory(job)
    for need in needs:
        need.check(source)
    console.print_next(console.own_command())


def convert_part(job: Job, part: Part, own: JobCommand) -> None:
    """Convert a part of a job, by its `own` command, and name the command that ends the job."""
    whole = typed_command(source=own.source, without="--part")
    num_shards = len(part.items(job.items))
    display = Display(Extent({"convert": (job.bytes_in, 0)}, num_shards))
    own_process()
    of_part = f"this part's {counted(num_shards, 'shard')}"
    say_when_interrupted(
        lambda: f"{_num_recorded(job, part.items(job.items))} of {of_part} are converted. The same command resumes",
        own.line(here=own.folder),
    )
    with display as events:
        execute(replace(job, command=whole), part=part, events=events)
    console.show(
        {"part": str(part), "shards": num_shards, "shards_of_job": len(job.plan.jobs)},
        f"part {part} is converted: {counted(num_shards, 'shard')} of the job's {len(job.plan.jobs)}",
        partial(console.print_note, "when all parts are done, the command without --part writes index and config:"),
    )
    console.print_next(whole.line(here=whole.folder))


def show_published_before(job: Job, target: "Target") -> None:
    """Delete what a run left on the Hub that was killed after its last commit, and name the commit."""
    from k2convert.job.publish import clean_up_published

    clean_up_published(job, target)
    console.print_note(f"{target.repo}: {target.revision} already holds this result")
    console.show({"repo": target.repo, "commit": target.head, "published_before": True})


def convert(
    job: Job, command: JobCommand, cluster: "AbstractContextManager[Cluster] | None", *, verify: bool, yes: bool
) -> None:
    """Do a job and show what it measured; ask before publishing unless `yes`. Raises any K2ConvertError."""
    if job.target is not None:
        confirm(job.target, total_bytes=job.plan.data_bytes, yes=yes)
    extent = Extent({"convert": (job.bytes_in, job.finished_bytes_in)}, len(job.plan.jobs), len(job.finished))
    display = Display(extent)
    if job.gptq is not None:
        _start_pass(job, job.gptq, command.source)
    own_process()
    start = time.monotonic()
    say_when_interrupted(partial(_how_far, job, display), command.line(here=command.folder))
    try:
        with nullcontext() if cluster is None else cluster as connected, display as events:
            if connected is not None and not connected.capacity["shards_at_a_time"]:
                console.print_event("no node has CPUs: start one with `ray start`, or wait until the cluster grows")
            outcome = execute(replace(job, command=command), events=events, cluster=connected, verify=verify)
    except UnservableError as error:
        from k2convert.cli.validation_view import show_validation

        show_validation(error.validation)
        raise
    job = replace(job, finished=outcome.finished)
    _show_outcome(job, outcome, command.source, seconds=time.monotonic() - start)


def _num_recorded(job: Job, items: Sequence[Item]) -> int:
    """Count the shards that have a record. The display may be one behind."""
    return len({item.name for item in items}.intersection(Journal(job.destination.folder).log.steps()))


def _how_far(job: Job, display: Display) -> str:
    if not Journal(job.destination.folder).is_begun():
        return _NOT_BEGUN
    state = f"{_num_recorded(job, job.items)} of {len(job.plan.jobs)} shards are converted"
    if job.gptq is not None and "calibrate" in display.meters:
        layer_pass = job.gptq.layer_pass
        state += f", {layer_pass.work.num_finished()} of {layer_pass.num_layers} layers are calibrated"
    return f"{state}. The same command resumes"


def _start_pass(job: Job, plan: "CalibrationPlan", source: str) -> None:
    check_room(job)
    if layers_left(job, plan):
        calibration_needs(plan, job).check(source)
        for line in text_lines(plan):
            console.print_event(line)


def _show_outcome(job: Job, outcome: Outcome, source: str, *, seconds: float) -> None:
    recipe = job.plan.recipe
    totals = outcome.totals
    missed = below_budget(outcome.records.values(), recipe)
    contract = None if outcome.validation is None else outcome.validation.contract
    result = JobResult(
        destination=str(job.destination if job.uses_hub else job.destination.folder),
        shards=len(job.plan.jobs),
        resumed_shards=len(job.finished),
        seconds=round(seconds, 3),
        tensor_bytes_out=job.plan.data_bytes,
        totals={role: metrics_document(metrics) for role, metrics in totals.items()},
        warnings=source_warnings(outcome.records.values()),
        below_budget={"tensor_sqnr_db": recipe.budget.tensor_sqnr_db, "tensors": missed} if missed else None,
        repo=job.destination.repo,
        commit=outcome.commit,
        contract=None
        if contract is None
        else {"rules": len(contract.rules), "unchecked": contract.unchecked, "failed": contract.failed},
    )
    views: list[str | Callable[[], None]] = []
    if outcome.calibrated is not None:
        views.append(partial(show_outputs, outcome.calibrated, job.gptq))
    views.append(partial(_show_run, job, totals, seconds))
    views += [partial(console.print_note, f"warning: {warning}") for warning in result.warnings]
    if contract is not None:
        views.append(contract.summary)
    is_evaluated = is_there(job.destination.folder / EVALUATION_NAME)
    if recipe.target == "nvfp4" and not is_evaluated:
        views.append(partial(console.print_note, f"`{_evaluation_command(job, source)}` measures the whole model"))
    if outcome.commit is not None:
        views.append(partial(show_commit, job.hub, job.destination, outcome.commit))
    console.show(result, *views)
    if outcome.commit is None and recipe.target == "nvfp4" and not missed:
        given = () if job.uses_hub else ("--source", source)
        console.print_next(console.command("k2convert", "validate", job.destination.folder, *given))
    check_budget(job.destination.folder, recipe, missed)


def _evaluation_command(job: Job, source: str) -> str:
    """Return the command that compares a result with its source on a text. One on the Hub has no folder to write to."""
    out = ("--out", "evaluation.json") if job.destination.repo is not None else ()
    return console.command("k2convert", "evaluate", source, job.destination, "--text", "FILE", *out)


def _plan(job: Job, source: str) -> JobPlan:
    plan = job.plan
    limits = job.limits
    target = job.target
    left = [shard for shard in plan.jobs if shard.name not in job.finished]
    bytes_in = sum(shard.bytes_in for shard in left)
    bytes_out = sum(shard.data_bytes for shard in left)
    return JobPlan(
        source=source,
        destination=str(job.destination),
        family=plan.family,
        recipe=plan.recipe.document(),
        fingerprint=job.description.fingerprint,
        workers=limits.workers,
        actions=action_counts(plan),
        tensor_bytes_in=job.source.checkpoint.tensor_bytes,
        tensor_bytes_out=plan.data_bytes,
        num_tensors_out=sum(shard.num_outputs for shard in plan.jobs),
        disk_needed=limits.disk_needed,
        disk_free=limits.disk_free,
        exclude_modules=list(plan.excludes),
        shards=[
            PlannedShard(shard.name, shard.num_outputs, shard.bytes_in, shard.data_bytes, shard.name in job.finished)
            for shard in plan.jobs
        ],
        bytes_to_read=bytes_in,
        bytes_to_write=bytes_out,
        minutes_at_1_gb_s=max(round((bytes_in + bytes_out) / _DISK_RATE / 60), 1),
        work_folder=str(job.destination.folder) if job.uses_hub else None,
        source_commit=job.source.revision if job.uses_hub else None,
        max_disk=limits.disk_allowed if job.uses_hub else None,
        branch=None if target is None else branch_name(job.digest),
        private=None if target is None else target.private,
        notices=[] if target is None else list(target.notices),
    )


def _show_plan(job: Job, plan: JobPlan) -> None:
    recipe = job.plan.recipe
    fp8 = f", fp8 {', '.join(recipe.fp8)}" if recipe.fp8 else ""
    print_line(
        f"{plan.source} ({plan.family}) -> {plan.destination}: {recipe.name}, {recipe.target}, "
        f"rule {recipe.rule}, layout {recipe.layout}, {recipe.activations}, roles {', '.join(recipe.roles)}{fp8}"
    )
    num_done = len([shard for shard in plan.shards if shard.finished])
    print_line(f"{counted(len(plan.shards), 'shard')}, {num_done} done")
    rows = [
        (
            {"scale": "copy, times powers of two", "fp8": "convert to FP8"}.get(name, name),
            f"{action['source_tensors']:,}",
            format_bytes(action["bytes_in"]),
            f"{action['tensors']:,}",
            format_bytes(action["bytes_out"]),
        )
        for name, action in plan.actions.items()
    ]
    print_table("tensors", ("action", "source tensors", "in", "result tensors", "out"), rows)
    if job.source.remote is not None:
        print_line(f"source: {job.source.remote.repo} at commit {job.source.remote.commit}")
    if job.target is not None:
        kind = "private" if plan.private else "public"
        print_line(f"publishes to {job.target.name} ({kind}) through its branch {plan.branch}")
    limit = ""
    if plan.max_disk is not None:
        limit = f" at once, may use {format_bytes(plan.max_disk)}"
    elif num_done:
        limit = (
            f", of which {format_bytes(sum(shard.bytes_out for shard in plan.shards if shard.finished))} are written"
        )
    print_line(f"disk: needs {format_bytes(plan.disk_needed)}{limit}, free {format_bytes(plan.disk_free)}")


def _left_line(plan: JobPlan) -> str:
    """Return what a job still has to read and to write."""
    if not plan.bytes_to_write:
        return "every shard is done"
    amounts = f"reads {format_bytes(plan.bytes_to_read)}, writes {format_bytes(plan.bytes_to_write)}"
    time = counted(plan.minutes_at_1_gb_s, "minute")
    if plan.bytes_to_read + plan.bytes_to_write < 60 * _DISK_RATE:
        time = "under a minute"
    return f"{amounts}: {time} at 1 GB/s, reads and writes together"


def _show_network(job: Job, plan: JobPlan) -> None:
    """Print what a job with the Hub still has to transfer."""
    if not plan.bytes_to_write:
        return
    amounts = {"downloads": sum(job.limits.source_bytes.values()), "uploads": plan.bytes_to_write}
    if job.target is None:
        del amounts["uploads"]
    print_line(f"network: {' and '.join(f'{verb} {format_bytes(count)}' for verb, count in amounts.items() if count)}")


def _show_run(job: Job, totals: Mapping[str, WeightMetrics], seconds: float) -> None:
    rows = [
        (
            role,
            f"{m.num_weights:,}",
            format_decibels(m.sqnr_db),
            exact_zero(m.relative_mse),
            f"{m.achieved_to_max:.3f}" if math.isfinite(m.achieved_to_max) else "",
        )
        for role, m in shown_totals(totals).items()
    ]
    if rows:
        columns = ("role", "weights", "SQNR", "relative MSE", "relative to max")
        print_table("weight error against the source", columns, rows)
    if TOTAL in totals and (words := totals[TOTAL].cast_words) is not None:
        print_line(f"cast: {words}")
    fresh = sum(s.bytes_in for s in job.plan.jobs if s.name not in job.finished)
    rate = ""
    if fresh and seconds:
        rate = f", {format_bytes(fresh / seconds)}/s read"
    print_line(f"{job.destination.folder}: {counted(len(job.plan.jobs), 'shard')}, {format_duration(seconds)}{rate}")


def show_commit(hub: Hub, destination: Destination, commit: str) -> None:
    from k2convert.cli.validation_view import print_serve

    revision = destination.version
    branch = "" if revision is None else f", branch {revision},"
    print_line(f"{redacted(hub.endpoint)}/{destination.repo}{branch} at commit {commit}")
    print_serve(str(destination.repo), folder=destination.folder, revision=revision)


def confirm(target: "Target", *, total_bytes: int, yes: bool) -> None:
    """Ask before publishing, unless `yes`; raises HubError without a terminal or without consent."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise HubError(f"{target.repo}: publishing without a terminal needs --yes.")
    kind = "private" if target.private else "PUBLIC"
    if not typer.confirm(f"Publish {format_bytes(total_bytes)} to the {kind} repository {target.name}?"):
        raise HubError(f"{target.repo}: not published.")
