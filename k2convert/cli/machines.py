"""`run --part` and `run --ray`: a job on several machines."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k2convert.cli.verbs import RunOptions
    from k2convert.job.parts import Part
    from k2convert.job.prepare import Job
    from k2convert.job.ray import Capacity, Cluster


@contextmanager
def open_cluster(options: "RunOptions") -> "Generator[Cluster]":
    """Connect to the cluster of --ray; raises PlanError without one."""
    assert options.ray is not None
    from k2convert.cli.options import parse_size
    from k2convert.job.ray import connect

    max_disk = None if options.max_disk is None else parse_size(options.max_disk)
    gpu = options.device == "cuda"
    with connect(options.ray, cpus=options.cpus_per_shard, with_gpu=gpu, max_disk=max_disk) as cluster:
        yield cluster


def capacity_line(found: "Capacity") -> str:
    """Return what a cluster has, and how many shards it converts at a time."""
    counts = [(found.nodes, "node"), (found.cpus, "CPU"), (found.gpus, "GPU")]
    has = ", ".join(f"{count:,} {unit}{'s' if count != 1 else ''}" for count, unit in counts if count or unit != "GPU")
    if found.lack:
        return f"cluster: {has}; {found.lack}, or wait until the cluster grows"
    return f"cluster: {has}; {found.shards_at_a_time:,} shards at a time; the time is not estimated"


def run_part(job: "Job", part: "Part", options: "RunOptions") -> None:
    """Do one part, and print the command that ends the job."""
    from k2convert.cli import console
    from k2convert.cli.options import command_words
    from k2convert.cli.progress import Display
    from k2convert.job.run import execute
    from k2convert.records.command import JobCommand
    from k2convert.records.events import Extent

    whole = JobCommand(command_words("run", replace(options, part=None)), str(Path.cwd()))
    job = replace(job, command=whole)
    num_shards = len(part.items(job.items))
    display = Display("convert", Extent({"convert": (job.bytes_in, 0)}, num_shards), quiet=options.quiet)
    try:
        with display as events:
            execute(job, part=part, events=events)
    except BaseException as error:
        error.add_note(f"{display.tally.shards} of this part's {num_shards} shards are converted")
        error.add_note(console.command(*command_words("run", options)))
        raise
    if options.as_json:
        console.print_json({"part": str(part), "shards": num_shards, "shards_of_job": len(job.plan.jobs)})
        return
    console.print_line(f"part {part}: {num_shards} of the {len(job.plan.jobs)} shards are converted")
    console.print_note("when all parts are done, the command without --part writes index and config:")
    console.print_next(whole.line(here=whole.folder))
