"""No link in the way of what a job will write: said before the job starts, not when it gets there hours later.

Each write checks once more (checkpoint/folders.py).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from k2convert.checkpoint.files import TEMPORARY_SUFFIX
from k2convert.checkpoint.folders import check_no_link
from k2convert.checkpoint.names import (
    CONFIG_NAME,
    DOWNLOADS_FOLDER,
    HF_QUANT_CONFIG_NAME,
    INDEX_NAME,
    JOB_NAME,
    LEDGER_NAME,
    PUBLISHED_NAME,
    RECORDS_FOLDER,
    SOURCE_COPY_FOLDER,
    UPLOADS_FOLDER,
    WALK_NAME,
    WORK_FOLDER,
    WORK_SUFFIX,
)

_FOLDERS: Final = (
    RECORDS_FOLDER,
    UPLOADS_FOLDER,
    DOWNLOADS_FOLDER,
    SOURCE_COPY_FOLDER,
    f"{WALK_NAME}{WORK_SUFFIX}",
)
_FILES: Final = (CONFIG_NAME, INDEX_NAME, LEDGER_NAME, HF_QUANT_CONFIG_NAME)


def refuse_links(destination: Path, *, shards: Iterable[str], sidecars: Iterable[Path]) -> None:
    """Refuse links below `destination` in place of files and folders that the job makes (DestinationError).

    `shards` are the names of the result's shards, `sidecars` the relative paths of the files to copy. Other links, and
    the destination itself if it is one, are left alone.
    """
    work = destination / WORK_FOLDER
    for folder in (work, *(work / name for name in _FOLDERS)):
        check_no_link(folder, is_folder=True)
    for path in sidecars:
        for parent in path.parents[:-1]:
            check_no_link(destination / parent, is_folder=True)
    for path in _files(destination, work, shards, sidecars):
        check_no_link(path)
        check_no_link(path.with_name(path.name + TEMPORARY_SUFFIX))


def _files(destination: Path, work: Path, shards: Iterable[str], sidecars: Iterable[Path]) -> Iterator[Path]:
    yield work / JOB_NAME
    yield work / PUBLISHED_NAME
    for name in (*_FILES, *sidecars):
        yield destination / name
    for shard in shards:
        yield destination / shard
        for folder in (RECORDS_FOLDER, UPLOADS_FOLDER):
            yield work / folder / f"{shard}.json"
