"""What `run` does on the command line between two folders: show the plan, convert, report."""

import time

from k2convert.cli import console
from k2convert.cli import progress as progress_views
from k2convert.cli.views import plan_document, run_document, show_plan, show_run
from k2convert.job.prepare import LocalJob, execute
from k2convert.job.shard import Progress
from k2convert.records.ledger import read_totals


def show_local_plan(job: LocalJob, as_json: bool) -> None:
    """Print what `run` would do."""
    if as_json:
        console.print_json(plan_document(job))
        return
    show_plan(job)
    console.print_next(console.own_command(without="--dry-run"))


def run_local(job: LocalJob, source: str, as_json: bool) -> None:
    """Do a job on folders and print what it lost."""
    done = sum(shard.bytes_in for shard in job.plan.jobs if shard.name in job.finished)
    display = progress_views.RunDisplay(
        what="convert",
        num_shards=len(job.plan.jobs),
        finished=len(job.finished),
        total_bytes=sum(shard.bytes_in for shard in job.plan.jobs),
        done_bytes=done,
        quiet=as_json,
    )

    def report(progress: Progress) -> None:
        display.advance(
            bytes_in=progress.bytes_in,
            bytes_out=progress.bytes_out,
            tensors=progress.tensors,
            shard_finished=progress.finished is not None,
        )

    if job.finished and not as_json:
        state = "complete already" if job.is_complete else "resuming"
        console.print_note(f"{job.destination}: {state}: {len(job.finished)} of {len(job.plan.jobs)} shards are done")
    start = time.monotonic()
    with display:
        execute(job, report=report)
    seconds = time.monotonic() - start
    if as_json:
        console.print_json(run_document(job, read_totals(job.destination), seconds))
        return
    show_run(job, read_totals(job.destination), seconds)
    if job.plan.recipe.target == "nvfp4":
        console.print_next(console.command("k2convert", "validate", job.destination, "--source", source))
