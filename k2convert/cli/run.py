"""`run`: plan, show or do a job, whether its ends are folders or repositories of the Hub."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import typer

from k2convert.checkpoint.index import missing_sidecars
from k2convert.cli import console
from k2convert.cli.interrupts import say_when_interrupted
from k2convert.cli.needs import (
    TIME_NOTE,
    calibration_needs,
    final_evaluation,
    final_line,
    job_document,
    layers_left,
    memory_line,
    show_outputs,
    show_start,
    text_lines,
)
from k2convert.cli.options import typed_command
from k2convert.cli.progress import Display, waiting
from k2convert.cli.tally import Tally
from k2convert.cli.verbs import RunOptions
from k2convert.cli.views import (
    confirm,
    left_document,
    plan_document,
    run_document,
    show_commit,
    show_left,
    show_network,
    show_plan,
    show_run,
)
from k2convert.errors import UnservableError, counted, read_size, require_extra
from k2convert.hub.client import SCHEME, Hub, bound_memory
from k2convert.job.locations import read_destination
from k2convert.job.opening import text_files
from k2convert.job.prepare import Job, JobOptions, check_job_memory, check_room, memory_bytes, open_job
from k2convert.job.resources import own_process
from k2convert.job.run import Outcome, Part, execute, read_part
from k2convert.machine import available_memory
from k2convert.models import read_architecture
from k2convert.plan.recipe import parse_settings
from k2convert.records.document import plain
from k2convert.records.events import Extent
from k2convert.records.ledger import below_budget, check_budget, doubts, summarize

if TYPE_CHECKING:
    from k2convert.calibration.conversion import CalibrationPlan
    from k2convert.job.ray import Cluster


_NO_USE_OF_GPU: Final = (
    "note: --device cuda: the conversion runs on the CPU. A GPU computes the text of --calibrate or --evaluate."
)


def run(options: RunOptions) -> None:
    """Plan a job, then show it (--dry-run) or do it."""
    for is_wrong, problem in _contradictions(options):
        if is_wrong:
            raise typer.BadParameter(problem)
    part = None
    if options.part is not None:
        part = read_part(options.part, os.environ)
    for name in ("calibrate", "evaluate", "ray"):
        if getattr(options, name):
            require_extra("ray" if name == "ray" else "calibrate", purpose=f"--{name}")
    if options.destination.startswith(SCHEME):
        bound_memory()
    with (
        waiting(f"reads the headers of {options.source}") as waits,
        open_job(_job_options(options), hub=Hub(notify=console.notifier())) as job,
    ):
        if options.evaluate:
            from k2convert.job.evaluation import with_evaluation

            text = text_files(options.evaluate, device=options.device)
            job = with_evaluation(job, text, any_text=options.any_text)
        waits.close()
        notices = [] if job.target is None else list(job.target.notices)
        for notice in (*notices, job.limits.shrunk):
            if notice is not None:
                console.print_note(f"note: {notice}")
        for name, problem in missing_sidecars(job.source.checkpoint.folder):
            console.print_note(f"warning: {options.source}: {name}: {problem}")
        if options.device == "cuda" and not (options.calibrate or options.evaluate):
            console.print_note(_NO_USE_OF_GPU)
        if options.dry_run:
            _show_plan(job, options)
        elif part is not None:
            _do_part(job, part, options)
        elif job.target is not None and job.is_published:
            from k2convert.job.publish import settle_published

            settle_published(job, job.target)
            console.print_note(f"{job.target.repo}: {job.target.revision} already holds this result")
            if options.evaluate:
                console.print_note("it was not evaluated: use `k2convert evaluate` with its address")
            console.show({"repo": job.target.repo, "commit": job.target.head, "published_before": True})
        else:
            _do(job, options)


def _contradictions(options: RunOptions) -> Iterator[tuple[object, str]]:
    """The options of machines and Hub that do not fit together, each with its remedy; see settle_recipe for others."""
    from_hub, to_hub = (place.startswith(SCHEME) for place in (options.source, options.destination))
    in_order = "--calibrate goes through the layers in order: leave out"
    yield options.part and (from_hub or to_hub), "--part needs folders that every task of the array sees, not hf://"
    yield options.part and options.calibrate, f"{in_order} --part"
    yield options.part and options.ray, "--ray and --part both share out the shards: use one of them"
    yield options.part and options.verify, "--verify is for the run that ends the job: leave out --part"
    yield options.ray and options.calibrate, f"{in_order} --ray"
    yield options.evaluate and options.part, "--evaluate is for the run that ends the job: leave out --part"
    yield options.evaluate and options.ray, "--evaluate computes on this machine: leave out --ray, or --evaluate"
    yield (
        (options.public or options.work_dir) and not to_hub,
        "--public and --work-dir only apply to a destination on the Hub: hf://owner/name",
    )
    yield (
        options.max_disk and not (from_hub or to_hub),
        "--max-disk only applies to hf:// sources or destinations: leave it out",
    )


def _job_options(options: RunOptions) -> JobOptions:
    return JobOptions(
        source=options.source,
        destination=read_destination(options.destination, work_folder=options.work_dir),
        recipe=options.recipe,
        settings=_recipe_overrides(options),
        text=text_files(options.calibrate, device=options.device, rounds=True) if options.calibrate else None,
        workers=options.workers,
        max_disk=read_size("--max-disk", options.max_disk),
        private=not options.public,
    )


def _recipe_overrides(options: RunOptions) -> dict[str, object]:
    """Return what --set and the other options replace in a recipe; raises BadParameter for a key that is set twice."""
    named: dict[str, object] = {
        "rule": options.rule,
        "layout": options.layout,
        "activations": options.activations,
        "target": options.to,
    }
    named = {key: value for key, value in named.items() if value is not None}
    overrides = parse_settings(options.settings or ())
    if twice := named.keys() & overrides.keys():
        raise typer.BadParameter(f"--set {', '.join(twice)}: there is an option for it too. Leave out one of them")
    return overrides | named


def _show_plan(job: Job, options: RunOptions) -> None:
    if options.ray is not None:
        _show_cluster_plan(job, options)
        return
    needs = [] if job.gptq is None else [calibration_needs(job.gptq, job)]
    views: list[str | Callable[[], None]] = []
    document = plan_document(job, source=options.source)
    if job.gptq is not None:
        document["calibration"] = job_document(job, job.gptq) | needs[0].document()
        smoothing = "on" if job.plan.recipe.smoothing else "off"
        views += [*text_lines(job.gptq), f"smoothing: {smoothing} (by default on for w4a4, off for w4a16)"]
        views += needs[0].lines()
        views.append(TIME_NOTE)
    else:
        document |= left_document(job)
        views += [memory_line(memory_bytes(job)), partial(show_left, job)]
    if job.uses_hub:
        views.append(partial(show_network, job))
    if job.evaluation is not None:
        last = final_evaluation(job, job.evaluation)
        document["evaluation"] = last.document()
        views.append(final_line(last, job.evaluation))
        needs.append(last)
    document["memory_needed"] = max([memory_bytes(job), *(need.memory for need in needs)])
    document["memory_available"] = available_memory()
    console.show(document, partial(show_plan, job, document), *views)
    check_room(job)
    check_job_memory(job)
    for need in needs:
        need.check(options.source)
    console.print_next(console.own_command())


def _show_cluster_plan(job: Job, options: RunOptions) -> None:
    with waiting("looks at the cluster"), _open_cluster(options) as cluster:
        found = cluster.capacity
    has = f"{counted(found.nodes, 'node')}, {counted(found.cpus, 'CPU')}"
    rate = f"{found.shards_at_a_time:,} shards at a time; the time is not estimated"
    lack = f"{found.lack}, or wait until the cluster grows"
    document = plan_document(job, source=options.source)
    console.show(
        document | {"cluster": asdict(found)},
        partial(show_plan, job, document),
        f"cluster: {has}; {lack if found.lack else rate}",
    )
    check_room(job)
    console.print_next(console.own_command())


def _open_cluster(options: RunOptions) -> "AbstractContextManager[Cluster]":
    assert options.ray is not None
    from k2convert.job.ray import connect

    max_disk = read_size("--max-disk", options.max_disk)
    return connect(options.ray, cpus=options.cpus_per_shard, max_disk=max_disk)


def _do_part(job: Job, part: Part, options: RunOptions) -> None:
    whole = typed_command(source=options.source, without="--part")
    own = typed_command(source=options.source)
    num_shards = len(part.items(job.items))
    display = Display("convert", Extent({"convert": (job.bytes_in, 0)}, num_shards))
    own_process()
    of_part = f"this part's {counted(num_shards, 'shard')}"
    say_when_interrupted(
        lambda: f"{display.tally.shards} of {of_part} are converted. The same command resumes",
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


def _do(job: Job, options: RunOptions) -> None:
    if job.target is not None:
        confirm(job.target, total_bytes=job.plan.data_bytes, yes=options.yes)
    command = typed_command(source=options.source)
    extent = Extent({"convert": (job.bytes_in, job.finished_bytes_in)}, len(job.plan.jobs), len(job.finished))
    display = Display("transfer" if job.uses_hub else "convert", extent)
    if job.gptq is not None:
        _start_pass(job, job.gptq, options)
    if job.evaluation is not None:
        last = final_evaluation(job, job.evaluation)
        last.check(options.source)
        console.print_event(final_line(last, job.evaluation))
    own_process()
    start = time.monotonic()
    say_when_interrupted(partial(_how_far, job, display.tally), command.line(here=command.folder))
    try:
        with nullcontext() if options.ray is None else _open_cluster(options) as cluster, display as events:
            outcome = execute(replace(job, command=command), events=events, cluster=cluster, verify=options.verify)
    except UnservableError as error:
        from k2convert.cli.validate import show_validation

        show_validation(error.validation)
        raise
    job = replace(job, finished=outcome.finished)
    _show_outcome(job, outcome, options, seconds=time.monotonic() - start)


def _how_far(job: Job, tally: Tally) -> str:
    if "evaluate" in tally.meters:
        from k2convert.job.evaluation import evaluation_works

        layers = read_architecture(job.source.checkpoint).num_layers
        done = min(evaluation_works(job.destination.folder)[1].num_finished(), layers)
        what = f"all shards are converted; the evaluation has {done} of {layers} layers"
    else:
        done = tally.shards if tally.num_shards else len(job.finished)
        what = f"{done} of {len(job.plan.jobs)} shards are converted"
        if job.gptq is not None and "calibrate" in tally.meters:
            layer_pass = job.gptq.layer_pass
            what += f", {layer_pass.work.num_finished()} of {layer_pass.num_layers} layers are calibrated"
    return f"{what}. The same command resumes"


def _start_pass(job: Job, plan: "CalibrationPlan", options: RunOptions) -> None:
    check_room(job)
    if layers_left(job, plan):
        calibration_needs(plan, job).check(options.source)
        show_start(plan)


def _show_outcome(job: Job, outcome: Outcome, options: RunOptions, *, seconds: float) -> None:
    totals = summarize(outcome.records.values())
    missed = below_budget(outcome.records.values(), job.plan.recipe)
    doubtful = doubts(outcome.records.values())
    document = run_document(job, totals, seconds) | ({"warnings": doubtful} if doubtful else {})
    views: list[str | Callable[[], None]] = []
    if outcome.calibrated is not None:
        views.append(partial(show_outputs, outcome.calibrated, job.gptq))
    views.append(partial(show_run, job, totals, seconds))
    views += [partial(console.print_note, f"warning: {doubt}") for doubt in doubtful]
    if missed:
        document["below_budget"] = {"tensor_sqnr_db": job.plan.recipe.budget.tensor_sqnr_db, "tensors": missed}
    if job.uses_hub:
        document |= {"destination": str(job.destination), "repo": job.destination.repo, "commit": outcome.commit}
    contract = None
    if outcome.validation is not None:
        contract = outcome.validation.contract
    if contract is not None:
        counts = {"rules": len(contract.rules), "unchecked": contract.unchecked, "failed": contract.failed}
        document["contract"] = counts
    if outcome.evaluation is not None:
        from k2convert.cli.evaluation_view import show_evaluation

        document["evaluation"] = plain(outcome.evaluation)
        views.append(partial(show_evaluation, outcome.evaluation))
    if contract is not None:
        views.append(contract.summary)
    if outcome.commit is not None:
        views.append(partial(show_commit, job.hub, job.destination, outcome.commit))
    console.show(document, *views)
    if outcome.commit is None and job.plan.recipe.target == "nvfp4":
        given = () if job.uses_hub else ("--source", options.source)
        console.print_next(console.command("k2convert", "validate", job.destination.folder, *given))
    check_budget(job.destination.folder, job.plan.recipe, missed)
