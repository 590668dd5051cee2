"""Run a planned job: the one executor, for folders and the Hub, array tasks, clusters and conversions with a text.

    open    lock the destination, resume: what is recorded, what is left
    loop    fetch, convert, record and upload the shards that are left, overlapping (pipeline.py)
    end     index, config and ledger; for the Hub, main

A local source has no fetch stage, a local destination no upload stage. A task of an array only differs in its shards
and its lock, and it ends after the loop. On a cluster the nodes fetch, convert and send. With a text, shards wait for
the pass over the layers. Everything else is the same code, so the bytes are the same.
"""

import re
import shutil
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final

from k2convert.checkpoint.files import discard_file, file_digest, own_suffix
from k2convert.checkpoint.folders import make_folder
from k2convert.checkpoint.names import WORK_FOLDER
from k2convert.checkpoint.reader import leave_cache
from k2convert.errors import PlanError, SourceReadError, counted, format_bytes, quoted
from k2convert.hub.client import ignore
from k2convert.job import resources
from k2convert.job.assemble import assemble, is_complete
from k2convert.job.locations import check_work_folder
from k2convert.job.pipeline import Pipeline, Stages
from k2convert.job.prepare import Job, check_job_memory, check_room
from k2convert.job.resources import Item
from k2convert.job.shard import convert_shard, shard_task
from k2convert.machine import BUFFERS, return_free_memory
from k2convert.records.calibration import CalibrationRecord
from k2convert.records.command import keep_command
from k2convert.records.events import SILENT, Events, Extent, Keep, Phase
from k2convert.records.journal import Journal, PackedRecords
from k2convert.records.ledger import summarize
from k2convert.records.work_log import lock_destination, share_destination

if TYPE_CHECKING:
    from k2convert.calibration.conversion import PassBesideJob
    from k2convert.check.results import ValidationReport
    from k2convert.job.ray import Cluster
    from k2convert.job.transfers import Uploads
    from k2convert.quantize.metrics.weight_metrics import WeightMetrics

_MAX_COUNT: Final = 100_000


@dataclass(frozen=True, slots=True)
class Part:
    """Part `number` of `count`, the first being 1, for the arrays of Slurm and other schedulers.

    Parts may run at the same time, in any order, and overlap: each writes temporary files of its own, and a shard that
    two of them write has the same bytes. Index, config and ledger are written by the run without a part.
    """

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def items(self, items: Sequence[Item]) -> list[Item]:
        """Return every `count`-th shard: the small first and last shards go to different parts."""
        return list(items[self.number - 1 :: self.count])


def read_part(text: str) -> Part:
    """Read `3/8`; raises PlanError."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    part = None
    if match is not None:
        part = Part(int(match[1]), int(match[2]))
    if part is None or not 1 <= part.number <= part.count <= _MAX_COUNT:
        raise PlanError(f"--part {quoted(text)}: expected I/N with I from 1 to N, such as 3/8.")
    return part


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a job: the records of all shards, those of an earlier run (`finished`), main's commit and more.

    `totals` are the measured errors of the weights by role and under "total".
    """

    folder: Path
    num_bytes: int
    records: PackedRecords
    finished: PackedRecords
    commit: str | None = None
    validation: "ValidationReport | None" = None
    calibrated: CalibrationRecord | None = None

    @property
    def totals(self) -> "dict[str, WeightMetrics]":
        return summarize(self.records.values())


def outcome_of(job: Job, records: PackedRecords, finished: PackedRecords) -> Outcome:
    """Return what a job left that has these records."""
    return Outcome(job.destination.folder, sum(item.output_bytes for item in job.items), records, finished)


def execute(
    job: Job,
    *,
    part: Part | None = None,
    cluster: "Cluster | None" = None,
    verify: bool = False,
    events: Events = SILENT,
) -> Outcome:
    """Do what is left of a job, or of a part; with `verify` hash finished shards first. Raises any K2ConvertError."""
    check_room(job)
    if cluster is None:
        check_job_memory(job)
    resources.configure_runtime(uses_hub=job.uses_hub, inflight=job.limits.inflight)
    with _open_run(job, part, verify, events) as run:
        layer_pass = None
        if run.job.gptq is not None:
            from k2convert.calibration.conversion import open_pass

            names = [item.name for item in run.items]
            layer_pass = open_pass(
                run.job.gptq, job.plan.recipe, names, calibrated=run.job.calibrated, events=run.events
            )
        events.begun(_extent(run, layer_pass, cluster), keep=run.keep)
        if cluster is not None:
            _run_stages(run, _cluster_stages(run, cluster), room=sys.maxsize)  # nodes have their own
        else:
            with _open_stages(run, layer_pass) as stages:
                _run_stages(run, stages, room=job.limits.room)
        if part is not None:
            return outcome_of(job, run.records, run.finished)
        if cluster is not None:
            run.journal.remove_temporary_files(job.description)
        shutil.rmtree(job.downloads, ignore_errors=True)
        job = run.job
        if layer_pass is not None:
            job = replace(job, calibrated=layer_pass.finish())
        BUFFERS.clear()  # what follows needs memory, but reads no tensors
        return_free_memory()
        names = assemble(job, run.records)
        if layer_pass is not None:
            layer_pass.plan.layer_pass.work.remove()
        outcome = replace(outcome_of(job, run.records, run.finished), calibrated=job.calibrated)
        if run.uploads is None or job.target is None:
            return outcome
        from k2convert.job.publish import publish_result

        BUFFERS.clear()
        commit, validation = publish_result(job, job.target, run.uploads, names)
        return replace(outcome, commit=commit, validation=validation)


@dataclass(slots=True)
class _Run:
    """An opened job: its records, those of an earlier run (`finished`), and what is left. A set `stop` ends it."""

    job: Job
    journal: Journal
    events: Events
    keep: Keep | None
    own: Sequence[Item]  # all items, or those of a part
    finished: PackedRecords
    records: PackedRecords
    uploads: "Uploads | None" = None
    items: list[Item] = field(default_factory=list[Item])
    to_upload: list[Item] = field(default_factory=list[Item])
    stop: Event = field(default_factory=Event)


@contextmanager
def _open_run(job: Job, part: Part | None, verify: bool, events: Events) -> Generator[_Run]:
    """Lock the destination, for a run alone or for a part beside others, and find what is left to do."""
    folder = job.destination.folder
    make_folder(folder / WORK_FOLDER)
    check_work_folder(folder / WORK_FOLDER)
    if part is None:
        with lock_destination(folder, events=events) as keep:
            yield _resume(job, keep, verify, events)
    else:
        with share_destination(folder, events=events):
            yield _join(job, part, events)


def _resume(job: Job, keep: Keep, verify: bool, events: Events) -> _Run:
    journal = Journal(job.destination.folder)
    was_begun = journal.job() is not None
    journal.begin(job.description)
    _save_command(journal, job)
    finished = verify_shards(journal, job.digest, everything=verify, events=events)
    if job.source.remote is not None:
        from k2convert.job.transfers import copy_small_files

        checkpoint = replace(job.source.checkpoint, folder=copy_small_files(job))
        job = replace(job, source=replace(job.source, checkpoint=checkpoint))
    run = _Run(job, journal, events, keep, own=job.items, finished=finished, records=finished.only(finished))
    if job.target is not None:
        from k2convert.job.transfers import open_uploads

        run.uploads = open_uploads(job, job.target, journal, events)
        run.records = run.uploads.records
    run.items, run.to_upload = _remaining(run)
    left = {item.name for item in run.items}
    run.finished = run.records.only(name for name in run.records if name not in left)
    num_done = len(job.items) - len(run.items) - len(run.to_upload)
    if was_begun or num_done:
        word = "resuming"
        if job.target is None and is_complete(job, run.records):
            word = "already complete"
        rest = ""
        if run.to_upload:
            rest = f", {len(run.to_upload)} more converted and not yet uploaded"
        events.note(f"{job.destination}: {word}: {num_done} of {counted(len(job.items), 'shard')} done{rest}")
    return run


def _join(job: Job, part: Part, events: Events) -> _Run:
    """Take part in a job. Other parts write at the same time: nothing of theirs is checked or removed."""
    journal = Journal(job.destination.folder, suffix=own_suffix())
    journal.join(job.description)
    _save_command(journal, job)
    finished = journal.finished(job.digest)
    own = part.items(job.items)
    run = _Run(job, journal, events, None, own=own, finished=finished, records=finished.only(finished))
    run.items = [item for item in own if item.name not in finished]
    return run


def _save_command(journal: Journal, job: Job) -> None:
    if job.command is not None:
        keep_command(journal.destination, job.command, suffix=journal.suffix)
    journal.leave_out_of_uploads()


def _remaining(run: _Run) -> tuple[list[Item], list[Item]]:
    """Return the items to convert, also those for the Hub that were not validated, and those only to upload."""
    items: list[Item] = []
    to_upload: list[Item] = []
    uploads = run.uploads
    folder = run.job.destination.folder
    for item in run.own:
        record = run.records.get(item.name)
        if uploads is not None and not uploads.is_checked(item.name):
            discard_file(folder / item.name)
            items.append(item)
        elif uploads is not None and uploads.has_arrived(item.name):
            discard_file(folder / item.name)
        elif record is None or not run.journal.has_file(record):
            items.append(item)
        elif uploads is not None:
            to_upload.append(item)
    return items, to_upload


def _extent(run: _Run, layer_pass: "PassBesideJob | None", cluster: "Cluster | None") -> Extent:
    job = run.job
    names = {item.name for item in run.own}
    left = {item.name for item in run.items}
    phases: dict[Phase, tuple[int, int]] = {}
    if job.source.remote is not None and cluster is None:
        sizes = job.limits.source_bytes
        needed = {source for item in run.items for source in item.sources}
        phases["download"] = (sum(sizes.values()), sum(sizes.values()) - sum(sizes[source] for source in needed))
    if layer_pass is not None:
        phases |= layer_pass.plan.layer_pass.phases(layer_pass.first, phases)
    shards = [shard for shard in job.plan.jobs if shard.name in names]
    done = sum(shard.bytes_in for shard in shards if shard.name not in left)
    phases["convert"] = (sum(shard.bytes_in for shard in shards), done)
    if job.target is not None and cluster is None:
        total = sum(item.output_bytes for item in job.items)
        phases["upload"] = (total, total - sum(item.output_bytes for item in (*run.items, *run.to_upload)))
    extent = Extent(phases, len(run.own), len(run.own) - len(run.items))
    if layer_pass is None:
        return extent
    return replace(extent, layer_tokens=layer_pass.plan.layer_pass.ids.size)


def _run_stages(run: _Run, stages: Stages, *, room: int) -> None:
    Pipeline(
        run.items,
        stages=stages,
        room=room,
        source_bytes=run.job.limits.source_bytes,
        stop=run.stop,
        to_upload=run.to_upload,
    ).run()


@contextmanager
def _open_stages(run: _Run, layer_pass: "PassBesideJob | None") -> Generator[Stages]:
    """Start the threads of this machine, and the layer pass beside them, for the block."""
    job = run.job
    limits = job.limits
    fetch = None
    if job.source.remote is not None:
        from k2convert.job.transfers import clean_up_downloads, fetch_shard

        fetch = partial(fetch_shard, job, job.source.remote, stop=run.stop, events=run.events)
        clean_up_downloads(job, run.items, run.to_upload)
    running = nullcontext()
    if layer_pass is not None:
        running = layer_pass.running(space=limits.layer_room, stop=run.stop, events=run.events)
    with resources.open_threads(limits.workers) as threads, running:
        yield Stages(
            fetch=fetch,
            convert=partial(_convert, run, threads, layer_pass),
            drop_source=lambda shard: discard_file(job.downloads / shard),
            drop_output=lambda shard: discard_file(job.destination.folder / shard),
            uploads=run.uploads,
            num_workers=limits.workers,
            waits=run.events.waits,
        )


def _cluster_stages(run: _Run, cluster: "Cluster") -> Stages:
    """Return the stages of a job whose shards are fetched, converted and sent by the nodes of a cluster."""
    return Stages(
        fetch=None,
        convert=partial(_convert_on_node, run, cluster),
        drop_source=ignore,
        drop_output=lambda shard: discard_file(run.job.destination.folder / shard),
        uploads=run.uploads,
        num_workers=max(len(run.items), 1),
    )


def _convert(run: _Run, threads: resources.Threads, layer_pass: "PassBesideJob | None", item: Item) -> None:
    """Convert one shard on this machine, check it if it is for the Hub, and record it."""
    calibration = None
    if layer_pass is not None:
        calibration = layer_pass.wait_for(item.name)
    task = replace(shard_task(run.job, item.name), calibration=calibration, suffix=run.journal.suffix)
    record = convert_shard(task, threads=threads, events=run.events, stop=run.stop)
    if task.for_upload:
        from k2convert.job.transfers import check_for_upload

        run.events.waits("convert", f"validates {item.name}")
        record = check_for_upload(task, record)
        run.events.waits("convert", "")
    run.journal.record(record)
    run.records[item.name] = record
    if layer_pass is not None:
        layer_pass.recorded(item.name)
    run.events.shard_finished(item.name)


def _convert_on_node(run: _Run, cluster: "Cluster", item: Item) -> None:
    """Have a node convert one shard, and record it."""
    from k2convert.job.ray import convert_on_node

    record = convert_on_node(cluster, run.job, item.name, stop=run.stop, events=run.events)
    run.records[item.name] = record
    if run.uploads is None:
        run.journal.record(record)
    else:
        run.uploads.adopt(record)
    run.events.shard_finished(item.name)


def verify_shards(journal: Journal, digest: str, *, everything: bool, events: Events) -> PackedRecords:
    """Return the records of sound shards and forget the others. `everything` hashes all. The caller holds the lock."""
    records, again = journal.find_records(digest)
    here = records.only(name for name, record in records.items() if journal.has_file(record))
    unverified = here.only(n for n, record in here.items() if everything or not journal.has_recorded_time(record))
    num_bytes = sum(record.file_bytes for record in unverified.values())
    if unverified:
        events.begun(Extent({"check": (num_bytes, 0)}))
    for name, record in unverified.items():
        if _has_hash(journal.destination / name, record.blake3):
            journal.record(record)
        else:
            again.append(name)
        events.progress(bytes_in=record.file_bytes)
    for name in again:
        journal.log.forget(name)
    if here or again:
        looked = "finished shards have their recorded size and time (--verify hashes them too)"
        if unverified:
            looked = f"finished shards hashed: {len(unverified)} ({format_bytes(num_bytes)})"
        damaged = ""
        if again:
            damaged = f"; damaged, to be converted again: {', '.join(sorted(again))}"
        events.note(f"verified: {looked}{damaged}")
    return here.only(name for name in here if name not in again)


def _has_hash(path: Path, blake3: str) -> bool:
    try:
        is_sound = file_digest(path) == blake3
        leave_cache(path)
    except (OSError, SourceReadError):
        return False
    return is_sound
