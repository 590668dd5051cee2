"""Where a result was published: DEST/.k2convert/published.json, written when main of the repository has it.

The shards of a job with a Hub destination leave the work folder after their upload. This record, and the uploads'
records, say where they are.
"""

from dataclasses import dataclass
from pathlib import Path

from k2convert.checkpoint.files import list_folder, write_atomically
from k2convert.checkpoint.folders import make_folder
from k2convert.checkpoint.names import CONFIG_NAME, INDEX_NAME, PUBLISHED_NAME, SHARD_SUFFIX, WORK_FOLDER
from k2convert.errors import CheckpointError, DestinationError
from k2convert.records.command import say_own_command
from k2convert.records.document import encode, read_document
from k2convert.records.journal import Journal


@dataclass(frozen=True, slots=True)
class Published:
    """A repository, owner/name[@branch], and the commit of its main or that branch that has the result."""

    repo: str
    commit: str

    def __str__(self) -> str:
        return f"hf://{self.repo} at commit {self.commit}"


def record_published(folder: Path, published: Published) -> None:
    """Note where the result of a folder was published; raises DestinationWriteError, DiskFullError."""
    make_folder(folder / WORK_FOLDER, root=folder)
    write_atomically(folder / WORK_FOLDER / PUBLISHED_NAME, encode(published), root=folder)


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
    if (job := journal.job()) is None:
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
