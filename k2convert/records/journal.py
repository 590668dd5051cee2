"""What is done, durably: one record per finished shard, one fingerprint per job, one lock per destination.

    DEST/.k2convert/job.json              fingerprint and list of shards, written before the first shard
    DEST/.k2convert/shards/SHARD.json     written after SHARD is whole and synced: the only claim of "done"
    DEST/.k2convert/lock                  held by the running process (flock: the kernel frees it when the owner dies)
    DEST/k2convert.json                   the ledger that travels with the result, derived from the records

Nothing in these files depends on time, host or path: an interrupted and an uninterrupted run end in the same bytes.
"""

import errno
import fcntl
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, TextIO, cast

from k2convert.checkpoint.files import TEMPORARY_SUFFIX, dump_json, make_folder, read_json_file, write_atomically
from k2convert.checkpoint.names import INDEX_NAME, LEDGER_NAME, WORK_FOLDER
from k2convert.errors import CheckpointError, DestinationError, DestinationWriteError, LockedError, ResumeError
from k2convert.records.fingerprint import fingerprint_digest
from k2convert.records.shard_record import ShardRecord


@dataclass(frozen=True, slots=True)
class JobState:
    """What `status` shows: the job's identity, all shards with their planned bytes, and the finished ones."""

    fingerprint: dict[str, Any]
    recipe: dict[str, Any]
    shards: dict[str, int]
    finished: dict[str, ShardRecord]
    is_complete: bool
    is_running: bool


class Journal:
    """The journal of one destination folder."""

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.folder = destination / WORK_FOLDER
        self._records = self.folder / "shards"

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the destination for this process; raises LockedError while another one does."""
        make_folder(self.folder)
        with self._open_lock(os.O_RDWR | os.O_CREAT) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise LockedError(
                    f"{self.destination}: another run (process {lock.read().strip() or 'unknown'}) is working here. "
                    "Wait for it or stop it; running the command again resumes."
                ) from None
            lock.seek(0)
            lock.truncate()
            lock.write(str(os.getpid()))
            lock.flush()
            try:
                yield
            finally:
                lock.truncate(0)

    def begin(self, *, fingerprint: dict[str, Any], recipe: dict[str, Any], shards: dict[str, int]) -> None:
        """Start the job, or resume it if its fingerprint is the same; raises ResumeError naming what differs."""
        job = self._read_job()
        if job is not None:
            found = cast(dict[str, Any], job["fingerprint"])
            different = [key for key in sorted({*found, *fingerprint}) if found.get(key) != fingerprint.get(key)]
            if different:
                changes = "; ".join(f"{key} was {found.get(key)!r}, now {fingerprint.get(key)!r}" for key in different)
                raise ResumeError(
                    f"{self.destination}: was begun as another job: {changes}. Use another folder, or delete this one "
                    "to start over."
                )
            self._sweep()
            return
        make_folder(self._records)
        document = {"fingerprint": fingerprint, "recipe": recipe, "shards": shards}
        write_atomically(self._job_path, dump_json(document))

    def pinned_revision(self) -> str | None:
        """The commit of the Hub that the job here was begun with, if there is one."""
        job = self._read_job()
        revision: Any = None if job is None else job["fingerprint"].get("source_revision")
        return revision if isinstance(revision, str) else None

    def record(self, record: ShardRecord) -> None:
        """Declare a shard finished; its file must be in place and synced."""
        write_atomically(self._records / f"{record.shard}.json", json.dumps(record.to_dict()).encode())

    def finished(self, *, fingerprint: str | None = None) -> dict[str, ShardRecord]:
        """Records of the shards whose files are in place with the recorded size; see `records`."""
        found = self.records(fingerprint=fingerprint)
        return {name: record for name, record in found.items() if self.has_file(record)}

    def has_file(self, record: ShardRecord) -> bool:
        """Whether the shard of a record is here, with the recorded size; it may have been published and removed."""
        target = self.destination / record.shard
        return target.is_file() and target.stat().st_size == record.file_bytes

    def records(self, *, fingerprint: str | None = None) -> dict[str, ShardRecord]:
        """All records by shard; with the digest of a job's fingerprint, only those of that job."""
        result: dict[str, ShardRecord] = {}
        for path in sorted(self._records.glob("*.json")):
            record = _read_record(path)
            if fingerprint is None or record.fingerprint == fingerprint:
                result[record.shard] = record
        return result

    def state(self, *, config_name: str) -> JobState:
        """Read the whole journal for display; raises DestinationError where there is none."""
        job = self._read_job()
        if job is None:
            raise DestinationError(f"{self.destination}: no conversion has been begun here.")
        records = self.records(fingerprint=fingerprint_digest(job["fingerprint"]))
        finished = {n: r for n, r in records.items() if self.has_file(r) or self._was_shipped(n)}
        is_assembled = all((self.destination / name).is_file() for name in (config_name, INDEX_NAME, LEDGER_NAME))
        return JobState(
            fingerprint=job["fingerprint"],
            recipe=job["recipe"],
            shards=job["shards"],
            finished=finished,
            is_complete=is_assembled and finished.keys() >= job["shards"].keys(),
            is_running=self._is_running(),
        )

    def _was_shipped(self, shard: str) -> bool:
        """Whether an upload record says that a shard was hashed to be published, after which its file may go."""
        return (self.folder / "uploads" / f"{shard}.json").exists()

    def _is_running(self) -> bool:
        if not (self.folder / "lock").exists():
            return False
        with self._open_lock(os.O_RDONLY) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    @property
    def _job_path(self) -> Path:
        return self.folder / "job.json"

    def _read_job(self) -> dict[str, Any] | None:
        """The job begun here, None where there is none; CheckpointError where its description is damaged."""
        if not self._job_path.exists() and not self._job_path.is_symlink():
            return None
        try:
            job = read_json_file(self._job_path)
            _check_job(job)
        except (CheckpointError, ValueError):
            raise CheckpointError(
                f"{self._job_path}: damaged, or not of this version. Delete it and run the same command again: what is "
                "finished is kept."
            ) from None
        return job

    def _open_lock(self, flags: int) -> TextIO:
        """Open the lock as a file of our own: a link might lead to somebody else's."""
        path = self.folder / "lock"
        try:
            descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
            if not S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR):
                raise DestinationError(f"{path}: is a link or a folder, not a file. Remove it.") from None
            raise DestinationWriteError(
                f"{path}: cannot be opened ({error.strerror}). Name a folder you may write to."
            ) from None
        return os.fdopen(descriptor, "r+" if flags & os.O_RDWR else "r")

    def _sweep(self) -> None:
        """Remove half-written files that a killed run left."""
        make_folder(self._records)
        for folder in (self.destination, self.folder, self._records):
            for path in folder.glob(f"*{TEMPORARY_SUFFIX}"):
                path.unlink(missing_ok=True)


def _check_job(job: dict[str, Any]) -> None:
    """Hold what is read of job.json against its form; ValueError."""
    if not all(isinstance(job.get(key), dict) for key in ("fingerprint", "recipe", "shards")):
        raise ValueError("a part is missing")
    if not all(isinstance(job["recipe"].get(key), str) for key in ("name", "target", "rule", "layout")):
        raise ValueError("no recipe")
    if not all(type(num_bytes) is int for num_bytes in job["shards"].values()):
        raise ValueError("no sizes")


def _read_record(path: Path) -> ShardRecord:
    remedy = "Delete it: its shard will be converted again."
    try:
        record = ShardRecord.from_dict(read_json_file(path))
        if f"{record.shard}.json" != path.name:
            raise ValueError(f"shard is {record.shard!r}")
    except CheckpointError:
        raise CheckpointError(f"{path}: damaged. {remedy}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not a record of this version ({error}). {remedy}") from None
    return record
