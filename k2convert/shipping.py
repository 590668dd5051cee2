"""The uploading side of a streamed job: from the journal's records to a branch, and from the branch to main.

A shard may leave the disk once the branch lists it with the sha256 computed here from the file. That hash is kept

    DEST/.k2convert/uploads/SHARD.json    sha256, blake3, size and the contract's scan, written before the upload

and travels to the branch together with the shard's record, so that another machine can continue the job.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from k2convert.checkpoint.index import read_json_file
from k2convert.checkpoint.writer import write_atomically
from k2convert.contract.streamed import scan_shard
from k2convert.errors import CheckpointError
from k2convert.hub.publish import Publication, Upload
from k2convert.journal import Journal, ShardRecord

UPLOADS = "uploads"
_RECORDS = "shards"
_READ_BYTES = 4 << 20


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

    publication: Publication
    journal: Journal
    records: dict[str, ShardRecord]
    uploads: dict[str, UploadRecord] = field(default_factory=dict[str, UploadRecord])
    _arrived: list[str] = field(default_factory=list[str])

    @property
    def num_pending(self) -> int:
        return self.publication.num_pending + len(self._arrived)

    def is_group_due(self) -> bool:
        return self.publication.is_group_due() or len(self._arrived) > 0

    def upload(self, name: str) -> None:
        """Hash and scan a shard's file, hold it against its record, and send it unless the branch has it.

        Raises CheckpointError where the file is no longer what was written.
        """
        record, path = self.records[name], self.journal.destination / name
        sha256 = hash_file(path, expected_blake3=record.blake3)
        digest = UploadRecord(sha256, record.blake3, record.file_bytes, scan_shard(path.parent, name))
        write_atomically(self._upload_path(name), json.dumps(asdict(digest)).encode())
        self.uploads[name] = digest
        if self.publication.has(name, digest.sha256, digest.file_bytes):
            self._arrived.append(name)
            return
        documents = {
            f"{_RECORDS}/{name}.json": json.dumps(asdict(record)).encode(),
            f"{UPLOADS}/{name}.json": json.dumps(asdict(digest)).encode(),
        }
        self.publication.upload(Upload(name, path, digest.sha256, digest.file_bytes), records=documents)

    def commit(self) -> list[str]:
        """Commit what was sent; returns the shards whose files are no longer needed here."""
        arrived, self._arrived = self._arrived, []
        return arrived + [upload.name for upload in self.publication.commit_group()]

    def restore(self, *, fingerprint: str) -> None:
        """Take over what the journal and the branch know of this job; records of other jobs are left out."""
        for folder in (_RECORDS, UPLOADS):
            (self.journal.folder / folder).mkdir(parents=True, exist_ok=True)
        found = self.publication.read_records(wanted=lambda name: not (self.journal.folder / name).exists())
        for name, data in found.items():
            if name.startswith((f"{_RECORDS}/", f"{UPLOADS}/")) and name.count("/") == 1 and "\\" not in name:
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
        return upload is not None and self.publication.has(name, upload.sha256, upload.file_bytes)

    def finish(self, *, files: Mapping[str, Path | bytes], message: str) -> str:
        """Publish all shards and `files` on main in one commit; returns its id."""
        shards = {name: (upload.sha256, upload.file_bytes) for name, upload in self.uploads.items()}
        return self.publication.finish(shards=shards, files=files, message=message)

    def _upload_path(self, name: str) -> Path:
        return self.journal.folder / UPLOADS / f"{name}.json"

    def _read_upload(self, name: str) -> UploadRecord | None:
        path = self._upload_path(name)
        if not path.exists():
            return None
        try:
            document: dict[str, Any] = read_json_file(path)
            return UploadRecord(**document)
        except (CheckpointError, TypeError):
            return None


def hash_file(path: Path, *, expected_blake3: str) -> str:
    """A file's sha256; raises CheckpointError where the same bytes do not have the recorded blake3."""
    ours, hubs = blake3(), hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            ours.update(data)
            hubs.update(data)
    if ours.hexdigest() != expected_blake3:
        raise CheckpointError(
            f"{path}: is no longer what was written: its blake3 differs from its record. Delete it and run the "
            "same command again; if it happens twice, suspect disk or memory."
        )
    return hubs.hexdigest()
