"""A calibration: plan it from headers and text, then walk through the layers and write the statistics file."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from blake3 import blake3

from k2convert.calibrate.statistics import LayerStatistics, StatisticsHeader
from k2convert.calibrate.text import Windows
from k2convert.calibrate.work import PassJob, WorkFolder
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.names import WORK_FOLDER
from k2convert.errors import DiskFullError
from k2convert.hub.client import Hub
from k2convert.hub.ranges import RemoteShards
from k2convert.job.layer_shards import LayerShards, layer_ranges, local_layers
from k2convert.job.limits import HUB_FREE_SHARE
from k2convert.job.places import Source
from k2convert.job.prepare import source_identities
from k2convert.job.room import existing_parent, used_bytes
from k2convert.job.statistics_file import (
    check_statistics_path,
    found_header,
    gather_statistics,
    source_fields,
    statistics_bytes,
    statistics_header,
    text_identity,
)
from k2convert.models import detect_family
from k2convert.models.names import Architecture
from k2convert.plan.plan import claim_projections
from k2convert.plan.recipe import load_recipe
from k2convert.records.command import JobCommand, keep_command
from k2convert.records.events import SILENT, Events, Extent, Phase
from k2convert.records.fingerprint import job_fingerprint

ARITHMETIC_VERSION: Final = 1  # to be raised when the same input gives different statistics


@dataclass(frozen=True, slots=True)
class CalibrationJob:
    """A planned calibration. Nothing has been written yet.

    `header` is that of the statistics file, without dropped windows. `disk_needed` and `disk_allowed` are bytes at one
    time. `shards` is None for a source in a folder. `command` is what the user typed.
    """

    source: Source
    work: WorkFolder
    windows: Windows
    job: PassJob
    header: StatisticsHeader
    architecture: Architecture
    devices: tuple[str, ...]
    workers: int
    shards: LayerShards | None
    disk_needed: int
    disk_allowed: int
    command: JobCommand | None = None

    @property
    def num_layers(self) -> int:
        """Every decoder layer."""
        return self.architecture.num_layers

    @property
    def num_tokens(self) -> int:
        """The tokens of all windows."""
        return self.windows.ids.size

    @property
    def num_finished(self) -> int:
        """How many layers an earlier run of this job has done."""
        found = self.work.job()
        return self.work.num_finished() if found is not None and found.identity == self.job.identity else 0

    def remove_leftovers(self) -> None:
        """Remove the work folder if a run of this job was killed when everything but that was done."""
        if (self.work.folder / WORK_FOLDER).is_dir():
            found = self.work.job()
            if found is None or found.identity == self.job.identity:
                self.work.remove()

    def extent(self, first: int) -> Extent:
        """Return how much is to be computed and fetched if the layers before `first` are done."""
        phases: dict[Phase, tuple[int, int]] = {}
        if self.shards is not None:
            takes = [self.shards.takes(layer) for layer in range(self.num_layers)]
            phases["download"] = (sum(takes), sum(takes[:first]))
        phases["calibrate"] = (self.num_layers * self.num_tokens, first * self.num_tokens)
        return Extent(phases, layer_tokens=self.num_tokens)

    def finished_header(self) -> StatisticsHeader | None:
        """Return the header of the statistics file if this job made it; None if there is no file.

        Raises DestinationError if the file was made from something else.
        """
        return found_header(self.work.statistics, self.header)


def prepare_calibration(
    *,
    source: Source,
    statistics: Path,
    windows: Windows,
    tokens: int,
    window: int,
    seed: int,
    devices: tuple[str, ...],
    workers: int,
    chunk: int,
    hub: Hub,
    max_disk: int | None = None,
) -> CalibrationJob:
    """Plan a calibration from headers and windows; raises PlanError, DiskFullError, DestinationError.

    `tokens` and `window` are what was asked for. `chunk` windows are computed at one time, unless an earlier run of
    the same job decided otherwise.
    """
    checkpoint, work = source.checkpoint, WorkFolder(statistics)
    check_statistics_path(statistics, source=checkpoint.folder if source.remote is None else None)
    recipe = load_recipe(detect_family(checkpoint).recipe)
    architecture = claim_projections(source=checkpoint, recipe=recipe).architecture
    fingerprint = job_fingerprint(source=checkpoint, recipe=recipe, revision=source.revision)
    identity = source_fields(fingerprint) | {
        "calibration": ARITHMETIC_VERSION,
        "texts": text_identity(windows),
        "tokens": tokens,
        "window": window,
        "seed": seed,
        "token_ids": blake3(windows.ids.tobytes()).hexdigest(),
        "device": devices[0].partition(":")[0],
        "layers": architecture.num_layers,
    }
    states = windows.ids.size * architecture.hidden_size * 4 * min(architecture.num_layers - 1, 2)
    small = states + 2 * statistics_bytes(architecture)
    allowed = _disk_allowed(work, uses_hub=source.remote is not None, max_disk=max_disk)
    shards, largest = None, 0
    if source.remote is not None:
        ranges = layer_ranges(checkpoint, architecture.num_layers)
        remote = RemoteShards(hub, source.remote, work.downloads)
        shards = LayerShards(checkpoint, remote, ranges, room=allowed - small, events=SILENT)
        largest = max(map(shards.takes, range(architecture.num_layers)), default=0)
    return CalibrationJob(
        source=source,
        work=work,
        windows=windows,
        job=PassJob(identity, chunk, source_identities(source)),
        header=statistics_header(windows, source_headers=fingerprint["source_headers"], seed=seed),
        architecture=architecture,
        devices=devices,
        workers=workers,
        shards=shards,
        disk_needed=small + largest,
        disk_allowed=allowed,
    )


def _disk_allowed(work: WorkFolder, *, uses_hub: bool, max_disk: int | None) -> int:
    free = shutil.disk_usage(existing_parent(work.folder)).free + used_bytes(work.folder)
    if max_disk is not None and max_disk > free:
        raise DiskFullError(
            f"--max-disk is {max_disk:,} bytes, but {work.folder.parent} has only {free:,} free. "
            "Name less, or free some space."
        )
    return max_disk if max_disk is not None else int(free * HUB_FREE_SHARE) if uses_hub else free


def check_calibration_room(job: CalibrationJob) -> None:
    """Refuse a calibration that cannot finish for lack of disk; raises DiskFullError with both numbers."""
    if job.disk_needed > job.disk_allowed:
        advice = "Allow more with --max-disk, or free some space" if job.shards is not None else "Free some space"
        raise DiskFullError(
            f"{job.work.folder}: the pass needs {job.disk_needed:,} bytes of disk at one time, but may use "
            f"{job.disk_allowed:,}. {advice}, or use fewer tokens."
        )


def execute_calibration(job: CalibrationJob, *, events: Events = SILENT) -> StatisticsHeader:
    """Do what is left of a calibration; returns the header of the statistics file. Can be called again after a failure.

    Raises any K2ConvertError.
    """
    from k2convert.calibrate.walk import Walk, walk_layers

    check_calibration_room(job)
    work, num_layers = job.work, job.num_layers
    with work.locked(events=events) as keep:
        was_begun = work.job() is not None
        begun = work.begin(job.job, events=events)
        if job.command is not None:
            keep_command(work.folder, job.command)
        first = work.resume(num_layers=num_layers, also={}, events=events)
        if was_begun:
            events.note(f"{work.statistics}: resuming: {first} of {num_layers} layers done")
        with ExitStack() as stack:
            around: Callable[[int], AbstractContextManager[Checkpoint]]
            around = partial(local_layers, job.source.checkpoint)
            if job.shards is not None:
                shards = replace(job.shards, events=events)
                stack.enter_context(shards.opened(first))
                around = shards.around
            events.begun(job.extent(first), keep=keep)
            walk = Walk(
                ids=job.windows.ids,
                num_layers=num_layers,
                hidden_size=job.architecture.hidden_size,
                seed=job.header.seed,
                chunk=begun.chunk,
                devices=job.devices,
                workers=job.workers,
                around=around,
            )

            def save(layer: LayerStatistics, dropped: int) -> None:
                work.write_layer(layer, replace(job.header, dropped=dropped))

            walk_layers(walk, work, save=save, events=events)
        header = gather_statistics(work, work.statistics, job.header, num_layers=num_layers)
    work.remove()
    return header
