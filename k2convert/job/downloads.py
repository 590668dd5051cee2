"""The fetch stage of a job: the work folder's copy of a remote source."""

from collections.abc import Sequence
from pathlib import Path
from threading import Event

from k2convert.checkpoint.files import write_atomically, writing
from k2convert.checkpoint.folders import make_folder, remove_folder
from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.names import SOURCE_COPY_FOLDER, WORK_FOLDER
from k2convert.errors import CheckpointError
from k2convert.hub.download import download_shard
from k2convert.hub.segments import part_path
from k2convert.hub.source import RemoteRepo
from k2convert.job.prepare import Job
from k2convert.job.room import Item
from k2convert.records.events import Events


def keep_small_files(job: Job) -> Path:
    """Copy a remote source's small files into the work folder: they were fetched to a temporary one. Returns it."""
    planned_from = job.source.checkpoint.folder
    if job.source.remote is None:
        return planned_from
    root = job.destination.folder
    folder = root / WORK_FOLDER / SOURCE_COPY_FOLDER
    remove_folder(folder, root=root)
    for path in sorted(planned_from.rglob("*")):
        target = folder / path.relative_to(planned_from)
        if path.is_file():
            make_folder(target.parent, root=root)
            write_atomically(target, path, root=root)
    return folder


def sweep_downloads(job: Job, items: Sequence[Item], to_upload: Sequence[Item]) -> None:
    """Keep the downloads of an earlier run that are needed first, as far as the room allows. Remove the others."""
    keep: set[str] = set()
    taken = sum(item.output_bytes for item in to_upload)
    for item in items:
        taken += sum(job.limits.source_bytes.get(s, 0) for s in item.sources if s not in keep) + item.output_bytes
        if taken > job.limits.room and (keep or to_upload):
            break
        keep.update(item.sources)
    names = {n for s in keep for n in (s, part_path(Path(s)).name, f"{part_path(Path(s)).name}.json")}
    for path in job.downloads.glob("*"):
        if path.name not in names:
            remove_file(path)


def fetch_shard(job: Job, remote: RemoteRepo, shard: str, *, stop: Event, events: Events) -> None:
    """Download one source shard and check that its header is the one of the plan (CheckpointError)."""
    path = job.downloads / shard

    def arrived(num_bytes: int, is_new: bool) -> None:
        events.transferred(downloaded=num_bytes, is_new=is_new)

    make_folder(job.downloads, root=job.destination.folder)
    download_shard(job.hub, remote, shard, target=path, stop=stop, arrived=arrived)
    if read_header(path).digest != job.source.checkpoint.headers[shard].digest:
        raise CheckpointError(f"{remote.repo}/{shard}: its header changed since planning. Run the same command again.")


def remove_file(path: Path) -> None:
    """Remove a file if it exists."""
    with writing(path):
        path.unlink(missing_ok=True)
