"""The stages of a job with the Hub: fetching shards of a remote source, and uploading finished ones.

Uploads go to the work branch, and from there to main. A shard may leave the disk when the branch lists it with the
sha256 of its record, which was computed while it was written. The record goes to the branch with
it, so that a different machine can continue the job.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event

from k2convert.check.shards import check_finished_shard
from k2convert.checkpoint.files import discard_file, write_atomically
from k2convert.checkpoint.folders import make_folder
from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.names import DONE_FOLDER, SOURCE_COPY_FOLDER, WORK_FOLDER
from k2convert.checkpoint.reader import leave_cache
from k2convert.errors import ChangedFileError, CheckpointError, counted
from k2convert.hub.branch import Branch, Upload, branch_name, sent_operation
from k2convert.hub.download import download_shard
from k2convert.hub.preflight import Target
from k2convert.hub.segments import part_path
from k2convert.hub.source import RemoteRepo
from k2convert.job.prepare import Job
from k2convert.job.resources import Item
from k2convert.job.shard import ShardTask
from k2convert.models import find_family
from k2convert.records.document import seal, unseal
from k2convert.records.events import SILENT, Events
from k2convert.records.fingerprint import JobDescription
from k2convert.records.journal import Journal, PackedRecords
from k2convert.records.ledger import ShardRecord


@dataclass(slots=True)
class Uploads:
    """The pipeline's UploadStage for one job. `records` is shared with the converting side."""

    branch: Branch
    journal: Journal
    records: PackedRecords
    events: Events = SILENT
    _on_branch: list[str] = field(default_factory=list[str])
    _sent_by_node: set[str] = field(default_factory=set[str])

    @property
    def num_pending(self) -> int:
        return self.branch.num_pending + len(self._on_branch)

    def is_group_due(self) -> bool:
        return self.branch.is_group_due() or len(self._on_branch) > 0

    def upload(self, name: str) -> None:
        """Send a shard's file unless it is there; raises ChangedFileError for other bytes than were recorded."""
        path = self.journal.destination / name
        record = self.records[name]
        if not record.is_checked or record.sha256 is None:
            raise ChangedFileError(path)
        upload = Upload(name, path, record.sha256, record.file_bytes)
        if name in self._sent_by_node:
            operation = sent_operation(name, sha256=record.sha256, num_bytes=record.file_bytes)
        elif self.has_arrived(name):
            self._on_branch.append(name)
            self.events.transferred(uploaded=record.file_bytes, is_new=False)
            return
        else:
            operation = self.branch.send(upload, sent=lambda sent: self.events.transferred(uploaded=sent))
            leave_cache(path)
        self.branch.add(upload, operation, records={_path_on_branch(name): seal(record)})

    def adopt(self, record: ShardRecord) -> None:
        """Take over a shard that another process has sent."""
        self.journal.log.declare(record.shard, record)
        self.records[record.shard] = record
        self._sent_by_node.add(record.shard)

    def commit(self) -> list[str]:
        """Commit what was sent; returns the shards whose local files are no longer needed."""
        on_branch = list(self._on_branch)  # other threads may add to it meanwhile
        names = on_branch + [upload.name for upload in self.branch.commit_group()]
        del self._on_branch[: len(on_branch)]
        return names

    def restore(self, job: JobDescription) -> None:
        """Take over what the journal and the branch know of a job."""
        self.records.update(self.journal.find_records(job.digest)[0])
        wanted = {_path_on_branch(shard) for shard in job.shards if shard not in self.records}
        for path, data in self.branch.read_records(wanted=wanted.__contains__).items():
            with suppress(ValueError):  # CheckpointError is one: a damaged record is none
                record = unseal(ShardRecord, data.decode(), where=path)
                if _path_on_branch(record.shard) == path:
                    self.journal.log.declare(record.shard, record)
                    if record.fingerprint == job.digest:
                        self.records[record.shard] = record

    def is_checked(self, name: str) -> bool:
        """Return whether a shard was converted and compared with the source. A local run does not compare."""
        record = self.records.get(name)
        return record is not None and record.is_checked

    def has_arrived(self, name: str) -> bool:
        """Return whether a shard needs neither conversion nor upload."""
        record = self.records.get(name)
        return record is not None and self.branch.has(name, record.sha256 or "", record.file_bytes)

    def commit_to_main(self, *, files: Mapping[str, Path | bytes], gone: Collection[str], message: str) -> str:
        """Put all shards and `files` on main in one commit, without what is `gone`; returns its id."""
        shards = {name: (record.sha256 or "", record.file_bytes) for name, record in self.records.items()}
        return self.branch.commit_to_main(shards=shards, files=files, gone=gone, message=message)


def _path_on_branch(shard: str) -> str:
    return f"{DONE_FOLDER}/{shard}.json"


def open_uploads(job: Job, target: Target, journal: Journal, events: Events) -> Uploads:
    """Open the work branch, and take over what an earlier run left there."""
    branch = Branch(job.hub, target, branch_name(job.digest))
    branch.open()
    uploads = Uploads(branch, journal, PackedRecords(), events)
    uploads.restore(job.description)
    if num_unchecked := sum(not uploads.is_checked(name) for name in uploads.records):
        job.hub.notify(f"{counted(num_unchecked, 'shard')} of an earlier run not validated: converting again")
    return uploads


def copy_small_files(job: Job) -> Path:
    """Copy a remote source's small files into the work folder: they were fetched to a temporary one. Returns it."""
    planned_from = job.source.checkpoint.folder
    folder = job.destination.folder / WORK_FOLDER / SOURCE_COPY_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted(planned_from.rglob("*")):
        target = folder / path.relative_to(planned_from)
        if path.is_file():
            make_folder(target.parent)
            write_atomically(target, path)
    return folder


def clean_up_downloads(job: Job, items: Sequence[Item], to_upload: Sequence[Item]) -> None:
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
            discard_file(path)


def fetch_shard(job: Job, remote: RemoteRepo, shard: str, *, stop: Event, events: Events) -> None:
    """Download one source shard and check that its header is the one of the plan (CheckpointError)."""
    path = job.downloads / shard

    def arrived(num_bytes: int, is_new: bool) -> None:
        events.transferred(downloaded=num_bytes, is_new=is_new)

    make_folder(job.downloads)
    download_shard(job.hub, remote, shard, target=path, stop=stop, arrived=arrived)
    if read_header(path).digest != job.source.checkpoint.headers[shard].digest:
        raise CheckpointError(f"{remote.repo}/{shard}: its header changed since planning. Run the same command again.")


def check_for_upload(task: ShardTask, record: ShardRecord) -> ShardRecord:
    """Validate a shard that was just written, while its source is here; return the record with the findings.

    Raises InvalidCheckpointError if the shard is not what the source gives; its file is removed.
    """
    path = task.destination / record.shard
    try:
        checked = check_finished_shard(
            path,
            record,
            source_folder=task.source_folder,
            recipe=task.recipe,
            calibration=task.calibration,
            family=find_family(task.family),
        )
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return replace(record, checked=checked)
