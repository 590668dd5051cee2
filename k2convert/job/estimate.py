"""Estimate of a job's time and memory, before it starts.

The disk that is read, the disk that is written and the kernels are measured for a fraction of a second each. The file
that is written has no name, so nothing can be left behind. The network is not measured.
"""

import fcntl
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from k2convert.choices import GROUP_SIZE
from k2convert.job.prepare import Job
from k2convert.job.resources import existing_parent
from k2convert.machine import PAGE_BYTES, available_memory, num_cores
from k2convert.models import find_family
from k2convert.plan.plan import ConvertStep
from k2convert.quantize.quantizer import create_quantizer
from k2convert.quantize.rules import RULES

MEASURE_SECONDS: Final = 0.4  # for each of reading, writing and converting
MAX_FREE_SHARE: Final = 0.05  # of the free disk, for the file that is written
_CHUNK_BYTES: Final = 8 << 20
_MAX_BYTES: Final = 1 << 30
_BLOCK: Final = (1024, 2048)  # of the weight that is converted to measure the kernels


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that are left to do, the rates in bytes a second (None: not measured), and the memory a job takes.

    `seconds` goes from full overlap of reading, converting and writing to a disk that reads and writes in turn. It is
    None if nothing is left or nothing was measured.
    """

    bytes_in: int
    bytes_out: int
    bytes_converted: int
    read_rate: float | None
    write_rate: float | None
    convert_rate: float | None
    memory_bytes: int
    memory_available: int

    @property
    def seconds(self) -> tuple[float, float] | None:
        """The least and the most seconds, without the network."""
        reading = self.bytes_in / (self.read_rate or math.inf)
        writing = self.bytes_out / (self.write_rate or math.inf)
        converting = self.bytes_converted / (self.convert_rate or math.inf)
        most = max(reading + writing, converting)
        if most:
            return (max(reading, writing, converting), most)
        return None


def estimate(job: Job, *, memory: int) -> Estimate:
    """Measure this machine for at most two seconds and estimate the rest of a job. Leaves nothing on the disk.

    `memory` is what the job takes, as it was counted before anything was measured.
    """
    left = [shard for shard in job.plan.jobs if shard.name not in job.finished]
    steps = (step for shard in left for step in shard.steps)
    members = (member for step in steps if isinstance(step, ConvertStep) for member in step.members)
    shards = [job.source.checkpoint.path(shard) for shard in job.source.checkpoint.headers]
    return Estimate(
        bytes_in=sum(shard.bytes_in for shard in left),
        bytes_out=sum(shard.data_bytes for shard in left),
        bytes_converted=sum(tensor.num_bytes for member in members for tensor in member.sources),
        read_rate=None if job.source.remote is not None else _read_rate(max(shards, key=lambda p: p.stat().st_size)),
        write_rate=_write_rate(existing_parent(job.destination.folder)),
        convert_rate=_convert_rate(job),
        memory_bytes=memory,
        memory_available=available_memory(),
    )


def _rate(step: Callable[[], int], *, finish: Callable[[], None] | None = None) -> float | None:
    """Call `step`, which returns bytes, for MEASURE_SECONDS, then `finish`; returns bytes a second."""
    begin = time.monotonic()
    done = 0
    while time.monotonic() - begin < MEASURE_SECONDS:
        count = step()
        done += count
        if count == 0:
            break
    if finish is not None:
        finish()
    if done:
        return done / max(time.monotonic() - begin, 1e-6)
    return None


def _read_rate(path: Path) -> float | None:
    """Read from the middle of a file past the page cache, where the filesystem allows that."""
    size = path.stat().st_size
    position = size // 2 // PAGE_BYTES * PAGE_BYTES
    try:
        with path.open("rb") as file, mmap.mmap(-1, _CHUNK_BYTES) as buffer:
            _pass_cache(file.fileno())

            def read() -> int:
                nonlocal position
                count = 0
                if position < size:
                    count = os.preadv(file.fileno(), [buffer], position)
                position += _CHUNK_BYTES
                return count

            return _rate(read)
    except OSError:
        return None


def _write_rate(folder: Path) -> float | None:
    """Write a file without a name in a folder, past the page cache where the filesystem allows that, and sync it."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    limit = min(_MAX_BYTES, int(free * MAX_FREE_SHARE))
    position = 0
    try:
        with tempfile.TemporaryFile(dir=folder) as file, mmap.mmap(-1, _CHUNK_BYTES) as buffer:
            _pass_cache(file.fileno())
            buffer.write(os.urandom(1 << 16) * (_CHUNK_BYTES >> 16))

            def write() -> int:
                nonlocal position
                count = 0
                if position + _CHUNK_BYTES <= limit:
                    count = os.pwrite(file.fileno(), buffer, position)
                position += count
                return count

            return _rate(write, finish=lambda: os.fsync(file.fileno()))
    except OSError:
        return None


def _pass_cache(descriptor: int) -> None:
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)


def _convert_rate(job: Job) -> float | None:
    """Convert a made-up weight on every core; returns source bytes a second, None for what is not measured."""
    recipe = job.plan.recipe
    if recipe.target != "nvfp4" or recipe.quantizer != "native":
        return None
    rows, columns = _BLOCK
    packed = np.arange(rows * columns // 2, dtype=np.uint32).astype(np.uint8).reshape(rows, -1)
    known = find_family(job.plan.family).source_format
    scales = np.frombuffer(known.usual_scale * (rows * columns // GROUP_SIZE), dtype=np.uint8)
    exponents = (np.arange(columns) % 3 - 1).astype(np.int8)
    quantizer = create_quantizer(recipe.quantizer, rule=recipe.rule)
    importance = None
    if RULES[recipe.rule].uses_importance:
        importance = (np.arange(columns) % 255 + 1).astype(np.uint8)

    def convert() -> int:
        weight = known.load(packed, scales, rows, "measured")
        if recipe.smoothing:
            weight = weight.divide_columns(exponents, name="measured")
        magnitude = quantizer.measure(weight, name="measured")
        scale = quantizer.global_scale(magnitude)
        quantizer.quantize(weight, name="measured", magnitude=magnitude, global_scale=scale, importance=importance)
        return packed.nbytes + scales.nbytes

    convert()  # tables are made with the first weight
    cores = num_cores()
    with ThreadPoolExecutor(max_workers=cores) as pool:
        rates = [future.result() for future in [pool.submit(_rate, convert) for _ in range(cores)]]
    return sum(rate for rate in rates if rate is not None)
