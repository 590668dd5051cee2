"""Run a planned job: the one executor, for folders and for the Hub.

A local source has no fetch stage, a local destination no upload stage. Everything else is the same code, so the bytes
are the same. What is done is recorded under DEST/.k2convert, and for a destination on the Hub on the work branch too.
"""

import os
import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event

from k2convert.checkpoint.files import own_suffix
from k2convert.checkpoint.folders import make_folder, remove_folder
from k2convert.checkpoint.names import (
    DOWNLOADS_FOLDER,
    RECORDS_FOLDER,
    SOURCE_COPY_FOLDER,
    UPLOADS_FOLDER,
    WORK_FOLDER,
)
from k2convert.errors import DestinationError, DestinationWriteError
from k2convert.hub.branch import Branch, branch_name
from k2convert.job import machine
from k2convert.job.assemble import assemble, is_complete
from k2convert.job.downloads import fetch_shard, keep_small_files, remove_file, sweep_downloads
from k2convert.job.feedback import OpenWalk, finish_walk, open_walk, walking
from k2convert.job.parts import Part
from k2convert.job.pipeline import Pipeline, Stages
from k2convert.job.prepare import Job, check_room
from k2convert.job.publish import publish_result
from k2convert.job.ray import Cluster
from k2convert.job.room import Item
from k2convert.job.uploads import Uploads
from k2convert.job.verify import shards_to_hash, verify_shards
from k2convert.job.workers import Workers
from k2convert.records.calibration import CalibrationRecord
from k2convert.records.command import keep_command
from k2convert.records.events import SILENT, Events, Extent, Phase
from k2convert.records.journal import Journal
from k2convert.records.shard_record import ShardRecord
from k2convert.validate.results import ValidationReport


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished job left: every shard's record; main's commit and the findings if the result went to the Hub.

    `calibrated` is what the ledger says of the calibration, None without one.
    """

    records: dict[str, ShardRecord]
    commit: str | None
    validation: ValidationReport | None = None
    calibrated: CalibrationRecord | None = None


def execute(job: Job, *, events: Events = SILENT, cluster: Cluster | None = None) -> Outcome:
    """Do what is left of a job, with a cluster on its nodes. After an interrupt or a failure it can be executed again.

    Raises any K2ConvertError; UnservableError if the result does not validate, and then main is not changed.
    """
    check_room(job)
    machine.settle_runtime(uses_hub=job.uses_hub)
    folder, journal = job.destination.folder, Journal(job.destination.folder)
    make_folder(folder / WORK_FOLDER, root=folder)
    _check_work_folder(folder / WORK_FOLDER)
    with journal.locked(events=events) as keep:
        was_begun = journal.job() is not None
        journal.begin(job.description)
        if job.command is not None:
            keep_command(folder, job.command)
        found = journal.find_records(job.digest)
        verified = verify_shards(journal, found, doubtful=shards_to_hash(journal, found, everything=False))
        checkpoint = replace(job.source.checkpoint, folder=keep_small_files(job))
        job = replace(job, source=replace(job.source, checkpoint=checkpoint))
        uploads = _open_uploads(job, journal, events)
        records = dict(verified.records) if uploads is None else uploads.records
        items, to_upload = _remaining(job, journal, uploads, records)
        if was_begun or len(items) + len(to_upload) < len(job.items):
            events.note(_say_resumed(job, items, to_upload))
        walk = open_walk(job, items, events)
        extent = _extent(job, items, to_upload, walk)
        if cluster is not None:
            extent = replace(extent, phases={"convert": extent.phases["convert"]})
        events.begun(extent, keep=keep)
        _run_pipeline(job, journal, uploads, records, items, to_upload, events, opened=walk, cluster=cluster)
        if cluster is not None:
            journal.sweep(job.description)
        remove_folder(job.downloads, root=folder)
        if walk is not None:
            job = finish_walk(job, walk)
        names = assemble(job, records)
        if walk is not None:
            walk.plan.work.remove()
        if uploads is None or job.target is None:
            return Outcome(records, None, calibrated=job.calibrated)
        machine.release_buffers()
        commit, validation = publish_result(job, job.target, uploads, names)
        return Outcome(records, commit, validation, job.calibrated)


def execute_part(job: Job, part: Part, *, events: Events = SILENT) -> Outcome:
    """Convert and record one part's shards, next to other parts. Executing it again does what is left of it.

    Raises K2ConvertError; LockedError while a run without a part works in the destination.
    """
    check_room(job)
    machine.settle_runtime(uses_hub=False)
    folder = job.destination.folder
    make_folder(folder / WORK_FOLDER, root=folder)
    _check_work_folder(folder / WORK_FOLDER)
    journal = Journal(folder, suffix=own_suffix())
    with journal.shared():
        journal.join(job.description)
        if job.command is not None:
            keep_command(folder, job.command, suffix=journal.suffix)
        records = journal.finished(job.digest)
        items = [item for item in part.items(job.items) if item.name not in records]
        events.begun(part_extent(job, part, records))
        _run_pipeline(job, journal, None, records, items, (), events, opened=None)
    return Outcome(records, None)


def part_extent(job: Job, part: Part, records: Container[str]) -> Extent:
    """Return how much one part has to do, and how much of it is recorded."""
    names = {item.name for item in part.items(job.items)}
    mine = [shard for shard in job.plan.jobs if shard.name in names]
    done = [shard for shard in mine if shard.name in records]
    sizes = (sum(shard.bytes_in for shard in mine), sum(shard.bytes_in for shard in done))
    return Extent({"convert": sizes}, len(mine), len(done))


def _check_work_folder(folder: Path) -> None:
    """Refuse a work folder that is not writable, or that has a file where k2convert needs a folder."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DestinationWriteError(f"{folder}: is not writable. Choose a folder that you may write to.")
    for name in (SOURCE_COPY_FOLDER, DOWNLOADS_FOLDER, RECORDS_FOLDER, UPLOADS_FOLDER):
        path = folder / name
        if path.exists() and not path.is_dir():
            raise DestinationError(f"{path}: is not a folder, but k2convert needs a folder there. Remove it.")


def _open_uploads(job: Job, journal: Journal, events: Events) -> Uploads | None:
    if job.target is None:
        return None
    branch = Branch(job.hub, job.target, branch_name(job.digest))
    branch.open()
    uploads = Uploads(branch, journal, {}, events)
    uploads.restore(job.digest)
    if num_unchecked := sum(not uploads.is_checked(name) for name in uploads.records):
        job.hub.notify(
            f"{num_unchecked} finished shards were not compared with the source by an earlier run: they are made again"
        )
    return uploads


def _say_resumed(job: Job, items: Sequence[Item], to_upload: Sequence[Item]) -> str:
    """Return the line that says what an earlier run has done."""
    done = len(job.items) - len(items) - len(to_upload)
    word = "already complete" if job.target is None and is_complete(job) else "resuming"
    rest = f", {len(to_upload)} more converted and not yet uploaded" if to_upload else ""
    return f"{job.destination}: {word}: {done} of {len(job.items)} shards done{rest}"


def _extent(job: Job, items: Sequence[Item], to_upload: Sequence[Item], walk: OpenWalk | None) -> Extent:
    """Return how much is to be done, and how much of it an earlier run did."""
    to_convert = {item.name for item in items}
    phases: dict[Phase, tuple[int, int]] = {}
    if job.source.remote is not None:
        needed = {source for item in items for source in item.sources}
        total = sum(job.limits.source_bytes.values())
        phases["download"] = (total, total - sum(job.limits.source_bytes[source] for source in needed))
    if walk is not None:
        phases |= walk.phases(phases)
    converted = sum(shard.bytes_in for shard in job.plan.jobs if shard.name not in to_convert)
    phases["convert"] = (job.bytes_in, converted)
    if job.target is not None:
        total = sum(item.output_bytes for item in job.items)
        phases["upload"] = (total, total - sum(item.output_bytes for item in (*items, *to_upload)))
    layer_tokens = 0 if walk is None else walk.plan.num_tokens
    return Extent(phases, len(job.items), len(job.items) - len(items), layer_tokens=layer_tokens)


def _run_pipeline(
    job: Job,
    journal: Journal,
    uploads: Uploads | None,
    records: dict[str, ShardRecord],
    items: Sequence[Item],
    to_upload: Sequence[Item],
    events: Events,
    *,
    opened: OpenWalk | None,
    cluster: Cluster | None = None,
) -> None:
    """Fetch, convert and upload the shards that are not finished; fills `records`.

    `opened` is the walk that the shards wait for, if the job has one. The nodes of a `cluster` fetch, convert and send;
    they get all shards at once.
    """
    remote, limits, stop = job.source.remote if cluster is None else None, job.limits, Event()
    num_workers = limits.workers if cluster is None else max(len(items), 1)
    sweep_downloads(job, items, to_upload)
    devices: SimpleQueue[str] = SimpleQueue()
    for worker in range(limits.workers):
        devices.put(limits.devices[worker % len(limits.devices)])
    with (
        machine.open_threads(limits.workers) as threads,
        walking(job, opened, items, stop=stop, events=events) as walk,
    ):
        workers = Workers(job, journal, records, events, stop, threads, devices, walk)
        convert = workers.convert if cluster is None else partial(workers.convert_on_node, cluster, uploads)
        stages = Stages(
            fetch=None if remote is None else partial(fetch_shard, job, remote, stop=stop, events=events),
            convert=convert,
            drop_source=lambda shard: remove_file(job.downloads / shard),
            drop_output=lambda shard: remove_file(job.destination.folder / shard),
            uploads=uploads,
        )
        Pipeline(
            items,
            source_bytes=limits.source_bytes,
            room=limits.room if cluster is None else sys.maxsize,
            stages=stages,
            num_workers=num_workers,
            stop=stop,
            to_upload=to_upload,
        ).run()


def _remaining(
    job: Job, journal: Journal, uploads: Uploads | None, records: dict[str, ShardRecord]
) -> tuple[list[Item], list[Item]]:
    """Return the items to convert, and those that only have to be uploaded.

    A shard for the Hub is converted again if its record does not say that it was compared with the source.
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
