"""Run a planned job: the one executor, for folders and for the Hub.

A local source has no fetch stage, a local destination no upload stage. Everything else is the same code, so the bytes
are the same. What is done is recorded under DEST/.k2convert, and for a destination on the Hub on the work branch too.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event

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
from k2convert.job.assemble import assemble
from k2convert.job.downloads import fetch_shard, keep_small_files, remove_file, sweep_downloads
from k2convert.job.pipeline import Pipeline, Stages
from k2convert.job.prepare import Job, check_room
from k2convert.job.publish import publish_result
from k2convert.job.room import Item
from k2convert.job.shard import ShardTask, convert_shard
from k2convert.job.uploads import Uploads
from k2convert.job.verify import shards_to_hash, verify_shards
from k2convert.records.events import SILENT, Events
from k2convert.records.journal import Journal
from k2convert.records.shard_record import ShardRecord
from k2convert.validate.results import ValidationReport


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished job left: every shard's record; main's commit and the findings if the result went to the Hub."""

    records: dict[str, ShardRecord]
    commit: str | None
    validation: ValidationReport | None = None


def execute(job: Job, *, events: Events = SILENT) -> Outcome:
    """Do what is left of a job. After an interrupt or a failure it can be executed again.

    Raises any K2ConvertError; UnservableError if the result does not validate, and then main is not changed.
    """
    check_room(job)
    machine.settle_runtime(uses_hub=job.uses_hub)
    folder, journal = job.destination.folder, Journal(job.destination.folder)
    make_folder(folder / WORK_FOLDER, root=folder)
    _check_work_folder(folder / WORK_FOLDER)
    with journal.locked():
        moved = journal.begin(job.description)
        found = journal.find_records(job.digest)
        verified = verify_shards(journal, found, doubtful=shards_to_hash(journal, found, everything=False))
        checkpoint = replace(job.source.checkpoint, folder=keep_small_files(job))
        job = replace(job, source=replace(job.source, checkpoint=checkpoint))
        uploads = _open_uploads(job, journal)
        records = dict(verified.records) if uploads is None else uploads.records
        _run_pipeline(job, journal, uploads, records, events, moved=moved)
        if moved:
            journal.describe(job.description)
        remove_folder(job.downloads, root=folder)
        names = assemble(job, records)
        if uploads is None or job.target is None:
            return Outcome(records, None)
        machine.release_buffers()
        return Outcome(records, *publish_result(job, job.target, uploads, names))


def _check_work_folder(folder: Path) -> None:
    """Refuse a work folder that is not writable, or that has a file where k2convert needs a folder."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DestinationWriteError(f"{folder}: is not writable. Choose a folder that you may write to.")
    for name in (SOURCE_COPY_FOLDER, DOWNLOADS_FOLDER, RECORDS_FOLDER, UPLOADS_FOLDER):
        path = folder / name
        if path.exists() and not path.is_dir():
            raise DestinationError(f"{path}: is not a folder, but k2convert needs a folder there. Remove it.")


def _open_uploads(job: Job, journal: Journal) -> Uploads | None:
    if job.target is None:
        return None
    branch = Branch(job.hub, job.target, branch_name(job.digest))
    branch.open()
    uploads = Uploads(branch, journal, {})
    uploads.restore(job.digest)
    if num_unchecked := sum(not uploads.is_checked(name) for name in uploads.records):
        job.hub.notify(
            f"{num_unchecked} finished shards were not compared with the source by an earlier run: they are made again"
        )
    return uploads


def _run_pipeline(
    job: Job,
    journal: Journal,
    uploads: Uploads | None,
    records: dict[str, ShardRecord],
    events: Events,
    *,
    moved: Sequence[str],
) -> None:
    """Fetch, convert and upload every shard that is not finished; fills `records`.

    If there is something to convert, what was made from `moved` source shards is made again, and must be the same.
    """
    remote, limits, stop = job.source.remote, job.limits, Event()
    items, to_upload = _remaining(job, journal, uploads, records)
    expected: dict[str, str] = {}
    if items and moved:
        expected = {n: r.blake3 for n, r in records.items() if not r.source_headers.keys().isdisjoint(moved)}
        events.note(f"the source was moved: {len(expected)} finished shards are made again, to compare them")
        items = [item for item in job.items if item in items or item.name in expected]
        to_upload = [item for item in to_upload if item.name not in expected]
    sweep_downloads(job, items, to_upload)
    devices: SimpleQueue[str] = SimpleQueue()
    for worker in range(limits.workers):
        devices.put(limits.devices[worker % len(limits.devices)])
    with machine.open_threads(limits.workers) as threads:

        def convert(item: Item, is_shrinking: bool) -> None:
            device = devices.get()
            try:
                task = _shard_task(job, item.name, device=device, is_shrinking=is_shrinking)
                task = replace(task, expected_blake3=expected.get(item.name))
                record = convert_shard(task, threads=threads, events=events, stop=stop)
            finally:
                devices.put(device)
            journal.record(record)
            records[item.name] = record
            if item.name not in expected:
                events.shard_finished(item.name)

        stages = Stages(
            fetch=None if remote is None else partial(fetch_shard, job, remote, stop=stop),
            convert=convert,
            drop_source=lambda shard: remove_file(job.downloads / shard),
            drop_output=lambda shard: remove_file(job.destination.folder / shard),
            uploads=uploads,
        )
        Pipeline(
            items,
            disk=limits.disk,
            source_bytes=limits.source_bytes,
            room=limits.room,
            stages=stages,
            num_workers=limits.workers,
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


def _shard_task(job: Job, name: str, *, device: str, is_shrinking: bool) -> ShardTask:
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
        is_shrinking=is_shrinking,
        for_upload=job.target is not None,
    )
