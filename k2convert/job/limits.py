"""How a job uses the machine and the disk, decided from headers before it starts."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k2convert.checkpoint.header import ShardHeader, encode_header, parse_header
from k2convert.checkpoint.index import list_sidecars
from k2convert.checkpoint.writer import ALIGNMENT
from k2convert.errors import DiskFullError
from k2convert.job.locations import Destination, Source
from k2convert.job.room import Item, existing_parent, least_room, used_bytes
from k2convert.plan.plan import Plan, ShardJob

if TYPE_CHECKING:
    from k2convert.calibrate.calibration import CalibrationPlan

RECORD_BYTES: Final = 2048  # journal and upload record of one projection
SHARD_RECORD_BYTES: Final = 8192
HUB_FREE_SHARE: Final = 0.9  # of the free disk, for a job with the Hub, unless --max-disk says otherwise


@dataclass(frozen=True, slots=True)
class Limits:
    """How a job uses the machine.

    `disk_allowed` is what it may use at a time, `disk_shards` what the shards need at least, `disk_small` what
    everything else takes, `disk_free` what was free at the start. `source_bytes` are the sizes of the source shards to
    fetch. `layer_room`, a part of `disk_small`, is what a walk's fetched layers may take.
    """

    devices: tuple[str, ...]
    workers: int
    source_bytes: Mapping[str, int]
    disk_shards: int
    disk_allowed: int
    disk_small: int
    disk_free: int
    layer_room: int = 0

    @property
    def disk_needed(self) -> int:
        return self.disk_shards + self.disk_small

    @property
    def room(self) -> int:
        """Bytes that shards may take."""
        return self.disk_allowed - self.disk_small


def output_headers(plan: Plan) -> dict[str, ShardHeader]:
    """Return the headers of the output shards as they will be written."""
    encoded = ((job, _encoded_header(job)) for job in plan.jobs)
    return {job.name: parse_header(raw, shard=job.name, file_bytes=len(raw) + job.data_bytes) for job, raw in encoded}


def output_items(plan: Plan) -> tuple[Item, ...]:
    """Return the output shards with their exact sizes. It encodes every header: 1 second for K2."""
    return tuple(
        Item(job.name, tuple(job.source_shards), len(_encoded_header(job)) + job.data_bytes) for job in plan.jobs
    )


def _encoded_header(job: ShardJob) -> bytes:
    outputs = [(o.name, o.dtype, o.shape, o.num_bytes) for o in job.outputs]
    return encode_header(outputs, metadata=dict(job.metadata), alignment=ALIGNMENT)


def allowed_disk(folder: Path, *, uses_hub: bool, max_disk: int | None) -> int:
    """Return the disk that a job in a folder may use; raises DiskFullError for a `max_disk` that is not there."""
    available = shutil.disk_usage(existing_parent(folder)).free + used_bytes(folder)
    if max_disk is None:
        return int(available * HUB_FREE_SHARE) if uses_hub else available
    if max_disk > available:
        raise DiskFullError(
            f"--max-disk is {max_disk:,} bytes, but {folder} has only {available:,} free. Name less, or free some "
            "space."
        )
    return max_disk


def plan_limits(
    plan: Plan,
    items: Sequence[Item],
    source: Source,
    destination: Destination,
    *,
    devices: tuple[str, ...],
    workers: int,
    max_disk: int | None,
    walk: "CalibrationPlan | None",
) -> Limits:
    """Decide how a job uses the machine and the disk; raises DiskFullError for a `max_disk` that is not there."""
    folder, remote, goes_to_hub = source.checkpoint.folder, source.remote, destination.repo is not None
    source_bytes = {name: remote.shard(name).num_bytes for name in source.checkpoint.headers} if remote else {}
    free = shutil.disk_usage(existing_parent(destination.folder)).free
    allowed = allowed_disk(destination.folder, uses_hub=remote is not None or goes_to_hub, max_disk=max_disk)
    small = sum((folder / p).stat().st_size for p in list_sidecars(folder))
    small += sum(p.stat().st_size for p in folder.glob("*.json"))
    copies = (0 if goes_to_hub else 1) + (remote is not None)  # shards have left the disk when a Hub job copies these
    small_bytes = RECORD_BYTES * len(plan.projections) + small * copies + len(items) * SHARD_RECORD_BYTES
    small_bytes += 0 if walk is None else walk.disk_bytes

    shards = least_room(items, source_bytes=source_bytes, outputs_leave=goes_to_hub)
    layer_room = 0
    if walk is not None:
        ample, least = walk.layer_rooms[0], walk.layer_rooms[-1]
        layer_room = ample if shards + small_bytes + ample <= allowed else least
    return Limits(devices, workers, source_bytes, shards, allowed, small_bytes + layer_room, free, layer_room)
