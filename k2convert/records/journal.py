"""The journal of one destination: its finished shards, its job, its lock, and where its result was published.

    DEST/.k2convert/job.json              fingerprint, recipe, list of shards and identity of the source, written before
                                          the first shard
    DEST/.k2convert/done/SHARD.json       written after SHARD is complete and synced: the only claim of "done"; its time
                                          of modification is set to SHARD's, so that a later change of SHARD shows
    DEST/.k2convert/lock                  held by the running process (flock: the kernel frees it when the owner dies);
                                          its number and how far it is, for `status`; empty after the run
    DEST/.k2convert/published.json        where the result was published, written when main of the repository has it;
                                          the shards of a job for the Hub are removed after their upload

Nothing in job.json and done/ depends on time, host or path of the run: an interrupted and an uninterrupted run of the
same source end in the same bytes.
"""

import pickle
import zlib
from collections import UserDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k2convert.checkpoint.files import (
    TEMPORARY_SUFFIX,
    file_digest,
    is_temporary,
    is_there,
    list_folder,
    parse_json_object,
    read_text_file,
    write_atomically,
    writing,
)
from k2convert.checkpoint.folders import check_no_link, make_folder, remove_file
from k2convert.checkpoint.index import check_level
from k2convert.checkpoint.names import (
    CONFIG_NAME,
    EVALUATION_NAME,
    IGNORE_NAME,
    INDEX_NAME,
    JOB_NAME,
    PUBLISHED_NAME,
    SHARD_SUFFIX,
    WORK_FOLDER,
)
from k2convert.errors import CheckpointError, DestinationError, MalformedFileError, counted, quoted, remedy
from k2convert.records.command import say_own_command
from k2convert.records.document import encode, read_document
from k2convert.records.fingerprint import (
    JobDescription,
    changed_shards,
    check_version,
    fingerprint_digest,
    parse_described,
    source_error,
)
from k2convert.records.ledger import Ledger, ShardRecord
from k2convert.records.work_log import WorkLog, check_same


class PackedRecords(UserDict[str, ShardRecord]):
    """Records by shard in a thirtieth of their memory (K3 has 247,296 projections), each made when it is asked for."""

    data: dict[str, Any]  # bytes

    def __getitem__(self, key: str) -> ShardRecord:
        return pickle.loads(zlib.decompress(self.data[key]))

    def __setitem__(self, key: str, item: ShardRecord) -> None:
        self.data[key] = zlib.compress(pickle.dumps(item), level=1)

    def __repr__(self) -> str:
        return f"PackedRecords({counted(len(self), 'shard')})"

    def only(self, shards: Iterable[str]) -> "PackedRecords":
        """Return the records of some of the shards."""
        chosen = PackedRecords()
        chosen.data.update((shard, self.data[shard]) for shard in shards)
        return chosen


class Journal:
    """The journal of one destination folder."""

    def __init__(self, destination: Path, *, suffix: str = TEMPORARY_SUFFIX) -> None:
        """`suffix` is that of temporary files, one of its own for each process that does a part of a job."""
        self.destination = destination
        self.suffix = suffix
        self.folder = destination / WORK_FOLDER
        self.log = WorkLog(self.folder, ShardRecord, suffix=suffix)
        self._job_path = self.folder / JOB_NAME

    def leave_out_of_uploads(self) -> None:
        """Name the work folder in DEST/.gitignore, which git and `hf upload` obey. One that is there stays as it is."""
        path = self.destination / IGNORE_NAME
        if not is_there(path):
            write_atomically(path, f"/{WORK_FOLDER}/\n".encode(), suffix=self.suffix)

    def begin(self, job: JobDescription) -> None:
        """Start a job, or resume it if its identity is the same; raises ResumeError."""
        make_folder(self.log.folder)
        before = self.job()
        if before is None:
            self._describe(job)
        else:
            self.check_resumes(before, job)
            changed = changed_shards(before.source, job.source)
            job = replace(job, source=before.source | {name: job.source[name] for name in changed})
            if job != before:
                self._describe(job)
        self.remove_temporary_files(job)

    def check_resumes(self, before: JobDescription, job: JobDescription) -> None:
        """Refuse to go on as `job` with the job that was begun here if they differ; raises ResumeError.

        The source of a finished shard must be the same. Another shard may have been downloaded again.
        """
        self._check_same(before, job)
        if changed := changed_shards(before.source, job.source):
            records, _ = self.find_records(job.digest)
            used = {name for record in records.values() for name in record.source_headers}
            for name in changed:
                if name in used:
                    raise source_error(name, self.destination)

    def join(self, job: JobDescription) -> None:
        """Start a job, or take part in the same one beside other processes; raises ResumeError."""
        make_folder(self.log.folder)
        if self.job() is None:
            write_atomically(self._job_path, encode(job), suffix=self.suffix, is_first=True)
        before = self.job()
        assert before is not None
        self._check_same(before, job)
        if changed := changed_shards(before.source, job.source):
            raise source_error(changed[0], self.destination)

    def _check_same(self, before: JobDescription, job: JobDescription) -> None:
        if before.version == job.version and before.has_other_headers(job.fingerprint):
            for name in changed_shards(before.source, job.source):
                raise source_error(name, self.destination)
        check_same(
            self.destination,
            before.identity,
            job.identity,
            version=before.version,
            elsewhere="Choose a different destination",
        )

    def _describe(self, job: JobDescription) -> None:
        write_atomically(self._job_path, encode(job))

    def is_begun(self) -> bool:
        """Return whether a job was begun here, also one whose description was removed."""
        return is_there(self._job_path) or is_there(self.log.folder)

    def job(self) -> JobDescription | None:
        """Return the job begun here, or None; raises CheckpointError if its description is damaged."""
        if not is_there(self._job_path):
            return None
        try:
            return parse_described(JobDescription, read_text_file(self._job_path), where=str(self._job_path))
        except MalformedFileError as error:
            check_no_link(self._job_path)
            self._check_version()
            raise CheckpointError(
                f"{error} It is damaged, or written by a different version. Delete it and run the same command again: "
                "finished shards are kept."
            ) from None

    def _check_version(self) -> None:
        """Refuse the description of an earlier release, which may have fields of its own; raises ResumeError."""
        with suppress(MalformedFileError):
            document = parse_json_object(read_text_file(self._job_path), where=str(self._job_path))
            version = document.get("version", 1)
            if "fingerprint" in document and isinstance(version, int):
                check_version(version, self.destination)

    def record(self, record: ShardRecord) -> None:
        """Declare a shard finished. Its file must be in place and synced."""
        path = self.destination / record.shard
        with writing(path):
            mtime_ns = path.stat().st_mtime_ns
        self.log.declare(record.shard, record, mtime_ns=mtime_ns)

    def records(self, result: Ledger) -> PackedRecords:
        """Return the records of a result, whose small files may be newer; raises CheckpointError if one is damaged."""
        records, damaged = self.find_records((self.job_of(result) or result).digest)
        if damaged:
            with remedy("Run the conversion again: its shard is converted again."):
                self._read(damaged[0])
        return records

    def job_of(self, result: Ledger) -> JobDescription | None:
        """Return the job of a result; None if it is not here, or its description is damaged or another result's.

        None too for a result that k2convert 0.3 pruned: its job's config has fewer experts than the source.
        """
        with suppress(CheckpointError):
            job = self.job()
            if job is not None and job.fingerprint == result.fingerprint and result.pruning is None:
                return job
        return None

    def find_records(self, digest: str) -> tuple[PackedRecords, list[str]]:
        """Return the records of the job with this fingerprint digest, and the shards whose records are damaged."""
        records = PackedRecords()
        damaged: list[str] = []
        for shard in self.log.steps():
            try:
                record = self._read(shard)
            except CheckpointError:
                damaged.append(shard)
                continue
            if record.fingerprint == digest:
                records[shard] = record
        return records, damaged

    def _read(self, shard: str) -> ShardRecord:
        record = self.log.read(shard)
        if record.shard != shard:
            raise MalformedFileError(f"{self.log.path(shard)}: is the record of {quoted(record.shard)}.")
        return record

    def finished(self, digest: str) -> PackedRecords:
        """Return the records of a job whose shards are here with the recorded size."""
        records, _ = self.find_records(digest)
        return records.only(name for name, record in records.items() if self.has_file(record))

    def has_file(self, record: ShardRecord) -> bool:
        """Return whether a record's shard is here with the recorded size. An uploaded shard may have been removed."""
        target = self.destination / record.shard
        return target.is_file() and target.stat().st_size == record.file_bytes

    def has_recorded_time(self, record: ShardRecord) -> bool:
        """Return whether a shard that is here was last modified when it was recorded."""
        shard = self.destination / record.shard
        return shard.stat().st_mtime_ns == self.log.path(record.shard).stat().st_mtime_ns

    def finished_or_sent(self, job: JobDescription) -> PackedRecords:
        """Return the records of shards that are here, or whose file was removed after its upload."""
        records, _ = self.find_records(job.digest)
        return records.only(name for name, record in records.items() if self.has_file(record) or record.is_checked)

    def remove_temporary_files(self, job: JobDescription) -> None:
        """Remove the half-written shards, records and job descriptions of a killed run, which may not come again."""
        records = [f"{shard}.json" for shard in job.shards]
        shards = [*job.shards, IGNORE_NAME]
        for folder, files in ((self.destination, shards), (self.log.folder, records), (self.folder, [JOB_NAME])):
            make_folder(folder)
            for path in list_folder(folder):
                if path.name.endswith(TEMPORARY_SUFFIX) and any(is_temporary(path.name, of=file) for file in files):
                    with suppress(DestinationError):  # a folder of that name is not ours
                        remove_file(path)


@dataclass(frozen=True, slots=True)
class Published:
    """A repository, owner/name[@branch], and the commit of its main or that branch that has the result.

    `contents` is the digest of what the folder had then; None if an earlier release published it.
    """

    repo: str
    commit: str
    contents: str | None = None

    def __str__(self) -> str:
        return f"hf://{self.repo} at commit {self.commit}"


def record_published(folder: Path, published: Published) -> None:
    """Note where the result of a folder was published; raises DestinationWriteError, DiskFullError."""
    check_no_link(folder / WORK_FOLDER)
    make_folder(folder / WORK_FOLDER)
    write_atomically(folder / WORK_FOLDER / PUBLISHED_NAME, encode(replace(published, contents=_contents(folder))))


def is_current(folder: Path, published: Published) -> bool:
    """Return whether the result in a folder is still what was published, as far as its job and its evaluation tell."""
    return published.contents in (None, _contents(folder))


def _contents(folder: Path) -> str | None:
    """Return the digest of a folder's result by its job and its evaluation; None without the job."""
    with suppress(CheckpointError):
        if (job := Journal(folder).job()) is not None:
            evaluation = folder / EVALUATION_NAME
            measured = file_digest(evaluation) if evaluation.is_file() else ""
            return fingerprint_digest({**job.fingerprint, "copies": {**job.copies}, "evaluation": measured})
    return None


def find_published(folder: Path) -> Published | None:
    """Return where the result of a folder was published; None if it was not, or if the record is damaged."""
    if not folder.is_dir():
        return None
    try:
        return read_document(Published, folder / WORK_FOLDER / PUBLISHED_NAME)
    except CheckpointError:
        return None


def has_left(folder: Path) -> bool:
    """Return whether all shards of a folder's job were uploaded or published, and none is here any more."""
    if next(folder.glob(f"*{SHARD_SUFFIX}"), None) is not None:
        return False
    if find_published(folder) is not None:
        return True
    journal = Journal(folder)
    job = journal.job()
    if job is None:
        return False
    records, _ = journal.find_records(job.digest)
    return all(shard in records and records[shard].is_checked for shard in job.shards)


def check_shards_are_here(folder: Path) -> None:
    """Refuse a work folder whose shards were removed after their upload (DestinationError); say where they are."""
    if not has_left(folder):
        return
    published = find_published(folder)
    if published is None:
        raise DestinationError(
            f"{folder}: its shards were uploaded to the Hub and are no longer here. Run the same `k2convert run` "
            "command again: it publishes them, or says that main has them."
        )
    raise DestinationError(
        f"{folder}: published as {published}, and its shards are no longer here. `k2convert validate "
        f"hf://{published.repo}` checks what was published."
    )


def check_finished(folder: Path) -> None:
    """Refuse a folder whose job is not finished (DestinationError), or that has no checkpoint (CheckpointError)."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file. Pass the folder of a finished conversion.")
    journal = Journal(folder)
    if (folder / CONFIG_NAME).exists():
        return
    if (job := journal.job()) is None:
        names = [path.name for path in list_folder(folder)]
        if folder.is_dir() and INDEX_NAME not in names and not any(name.endswith(SHARD_SUFFIX) for name in names):
            check_level(folder)
            raise CheckpointError(
                f"{folder}: holds no checkpoint: neither {CONFIG_NAME} nor a shard. Pass the folder of a finished "
                "conversion."
            )
        return
    finished = len(journal.finished(job.digest))
    raise DestinationError(
        f"{folder}: not finished: {finished} of {len(job.shards)} shards are converted. {say_own_command(folder)}Run "
        "it again: it resumes."
    )
