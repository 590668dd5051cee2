"""Plan calibrations as jobs. Nothing of calibrate/ is loaded without one."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from k2convert.errors import DestinationError
from k2convert.hub.client import Hub
from k2convert.job.limits import allowed_disk
from k2convert.job.locations import Source, check_statistics_path
from k2convert.job.machine import device_name
from k2convert.models import detect_family
from k2convert.plan.plan import ShardJob, claim_projections
from k2convert.plan.recipe import load_recipe
from k2convert.records.fingerprint import job_fingerprint
from k2convert.records.job_description import JobDescription

if TYPE_CHECKING:
    from k2convert.calibrate.calibration import CalibrationPlan, CalibrationText


def plan_walk(
    text: "CalibrationText",
    source: Source,
    folder: Path,
    shards: Sequence[ShardJob],
    description: JobDescription,
    *,
    devices: tuple[str, ...],
    hub: Hub,
) -> "CalibrationPlan":
    """Plan the walk of a conversion; raises DestinationError if its statistics cannot be saved."""
    from k2convert.calibrate.calibration import WalkSource, plan_calibration
    from k2convert.calibrate.layer_files import conversion_work

    path = text.saved
    if path is not None:
        check_statistics_path(path, source=source.checkpoint.folder if source.remote is None else None)
        if path.resolve().is_relative_to(folder.resolve()):
            raise DestinationError(
                f"{path}: is inside the destination, where only the result goes. Choose a path outside."
            )
    walk = plan_calibration(
        text,
        WalkSource(source.checkpoint, source.remote, hub, description.source),
        identity=description.fingerprint,
        work=conversion_work(folder),
        devices=devices,
        shards=shards,
    )
    walk.finished_header()  # refuses statistics of anything else in its place
    return walk


def plan_statistics(
    text: "CalibrationText",
    source: Source,
    statistics: Path,
    *,
    devices: tuple[str, ...],
    hub: Hub,
    max_disk: int | None = None,
) -> "CalibrationPlan":
    """Plan the calibration that writes a statistics file; raises PlanError, DiskFullError, DestinationError."""
    from k2convert.calibrate.calibration import WalkSource, plan_calibration, source_fields
    from k2convert.calibrate.layer_files import statistics_work

    checkpoint, work = source.checkpoint, statistics_work(statistics)
    check_statistics_path(statistics, source=checkpoint.folder if source.remote is None else None)
    recipe = load_recipe(detect_family(checkpoint).recipe, {})
    claim_projections(source=checkpoint, recipe=recipe)  # refuses a source that cannot be converted
    fingerprint = job_fingerprint(source=checkpoint, recipe=recipe, revision=source.revision)
    return plan_calibration(
        text,
        WalkSource(checkpoint, source.remote, hub, source.identities()),
        identity=source_fields(fingerprint) | text.identity(device_name(devices)),
        work=work,
        devices=devices,
        disk_allowed=allowed_disk(work.folder, uses_hub=source.remote is not None, max_disk=max_disk),
    )
