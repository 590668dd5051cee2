"""The uploading side of a streamed job: from the journal's records to a branch, and from the branch to main.

A shard may leave the disk once the branch lists it with the sha256 computed here from the file. That hash is kept

    DEST/.k2convert/uploads/SHARD.json    sha256, blake3, size and the contract's scan, written before the upload

and travels to the branch together with the shard's record, so that another machine can continue the job.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k2convert.checkpoint.files import parse_json_object, read_json_file, write_atomically
from k2convert.checkpoint.page_cache import leave_cache
from k2convert.checkpoint.reader import Bytes
from k2convert.errors import ChangedFileError, CheckpointError
from k2convert.hub.branch import Branch, Upload
from k2convert.records.journal import Journal
from k2convert.records.shard_record import ShardRecord
from k2convert.validate.contract.streamed import is_scan, scan_shard

UPLOADS = "uploads"
_RECORDS = "shards"


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """The hashes of one finished shard and what the contract's scan of it found; `blake3` ties them to its record."""

    sha256: str
    blake3: str
    file_bytes: int
    scan: dict[str, Any]


@dataclass(slots=True)
class Shipping:
    """Implements the pipeline's Publisher for one job; `records` is shared with the converting side."""

    branch: Branch
    journal: Journal
    records: dict[str, ShardRecord]
    uploads: dict[str, UploadRecord] = field(default_factory=dict[str, UploadRecord])
    _arrived: list[str] = field(default_factory=list[str])

    @property
    def num_pending(self) -> int:
        return self.branch.num_pending + len(self._arrived)

    def is_group_due(self) -> bool:
        return self.branch.is_group_due() or len(self._arrived) > 0

    def upload(self, name: str) -> None:
        """Scan a shard's file and send it unless the branch has it.

        A shard counts as published when the Hub lists it with the sha256 of what was written: taken while it was
        written, or else here from the file, held against the record's blake3. Raises CheckpointError where the file is
        no longer what was written.
        """
        path = self.journal.destination / name
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="examine") as aside:
            examined = aside.submit(self._examine, name)
            if name in self.branch.on_branch:
                found = examined.result()
                if self.branch.has(name, found.sha256, found.file_bytes):
                    self._arrived.append(name)
                    return
            operation = self.branch.send(name, path, sha256=self.records[name].sha256)
            found = examined.result()
        leave_cache(path)
        documents = {
            f"{_RECORDS}/{name}.json": json.dumps(self.records[name].to_dict()).encode(),
            f"{UPLOADS}/{name}.json": json.dumps(asdict(found)).encode(),
        }
        self.branch.add(Upload(name, path, found.sha256, found.file_bytes), operation, records=documents)

    def _examine(self, name: str) -> UploadRecord:
        """Look at a shard's bytes and keep what was found."""
        record, path, hashes = self.records[name], self.journal.destination / name, ShardHashes()
        if record.sha256 is not None:
            scan, sha256 = scan_shard(path.parent, name, blake3=record.blake3), record.sha256
        else:
            scan = scan_shard(path.parent, name, passing=hashes.add)
            sha256 = hashes.sha256(name)
        if scan["digests"][name] != record.blake3:
            raise ChangedFileError(path)
        found = UploadRecord(sha256, record.blake3, record.file_bytes, scan)
        write_atomically(self._upload_path(name), json.dumps(asdict(found)).encode())
        self.uploads[name] = found
        return found

    def commit(self) -> list[str]:
        """Commit what was sent; returns the shards whose files are no longer needed here."""
        arrived = list(self._arrived)  # other threads may add to it meanwhile
        names = arrived + [upload.name for upload in self.branch.commit_group()]
        del self._arrived[: len(arrived)]
        return names

    def restore(self, *, fingerprint: str) -> None:
        """Take over what the journal and the branch know of this job; records of other jobs are left out."""
        for folder in (_RECORDS, UPLOADS):
            (self.journal.folder / folder).mkdir(parents=True, exist_ok=True)
        found = self.branch.read_records(wanted=lambda name: not (self.journal.folder / name).exists())
        for name, data in found.items():
            if _is_record(name, data):
                write_atomically(self.journal.folder / name, data)
        for name, record in self.journal.records().items():
            if record.fingerprint == fingerprint:
                self.records[name] = record
        for name, record in self.records.items():
            upload = self._read_upload(name)
            if upload is not None and upload.blake3 == record.blake3:
                self.uploads[name] = upload

    def is_on_branch(self, name: str) -> bool:
        """Whether a shard needs neither conversion nor upload any more."""
        upload = self.uploads.get(name)
        return upload is not None and self.branch.has(name, upload.sha256, upload.file_bytes)

    def finish(self, *, files: Mapping[str, Path | bytes], message: str) -> str:
        """Publish all shards and `files` on main in one commit; returns its id."""
        shards = {name: (upload.sha256, upload.file_bytes) for name, upload in self.uploads.items()}
        return self.branch.commit_to_main(shards=shards, files=files, message=message)

    def _upload_path(self, name: str) -> Path:
        return self.journal.folder / UPLOADS / f"{name}.json"

    def _read_upload(self, name: str) -> UploadRecord | None:
        path = self._upload_path(name)
        if not path.exists():
            return None
        try:
            return _upload_record(read_json_file(path))
        except CheckpointError:
            return None


def _is_record(path: str, data: bytes) -> bool:
    """Whether a file of the branch is one that an earlier run put there, whole; others are made again."""
    folder, _, name = path.partition("/")
    if folder not in (_RECORDS, UPLOADS) or "/" in name or "\\" in name:
        return False
    try:
        document = parse_json_object(data.decode(), where=path)
        if folder == UPLOADS:
            return _upload_record(document) is not None
        return f"{ShardRecord.from_dict(document).shard}.json" == name
    except (CheckpointError, ValueError):
        return False


def _upload_record(document: dict[str, Any]) -> UploadRecord | None:
    """The record that a document holds, or None where it is of another form than `_examine` writes."""
    kinds = {"sha256": str, "blake3": str, "file_bytes": int, "scan": dict}
    if document.keys() != kinds.keys() or not all(isinstance(document[key], kind) for key, kind in kinds.items()):
        return None
    return UploadRecord(**document) if is_scan(document["scan"]) else None


class ShardHashes:
    """The sha256 of shards whose bytes pass in order: what the Hub knows files by."""

    def __init__(self) -> None:
        self._digests: dict[str, Any] = {}

    def add(self, shard: str, data: Bytes) -> None:
        """Take the next bytes of a shard; a scan's `passing`."""
        self._digests.setdefault(shard, hashlib.sha256()).update(data.data)

    def sha256(self, shard: str) -> str:
        """The hash as hex of all that has passed."""
        return self._digests[shard].hexdigest()
