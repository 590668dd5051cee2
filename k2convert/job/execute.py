"""One job with the Hub on either side: shards are fetched, converted, uploaded and deleted as they come.

What a shard becomes is decided by the same plan and written by the same converter as in a local job, so the bytes are
the same. Local state lies under DEST/.k2convert; for a destination on the Hub, DEST is a work folder, and what it knows
is on the work branch too.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

from k2convert.buffers import BUFFERS
from k2convert.checkpoint.files import writing
from k2convert.checkpoint.header import ShardHeader, encode_header, parse_header, read_header
from k2convert.checkpoint.holes import ShrinkingFile, can_punch_holes
from k2convert.checkpoint.names import LEDGER_NAME, WORK_FOLDER
from k2convert.checkpoint.reader import ShardReader
from k2convert.checkpoint.sidecars import list_sidecars
from k2convert.checkpoint.writer import ALIGNMENT
from k2convert.errors import CheckpointError, DestinationError, DestinationWriteError, DiskFullError
from k2convert.hub.branch import Branch, branch_name
from k2convert.hub.client import Hub
from k2convert.hub.download import download_shard
from k2convert.hub.preflight import Target, is_published
from k2convert.hub.segments import part_path
from k2convert.hub.source import RemoteRepo
from k2convert.job.assemble import assemble
from k2convert.job.machine import conversion_pool, reading_pool, settle_runtime
from k2convert.job.pipeline import Pipeline, Stages
from k2convert.job.prepare import LocalJob
from k2convert.job.room import DiskPlan, Item, plan_disk
from k2convert.job.shard import Progress, Report, ShardConverter
from k2convert.job.uploads import UPLOADS, Shipping, UploadRecord
from k2convert.plan.plan import ShardJob
from k2convert.quantize.quantizer import create_quantizer
from k2convert.records.fingerprint import fingerprint_digest
from k2convert.records.journal import Journal
from k2convert.records.shard_record import ShardRecord

RECORD_BYTES = 2048  # journal and upload record of one projection
FREE_SHARE = 0.9  # of the free disk that a job may use unless told otherwise
CORE_INFLIGHT_BYTES = 24 << 20  # less than a local job's: the line is slower than the disk, and uploading takes memory


@dataclass(frozen=True, slots=True)
class TransferJob:
    """A planned job, nothing touched yet. `remote` and `target` are None for a local source or destination."""

    local: LocalJob
    hub: Hub
    remote: RemoteRepo | None
    target: Target | None
    items: tuple[Item, ...]
    source_bytes: dict[str, int]
    max_disk: int
    base_bytes: int
    disk: DiskPlan
    is_published: bool

    @property
    def branch(self) -> str:
        return branch_name(fingerprint_digest(self.local.fingerprint))

    @property
    def downloads(self) -> Path:
        return self.local.destination / WORK_FOLDER / "download"


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a finished transfer left: all records, and main's commit where the result went to the Hub."""

    records: dict[str, ShardRecord]
    commit: str | None


Assembled = Callable[[Path, dict[str, UploadRecord]], dict[str, bytes]]
"""Called with the folder and the upload records when all but the shards is in place, before main is touched.

It checks what was made, and returns further files to publish."""


def output_headers(local: LocalJob) -> dict[str, ShardHeader]:
    """The output shards' headers as they are written."""
    headers: dict[str, ShardHeader] = {}
    for job in local.plan.jobs:
        outputs = [(o.name, o.dtype, o.shape, o.num_bytes) for o in job.outputs]
        raw = encode_header(outputs, metadata=dict(job.metadata), alignment=ALIGNMENT)
        headers[job.name] = parse_header(raw, shard=job.name, file_bytes=len(raw) + job.data_bytes)
    return headers


def output_items(local: LocalJob) -> tuple[Item, ...]:
    """The output shards with their exact sizes."""
    sizes = output_headers(local)
    return tuple(Item(j.name, tuple(j.source_shards), sizes[j.name].file_bytes) for j in local.plan.jobs)


def prepare_transfer(
    *, local: LocalJob, hub: Hub, remote: RemoteRepo | None, target: Target | None, max_disk: int | None
) -> TransferJob:
    """Decide how a job uses the disk; raises DiskFullError where it cannot, HubError where main holds other weights."""
    items = output_items(local)
    source_bytes = {name: remote.shard(name).num_bytes for name in local.source.headers} if remote else {}
    mine = _used_bytes(local.destination)
    available = local.disk_free + mine
    allowed = int(available * FREE_SHARE) if max_disk is None else max_disk
    if allowed > available:
        raise DiskFullError(
            f"--max-disk is {allowed:,} bytes, but {local.destination} has {available:,} free. Name less, or free some."
        )
    small = sum((local.source.folder / p).stat().st_size for p in list_sidecars(local.source.folder))
    small += sum(p.stat().st_size for p in local.source.folder.glob("*.json"))
    copies = 1 if target is None else 0  # with a target, the shards have left when the small files are copied
    base = RECORD_BYTES * len(local.plan.projections) + small * (copies + (remote is not None)) + len(items) * 8192
    probe = next(p for p in (local.destination.absolute(), *local.destination.absolute().parents) if p.exists())
    disk = plan_disk(
        items,
        source_bytes=source_bytes,
        room=allowed - base,
        outputs_leave=target is not None,
        can_shrink=remote is not None and can_punch_holes(probe),
    )
    published = target is not None and is_published(hub, target, fingerprint=local.fingerprint, ledger_name=LEDGER_NAME)
    return TransferJob(local, hub, remote, target, items, source_bytes, allowed, base, disk, published)


def execute_transfer(job: TransferJob, *, report: Report, assembled: Assembled) -> Arrival:
    """Do what is left of the job. Interrupted or failed, it can be executed again.

    Raises HubError, DiskFullError, DestinationError, DestinationWriteError, CheckpointError; what `assembled` raises
    stops the job before main is touched.
    """
    settle_runtime()
    local = job.local
    with writing(local.destination):
        local.destination.mkdir(parents=True, exist_ok=True)
        (local.destination / WORK_FOLDER).mkdir(exist_ok=True)
    _check_work_folder(local.destination / WORK_FOLDER)
    journal = Journal(local.destination)
    with journal.locked():
        shards = {shard.name: shard.data_bytes for shard in local.plan.jobs}
        journal.begin(fingerprint=local.fingerprint, recipe=local.plan.recipe.document(), shards=shards)
        local = replace(local, source=replace(local.source, folder=_settle_source(job)))
        job = replace(job, local=local)
        shipping = _open_shipping(job, journal)
        mine = fingerprint_digest(local.fingerprint)
        records = shipping.records if shipping is not None else journal.finished(fingerprint=mine)
        _run_pipeline(job, journal, shipping, records, report)
        BUFFERS.clear()  # what follows reads no tensors, but draws pictures
        shutil.rmtree(job.downloads, ignore_errors=True)
        names = assemble(
            plan=local.plan,
            source=local.source,
            destination=local.destination,
            records=records,
            fingerprint=local.fingerprint,
            repo=local.repo,
        )
        extra = assembled(local.destination, shipping.uploads if shipping is not None else {})
        if shipping is None or job.target is None:
            return Arrival(records, None)
        files: dict[str, Path | bytes] = {name: local.destination / name for name in names}
        commit = shipping.finish(files=files | extra, message=f"Add {job.target.repo.partition('/')[2]}")
        return Arrival(records, commit)


def _check_work_folder(folder: Path) -> None:
    """Refuse a work folder that cannot be written to, or has something else in the place of what is kept there."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DestinationWriteError(f"{folder}: cannot be written to. Name a folder you may write to.")
    for name in ("source", "download", "shards", UPLOADS):
        path = folder / name
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            kind = "a link" if path.is_symlink() else "no folder"
            raise DestinationError(f"{path}: is {kind}, where k2convert keeps a folder of its own. Remove it.")
    if (folder / "lock").is_dir():
        raise DestinationError(f"{folder / 'lock'}: is a folder, where k2convert keeps a file of its own. Remove it.")


def _settle_source(job: TransferJob) -> Path:
    """Keep a remote source's small files in the work folder: planning fetched them to a temporary one."""
    if job.remote is None:
        return job.local.source.folder
    folder = job.local.destination / WORK_FOLDER / "source"
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted(job.local.source.folder.rglob("*")):
        target = folder / path.relative_to(job.local.source.folder)
        if path.is_file():
            with writing(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    return folder


def _open_shipping(job: TransferJob, journal: Journal) -> Shipping | None:
    if job.target is None:
        return None
    branch = Branch(job.hub, job.target, job.branch)
    branch.open()
    shipping = Shipping(branch, journal, {})
    shipping.restore(fingerprint=fingerprint_digest(job.local.fingerprint))
    return shipping


def _run_pipeline(
    job: TransferJob, journal: Journal, shipping: Shipping | None, records: dict[str, ShardRecord], report: Report
) -> None:
    local, stop = job.local, Event()
    items, waiting = _left(job, journal, shipping, records)
    _sweep_downloads(job, items, waiting)
    jobs = {shard.name: shard for shard in local.plan.jobs}
    inflight = (os.cpu_count() or 1) * CORE_INFLIGHT_BYTES
    BUFFERS.limit(2 * inflight)  # the rest is what arrives and what is being written
    with (
        conversion_pool() as pool,
        reading_pool(local.workers) as reading,
        ShardReader(local.source.path) as reader,
    ):
        converters = [
            ShardConverter(
                plan=local.plan,
                reader=reader,
                quantizer=create_quantizer(local.plan.recipe.quantizer, rule=local.plan.recipe.rule, device=device),
                destination=local.destination,
                pool=pool,
                reading=reading,
                fingerprint=fingerprint_digest(local.fingerprint),
                header_digests={name: header.digest for name, header in local.source.headers.items()},
                stop=stop,
                for_upload=shipping is not None,
                inflight_bytes=inflight // local.workers,
            )
            for device in local.devices
        ]
        free = [converters[worker % len(converters)] for worker in range(local.workers)]

        def convert(item: Item, shrinking: bool) -> None:
            converter = free.pop()
            try:
                record = _convert_one(job, converter, jobs[item.name], shrinking=shrinking, report=report)
            finally:
                free.append(converter)
            journal.record(record)
            records[item.name] = record
            report(Progress(finished=item.name))

        stages = Stages(
            fetch=lambda shard: _fetch(job, shard, stop),
            convert=convert,
            drop_source=lambda shard: _drop(job.downloads / shard),
            drop_output=lambda shard: _drop(local.destination / shard),
            publisher=shipping,
        )
        Pipeline(
            items,
            disk=job.disk,
            source_bytes=job.source_bytes,
            room=job.max_disk - job.base_bytes,
            stages=stages,
            num_workers=local.workers,
            stop=stop,
            waiting=waiting,
        ).run()


def _left(
    job: TransferJob, journal: Journal, shipping: Shipping | None, records: dict[str, ShardRecord]
) -> tuple[list[Item], list[Item]]:
    """What is still to be converted, and what is only to be uploaded."""
    items: list[Item] = []
    waiting: list[Item] = []
    for item in job.items:
        record = records.get(item.name)
        if shipping is not None and shipping.is_on_branch(item.name):
            _drop(job.local.destination / item.name)
        elif record is None or not journal.has_file(record):
            items.append(item)
        elif shipping is not None:
            waiting.append(item)
    return items, waiting


def _sweep_downloads(job: TransferJob, items: list[Item], waiting: list[Item]) -> None:
    """Keep of an earlier run's downloads what this one will get to first, as far as the room goes."""
    keep: set[str] = set()
    taken = sum(item.output_bytes for item in waiting)
    for item in items:
        taken += sum(job.source_bytes.get(s, 0) for s in item.sources if s not in keep) + item.output_bytes
        if taken > job.max_disk - job.base_bytes and (keep or waiting):
            break
        keep.update(item.sources)
    names = {n for s in keep for n in (s, part_path(Path(s)).name, f"{part_path(Path(s)).name}.json")}
    for path in job.downloads.glob("*"):
        if path.name not in names:
            _drop(path)


def _fetch(job: TransferJob, shard: str, stop: Event) -> None:
    """Bring one source shard to disk, and make sure that it is the one that was planned with."""
    if job.remote is None:
        return
    path = job.downloads / shard
    download_shard(job.hub, job.remote, shard, target=path, stop=stop)
    if read_header(path).digest != job.local.source.headers[shard].digest:
        raise CheckpointError(
            f"{job.remote.repo}/{shard}: its header is another than the one the plan was made from. "
            "Run the same command again."
        )


def _convert_one(
    job: TransferJob, converter: ShardConverter, shard: ShardJob, *, shrinking: bool, report: Report
) -> ShardRecord:
    if job.remote is None:
        return converter.convert(shard, report=report)
    files = {name: ShrinkingFile(job.downloads / name) for name in shard.source_shards} if shrinking else {}

    def consumed(name: str, begin: int, end: int) -> None:
        files[name].consume(begin, end)

    with ShardReader(lambda name: job.downloads / name, consumed=consumed if shrinking else None) as reader:
        return replace(converter, reader=reader, preallocate=not shrinking).convert(shard, report=report)


def _drop(path: Path) -> None:
    with writing(path):
        path.unlink(missing_ok=True)


def _used_bytes(folder: Path) -> int:
    """Disk blocks that a folder's files take now."""
    paths: list[Any] = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()] if folder.is_dir() else []
    return sum(path.stat().st_blocks * 512 for path in paths)
