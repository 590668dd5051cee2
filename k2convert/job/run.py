"""Run a planned job: the one executor, for folders and the Hub, array tasks, clusters and conversions with a text.

    open    lock the destination, resume: what is recorded, what is left
    loop    fetch, convert, record and upload the shards that are left, overlapping (pipeline.py)
    end     index, config and ledger; for the Hub, main

A local source has no fetch stage, a local destination no upload stage. A task of an array only differs in its shards
and its lock, and it ends after the loop. On a cluster the nodes fetch, convert and send. With a text, shards wait for
the walk through the layers. Everything else is the same code, so the bytes are the same.
"""

import sys
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING

from k2convert.checkpoint.files import TEMPORARY_SUFFIX, own_suffix
from k2convert.checkpoint.folders import make_folder, remove_folder
from k2convert.checkpoint.names import WORK_FOLDER
from k2convert.job import machine
from k2convert.job.assemble import assemble, is_complete
from k2convert.job.downloads import fetch_shard, keep_small_files, remove_file, sweep_downloads
from k2convert.job.locations import check_work_folder
from k2convert.job.parts import Part
from k2convert.job.pipeline import Pipeline, Stages
from k2convert.job.prepare import Job, check_room
from k2convert.job.room import Item, Room
from k2convert.job.shard import ShardTask, convert_shard
from k2convert.job.verify import verify_shards
from k2convert.records.calibration import CalibrationRecord
from k2convert.records.command import keep_command
from k2convert.records.events import SILENT, Events, Extent, Keep, Phase
from k2convert.records.journal import Journal
from k2convert.records.shard_record import ShardRecord

if TYPE_CHECKING:
    from k2convert.calibrate.conversion import OpenWalk, ShardWalk
    from k2convert.job.ray import Cluster
    from k2convert.job.uploads import Uploads
    from k2convert.validate.results import ValidationReport


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job left: the record of every shard; main's commit and the findings if the result went to the Hub.

    `finished` are the records that an earlier run left. `calibrated` is the calibration's entry in the ledger.
    """

    records: dict[str, ShardRecord]
    finished: dict[str, ShardRecord]
    commit: str | None = None
    validation: "ValidationReport | None" = None
    calibrated: CalibrationRecord | None = None


def execute(
    job: Job,
    *,
    part: Part | None = None,
    cluster: "Cluster | None" = None,
    verify: bool = False,
    events: Events = SILENT,
) -> Outcome:
    """Do what is left of a job, or of one part of it. After an interrupt or a failure it can be executed again.

    With `verify` all finished shards are hashed first. Raises any K2ConvertError; LockedError while another run works
    in the destination; UnservableError if the result does not validate, and then main is not changed.
    """
    check_room(job)
    machine.settle_runtime(uses_hub=job.uses_hub)
    with _opened(job, part, verify, events) as run:
        walk = _open_walk(run)
        events.begun(_extent(run, walk, cluster), keep=run.keep)
        with _stages(run, walk, cluster) as stages:
            Pipeline(run.items, stages=stages, room=_room(job, cluster), stop=run.stop, to_upload=run.to_upload).run()
        if part is not None:
            return Outcome(run.records, run.finished)
        if cluster is not None:
            run.journal.sweep(job.description)
        remove_folder(job.downloads, root=job.destination.folder)
        return _ended(run, walk)


@dataclass(frozen=True, slots=True)
class _Run:
    """An opened job: the records so far, the items to convert and those only to upload. `mine` are a part's items.

    `finished` are the records of an earlier run, `keep` stores a line for `status`. A set `stop` ends the loop.
    """

    job: Job
    journal: Journal
    uploads: "Uploads | None"
    finished: dict[str, ShardRecord]
    records: dict[str, ShardRecord]
    mine: list[Item]
    items: list[Item]
    to_upload: list[Item]
    events: Events
    keep: Keep | None
    stop: Event


@contextmanager
def _opened(job: Job, part: Part | None, verify: bool, events: Events) -> Generator[_Run]:
    """Lock the destination, begin or resume the job, and find out what is left of it."""
    folder = job.destination.folder
    make_folder(folder / WORK_FOLDER, root=folder)
    check_work_folder(folder / WORK_FOLDER)
    journal = Journal(folder, suffix=TEMPORARY_SUFFIX if part is None else own_suffix())
    with journal.locked(events=events) if part is None else journal.shared() as keep:
        was_begun = journal.job() is not None
        (journal.begin if part is None else journal.join)(job.description)
        if job.command is not None:
            keep_command(folder, job.command, suffix=journal.suffix)
        if part is not None:  # other tasks write at the same time: nothing of theirs is checked or removed
            found = journal.finished(job.digest)
            mine = part.items(job.items)
            items = [item for item in mine if item.name not in found]
            yield _Run(job, journal, None, dict(found), found, mine, items, [], events, keep, Event())
            return
        found = verify_shards(journal, job.digest, everything=verify, events=events)
        checkpoint = replace(job.source.checkpoint, folder=keep_small_files(job))
        job = replace(job, source=replace(job.source, checkpoint=checkpoint))
        uploads = _open_uploads(job, journal, events)
        records = dict(found) if uploads is None else uploads.records
        items, to_upload = _remaining(job, journal, uploads, records)
        run = _Run(job, journal, uploads, found, records, list(job.items), items, to_upload, events, keep, Event())
        if was_begun or len(items) + len(to_upload) < len(job.items):
            events.note(_resumed_line(run))
        yield run


def _open_uploads(job: Job, journal: Journal, events: Events) -> "Uploads | None":
    if job.target is None:
        return None
    from k2convert.hub.branch import Branch, branch_name
    from k2convert.job.uploads import Uploads

    branch = Branch(job.hub, job.target, branch_name(job.digest))
    branch.open()
    uploads = Uploads(branch, journal, {}, events)
    uploads.restore(job.digest)
    if num_unchecked := sum(not uploads.is_checked(name) for name in uploads.records):
        job.hub.notify(
            f"{num_unchecked} finished shards were not validated by an earlier run: they are converted again"
        )
    return uploads


def _remaining(
    job: Job, journal: Journal, uploads: "Uploads | None", records: Mapping[str, ShardRecord]
) -> tuple[list[Item], list[Item]]:
    """Return the items to convert, and those that only have to be uploaded.

    A shard for the Hub is converted again if its record does not say that it was validated.
    """
    items: list[Item] = []
    to_upload: list[Item] = []
    for item in job.items:
        record = records.get(item.name)
        if uploads is not None and not uploads.is_checked(item.name):
            remove_file(job.destination.folder / item.name)
            items.append(item)
        elif uploads is not None and uploads.has_arrived(item.name):
            remove_file(job.destination.folder / item.name)
        elif record is None or not journal.has_file(record):
            items.append(item)
        elif uploads is not None:
            to_upload.append(item)
    return items, to_upload


def _resumed_line(run: _Run) -> str:
    """Return the line that states what an earlier run has done."""
    job, total = run.job, len(run.mine)
    done = total - len(run.items) - len(run.to_upload)
    word = "already complete" if job.target is None and is_complete(job, run.records) else "resuming"
    rest = f", {len(run.to_upload)} more converted and not yet uploaded" if run.to_upload else ""
    return f"{job.destination}: {word}: {done} of {total} shards done{rest}"


def _open_walk(run: _Run) -> "OpenWalk | None":
    job = run.job
    if job.gptq is None:
        return None
    from k2convert.calibrate.conversion import open_walk

    names, is_scaled = [item.name for item in run.items], bool(job.plan.recipe.smoothing)
    return open_walk(job.gptq, names, smoothing=is_scaled, calibrated=job.calibrated, events=run.events)


def _extent(run: _Run, walk: "OpenWalk | None", cluster: "Cluster | None") -> Extent:
    """Return how much is to be done, and how much of it an earlier run did."""
    job, names, left = run.job, {item.name for item in run.mine}, {item.name for item in run.items}
    phases: dict[Phase, tuple[int, int]] = {}
    if job.source.remote is not None and cluster is None:
        sizes, needed = job.limits.source_bytes, {source for item in run.items for source in item.sources}
        phases["download"] = (sum(sizes.values()), sum(sizes.values()) - sum(sizes[source] for source in needed))
    if walk is not None:
        phases |= walk.phases(phases)
    shards = [shard for shard in job.plan.jobs if shard.name in names]
    done = sum(shard.bytes_in for shard in shards if shard.name not in left)
    phases["convert"] = (sum(shard.bytes_in for shard in shards), done)
    if job.target is not None and cluster is None:
        total = sum(item.output_bytes for item in job.items)
        phases["upload"] = (total, total - sum(item.output_bytes for item in (*run.items, *run.to_upload)))
    layer_tokens = 0 if walk is None else walk.num_tokens
    return Extent(phases, len(run.mine), len(run.mine) - len(run.items), layer_tokens=layer_tokens)


def _room(job: Job, cluster: "Cluster | None") -> Room:
    """Return the room for shards on this machine's disk; the nodes of a cluster look after theirs."""
    return Room(job.limits.room if cluster is None else sys.maxsize, job.limits.source_bytes)


@contextmanager
def _stages(run: _Run, walk: "OpenWalk | None", cluster: "Cluster | None") -> Generator[Stages]:
    """Start threads, and the walk if there is one; yields what happens to a shard.

    The nodes of a `cluster` fetch, convert and send; they get all shards at once.
    """
    job, limits = run.job, run.job.limits
    remote = job.source.remote if cluster is None else None
    sweep_downloads(job, run.items, run.to_upload)
    with machine.open_threads(limits.workers) as threads, _walking(run, walk) as walking:
        convert = _LocalStage(run, threads, walking).convert if cluster is None else partial(_on_node, run, cluster)
        yield Stages(
            fetch=None if remote is None else partial(fetch_shard, job, remote, stop=run.stop, events=run.events),
            convert=convert,
            drop_source=lambda shard: remove_file(job.downloads / shard),
            drop_output=lambda shard: remove_file(job.destination.folder / shard),
            uploads=run.uploads,
            num_workers=limits.workers if cluster is None else max(len(run.items), 1),
        )


def _walking(run: _Run, walk: "OpenWalk | None") -> "AbstractContextManager[ShardWalk | None]":
    if walk is None:
        return nullcontext()
    from k2convert.calibrate.conversion import walking

    return walking(walk, room=run.job.limits.layer_room, stop=run.stop, events=run.events)


@dataclass(frozen=True, slots=True)
class _LocalStage:
    """The convert stage of this process."""

    run: _Run
    threads: machine.Threads
    walk: "ShardWalk | None"
    devices: SimpleQueue[str] = field(default_factory=SimpleQueue[str])

    def __post_init__(self) -> None:
        limits = self.run.job.limits
        for worker in range(limits.workers):
            self.devices.put(limits.devices[worker % len(limits.devices)])

    def convert(self, item: Item) -> None:
        """Convert a shard, when the walk has done its layers, and record it."""
        run, walk, job = self.run, self.walk, self.run.job
        calibration = job.calibration if walk is None else walk.wait_for(item.name)
        device = self.devices.get()
        try:
            if job.source.remote is not None and calibration is not None:
                from k2convert.calibrate.fitting import check_norms

                check_norms(calibration.statistics, job.source.checkpoint, folder=job.downloads, shards=item.sources)
            task = replace(_task(job, item.name, device), calibration=calibration, suffix=run.journal.suffix)
            record = convert_shard(task, threads=self.threads, events=run.events, stop=run.stop)
        finally:
            self.devices.put(device)
        run.journal.record(record)
        run.records[item.name] = record
        if walk is not None:
            walk.recorded(item.name)
        run.events.shard_finished(item.name)


def _on_node(run: _Run, cluster: "Cluster", item: Item) -> None:
    """Have a node convert a shard and, for the Hub, fetch and send it; record it here."""
    from k2convert.hub.branch import branch_name
    from k2convert.job.ray import NodeTask

    job, limits = run.job, run.job.limits
    task = _task(job, item.name, limits.devices[0])
    task = replace(
        task,
        source_folder=task.source_folder.absolute(),
        destination=task.destination.absolute(),
        calibration=job.calibration,
    )
    sizes = (sum(limits.source_bytes.get(s, 0) for s in i.sources) + i.output_bytes for i in job.items)
    branch = "" if job.target is None else branch_name(job.digest)
    work = NodeTask(task, job.source.remote, job.target, branch, max(sizes))
    result = cluster.convert(work, stop=run.stop, events=run.events)
    run.records[item.name] = result.record
    if run.uploads is None:
        run.journal.record(result.record)
    else:
        run.uploads.adopt(result.record)
    outputs = task.shard.outputs
    run.events.progress(bytes_in=task.shard.bytes_in, bytes_out=task.shard.data_bytes, tensors=len(outputs))
    run.events.note(f"node {result.node}: {item.name}")
    run.events.shard_finished(item.name)


def _task(job: Job, name: str, device: str) -> ShardTask:
    shard = next(shard for shard in job.plan.jobs if shard.name == name)
    headers = job.source.checkpoint.headers
    return ShardTask(
        shard=shard,
        recipe=job.plan.recipe,
        source_folder=job.source.checkpoint.folder if job.source.remote is None else job.downloads,
        destination=job.destination.folder,
        device=device,
        fingerprint=job.digest,
        header_digests={source: headers[source].digest for source in shard.source_shards},
        inflight_bytes=machine.inflight_bytes(uses_hub=job.uses_hub) // job.limits.workers,
        for_upload=job.target is not None,
        kept=None if job.source.pruning is None else job.source.pruning.kept,
    )


def _ended(run: _Run, walk: "OpenWalk | None") -> Outcome:
    """Write the files next to the shards, and publish the result if it goes to the Hub."""
    job = run.job
    if walk is not None:
        job = replace(job, calibrated=walk.finish())
    names = assemble(job, run.records)
    if walk is not None:
        walk.plan.work.remove()
    outcome = Outcome(run.records, run.finished, calibrated=job.calibrated)
    if run.uploads is None or job.target is None:
        return outcome
    from k2convert.job.publish import publish_result

    machine.release_buffers()
    commit, validation = publish_result(job, job.target, run.uploads, names)
    return replace(outcome, commit=commit, validation=validation)
