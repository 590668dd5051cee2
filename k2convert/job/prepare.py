"""Plan a job: what to convert, where to, and how it uses the machine and the disk. Writes nothing."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from k2convert.checkpoint.files import parse_json_object
from k2convert.checkpoint.header import ShardHeader, encode_header, parse_header
from k2convert.checkpoint.holes import can_punch_holes
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.names import DOWNLOADS_FOLDER, LEDGER_NAME, WORK_FOLDER
from k2convert.checkpoint.sidecars import list_sidecars
from k2convert.checkpoint.writer import ALIGNMENT
from k2convert.choices import Device
from k2convert.errors import CheckpointError, DiskFullError, PlanError, require_extra
from k2convert.hub.client import Hub, check_endpoint
from k2convert.hub.preflight import Target, check_target, other_weights_error, read_published
from k2convert.hub.source_card import SourceCard, accepted_card
from k2convert.job.links import refuse_links
from k2convert.job.machine import choose_devices, choose_workers
from k2convert.job.places import Destination, Source, check_destination
from k2convert.job.room import DiskPlan, Item, existing_parent, plan_disk, used_bytes
from k2convert.models import detect_family
from k2convert.plan.plan import Plan, plan_conversion
from k2convert.plan.recipe import Recipe, load_recipe
from k2convert.records.command import JobCommand
from k2convert.records.fingerprint import job_fingerprint
from k2convert.records.journal import JobDescription, Journal
from k2convert.records.ledger import parse_ledger
from k2convert.records.shard_record import ShardRecord
from k2convert.records.source_identity import Identities, hub_identity, local_identity

RECORD_BYTES: Final = 2048  # journal and upload record of one projection
SHARD_RECORD_BYTES: Final = 8192
HUB_FREE_SHARE: Final = 0.9  # of the free disk, for a job with the Hub, unless --max-disk says otherwise


@dataclass(frozen=True, slots=True)
class Limits:
    """How a job uses the machine.

    `disk_allowed` is what it may use at one time, `disk_small` what everything but the shards takes, `disk_free` what
    was free at the start. `source_bytes` are the sizes of the source shards to fetch.
    """

    devices: tuple[str, ...]
    workers: int
    source_bytes: Mapping[str, int]
    disk: DiskPlan
    disk_allowed: int
    disk_small: int
    disk_free: int

    @property
    def disk_needed(self) -> int:
        return self.disk.needed_bytes + self.disk_small

    @property
    def room(self) -> int:
        """Bytes that shards may take."""
        return self.disk_allowed - self.disk_small


@dataclass(frozen=True, slots=True)
class Job:
    """A planned job. Nothing has been written yet.

    `target` is set if the result goes to the Hub, `card` is what the Hub accepts of the source's model card,
    `finished` are the shards that an earlier run left in the destination folder. `command` is what the user typed.
    """

    source: Source
    destination: Destination
    hub: Hub
    target: Target | None
    card: SourceCard
    is_published: bool
    plan: Plan
    description: JobDescription
    limits: Limits
    finished: dict[str, ShardRecord]
    command: JobCommand | None = None

    @property
    def uses_hub(self) -> bool:
        return self.source.remote is not None or self.target is not None

    @property
    def digest(self) -> str:
        """The digest of the fingerprint."""
        return self.description.digest

    @property
    def downloads(self) -> Path:
        return self.destination.folder / WORK_FOLDER / DOWNLOADS_FOLDER

    @property
    def items(self) -> tuple[Item, ...]:
        """The output shards with their exact sizes."""
        return output_items(self.plan)

    @property
    def bytes_in(self) -> int:
        return sum(shard.bytes_in for shard in self.plan.jobs)

    @property
    def finished_bytes_in(self) -> int:
        return sum(shard.bytes_in for shard in self.plan.jobs if shard.name in self.finished)


def choose_recipe(source: Checkpoint, recipe: str | None, overrides: Mapping[str, Any]) -> Recipe:
    """Load the named recipe, or that of the source's family, with command-line overrides."""
    return load_recipe(recipe or detect_family(source).recipe, **overrides)


def prepare(
    *,
    source: Source,
    destination: Destination,
    recipe: Recipe,
    device: Device = "auto",
    workers: int | None = None,
    max_disk: int | None = None,
    private: bool = True,
    hub: Hub | None = None,
) -> Job:
    """Plan a job and check its destination; raises PlanError, DestinationError, HubError, DiskFullError."""
    hub = hub or Hub()
    checkpoint, folder = source.checkpoint, destination.folder
    check_destination(folder, source=checkpoint.folder if source.remote is None else None)
    plan = plan_conversion(source=checkpoint, recipe=recipe)
    refuse_links(folder, shards=[shard.name for shard in plan.jobs], sidecars=list_sidecars(checkpoint.folder))
    description = JobDescription(
        fingerprint=job_fingerprint(source=checkpoint, recipe=recipe, revision=source.revision),
        recipe=recipe.document(),
        shards={shard.name: shard.data_bytes for shard in plan.jobs},
        source=_source_identities(source),
    )
    finished = Journal(folder).finished(description.digest)
    target, card, published = None, SourceCard(), False
    if destination.repo is not None:
        target = _check_target(plan, source, repo=destination.repo, private=private, hub=hub)
        card = accepted_card(hub, source.card)
        published = is_published(hub, target, description.fingerprint)
    if recipe.quantizer == "reference" and recipe.target == "nvfp4":
        require_extra("reference", purpose="the reference quantizer")
    devices = choose_devices(device)
    num_pending = sum(shard.name not in finished for shard in plan.jobs)
    chosen = min(choose_workers(workers, num_devices=len(devices)), max(num_pending, 1))
    return Job(
        source=source,
        destination=destination,
        hub=hub,
        target=target,
        card=card,
        is_published=published,
        plan=plan,
        description=description,
        limits=_plan_limits(plan, source, destination, devices=devices, workers=chosen, max_disk=max_disk),
        finished=finished,
    )


def _source_identities(source: Source) -> Identities:
    checkpoint, remote = source.checkpoint, source.remote
    if remote is None:
        return {shard: local_identity(checkpoint.path(shard)) for shard in checkpoint.headers}
    return {shard: hub_identity(remote.shard(shard).sha256) for shard in checkpoint.headers}


def _check_target(plan: Plan, source: Source, *, repo: str, private: bool, hub: Hub) -> Target:
    check_endpoint()
    if plan.recipe.target != "nvfp4":
        raise PlanError("--to bf16 needs a folder as destination: only NVFP4 checkpoints are validated and published.")
    file_bytes = {item.name: item.output_bytes for item in output_items(plan)}
    return check_target(
        hub, repo=repo, private=private, file_bytes=file_bytes, licence=source.card.licence, source=source.remote
    )


def is_published(hub: Hub, target: Target, fingerprint: Mapping[str, Any]) -> bool:
    """Return whether main has the finished result of this job; raises HubError if it has any other weights."""
    data = read_published(hub, target, LEDGER_NAME)
    if data is None:
        return False
    try:
        ledger = parse_ledger(parse_json_object(data.decode(errors="replace"), where=LEDGER_NAME))
    except CheckpointError:
        raise other_weights_error(target) from None
    if ledger.fingerprint != dict(fingerprint):
        raise other_weights_error(target)
    sizes = {name: file.num_bytes for name, file in target.files.items()}
    return bool(ledger.shards) and all(sizes.get(name) == shard.num_bytes for name, shard in ledger.shards.items())


def output_headers(plan: Plan) -> dict[str, ShardHeader]:
    """Return the headers of the output shards as they will be written."""
    headers: dict[str, ShardHeader] = {}
    for job in plan.jobs:
        outputs = [(o.name, o.dtype, o.shape, o.num_bytes) for o in job.outputs]
        raw = encode_header(outputs, metadata=dict(job.metadata), alignment=ALIGNMENT)
        headers[job.name] = parse_header(raw, shard=job.name, file_bytes=len(raw) + job.data_bytes)
    return headers


def output_items(plan: Plan) -> tuple[Item, ...]:
    """Return the output shards with their exact sizes."""
    sizes = output_headers(plan)
    return tuple(Item(j.name, tuple(j.source_shards), sizes[j.name].file_bytes) for j in plan.jobs)


def _plan_limits(
    plan: Plan,
    source: Source,
    destination: Destination,
    *,
    devices: tuple[str, ...],
    workers: int,
    max_disk: int | None,
) -> Limits:
    folder, remote, goes_to_hub = source.checkpoint.folder, source.remote, destination.repo is not None
    items = output_items(plan)
    source_bytes = {name: remote.shard(name).num_bytes for name in source.checkpoint.headers} if remote else {}
    existing = existing_parent(destination.folder)
    free = shutil.disk_usage(existing).free
    available = free + used_bytes(destination.folder)
    share = HUB_FREE_SHARE if remote is not None or goes_to_hub else 1.0
    allowed = int(available * share) if max_disk is None else max_disk
    if allowed > available:
        raise DiskFullError(
            f"--max-disk is {allowed:,} bytes, but {destination.folder} has only {available:,} free. "
            "Name less, or free some space."
        )
    small = sum((folder / p).stat().st_size for p in list_sidecars(folder))
    small += sum(p.stat().st_size for p in folder.glob("*.json"))
    copies = (0 if goes_to_hub else 1) + (remote is not None)  # shards have left the disk when a Hub job copies these
    small_bytes = RECORD_BYTES * len(plan.projections) + small * copies + len(items) * SHARD_RECORD_BYTES
    disk = plan_disk(
        items,
        source_bytes=source_bytes,
        room=allowed - small_bytes,
        outputs_leave=goes_to_hub,
        can_shrink=remote is not None and can_punch_holes(existing),
    )
    return Limits(devices, workers, source_bytes, disk, allowed, small_bytes, free)


def check_room(job: Job) -> None:
    """Refuse a job that cannot finish for lack of disk; raises DiskFullError with both numbers."""
    limits = job.limits
    if limits.disk_needed <= limits.disk_allowed:
        return
    advice = f"Free {limits.disk_needed - limits.disk_allowed:,} bytes, or choose a folder on a different disk."
    if job.uses_hub:
        advice = "Allow more with --max-disk, or free some space."
        if job.target is None:
            advice += " Publishing to the Hub (hf://owner/name) needs room for a few shards only."
    raise DiskFullError(
        f"{job.destination.folder}: the job needs at least {limits.disk_needed:,} bytes of disk at one time, but "
        f"may use {limits.disk_allowed:,}. {advice}"
    )
