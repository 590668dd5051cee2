"""Upload shards to a work branch as they are ready, then put them all on main in one atomic commit.

    work branch  k2convert-<fingerprint>   shards in groups, with their records under .k2convert/
    main         one commit                CommitOperationCopy of every shard (no bytes move) + config, index, card, ...

A result may go to another branch than main, as a new version: the same, and in that branch's commit the files of main
that are not of the result are deleted. Here "main" is the branch that the result goes to.

Readers of main never see half a model. The branch is the state: after an interruption its tree shows which shards are
uploaded. A local copy may be deleted only after the branch lists the shard with the sha256 computed here. Commits in
groups stay below the Hub's limit of 128 commits per hour and repository.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from k2convert.checkpoint.names import IGNORE_NAME, WORK_FOLDER
from k2convert.errors import ChangedFileError, HubError
from k2convert.hub.client import MAIN, Hub, ignore
from k2convert.hub.download import file_sha256
from k2convert.hub.request_errors import HubRequestError, explain_transport, explained, redacted
from k2convert.hub.source import RemoteFile, list_files, matches, read_file

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete

    from k2convert.hub.preflight import Target

    Operation = CommitOperationAdd | CommitOperationCopy | CommitOperationDelete

MAX_COMMITS_PER_HOUR = 120  # the Hub's limit is 128; the rest is for the account's other work
GROUP_SHARDS = 8
GROUP_SECONDS = 300.0
_ATTRIBUTES_NAME = ".gitattributes"  # the Hub's own file


def branch_name(digest: str) -> str:
    """The work branch of the job whose fingerprint has this digest, in hex."""
    return f"k2convert-{digest[:12]}"


@dataclass(frozen=True, slots=True)
class Upload:
    """One finished shard: its file, and the hash and size that the Hub must list before the file may be deleted."""

    name: str
    path: Path
    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """A shard that was sent and waits for its commit."""

    upload: Upload
    operation: "CommitOperationAdd"
    records: Mapping[str, bytes]


class Branch:
    """The work branch of one job in one repository. Several threads may send and add, but only one may commit."""

    def __init__(self, hub: Hub, target: "Target", name: str) -> None:
        self.hub = hub
        self.target = target
        self.repo = target.repo
        self.name = name
        self.head = ""
        self.on_branch: dict[str, RemoteFile] = {}
        self._pending: list[_Pending] = []
        self._commits: deque[float] = deque()
        self._since = 0.0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def open(self) -> None:
        """Create the repository and the branch if they are missing, and list the files of the branch."""
        api = self.hub.api()
        repo = self.repo
        self.hub.call(
            f"create the repository {repo}",
            lambda: api.create_repo(repo, repo_type="model", private=self.target.private, exist_ok=True),
        )
        info = self.hub.call(f"look up {repo}", lambda: api.model_info(repo, revision=MAIN))
        if self.target.private and not info.private:
            raise HubError(f"{repo}: is public, but a private one was requested. Pass --public, or choose another.")
        self.head = info.sha or ""
        self._create_branch(self.name)
        if self.target.revision != MAIN:
            self.head = self.target.head or self.head
        self.on_branch = list_files(self.hub, repo, self.name)

    def _create_branch(self, name: str) -> None:
        api = self.hub.api()
        self.hub.call(
            f"create the branch {name} of {self.repo}",
            lambda: api.create_branch(self.repo, branch=name, revision=self.head, exist_ok=True),
        )

    def read_records(self, *, wanted: Callable[[str], bool]) -> dict[str, bytes]:
        """The wanted small files that earlier runs committed with their shards, by path below .k2convert/."""
        records: dict[str, bytes] = {}
        for path, file in self.on_branch.items():
            name = path.removeprefix(f"{WORK_FOLDER}/")
            if name != path and wanted(name):
                records[name] = read_file(self.hub, self.repo, self.name, file)
        return records

    def has(self, name: str, sha256: str, num_bytes: int) -> bool:
        """Return whether the branch lists a shard with this hash and size."""
        file = self.on_branch.get(name)
        return file is not None and file.sha256 == sha256 and file.num_bytes == num_bytes

    def send(self, upload: Upload, *, sent: Callable[[int], None] = ignore) -> "CommitOperationAdd":
        """Send one shard's bytes; pass the returned operation to `add`.

        `sent` gets the bytes since its last call, negative before a retry. The sha256 is compared: by the Hub for plain
        LFS, which is told the one of `upload`, over Xet with the library's hash. Raises ChangedFileError if it differs,
        HubError.
        """
        from huggingface_hub import CommitOperationAdd, constants

        api = self.hub.api()
        position = 0
        is_plain = constants.HF_HUB_DISABLE_XET

        def move_to(reached: int) -> None:
            nonlocal position
            if reached != position:
                sent(reached - position)
                position = reached

        def attempt() -> CommitOperationAdd:
            move_to(0)
            operation = counted_operation(upload.name, upload.path, move_to)
            if is_plain:
                operation.upload_info.sha256 = bytes.fromhex(upload.sha256)
            with _transfer_errors(f"upload {upload.name}"):
                api.preupload_lfs_files(self.repo, additions=[operation], revision=self.name)
            move_to(operation.upload_info.size)
            return operation

        try:
            operation = self.hub.call(f"upload {upload.name} to {self.repo}", attempt)
        except HubError:
            if file_sha256(upload.path) != upload.sha256:  # the Hub refuses such bytes
                raise ChangedFileError(upload.path) from None
            raise
        if operation.upload_info.sha256.hex() != upload.sha256:
            raise ChangedFileError(upload.path)
        return operation

    def add(self, upload: Upload, operation: "CommitOperationAdd", *, records: Mapping[str, bytes]) -> None:
        """Let a sent shard wait for its commit; `records` are small files to commit with it, by path in .k2convert/."""
        if not self._pending:
            self._since = time.monotonic()
        self._pending.append(_Pending(upload, operation, records))

    def is_group_due(self) -> bool:
        """Return whether enough shards wait for a commit, or have waited long enough."""
        if not self._pending:
            return False
        return len(self._pending) >= GROUP_SHARDS or time.monotonic() - self._since >= GROUP_SECONDS

    def commit_group(self) -> list[Upload]:
        """Commit the group; returns its shards once the branch lists them: they may be deleted. Raises HubError."""
        from huggingface_hub import CommitOperationAdd

        pending = list(self._pending)
        if not pending:
            return []
        self._wait_for_the_hour()
        api = self.hub.api()
        group = [shard.upload for shard in pending]
        operations: list[Operation] = [shard.operation for shard in pending]
        for shard in pending:
            operations += [CommitOperationAdd(f"{WORK_FOLDER}/{path}", data) for path, data in shard.records.items()]
        if IGNORE_NAME in self.on_branch:  # main's: the Hub would leave out the records without a word
            operations.append(CommitOperationAdd(IGNORE_NAME, b"# nothing\n"))
        message = f"Add {len(group)} shards: {group[0].name} to {group[-1].name}" if len(group) > 1 else group[0].name
        self._create_commit(f"commit {len(group)} shards to {self.repo}", operations, message=message)
        self._commits.append(time.monotonic())
        from huggingface_hub.hf_api import RepoFile

        names = [upload.name for upload in group]
        listed = self.hub.call(
            f"list {len(names)} shards of {self.repo}", lambda: api.get_paths_info(self.repo, names, revision=self.name)
        )
        for entry in listed:
            if isinstance(entry, RepoFile) and entry.lfs is not None:
                self.on_branch[entry.path] = RemoteFile(entry.path, entry.size, entry.lfs.sha256, None)
        for upload in group:
            if not self.has(upload.name, upload.sha256, upload.num_bytes):
                raise HubError(
                    f"{self.repo}: {upload.name} has a different sha256 on {self.name} than on disk. "
                    "Nothing was deleted. Run the same command again."
                )
        del self._pending[: len(pending)]
        self._since = time.monotonic()
        return group

    def _create_commit(
        self, action: str, operations: "list[Operation]", *, message: str, on_main: bool = False
    ) -> None:
        """Commit to the work branch, or to main if main has not moved; this also uploads small files."""
        api = self.hub.api()
        revision, parent = (self.target.revision, self.head) if on_main else (self.name, None)

        def attempt() -> None:
            with _transfer_errors(action):
                api.create_commit(
                    self.repo, operations, commit_message=message, revision=revision, parent_commit=parent
                )

        self.hub.call(action, attempt)

    def _wait_for_the_hour(self) -> None:
        while self._commits and time.monotonic() - self._commits[0] >= 3600:
            self._commits.popleft()
        if len(self._commits) >= MAX_COMMITS_PER_HOUR:
            seconds = 3600 - (time.monotonic() - self._commits[0])
            self.hub.notify(f"{MAX_COMMITS_PER_HOUR} commits in the last hour; the next one waits {seconds:.0f} s")
            time.sleep(max(seconds, 0))

    def commit_to_main(
        self,
        *,
        shards: Mapping[str, tuple[str, int]],
        files: Mapping[str, Path | bytes],
        gone: Collection[str] = (),
        message: str,
    ) -> str:
        """Put all on main in one commit and delete the work branch; raises HubError.

        `shards` are (sha256, size), `gone` the files that an earlier commit had and this one does not.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete

        api = self.hub.api()
        revision = self.target.revision
        # By commit, not by name: main gets exactly the files checked here, even if the branch moves meanwhile.
        branch = self.hub.call(f"look up {self.name}", lambda: api.model_info(self.repo, revision=self.name)).sha
        self.on_branch = list_files(self.hub, self.repo, branch or self.name)
        missing = [name for name, (sha256, size) in shards.items() if not self.has(name, sha256, size)]
        if missing:
            raise HubError(
                f"{self.repo}: {missing[0]} is not on {self.name} as it was uploaded. Run the same command again. If "
                "that fails too, find out who else writes to that branch."
            )
        on_main = list_files(self.hub, self.repo, self.head)
        operations: list[Operation] = [
            CommitOperationCopy(name, name, src_revision=branch or self.name)
            for name, (sha256, _) in sorted(shards.items())
            if name not in on_main or on_main[name].sha256 != sha256
        ]
        operations += [CommitOperationAdd(path, content) for path, content in sorted(files.items())]
        operations += [CommitOperationDelete(path) for path in sorted(on_main.keys() & set(gone) - files.keys())]
        if revision != MAIN and self.target.head is None:
            self._create_branch(revision)
            others = on_main.keys() - shards.keys() - files.keys() - {_ATTRIBUTES_NAME, *gone}
            operations += [CommitOperationDelete(path) for path in sorted(others)]
        self._wait_for_the_hour()
        action = f"commit the model to {revision} of {self.repo}"
        try:
            self._create_commit(action, operations, message=message, on_main=True)
        except HubRequestError as error:
            # If the answer to a commit is lost, the retry finds that main has moved, because of that commit.
            if error.status != 412 or not self._is_on_main(shards, files):
                raise
        if not self._is_on_main(shards, files):
            raise HubError(f"{self.repo}: {revision} lacks the committed files. Look at its history, then run again.")
        self.delete()
        info = self.hub.call(f"look up {self.repo}", lambda: api.model_info(self.repo, revision=revision))
        return info.sha or ""

    def _is_on_main(self, shards: Mapping[str, tuple[str, int]], files: Mapping[str, Path | bytes]) -> bool:
        listed = list_files(self.hub, self.repo, self.target.revision)
        for name, expected in shards.items():
            if name not in listed or (listed[name].sha256, listed[name].num_bytes) != expected:
                return False
        return all(path in listed and matches(content, listed[path]) for path, content in files.items())

    def delete(self) -> None:
        """Delete the work branch, if it exists."""
        api = self.hub.api()
        try:
            self.hub.call(
                f"delete the branch {self.name} of {self.repo}", lambda: api.delete_branch(self.repo, branch=self.name)
            )
        except HubRequestError as error:
            if error.status != 404:
                raise


@contextmanager
def _transfer_errors(action: str) -> Generator[None]:
    """Turn the bare errors of the library and hf_xet into their causes, so that those are retried and explained."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None:
            with explained(action):
                raise error.__cause__ from None
        raise explain_transport(action, error, failure="the upload failed") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise HubError(f"could not {action}: the Hub refused it ({redacted(str(error))}).") from error


def sent_operation(name: str, *, sha256: str, num_bytes: int) -> "CommitOperationAdd":
    """Return the library's operation for a file that another process has sent: a commit needs its hash and size."""
    from huggingface_hub import CommitOperationAdd

    operation = CommitOperationAdd(name, b"")
    operation.upload_info.sha256 = bytes.fromhex(sha256)
    operation.upload_info.size = num_bytes
    operation._upload_mode, operation._is_uploaded = "lfs", True  # pyright: ignore[reportPrivateUsage]
    return operation


def counted_operation(name: str, path: Path, move_to: Callable[[int], None]) -> "CommitOperationAdd":
    """Return the library's operation for one file; `move_to` gets how far plain LFS has read the file to send it."""
    from huggingface_hub import CommitOperationAdd

    class Counted(CommitOperationAdd):
        @contextmanager
        def as_file(self, with_tqdm: bool = False) -> Generator[BinaryIO]:
            with path.open("rb") as file:
                if with_tqdm:  # the library asks for a progress bar, so it is going to send the bytes
                    read = file.read

                    def read_counted(size: int | None = -1) -> bytes:
                        data = read(size)
                        move_to(file.tell())
                        return data

                    file.read = read_counted
                yield file

    return Counted(name, path)
