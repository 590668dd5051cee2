"""The journal of one destination: one record per finished shard, one description of the job, one lock.

    DEST/.k2convert/job.json              fingerprint, recipe and list of shards, written before the first shard
    DEST/.k2convert/shards/SHARD.json     written after SHARD is complete and synced: the only claim of "done"
    DEST/.k2convert/lock                  held by the running process (flock: the kernel frees it when the owner dies);
                                          its number and how far it is, for `status`; empty after the run

Nothing that a finished job leaves in these files depends on time, host or path: an interrupted and an uninterrupted run
end in the same bytes.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final, TextIO

from k2convert.checkpoint.files import TEMPORARY_SUFFIX, dump_json, make_folder, read_json_file, write_atomically
from k2convert.checkpoint.names import (
    CONFIG_NAME,
    INDEX_NAME,
    JOB_NAME,
    LEDGER_NAME,
    LOCK_NAME,
    RECORDS_FOLDER,
    UPLOADS_FOLDER,
    WORK_FOLDER,
)
from k2convert.errors import (
    CheckpointError,
    DestinationError,
    DestinationWriteError,
    LockedError,
    MalformedFileError,
    ResumeError,
)
from k2convert.records.command import JobCommand, read_command
from k2convert.records.events import Keep
from k2convert.records.fingerprint import fingerprint_digest
from k2convert.records.shard_record import ShardRecord
from k2convert.records.tally import parse_summary

_MAX_KEPT: Final = 1 << 16  # characters read from a lock file


@dataclass(frozen=True, slots=True)
class JobDescription:
    """What a destination is for: the fingerprint, the resolved recipe, and the planned bytes of every shard."""

    fingerprint: dict[str, Any]
    recipe: dict[str, Any]
    shards: dict[str, int]

    @property
    def digest(self) -> str:
        """The digest of the fingerprint, as the job's records carry it."""
        return fingerprint_digest(self.fingerprint)


@dataclass(frozen=True, slots=True)
class JobState:
    """What `status` shows: the job, its finished shards, and whether it is complete or running.

    `command` resumes an unfinished job; jobs that another program began have none. `progress` is what the running
    process last said (Tally.summary), `progress_age` how many seconds ago that was.
    """

    job: JobDescription
    finished: dict[str, ShardRecord]
    is_complete: bool
    is_running: bool
    command: JobCommand | None = None
    progress: dict[str, Any] | None = None
    progress_age: float = 0.0


class Journal:
    """The journal of one destination folder."""

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.folder = destination / WORK_FOLDER
        self._records = self.folder / RECORDS_FOLDER
        self._job_path = self.folder / JOB_NAME
        self._lock_path = self.folder / LOCK_NAME

    @contextmanager
    def locked(self) -> Generator[Keep]:
        """Lock the destination for this process; raises LockedError while another process has it.

        Yields a function that keeps one line in the lock file, for `status`.
        """
        make_folder(self.folder)
        with self._open_lock(os.O_RDWR | os.O_CREAT) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise LockedError(
                    f"{self.destination}: another run (process {lock.readline().strip() or 'unknown'}) is working "
                    "here. Wait for it or stop it, then run the same command again."
                ) from None
            _write_owner(lock, "")
            try:
                yield partial(_keep, lock)
            finally:
                lock.truncate(0)

    def begin(self, job: JobDescription) -> None:
        """Start a job, or resume it if its fingerprint is the same; raises ResumeError naming what differs."""
        found = self.job()
        if found is None:
            make_folder(self._records)
            document = {"fingerprint": job.fingerprint, "recipe": job.recipe, "shards": job.shards}
            write_atomically(self._job_path, dump_json(document))
            return
        old, new = found.fingerprint, job.fingerprint
        if different := [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]:
            changes = "; ".join(f"{key} was {old.get(key)!r}, now {new.get(key)!r}" for key in different)
            raise ResumeError(
                f"{self.destination}: holds a different job: {changes}. Choose a different folder, or delete this one "
                "to start over."
            )
        self._sweep()

    def job(self) -> JobDescription | None:
        """Return the job begun here, or None; raises CheckpointError if its description is damaged."""
        if not self._job_path.exists() and not self._job_path.is_symlink():
            return None
        try:
            return _job_description(read_json_file(self._job_path))
        except (CheckpointError, ValueError):
            raise CheckpointError(
                f"{self._job_path}: damaged, or written by a different version. Delete it and run the same command "
                "again: finished shards are kept."
            ) from None

    def pinned_revision(self) -> str | None:
        """Return the commit of the Hub source that the job here began with, if any."""
        job = self.job()
        revision: Any = None if job is None else job.fingerprint.get("source_revision")
        return revision if isinstance(revision, str) else None

    def record(self, record: ShardRecord) -> None:
        """Declare a shard finished. Its file must be in place and synced."""
        write_atomically(self._records / f"{record.shard}.json", json.dumps(record.to_dict()).encode())

    def records(self, digest: str) -> dict[str, ShardRecord]:
        """Return the records of the job with this fingerprint digest, by shard."""
        return {name: record for name, record in self.all_records().items() if record.fingerprint == digest}

    def all_records(self) -> dict[str, ShardRecord]:
        """Return every record by shard, also those of other jobs; raises CheckpointError for a damaged one."""
        found = (_read_record(path) for path in sorted(self._records.glob("*.json")))
        return {record.shard: record for record in found}

    def finished(self, digest: str) -> dict[str, ShardRecord]:
        """Return the records of a job whose shards are here with the recorded size."""
        return {name: record for name, record in self.records(digest).items() if self.has_file(record)}

    def has_file(self, record: ShardRecord) -> bool:
        """Return whether a record's shard is here with the recorded size. An uploaded shard may have been removed."""
        target = self.destination / record.shard
        return target.is_file() and target.stat().st_size == record.file_bytes

    def state(self) -> JobState:
        """Read the whole journal for display; raises DestinationError if no job was begun here."""
        job = self.job()
        if job is None:
            raise DestinationError(
                f"{self.destination}: holds no conversion. `k2convert run SOURCE {self.destination}` begins one."
            )
        finished = {n: r for n, r in self.records(job.digest).items() if self.has_file(r) or self._was_uploaded(n)}
        running, progress, age = self._running()
        is_assembled = all((self.destination / name).is_file() for name in (CONFIG_NAME, INDEX_NAME, LEDGER_NAME))
        return JobState(
            job=job,
            finished=finished,
            is_complete=is_assembled and finished.keys() >= job.shards.keys(),
            is_running=running,
            command=read_command(self.destination),
            progress=progress,
            progress_age=age,
        )

    def _was_uploaded(self, shard: str) -> bool:
        """Return whether a shard was hashed for upload. Its file may be removed after that."""
        return (self.folder / UPLOADS_FOLDER / f"{shard}.json").exists()

    def _running(self) -> tuple[bool, dict[str, Any] | None, float]:
        """Return whether a process works here, and what it last said about its progress and how long ago."""
        if not self._lock_path.exists():
            return False, None, 0.0
        with self._open_lock(os.O_RDONLY) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                _, _, said = lock.read(_MAX_KEPT).partition("\n")
                age = time.time() - os.fstat(lock.fileno()).st_mtime
                return True, parse_summary(said), max(age, 0.0)
            return False, None, 0.0

    def _open_lock(self, flags: int) -> TextIO:
        """Open the lock file without following a link, which might lead to any file."""
        path = self._lock_path
        try:
            descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
            if not S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR):
                raise DestinationError(f"{path}: is a link or a folder, not a file. Remove it.") from None
            raise DestinationWriteError(
                f"{path}: cannot be opened ({error.strerror}). Choose a folder that you may write to."
            ) from None
        return os.fdopen(descriptor, "r+" if flags & os.O_RDWR else "r")

    def _sweep(self) -> None:
        """Remove the half-written files of a killed run."""
        make_folder(self._records)
        for folder in (self.destination, self.folder, self._records):
            for path in folder.glob(f"*{TEMPORARY_SUFFIX}"):
                path.unlink(missing_ok=True)


def _write_owner(lock: TextIO, text: str) -> None:
    """Write this process's number and a line of text into the lock file."""
    lock.seek(0)
    lock.truncate()
    lock.write(f"{os.getpid()}\n{text}")
    lock.flush()


def _keep(lock: TextIO, text: str) -> None:
    with suppress(OSError, ValueError):  # a display for others must not end the work; the file may be closed already
        _write_owner(lock, text)


def _job_description(document: dict[str, Any]) -> JobDescription:
    """Check what job.json holds; raises ValueError."""
    if not all(isinstance(document.get(key), dict) for key in ("fingerprint", "recipe", "shards")):
        raise ValueError("a part is missing")
    if not all(isinstance(document["recipe"].get(key), str) for key in ("name", "target", "rule", "layout")):
        raise ValueError("no recipe")
    if not all(type(num_bytes) is int for num_bytes in document["shards"].values()):
        raise ValueError("no sizes")
    return JobDescription(document["fingerprint"], document["recipe"], document["shards"])


def _read_record(path: Path) -> ShardRecord:
    remedy = "Delete it: its shard will be converted again."
    try:
        record = ShardRecord.from_dict(read_json_file(path))
        if f"{record.shard}.json" != path.name:
            raise ValueError(f"shard is {record.shard!r}")
    except MalformedFileError:
        raise CheckpointError(f"{path}: damaged. {remedy}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not a record of this version ({error}). {remedy}") from None
    return record
