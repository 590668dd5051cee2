"""One local job from start to end: plan, room, lock, journal, loop, assembly. What `run` calls."""

import ctypes
import gc
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from k2convert.assemble import assemble, assembled_files
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.reader import ShardReader
from k2convert.checkpoint.sidecars import list_sidecars
from k2convert.checkpoint.writer import holds_exactly, make_folder
from k2convert.convert import INFLIGHT_BYTES, Report, ShardConverter, run_conversion
from k2convert.errors import DiskFullError, PlanError
from k2convert.journal import Journal, ShardRecord, check_destination
from k2convert.k2 import detect_family
from k2convert.lazy_torch import torch
from k2convert.plan import Plan, fingerprint_digest, job_fingerprint, plan_conversion
from k2convert.quantizers import create_quantizer
from k2convert.recipe import Recipe, default_recipe_name, load_recipe

HEADER_BYTES_ESTIMATE = 1 << 20  # a K2 shard's header is 450 kB
DISK_RESERVE_BYTES = 64 << 20  # journal, index, ledger
CORES_PER_WORKER = 8  # one shard's writer keeps up with about this many converting threads
MAX_WORKERS = 8
READERS_PER_WORKER = 2
WORKER_BYTES = 1 << 30  # what one shard in work may take with CORES_PER_WORKER threads, and some
SWITCH_SECONDS = 0.0005  # a kernel that comes back waits this long for the lock, not Python's 5 ms
CORE_INFLIGHT_BYTES = 64 << 20  # an expert's gate and up, in and out, being converted and waiting to be written


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


def available_memory() -> int:
    """Bytes of memory that can be had without swapping; by the kernel's estimate where it gives one."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def inflight_bytes(workers: int) -> int:
    """Bytes that one of `workers` shards may have in work, so that every core finds something to do."""
    cores = os.cpu_count() or 1
    return max(INFLIGHT_BYTES, cores * CORE_INFLIGHT_BYTES) // workers


def conversion_pool() -> ThreadPoolExecutor:
    """Threads that convert: one a core, shared by all shards in work."""
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="convert")


def reading_pool(workers: int) -> ThreadPoolExecutor:
    """Threads that read: enough of them that a disk always has a request to work on."""
    return ThreadPoolExecutor(max_workers=READERS_PER_WORKER * workers, thread_name_prefix="read")


def choose_recipe(source: Checkpoint, recipe: str | None, overrides: dict[str, Any]) -> Recipe:
    """The named recipe, or the one for the detected family, with command-line overrides."""
    return load_recipe(recipe or default_recipe_name(detect_family(source)[0]), **overrides)


def choose_devices(device: str) -> tuple[str, ...]:
    """Torch devices to convert on: every visible CUDA device, or the CPU; raises PlanError for CUDA without one."""
    asked = device == "cuda" or (device == "auto" and _has_driver())
    count = torch.cuda.device_count() if asked and torch.cuda.is_available() else 0
    if device == "cuda" and count == 0:
        raise PlanError("--device cuda: torch sees no CUDA device. Use --device cpu, or install a CUDA build of torch.")
    return tuple(f"cuda:{i}" for i in range(count)) or ("cpu",)


def _has_driver() -> bool:
    """Whether NVIDIA's driver is there: to hear from torch that it is not takes seconds."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


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


def settle_runtime() -> None:
    """Prepare the process for hours of work: torch must not add threads to ours, the plan needs no more scanning."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch imported later
    if "torch" in sys.modules:
        torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()
    gc.enable()


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
