"""Plan a job: what to convert, where to, and how it uses the machine and the disk. Writes nothing."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k2convert.checkpoint.index import Checkpoint, engine_links_out, list_sidecars, refuse_links_out
from k2convert.checkpoint.names import DOWNLOADS_FOLDER, WORK_FOLDER
from k2convert.checkpoint.writer import NUM_STAGING, STAGING_BYTES
from k2convert.errors import (
    CheckpointError,
    HubError,
    SourceChangedError,
    check_disk,
    format_bytes,
    remedy,
    require_extra,
)
from k2convert.hub.client import Hub, RepoRef, check_endpoint
from k2convert.job.locations import (
    Destination,
    check_destination,
    commit_of,
    fetch_ledger,
    open_checkpoint_at,
    refuse_other_files,
    refuse_symlinks,
    repo_at,
)
from k2convert.job.opening import TextFiles, read_text
from k2convert.job.resources import (
    RECORD_BYTES,
    SHARD_RECORD_BYTES,
    Item,
    Limits,
    allowed_disk,
    check_memory,
    choose_workers,
    device_name,
    free_bytes,
    inflight_bytes,
    least_room,
    output_items,
    xet_bytes,
)
from k2convert.machine import available_memory, num_cores, peak_bytes
from k2convert.models import check_calibrated, detect_family, read_architecture
from k2convert.models.projections import SOURCE_REMEDY
from k2convert.plan.plan import Plan, plan_conversion
from k2convert.plan.recipe import Recipe, load_recipe, resolve_recipe
from k2convert.quantize.rules import RULES
from k2convert.records.calibration import CalibrationRecord
from k2convert.records.command import JobCommand
from k2convert.records.fingerprint import (
    IDENTITY_VERSION,
    JobDescription,
    Source,
    check_version,
    config_obstacle,
    copied_files,
    job_fingerprint,
    source_digest,
)
from k2convert.records.journal import Journal, PackedRecords
from k2convert.records.ledger import find_ledger

if TYPE_CHECKING:
    from k2convert.calibration.conversion import CalibrationPlan
    from k2convert.forward.layer_pass import PassText
    from k2convert.hub.preflight import Target
    from k2convert.hub.source_card import SourceCard

TENSOR_BYTES: Final = 500  # of memory, for a tensor of a result that is checked; K2 has 277,335
CHECK_BYTES: Final = 64 << 20  # of memory, for rows of the certificate and buffers of connections; measured
_MOST_CHANGES: Final = 12  # of a source, in one line


@dataclass(frozen=True, slots=True)
class Job:
    """A planned job. Nothing has been written yet."""

    source: Source
    destination: Destination
    hub: Hub
    target: "Target | None"  # set if the result goes to the Hub
    card: "SourceCard | None"  # what the Hub accepts of the source's model card
    is_published: bool
    plan: Plan
    items: tuple[Item, ...]
    description: JobDescription
    limits: Limits
    finished: PackedRecords  # shards that an earlier run left in the destination folder
    command: JobCommand | None = None  # what the user typed
    gptq: "CalibrationPlan | None" = None  # the layer pass of rule gptq
    calibrated: CalibrationRecord | None = None  # what the ledger says of it, None until it is done

    @property
    def uses_hub(self) -> bool:
        return self.source.remote is not None or self.target is not None

    @property
    def digest(self) -> str:
        return self.description.digest

    @property
    def downloads(self) -> Path:
        return self.destination.folder / WORK_FOLDER / DOWNLOADS_FOLDER

    @property
    def bytes_in(self) -> int:
        return sum(shard.bytes_in for shard in self.plan.jobs)

    @property
    def finished_bytes_in(self) -> int:
        return sum(shard.bytes_in for shard in self.plan.jobs if shard.name in self.finished)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of a conversion. `recipe` is a name or a file, by default the family's; `settings` replace its keys."""

    source: str
    destination: Destination
    recipe: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    text: TextFiles | None = None
    workers: int | None = None
    max_disk: int | None = None
    private: bool = True


@contextmanager
def open_job(options: JobOptions, *, hub: Hub) -> Generator[Job]:
    """Open both ends of a conversion and plan it for the block. Writes nothing. Raises any K2ConvertError."""
    begun = Journal(options.destination.folder).job()
    if begun is not None:
        check_version(begun.version, options.destination.folder)
    pinned = _pinned(options, begun, hub)
    recipe = None if begun is None else begun.recipe
    with open_checkpoint_at(options.source, hub=hub, pinned=pinned, recipe=recipe) as source:
        try:
            if begun is not None:
                _check_config(begun, source.checkpoint, options.destination)
            job = _planned(options, source, hub)
        except SourceChangedError as error:
            assert begun is not None
            raise SourceChangedError(f"{error} {_way_back(begun, source, hub)}") from None
        yield job


def _check_config(begun: JobDescription, source: Checkpoint, destination: Destination) -> None:
    """Refuse a config.json that the weights of the destination's job cannot have (SourceChangedError)."""
    if begun.fingerprint["source_headers"] != source_digest(source):
        return
    if obstacle := config_obstacle(begun.config, source, source.config_text, begun.recipe):
        raise SourceChangedError(f"{destination}: {obstacle.problem}. {obstacle.advice}".rstrip())


def _way_back(begun: JobDescription, source: Source, hub: Hub) -> str:
    """Return what to do to go on with the source as it was when a job began."""
    commit = begun.source_revision
    if commit is None or source.repo is None:
        return "To go on, restore the source."
    from k2convert.hub.source import find_commit

    if find_commit(hub, source.repo, commit) is None:
        return f"{source.repo} does not have the commit {commit[:7]} any more, with which the job began."
    return f"To go on with the source of then, add @{commit} to it."


def _planned(options: JobOptions, source: Source, hub: Hub) -> Job:
    checkpoint = source.checkpoint
    chosen = choose_recipe(checkpoint, options.recipe, options.settings)
    if options.text is not None or (chosen.target == "nvfp4" and RULES[chosen.rule].needs_text):
        check_calibrated(checkpoint)
    recipe = resolve_recipe(chosen, has_text=options.text is not None, to_hub=options.destination.repo is not None)
    if recipe.quantizer == "reference" and recipe.rule != chosen.rule:
        hub.notify(f"note: quantizer reference converts by rule {recipe.rule} only, so that is the rule")
    text = None
    if options.text is not None:
        text = read_text(options.text, recipe.calibration, source, hub)
    return prepare(options, source, recipe, text=text, hub=hub)


def _pinned(options: JobOptions, begun: JobDescription | None, hub: Hub) -> str | None:
    """Return the commit of the source that the destination's job or published result is of, if no other is named."""
    ref = repo_at(options.source)
    if ref is None or ref.revision is not None:
        return None
    if begun is not None:
        return begun.source_revision
    if options.destination.repo is None:
        return None
    from k2convert.hub.source import resolve_source

    with suppress(CheckpointError, HubError):  # the checks of the target name what is wrong, if anything is
        target = resolve_source(hub, RepoRef(options.destination.repo, options.destination.revision))
        return commit_of(fetch_ledger(hub, target.repo, target.commit, target.files), options.source)
    return None


def choose_recipe(source: Checkpoint, recipe: str | None, overrides: Mapping[str, Any]) -> Recipe:
    """Load the named recipe, or that of the source's family, with command-line overrides."""
    return load_recipe(recipe or detect_family(source).recipe, overrides)


def prepare(
    options: JobOptions,
    source: Source,
    recipe: Recipe,
    *,
    text: "PassText | None",
    hub: Hub,
) -> Job:
    """Plan a job by a resolved recipe. Raises PlanError, CalibrationError, DestinationError, HubError,
    DiskFullError.
    """
    checkpoint = source.checkpoint
    destination = options.destination
    folder = destination.folder
    if recipe.quantizer == "reference" and recipe.target == "nvfp4":
        require_extra("reference", purpose="the reference quantizer")
    check_destination(folder, source=source.local)
    if folder.is_symlink():
        hub.notify(f"{folder}: is a link, so the result is in {folder.resolve()}")
    # With a text, which channels of a layer are scaled is known when the layer pass has done it: any may be.
    scaled_layers = read_architecture(checkpoint).moe_layers if recipe.smoothing else ()
    plan = plan_conversion(source=checkpoint, recipe=recipe, scaled_layers=scaled_layers)
    items = output_items(plan)
    calibration = None
    calibrated = None
    identity = None
    if text is not None:
        identity = text.identity(device_name(text.devices))
    with remedy(SOURCE_REMEDY):
        sidecars = list_sidecars(checkpoint.folder)
    if destination.repo is not None:  # a folder can be completed, what is published cannot
        refuse_links_out(checkpoint.folder, engine_links_out(checkpoint.folder))
    description = JobDescription(
        fingerprint=job_fingerprint(
            source=checkpoint,
            recipe=plan.recipe,
            revision=source.revision,
            layer_pass=identity,
        ),
        recipe=plan.recipe,
        shards={shard.name: shard.data_bytes for shard in plan.jobs},
        source=source.identities(),
        version=IDENTITY_VERSION,
        config=checkpoint.parse_config(),
        copies=copied_files(checkpoint),
    )
    begun = Journal(folder).job()
    if begun is not None:
        description = _resumed(begun, description, folder, hub)
    finished = Journal(folder).finished(description.digest)
    refuse_symlinks(folder, [*(Path(shard.name) for shard in plan.jobs), *sidecars], finished=finished)
    others = refuse_other_files(folder, jobs=plan.jobs, sidecars=sidecars)
    if others and destination.repo is None:
        hub.warn(f"{folder}: has other files, such as {others[0]}: they stay, and `k2convert publish` sends them too")
    if text is not None:
        from k2convert.calibration.conversion import plan_calibration
        from k2convert.calibration.layer_files import conversion_work

        calibration = plan_calibration(
            text, source, hub=hub, identity=description.identity, work=conversion_work(folder), shards=plan.jobs
        )
        calibrated = _recorded_calibration(folder, description)
        items = tuple(sorted(items, key=lambda item, plan=calibration: plan.needs[item.name].last))
    target, card = _check_target(items, source, destination, private=options.private, hub=hub)
    is_done = False
    if target is not None:
        from k2convert.job.published import has_shards, is_published

        copies = {path.as_posix(): checkpoint.folder / path for path in sidecars}
        is_same = partial(has_shards, description=description, source=source, folder=folder, hub=hub)
        is_done = is_published(hub, target, description.fingerprint, copies, is_same=is_same)
    limits = _plan_limits(options, plan, items, source, num_finished=len(finished), calibration=calibration)
    return Job(
        source=source,
        destination=destination,
        hub=hub,
        target=target,
        card=card,
        is_published=is_done,
        plan=plan,
        items=items,
        description=description,
        limits=limits,
        finished=finished,
        gptq=calibration,
        calibrated=calibrated,
    )


def _resumed(begun: JobDescription, now: JobDescription, folder: Path, hub: Hub) -> JobDescription:
    """Return the job as it goes on in its folder, and say what it takes over from the source; raises ResumeError."""
    changes = begun.changes(now, folder)
    description = begun.resumed_by(now, is_changed=bool(changes))
    Journal(folder).check_resumes(begun, description)
    if changes:
        more = f"; and {len(changes) - _MOST_CHANGES} more" if len(changes) > _MOST_CHANGES else ""
        hub.warn(f"takes over what has changed at the source: {'; '.join(changes[:_MOST_CHANGES])}{more}")
    return description


def _plan_limits(
    options: JobOptions,
    plan: Plan,
    items: Sequence[Item],
    source: Source,
    *,
    num_finished: int,
    calibration: "CalibrationPlan | None",
) -> Limits:
    destination = options.destination
    workers = min(choose_workers(options.workers), max(len(items) - num_finished, 1))
    folder = source.checkpoint.folder
    remote = source.remote
    goes_to_hub = destination.repo is not None
    source_bytes = {name: remote.shard(name).num_bytes for name in source.checkpoint.headers} if remote else {}
    allowed = allowed_disk(destination.folder, uses_hub=remote is not None or goes_to_hub, max_disk=options.max_disk)
    small = sum((folder / p).stat().st_size for p in list_sidecars(folder))
    small += sum(p.stat().st_size for p in folder.glob("*.json"))
    copies = (0 if goes_to_hub else 1) + (remote is not None)  # shards have left the disk when a Hub job copies these
    small_bytes = RECORD_BYTES * len(plan.projections) + small * copies + len(items) * SHARD_RECORD_BYTES
    small_bytes += 0 if calibration is None else calibration.layer_pass.disk_bytes

    shards = least_room(items, source_bytes=source_bytes, outputs_leave=goes_to_hub)
    layer_room = 0
    if calibration is not None:
        ample, least = calibration.layer_pass.fetch_sizes
        layer_room = ample if shards + small_bytes + ample <= allowed else least
    uses_hub = remote is not None or goes_to_hub
    usable = available_memory() - xet_bytes(uploads=goes_to_hub)
    inflight = inflight_bytes(uses_hub=uses_hub, cores=num_cores(), memory=usable)
    return Limits(
        workers=workers,
        source_bytes=source_bytes,
        disk_shards=shards,
        disk_allowed=allowed,
        disk_small=small_bytes + layer_room,
        disk_free=free_bytes(destination.folder),
        inflight=inflight,
        layer_room=layer_room,
    )


def _recorded_calibration(folder: Path, description: JobDescription) -> CalibrationRecord | None:
    with suppress(CheckpointError):
        ledger = find_ledger(folder)
        if ledger is not None and description.describes(ledger.fingerprint):
            return ledger.calibration
    return None


def _check_target(
    items: Sequence[Item], source: Source, destination: Destination, *, private: bool, hub: Hub
) -> "tuple[Target | None, SourceCard | None]":
    """Check the repository that the result goes to, if it goes to one, and the source's card; raises HubError."""
    if destination.repo is None:
        return None, None
    from k2convert.hub.own_card import card_words, published_card
    from k2convert.hub.preflight import check_target
    from k2convert.hub.source_card import accepted_card

    check_endpoint()
    card = source.card
    target = check_target(
        hub,
        repo=destination.repo,
        private=private,
        file_bytes={item.name: item.output_bytes for item in items},
        licence=card.licence,
        source=source.remote,
        revision=destination.revision,
    )
    if words := card_words(None, published_card(hub, target), target.repo):
        target = replace(target, notices=(*target.notices, words))
    return target, accepted_card(hub, card)


def check_room(job: Job) -> None:
    """Refuse a job that cannot finish for lack of disk; raises DiskFullError with both numbers."""
    limits = job.limits
    advice = f"Free {format_bytes(limits.disk_needed - limits.disk_allowed)}, or choose a folder on a different disk."
    if job.uses_hub:
        advice = "Allow more with --max-disk, or free some space."
        if job.target is None:
            advice += " Publishing to the Hub (hf://owner/name) needs room for a few shards only."
    check_disk(
        f"{job.destination.folder}: the job", needed=limits.disk_needed, allowed=limits.disk_allowed, remedy=advice
    )


def memory_bytes(job: Job, *, layer_pass: int = 0) -> int:
    """Return this process's peak, and what is more: work, or for the Hub the end, when a result is checked as a whole.

    Work is shards, as much in staging, Xet's streams, a layer pass, and for the Hub the check of each shard.
    """
    shards = job.limits.inflight + max(job.limits.inflight, job.limits.workers * NUM_STAGING * STAGING_BYTES)
    if job.gptq is not None:  # a small model has less than that
        shards = min(shards, job.bytes_in + job.plan.data_bytes)
    work = shards + layer_pass + xet_bytes(uploads=job.target is not None)
    if job.target is None:
        return peak_bytes() + work
    return peak_bytes() + max(work + CHECK_BYTES, TENSOR_BYTES * sum(shard.num_outputs for shard in job.plan.jobs))


def check_job_memory(job: Job) -> None:
    """Refuse a job whose shards do not fit into the memory (PlanError); a layer pass's own needs are not in this."""
    fewer = "fewer --workers, " if job.limits.workers > 1 else ""
    check_memory(
        str(job.source.local or job.source.repo),
        needed=memory_bytes(job),
        available=available_memory() + peak_bytes(),
        use=f"{fewer}a larger limit (the container's, Slurm's --mem, `ulimit -v`), or ",
    )
