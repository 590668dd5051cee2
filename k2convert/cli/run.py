"""`run`: plan, show or do a job, whether its ends are folders or repositories of the Hub."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import typer

from k2convert.cli import console
from k2convert.cli.feedback import (
    forecast_walk,
    norm_scaling_line,
    read_calibration_text,
    show_outputs,
    show_walk,
    walk_document,
    walk_line,
)
from k2convert.cli.forecast import ELSEWHERE, Computer, choose_computer
from k2convert.cli.machines import capacity_line, check_cluster, chosen_part, open_cluster, run_part
from k2convert.cli.options import RunOptions, command_words, on_branch, parse_size
from k2convert.cli.progress import Display, Waiting
from k2convert.cli.recipe_overrides import check_kv_cache, has_text, recipe_overrides
from k2convert.cli.serving import print_serve
from k2convert.cli.texts import check_time
from k2convert.cli.validation_view import contract_counts, show_validation
from k2convert.cli.views import (
    estimate_document,
    plan_document,
    run_document,
    show_estimate,
    show_network,
    show_plan,
    show_run,
)
from k2convert.errors import HubError, InvalidCheckpointError, missing_module, require_extra
from k2convert.hub.branch import Branch, branch_name
from k2convert.hub.client import MAIN, Hub
from k2convert.hub.preflight import Target
from k2convert.hub.request_errors import redacted
from k2convert.hub.xet import bound_memory
from k2convert.job.estimate import estimate, memory_bytes
from k2convert.job.feedback_plan import FeedbackPlan
from k2convert.job.kept_experts import prune_source
from k2convert.job.machine import has_driver
from k2convert.job.places import Destination, open_source, read_destination
from k2convert.job.prepare import Job, check_room, choose_recipe, prepare
from k2convert.job.publish import UnservableError
from k2convert.job.run import Outcome, execute
from k2convert.job.statistics_file import open_named_statistics
from k2convert.records.command import JobCommand
from k2convert.records.events import Extent
from k2convert.records.journal import Journal
from k2convert.records.ledger import below_budget, summarize
from k2convert.records.publication import Published, record_published


def run(options: RunOptions) -> None:
    """Plan a job, then show it (--dry-run) or do it."""
    if options.revision is not None and not options.destination.startswith("hf://"):
        raise typer.BadParameter("--revision only applies to a destination on the Hub: hf://owner/name")
    options = replace(options, destination=on_branch(options.destination, options.revision), revision=None)
    overrides, part = recipe_overrides(options), chosen_part(options)
    check_cluster(options)
    if (options.gpu or options.cores) and not has_text(options):
        raise typer.BadParameter(f"{'--gpu' if options.gpu else '--cores'} is for --calibrate")
    computer = _choose_computer(options) if has_text(options) else None
    destination = read_destination(options.destination, work_folder=options.work_dir)
    if destination.repo is None and (options.public or options.work_dir is not None):
        raise typer.BadParameter("--public and --work-dir only apply to a destination on the Hub: hf://owner/name")
    if destination.repo is not None:
        bound_memory()
    if has_text(options):
        require_extra("calibrate", purpose="--calibrate")
    hub = Hub(notify=console.notifier(quiet=options.quiet))
    pinned = Journal(destination.folder).pinned_revision()
    with (
        Waiting(f"reads the headers of {options.source}", quiet=options.quiet) as waiting,
        open_named_statistics(options.statistics, hub=hub) as statistics,
        open_source(options.source, hub=hub, pinned=pinned) as source,
    ):
        if statistics is not None and statistics.origin is not None:
            options = replace(options, statistics=statistics.origin)  # the commands that are kept or printed name it
        if source.remote is None and destination.repo is None and options.max_disk is not None:
            raise typer.BadParameter("--max-disk only applies to hf:// sources or destinations")
        recipe = choose_recipe(source.checkpoint, options.recipe, overrides)
        check_kv_cache(recipe.layout, recipe.kv_cache)
        source = prune_source(source, recipe, hub=hub)
        job = prepare(
            source=source,
            destination=destination,
            recipe=recipe,
            statistics=statistics,
            text=None if computer is None else read_calibration_text(options, source, computer),
            device="cpu" if computer is not None and computer.elsewhere else options.device,
            workers=options.workers,
            max_disk=None if options.max_disk is None else parse_size(options.max_disk),
            private=not options.public,
            hub=hub,
            on_cluster=options.ray is not None,
        )
        waiting.end()
        if job.target is not None:
            print_notices(job.target)
        if options.device == "auto" and has_driver() and missing_module("torch") is not None:
            console.print_note(
                "note: this machine has a CUDA driver, but torch is not installed: converting on the CPU. "
                "To use the GPU: pip install 'k2convert[torch]'"
            )
        if options.dry_run:
            _show_plan(job, options, computer)
        elif part is not None:
            run_part(job, part, options)
        elif job.target is not None and job.is_published:
            _show_published(job, job.target, as_json=options.as_json)
        else:
            _do(job, options)


def _choose_computer(options: RunOptions) -> Computer:
    return choose_computer(options.device, gpu=options.gpu, cores=options.cores, dry_run=options.dry_run)


def _show_plan(job: Job, options: RunOptions, computer: Computer | None) -> None:
    if options.ray is not None:
        _show_cluster_plan(job, options)
        return
    walk = None if job.feedback is None or computer is None else forecast_walk(job, job.feedback, computer)
    needed = memory_bytes(job, walk=0 if walk is None else walk.memory.main)
    with Waiting("measures the disk and the kernels", quiet=options.quiet):
        estimated = estimate(job, memory=needed)
        time = None if walk is None else walk.time(disk_bytes=estimated.bytes_in + estimated.bytes_out)
    if options.as_json:
        document = plan_document(job, source=options.source) | {"estimate": estimate_document(estimated)}
        if job.feedback is not None and walk is not None and time is not None:
            document["calibration"] = walk_document(job, job.feedback) | walk.document(time, needed)
        console.print_json(document)
    else:
        show_plan(job, source=options.source)
        if job.feedback is not None and walk is not None and time is not None:
            console.print_line(walk_line(job.feedback))
            console.print_line(norm_scaling_line(job))
            show_walk(walk, time, estimated, needed=needed)
        else:
            show_estimate(estimated)
        show_network(job, estimated)
    if walk is None or not walk.computer.elsewhere:
        check_room(job)
    if walk is not None and time is not None:
        walk.check(options.source, needed=needed)
        if not walk.computer.elsewhere:
            check_time(time, source=options.source, yes=options.yes)
    if not options.as_json:
        console.print_next(console.own_command(without="--dry-run", options=ELSEWHERE))


def _show_cluster_plan(job: Job, options: RunOptions) -> None:
    with Waiting("looks at the cluster", quiet=options.quiet), open_cluster(options) as cluster:
        capacity = cluster and cluster.capacity
    if options.as_json:
        document = plan_document(job, source=options.source)
        console.print_json(document | ({} if capacity is None else {"cluster": asdict(capacity)}))
    else:
        show_plan(job, source=options.source)
        if capacity is not None:
            console.print_line(capacity_line(capacity))
    check_room(job)
    if not options.as_json:
        console.print_next(console.own_command(without="--dry-run"))


def _show_published(job: Job, target: Target, *, as_json: bool) -> None:
    Branch(job.hub, target, branch_name(job.digest)).delete()  # a run killed after its last commit leaves it
    record_published(job.destination.folder, Published(target.name, str(target.head)))
    console.print_note(f"{target.repo}: {target.revision} already holds this result")
    if as_json:
        console.print_json({"repo": target.repo, "commit": target.head, "published_before": True})


def _do(job: Job, options: RunOptions) -> None:
    if job.target is not None:
        confirm(job.target, total_bytes=job.plan.data_bytes, yes=options.yes, ask=typer.confirm)
    command = JobCommand(command_words("run", options), str(Path.cwd()))
    job = replace(job, command=command)
    extent = Extent({"convert": (job.bytes_in, job.finished_bytes_in)}, len(job.plan.jobs), len(job.finished))
    display = Display("transfer" if job.uses_hub else "convert", extent, quiet=options.quiet)
    if job.feedback is not None:
        display.tally.expected_seconds["calibrate"] = _start_walk(job, job.feedback, options)
    start = time.monotonic()
    try:
        with open_cluster(options) as cluster, display as events:
            outcome = execute(job, events=events, cluster=cluster, verify=options.verify)
    except UnservableError as error:
        if not options.as_json:
            show_validation(error.validation)
        raise
    except BaseException as error:
        error.add_note(f"{display.tally.shards} of {len(job.plan.jobs)} shards are converted. The same command resumes")
        error.add_note(command.line(here=command.folder))  # both are shown after an interrupt
        raise
    job = replace(job, finished=outcome.finished)
    if job.target is not None and outcome.commit is not None:
        record_published(job.destination.folder, Published(job.target.name, outcome.commit))
    _show_outcome(job, outcome, options, seconds=time.monotonic() - start)


def _start_walk(job: Job, plan: FeedbackPlan, options: RunOptions) -> float:
    """Say how long the rest of the walk takes, and return the seconds.

    Raises CalibrationError if it is too long, PlanError if the memory is not there.
    """
    check_room(job)
    walk = forecast_walk(job, plan, Computer(job.limits.devices, plan.text.threads))
    if walk.size.num_layers == 0:
        return 0.0
    walk.check(options.source, needed=memory_bytes(job, walk=walk.memory.main))
    with Waiting("measures one expert", quiet=options.quiet):
        time = walk.time()
    check_time(time, source=options.source, yes=options.yes)
    if not options.quiet:
        span = console.format_span(time.least, time.most)
        console.print_event(f"{walk_line(plan)}: {span} (an estimate from one expert on this machine)")
    return time.middle


def _show_outcome(job: Job, outcome: Outcome, options: RunOptions, *, seconds: float) -> None:
    totals = summarize(outcome.records.values())
    missed = below_budget(outcome.records.values(), job.plan.recipe)
    if options.as_json:
        document = run_document(job, totals, seconds)
        if missed:
            document["below_budget"] = {"tensor_sqnr_db": job.plan.recipe.budget.tensor_sqnr_db, "tensors": missed}
        if job.uses_hub:
            document |= {
                "destination": str(job.destination),
                "repo": job.destination.repo,
                "commit": outcome.commit,
            }
            if outcome.validation is not None:
                document["contract"] = contract_counts(outcome.validation.contract)
        console.print_json(document)
        _refuse_below_budget(job, missed)
        return
    show_outputs(outcome.calibrated)
    show_run(job, totals, seconds)
    if outcome.commit is not None:
        if outcome.validation is not None:
            console.print_line(outcome.validation.contract.summary)
        show_commit(job.hub, job.destination, outcome.commit)
    elif job.plan.recipe.target == "nvfp4":
        given = () if job.uses_hub else ("--source", options.source)
        if given and options.statistics is not None:
            given += ("--statistics", options.statistics)
        console.print_next(console.command("k2convert", "validate", job.destination.folder, *given))
    _refuse_below_budget(job, missed)


def _refuse_below_budget(job: Job, missed: Mapping[str, float]) -> None:
    """Raise InvalidCheckpointError if `validate` will not accept the weight error. The result stays."""
    if missed:
        worst = ", ".join(f"{name} has {figure:.2f} dB" for name, figure in list(missed.items())[:3])
        raise InvalidCheckpointError(
            f"{job.destination.folder}: {len(missed)} {'tensor is' if len(missed) == 1 else 'tensors are'} below the "
            f"error budget of {job.plan.recipe.budget.tensor_sqnr_db:g} dB, so `validate` fails: {worst}"
            f"{', ...' if len(missed) > 3 else ''}. Choose a different rule, or set `budget` in the recipe."
        )


def print_notices(target: Target) -> None:
    """Print what the user should know before publishing."""
    for notice in target.notices:
        console.print_note(f"note: {notice}")


def show_commit(hub: Hub, destination: Destination, commit: str) -> None:
    """Print where a result was published, and how to serve it."""
    revision = None if destination.revision == MAIN else destination.revision
    branch = "" if revision is None else f", branch {revision},"
    console.print_line(f"{redacted(hub.endpoint)}/{destination.repo}{branch} at commit {commit}")
    print_serve(str(destination.repo), folder=destination.folder, revision=revision)


def confirm(target: Target, *, total_bytes: int, yes: bool, ask: Callable[[str], bool]) -> None:
    """Ask before publishing, unless `yes`; raises HubError without a terminal or without consent."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise HubError(f"{target.repo}: publishing without a terminal needs --yes.")
    kind = "private" if target.private else "PUBLIC"
    if not ask(f"Publish {console.format_bytes(total_bytes)} to the {kind} repository {target.name}?"):
        raise HubError(f"{target.repo}: not published.")
