"""One local job from start to end: plan, room, lock, journal, loop, assembly. What `run` calls."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from k2convert.checkpoint.files import holds_exactly, make_folder
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.reader import ShardReader
from k2convert.checkpoint.sidecars import list_sidecars
from k2convert.errors import DiskFullError
from k2convert.job.assemble import assemble, assembled_files
from k2convert.job.machine import (
    CORES_PER_WORKER,
    MAX_WORKERS,
    WORKER_BYTES,
    available_memory,
    choose_devices,
    conversion_pool,
    inflight_bytes,
    reading_pool,
    settle_runtime,
)
from k2convert.job.places import check_destination
from k2convert.job.shard import Report, ShardConverter, run_conversion
from k2convert.models.kimi import detect_family
from k2convert.plan.plan import Plan, plan_conversion
from k2convert.plan.recipe import Recipe, default_recipe_name, load_recipe
from k2convert.quantize.quantizer import create_quantizer
from k2convert.records.fingerprint import fingerprint_digest, job_fingerprint
from k2convert.records.journal import Journal
from k2convert.records.shard_record import ShardRecord

HEADER_BYTES_ESTIMATE = 1 << 20  # a K2 shard's header is 450 kB
DISK_RESERVE_BYTES = 64 << 20  # journal, index, ledger


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A planned job on local folders, nothing touched yet."""

    source: Checkpoint
    destination: Path
    plan: Plan
    fingerprint: dict[str, Any]
    devices: tuple[str, ...]
    workers: int
    finished: dict[str, ShardRecord]
    disk_needed: int
    disk_free: int
    repo: str | None

    @property
    def is_complete(self) -> bool:
        """Whether every shard is recorded and everything beside them stands as it should; reads it all."""
        if len(self.finished) != len(self.plan.jobs):
            return False
        files = assembled_files(
            plan=self.plan,
            source=self.source,
            destination=self.destination,
            records=self.finished,
            fingerprint=self.fingerprint,
            repo=self.repo,
        )
        return all(holds_exactly(self.destination / relative, content) for relative, content in files)


def choose_recipe(source: Checkpoint, recipe: str | None, overrides: dict[str, Any]) -> Recipe:
    """The named recipe, or the one for the detected family, with command-line overrides."""
    return load_recipe(recipe or default_recipe_name(detect_family(source)[0]), **overrides)


def prepare(
    *,
    source: Checkpoint,
    destination: Path,
    recipe: Recipe,
    device: str,
    workers: int | None,
    revision: str | None = None,
    repo: str | None = None,
) -> LocalJob:
    """Plan a job and measure the room it needs; touches nothing. `repo` names a source on the Hub."""
    check_destination(destination, source=source.folder if repo is None else None)
    plan = plan_conversion(source=source, recipe=recipe)
    fingerprint = job_fingerprint(source=source, recipe=recipe, revision=revision)
    devices = choose_devices(device)
    finished = Journal(destination).finished(fingerprint=fingerprint_digest(fingerprint))
    pending = [job for job in plan.jobs if job.name not in finished]
    cores = os.cpu_count() or 1
    roomy = available_memory() // WORKER_BYTES
    chosen = workers or max(len(devices), min(cores // CORES_PER_WORKER, MAX_WORKERS, roomy), 1)
    sidecars = sum((source.folder / path).stat().st_size for path in list_sidecars(source.folder))
    needed = sum(job.data_bytes + HEADER_BYTES_ESTIMATE for job in pending) + sidecars + DISK_RESERVE_BYTES
    existing = next(p for p in (destination.absolute(), *destination.absolute().parents) if p.exists())
    return LocalJob(
        source=source,
        destination=destination,
        plan=plan,
        fingerprint=fingerprint,
        devices=devices,
        workers=min(chosen, max(len(pending), 1)),
        finished=finished,
        disk_needed=needed if pending else 0,
        disk_free=shutil.disk_usage(existing).free,
        repo=repo,
    )


def check_room(job: LocalJob) -> None:
    """Refuse to start what cannot end; raises DiskFullError."""
    if job.disk_needed > job.disk_free:
        raise DiskFullError(
            f"{job.destination}: needs {job.disk_needed:,} bytes, the disk has {job.disk_free:,} free. "
            f"Free {job.disk_needed - job.disk_free:,} bytes, or name a destination on another disk."
        )


def execute(job: LocalJob, *, report: Report) -> dict[str, ShardRecord]:
    """Do what is left of the job; returns every shard's record. Interrupted or failed, it can be executed again."""
    check_room(job)
    settle_runtime()
    journal, recipe = Journal(job.destination), job.plan.recipe
    make_folder(job.destination)
    with journal.locked(), ShardReader(job.source.path) as reader:
        shards = {shard.name: shard.data_bytes for shard in job.plan.jobs}
        journal.begin(fingerprint=job.fingerprint, recipe=recipe.document(), shards=shards)
        stop, digest = Event(), fingerprint_digest(job.fingerprint)
        with conversion_pool() as pool, reading_pool(job.workers) as reading:
            converters = [
                ShardConverter(
                    plan=job.plan,
                    reader=reader,
                    quantizer=create_quantizer(recipe.quantizer, rule=recipe.rule, device=device),
                    destination=job.destination,
                    pool=pool,
                    reading=reading,
                    fingerprint=digest,
                    header_digests={name: header.digest for name, header in job.source.headers.items()},
                    stop=stop,
                    inflight_bytes=inflight_bytes(job.workers),
                )
                for device in job.devices
            ]
            records = run_conversion(
                plan=job.plan,
                converters=converters,
                journal=journal,
                fingerprint=digest,
                workers=job.workers,
                report=report,
            )
        assemble(
            plan=job.plan,
            source=job.source,
            destination=job.destination,
            records=records,
            fingerprint=job.fingerprint,
            repo=job.repo,
        )
    return records
