"""The upload stage of a job: from finished shards to the work branch, and from the branch to main.

A shard may leave the disk when the branch lists it with the sha256 that was computed here. That hash is kept in

    DEST/.k2convert/uploads/SHARD.json    sha256, blake3, size and the contract's scan, written before the upload

and goes to the branch with the shard's record, so that a different machine can continue the job.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k2convert.checkpoint.files import parse_json_object, read_json_file, write_atomically
from k2convert.checkpoint.folders import make_folder
from k2convert.checkpoint.names import RECORDS_FOLDER, UPLOADS_FOLDER
from k2convert.checkpoint.page_cache import leave_cache
from k2convert.checkpoint.reader import Bytes
from k2convert.errors import ChangedFileError, CheckpointError
from k2convert.hub.branch import Branch, Upload
from k2convert.hub.operations import sent_operation
from k2convert.records.checksum import seal, unseal
from k2convert.records.events import SILENT, Events
from k2convert.records.journal import Journal
from k2convert.records.shard_record import ShardRecord
from k2convert.validate.contract.streamed import is_scan, scan_shard


class ShardHashes:
    """Computes the sha256 of shards while their bytes pass in order. The Hub identifies files by it."""

    def __init__(self) -> None:
        self._digests: dict[str, Any] = {}

    def shard_bytes(self, shard: str, data: Bytes) -> None:
        """Take the next bytes of a shard."""
        self._digests.setdefault(shard, hashlib.sha256()).update(data.data)

    def sha256(self, shard: str) -> str:
        """Return the hash of all bytes so far, as hex."""
        return self._digests[shard].hexdigest()


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """The hashes of one finished shard, and what the contract's scan found. `blake3` ties it to the shard's record."""

    sha256: str
    blake3: str
    file_bytes: int
    scan: dict[str, Any]


@dataclass(slots=True)
class Uploads:
    """The pipeline's UploadStage for one job. `records` is shared with the converting side."""

    branch: Branch
    journal: Journal
    records: dict[str, ShardRecord]
    events: Events = SILENT
    uploads: dict[str, UploadRecord] = field(default_factory=dict[str, UploadRecord])
    _on_branch: list[str] = field(default_factory=list[str])
    _sent_by_node: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])

    @property
    def num_pending(self) -> int:
        return self.branch.num_pending + len(self._on_branch)

    def is_group_due(self) -> bool:
        return self.branch.is_group_due() or len(self._on_branch) > 0

    def upload(self, name: str) -> None:
        """Scan a shard's file, and send it unless the branch has it.

        A shard is on the branch if the Hub lists it with the sha256 of what was written. That hash was computed during
        the write, or it is computed here while the file's blake3 is compared with the record. Raises ChangedFileError
        if the file does not match its record.
        """
        path = self.journal.destination / name
        if name in self._sent_by_node:
            found, documents = self.uploads[name], self._sent_by_node[name]
            operation = sent_operation(name, sha256=found.sha256, num_bytes=found.file_bytes)
        else:
            with ThreadPoolExecutor(max_workers=1, thread_name_prefix="examine") as aside:
                examined = aside.submit(self._examine, name)
                if name in self.branch.on_branch:
                    found = examined.result()
                    if self.branch.has(name, found.sha256, found.file_bytes):
                        self._on_branch.append(name)
                        self.events.transferred(uploaded=found.file_bytes, is_new=False)
                        return
                operation = self.branch.send(name, path, sha256=self.records[name].sha256, sent=self._sent)
                found = examined.result()
            leave_cache(path)
            documents = self._documents(name, found)
        self.branch.add(Upload(name, path, found.sha256, found.file_bytes), operation, records=documents)

    def send_only(self, name: str) -> dict[str, bytes]:
        """Scan and send a shard's file; returns the small files that go with it into the commit of another process."""
        found = self._examine(name)
        self.branch.send(name, self.journal.destination / name, sha256=self.records[name].sha256)
        return self._documents(name, found)

    def adopt(self, name: str, documents: Mapping[str, bytes]) -> None:
        """Take over a shard that another process has sent: `documents` is what `send_only` returned there."""
        for path, data in documents.items():
            make_folder((self.journal.folder / path).parent, root=self.journal.destination)
            write_atomically(self.journal.folder / path, data, root=self.journal.destination)
        found = self._read_upload(name)
        if found is None or found.blake3 != self.records[name].blake3:
            raise ChangedFileError(self.journal.destination / name)
        self.uploads[name] = found
        self._sent_by_node[name] = dict(documents)

    def _documents(self, name: str, found: UploadRecord) -> dict[str, bytes]:
        return {
            f"{RECORDS_FOLDER}/{name}.json": seal(self.records[name].to_dict()),
            f"{UPLOADS_FOLDER}/{name}.json": seal(asdict(found)),
        }

    def _sent(self, num_bytes: int) -> None:
        self.events.transferred(uploaded=num_bytes)

    def _examine(self, name: str) -> UploadRecord:
        """Scan a shard's bytes and keep what was found."""
        record, path, hashes = self.records[name], self.journal.destination / name, ShardHashes()
        if record.sha256 is not None:
            scan, sha256 = scan_shard(path.parent, name, blake3=record.blake3), record.sha256
        else:
            scan = scan_shard(path.parent, name, visitor=hashes)
            sha256 = hashes.sha256(name)
        if scan["digests"][name] != record.blake3 or not record.is_checked:
            raise ChangedFileError(path)
        found = UploadRecord(sha256, record.blake3, record.file_bytes, scan)
        write_atomically(self._upload_path(name), seal(asdict(found)), root=self.journal.destination)
        self.uploads[name] = found
        return found

    def commit(self) -> list[str]:
        """Commit what was sent; returns the shards whose local files are no longer needed."""
        on_branch = list(self._on_branch)  # other threads may add to it meanwhile
        names = on_branch + [upload.name for upload in self.branch.commit_group()]
        del self._on_branch[: len(on_branch)]
        return names

    def restore(self, digest: str) -> None:
        """Take over what the journal and the branch know of the job with this fingerprint digest."""
        root = self.journal.destination
        for folder in (RECORDS_FOLDER, UPLOADS_FOLDER):
            make_folder(self.journal.folder / folder, root=root)
        found = self.branch.read_records(wanted=lambda name: not self._has_undamaged(name))
        for name, data in found.items():
            if _is_record(name, data):
                write_atomically(self.journal.folder / name, data, root=root)
        self.records.update(self.journal.find_records(digest).records)
        for name, record in self.records.items():
            upload = self._read_upload(name)
            if upload is not None and upload.blake3 == record.blake3:
                self.uploads[name] = upload

    def is_checked(self, name: str) -> bool:
        """Return whether a shard was converted and compared with the source. A local run does not compare."""
        record = self.records.get(name)
        return record is not None and record.is_checked

    def has_arrived(self, name: str) -> bool:
        """Return whether a shard needs neither conversion nor upload."""
        upload = self.uploads.get(name)
        return upload is not None and self.branch.has(name, upload.sha256, upload.file_bytes)

    def commit_to_main(self, *, files: Mapping[str, Path | bytes], message: str) -> str:
        """Put all shards and `files` on main in one commit; returns its id."""
        shards = {name: (upload.sha256, upload.file_bytes) for name, upload in self.uploads.items()}
        return self.branch.commit_to_main(shards=shards, files=files, message=message)

    def _has_undamaged(self, name: str) -> bool:
        """Return whether the journal has an undamaged record under this path."""
        try:
            return _is_record(name, (self.journal.folder / name).read_bytes())
        except OSError:
            return False

    def _upload_path(self, name: str) -> Path:
        return self.journal.folder / UPLOADS_FOLDER / f"{name}.json"

    def _read_upload(self, name: str) -> UploadRecord | None:
        path = self._upload_path(name)
        if not path.exists():
            return None
        try:
            return _parse_upload(read_json_file(path))
        except CheckpointError:
            return None


def _is_record(path: str, data: bytes) -> bool:
    """Return whether a file of the branch is an undamaged record of an earlier run. Other files are ignored."""
    folder, _, name = path.partition("/")
    if folder not in (RECORDS_FOLDER, UPLOADS_FOLDER) or "/" in name or "\\" in name:
        return False
    try:
        document = parse_json_object(data.decode(), where=path)
        if folder == UPLOADS_FOLDER:
            return _parse_upload(document) is not None
        return f"{ShardRecord.from_dict(unseal(document)).shard}.json" == name
    except ValueError:  # CheckpointError is one
        return False


def _parse_upload(document: dict[str, Any]) -> UploadRecord | None:
    """Return the record in a document, or None if it is damaged."""
    kinds = {"sha256": str, "blake3": str, "file_bytes": int, "scan": dict}
    try:
        content = unseal(document)
    except ValueError:
        return None
    if content.keys() != kinds.keys():
        return None
    if not all(isinstance(content[key], kind) for key, kind in kinds.items()):
        return None
    return UploadRecord(**content) if is_scan(content["scan"]) else None
