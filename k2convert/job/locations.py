"""Where a job reads and writes: a folder, or a repository on the Hub.

A repository is opened without downloading a shard. A destination on the Hub needs a work folder for shards that are not
uploaded yet and for the journal. The work folder stays after the job, some megabytes, so that `status` and a second
run can tell what was done.
"""

import os
from collections.abc import Container, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Final

from k2convert.checkpoint.files import TEMPORARY_SUFFIX, mode_of, walk_folder
from k2convert.checkpoint.folders import check_no_link, temporary_folder
from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.index import Checkpoint, home_folders, is_part_of_checkpoint, open_checkpoint
from k2convert.checkpoint.names import (
    CONFIG_NAME,
    DONE_FOLDER,
    DOWNLOADS_FOLDER,
    EVALUATION_NAME,
    HF_QUANT_CONFIG_NAME,
    INDEX_NAME,
    LEDGER_NAME,
    REPORT_PAGE_NAME,
    REPORT_PICTURE_NAME,
    REPORT_TEXT_NAME,
    SHARD_SUFFIX,
    SOURCE_COPY_FOLDER,
    WORK_FOLDER,
)
from k2convert.errors import (
    CheckpointError,
    DestinationError,
    DestinationWriteError,
    HubError,
    K2ConvertError,
    remedy,
)
from k2convert.hub.client import MAIN, SCHEME, Hub, RepoRef, parse_repo, target_revision
from k2convert.models.projections import SOURCE_REMEDY
from k2convert.plan.plan import ShardJob
from k2convert.plan.recipe import Recipe
from k2convert.records.command import read_command, shell_line
from k2convert.records.fingerprint import Obstacle, Source, config_changes, config_obstacle
from k2convert.records.journal import Journal
from k2convert.records.ledger import MAX_NAMED, Ledger, parse_ledger

if TYPE_CHECKING:
    from k2convert.hub.source import RemoteFile, RemoteRepo

WORK_ROOT: Final = Path("k2convert-work")
LOG_SUFFIXES: Final = (".log", ".out", ".err")  # of what `publish` leaves out: a log grows while it is published
_WRITTEN: Final = (CONFIG_NAME, INDEX_NAME, LEDGER_NAME, HF_QUANT_CONFIG_NAME, EVALUATION_NAME)
_MOVE: Final = "Move it elsewhere, or choose a different folder."
_REMOTE_REMEDY: Final = "The repository is incomplete or damaged: choose a different revision, or tell its owner."


@dataclass(frozen=True, slots=True)
class Destination:
    """A folder to write to, and the repository and its branch that the result goes to, if it goes to the Hub."""

    folder: Path
    repo: str | None = None
    revision: str = MAIN

    @property
    def version(self) -> str | None:
        """The branch, if it is not main."""
        return None if self.revision == MAIN else self.revision

    def __str__(self) -> str:
        if self.repo is None:
            return str(self.folder)
        return str(RepoRef(self.repo, self.version))


@contextmanager
def open_checkpoint_at(
    address: str, *, hub: Hub, pinned: str | None = None, recipe: Recipe | None = None
) -> Generator[Source]:
    """Open a folder, or the headers and small files of a repository.

    A name without hf:// is a folder, never looked up on the Hub. `pinned` is the commit that a job or a result is of,
    by its `recipe` if it is known: it is opened, with a warning if the repository has moved since, unless another
    revision with other weights is named. Raises CheckpointError, HubError.
    """
    repo = repo_at(address)
    if repo is None:
        with remedy(SOURCE_REMEDY):
            checkpoint = open_checkpoint(Path(address))
        yield Source(checkpoint)
        return
    from k2convert.hub.source import open_remote

    remote, now = _resolve(hub, repo, pinned)
    with folder_of(repo, shown_as=address) as folder:
        with remedy(_REMOTE_REMEDY):
            checkpoint = open_remote(hub, remote, folder=folder)
        if now is not None:
            hub.warn(_moved(remote, now, repo, *_config_moves(hub, now, checkpoint, recipe)))
        yield Source(checkpoint, remote)


def repo_at(address: str) -> RepoRef | None:
    """Return the repository of an address; None for a folder."""
    if address.startswith(SCHEME):
        return parse_repo(address)
    return None


@contextmanager
def folder_of(repo: RepoRef, *, shown_as: str) -> Generator[Path]:
    """Make a temporary folder for a repository. Expected errors name the repository as it is shown, not the folder."""
    with temporary_folder() as temporary:
        folder = temporary / repo.repo
        folder.mkdir(parents=True)
        try:
            yield folder
        except K2ConvertError as error:
            error.args = tuple(
                arg.replace(str(folder), shown_as) if isinstance(arg, str) else arg for arg in error.args
            )
            raise


def _resolve(hub: Hub, ref: RepoRef, pinned: str | None) -> "tuple[RemoteRepo, RemoteRepo | None]":
    """Return the repository at the commit to read, and as it is now if that differs and is not read."""
    from k2convert.hub.source import changed_files, find_commit, resolve_source

    if pinned is None or pinned == ref.revision:
        return resolve_source(hub, ref), None
    then = find_commit(hub, ref.repo, pinned)
    if then is None:  # the job began with a different repository, or the commit was removed
        now = resolve_source(hub, ref)
        hub.warn(f"{ref.repo} does not have the commit {pinned[:7]}: {ref.revision or MAIN} is read")
        return now, None
    try:
        now = resolve_source(hub, ref)
    except HubError:
        if ref.revision is not None:
            raise
        return then, None
    changed = changed_files(then, now)
    if ref.revision is not None and any(path.endswith(SHARD_SUFFIX) for path in changed):
        return now, None
    return then, now if changed else None


def _config_moves(
    hub: Hub, now: "RemoteRepo", then: Checkpoint, recipe: Recipe | None
) -> tuple[list[str], Obstacle | None]:
    """Return the fields of config.json that are others now, and what forbids that a job goes on with it, if it does."""
    from k2convert.hub.source import read_file

    file = now.files.get(CONFIG_NAME)
    if file is None:
        return [], None
    with suppress(HubError):
        text = read_file(hub, now.repo, now.commit, file).decode(errors="replace")
        before = then.parse_config()
        obstacle = None if recipe is None else config_obstacle(before, then, text, recipe)
        return config_changes(before, then, text), obstacle
    return [], None


def _moved(
    then: "RemoteRepo", now: "RemoteRepo", ref: RepoRef, fields: Sequence[str], obstacle: Obstacle | None
) -> str:
    """Say how a repository differs from the commit that is read, and what to do to get what it has now."""
    from k2convert.hub.source import changed_files

    changed = changed_files(then, now)
    branch = ref.revision or MAIN
    address = RepoRef(ref.repo, branch)
    verb = "differs" if len(changed) == 1 else "differ"
    advice = (
        f"`{shell_line(('k2convert', 'run', str(address), 'DEST'))}`, with the options of the first time, takes over "
        "what differs; it converts shards again only if their records are not here"
    )
    if any(path.endswith(SHARD_SUFFIX) for path in changed):
        advice = f"to convert {address}, choose a new destination"
    elif obstacle is not None:
        advice = f"{obstacle.problem}, so `k2convert run` with {address} refuses it"
        fields = ()
    if fields:
        verb = f"{verb} ({', '.join(fields)})"
    return (
        f"{branch} is at {now.commit[:7]}, not at {then.commit[:7]} of the conversion: {named(changed)} {verb}. "
        f"{then.commit[:7]} is read; {advice}"
    )


def named(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"


def fetch_ledger(
    hub: Hub, repo: str, commit: str, files: "Mapping[str, RemoteFile]", *, where: str = LEDGER_NAME
) -> Ledger | None:
    """Read the ledger among a repository's files; None without one. Raises HubError, MalformedFileError."""
    from k2convert.hub.source import read_file

    if LEDGER_NAME not in files:
        return None
    return parse_ledger(read_file(hub, repo, commit, files[LEDGER_NAME]).decode(errors="replace"), where=where)


def commit_of(ledger: Ledger | None, address: str) -> str | None:
    """Return the commit that a result was converted from, if `address` is one of its source's repository."""
    ref = repo_at(address)
    if ledger is None or ref is None or ref.repo != ledger.source.repo:
        return None
    return ledger.source.revision


def named_source(folder: Path, ledger: Ledger | None) -> tuple[str, ...]:
    """Return the option that names the source of the result in a folder: the job's own, or the ledger's repository.

    Empty if neither is known, or if the folder of the source is no longer there.
    """
    command = read_command(folder)
    if command is not None and command.source:
        address = command.address(command.source, here=str(Path.cwd()))
        if address.startswith(SCHEME) or Path(address).exists():
            return ("--source", address)
    if ledger is not None and ledger.source.repo is not None:
        return ("--source", str(RepoRef(ledger.source.repo)))
    return ()


def read_destination(text: str) -> Destination:
    """Return a folder, or hf://owner/name[@branch] with its work folder; raises HubError if that is no branch."""
    repo = repo_at(text)
    if repo is None:
        return Destination(Path(text))
    destination = Destination(Path(), repo.repo, target_revision(repo))
    return replace(destination, folder=WORK_ROOT / str(destination).removeprefix(SCHEME).replace("/", "--"))


def check_destination(destination: Path, *, source: Path | None) -> None:
    """Refuse a folder that is the source, is in it or contains it, and what is no folder (DestinationError)."""
    if destination.is_symlink() and not destination.exists():
        raise DestinationError(f"{destination}: is a link that leads to nothing. Remove the link, or choose a folder.")
    target = destination.resolve()
    for origin in () if source is None else home_folders(source):
        if target == origin:
            raise DestinationError(f"{destination}: is the source, which is never written to. Choose a new folder.")
        if target.is_relative_to(origin):
            raise DestinationError(f"{destination}: is inside the source {origin}. Choose a folder outside it.")
        if origin.is_relative_to(target):
            raise DestinationError(f"{destination}: contains the source {source}. Choose a folder next to it.")
    for path in (destination, *destination.absolute().parents):
        if path.exists() and not path.is_dir():
            subject = f"{path}:" if path == destination else f"{destination}: {path}"
            raise DestinationError(f"{subject} is not a folder. Choose a folder.")


def refuse_other_files(destination: Path, *, jobs: Iterable[ShardJob], sidecars: Iterable[Path]) -> list[Path]:
    """Refuse a folder without a job that has what the job would write or an engine would read (DestinationError).

    Returns the relative paths of the files of others that stay there, and that `publish` would send.
    """
    if Journal(destination).is_begun():
        return []
    shards = {Path(job.name): job for job in jobs}
    own = {*shards, *sidecars, *map(Path, (*_WRITTEN, REPORT_PAGE_NAME, REPORT_TEXT_NAME, REPORT_PICTURE_NAME))}
    parents = {folder for path in own for folder in path.parents}
    with remedy(_MOVE):
        files = [(path, path.relative_to(destination)) for path in walk_folder(destination)]
    refused = [(path, relative) for path, relative in files if _is_in_the_way(path, relative, own, parents)]
    own_shards = [relative for _, relative in refused if relative in shards]
    if own_shards and all(_is_written(destination / shard, shards[shard]) for shard in own_shards):
        raise DestinationError(
            f"{destination}: has shards of this job, such as {own_shards[0]}, but not {WORK_FOLDER}, which lists "
            f"finished shards. `cp -r FOLDER/*` leaves it out. Copy it too: `cp -a FOLDER/. {destination}`. Or choose "
            "a different folder."
        )
    for path, relative in refused:
        reason = "it would become part of the result"
        if relative in own or relative in parents:
            reason = "the job needs this name"
        raise DestinationError(f"{path}: is not from k2convert, and {reason}. {_MOVE}")
    return [relative for path, relative in files if S_ISREG(mode_of(path)) and not _is_left_out(relative)]


def _is_left_out(relative: Path) -> bool:
    return relative.parts[0].startswith(".") or relative.suffix in LOG_SUFFIXES


def _is_in_the_way(path: Path, relative: Path, own: Container[Path], parents: Container[Path]) -> bool:
    mode = mode_of(path)
    if relative in own or path.name.startswith("."):
        return relative in own
    if S_ISDIR(mode):
        return False
    is_special = bool(mode) and not S_ISREG(mode)
    return is_special or relative in parents or is_part_of_checkpoint(relative)


def _is_written(path: Path, job: ShardJob) -> bool:
    try:
        tensors = read_header(path).tensors
    except CheckpointError:
        return False
    return [(t.name, t.dtype, t.shape) for t in tensors.values()] == [(t.name, t.dtype, t.shape) for t in job.outputs]


def refuse_symlinks(folder: Path, files: Iterable[Path], *, finished: Container[str]) -> None:
    """Refuse links below `folder` where a job writes (DestinationError). A `finished` shard may be one."""
    work = folder / WORK_FOLDER
    for path in (work, *sorted(work.rglob("*"))):
        check_no_link(path)
    for file in (*files, *map(Path, _WRITTEN)):
        for path in (*reversed(file.parents[:-1]), file, file.with_name(file.name + TEMPORARY_SUFFIX)):
            if str(path) not in finished:
                check_no_link(folder / path)


def check_work_folder(folder: Path) -> None:
    """Refuse a work folder that is not writable, or that has a file where k2convert needs a folder."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DestinationWriteError(f"{folder}: is not writable. Choose a folder that you may write to.")
    for name in (SOURCE_COPY_FOLDER, DOWNLOADS_FOLDER, DONE_FOLDER):
        path = folder / name
        if path.exists() and not path.is_dir():
            raise DestinationError(f"{path}: is not a folder, but k2convert needs a folder there. Remove it.")


def check_output_path(path: Path, *, source: Path | None) -> None:
    """Refuse a path that no file can be written to, or that is in the source; raises DestinationError."""
    if path.is_dir():
        raise DestinationError(f"{path}: is a folder. Name a file to write to.")
    if path.is_symlink():
        raise DestinationError(f"{path}: is a link. Remove it, or choose a different name.")
    for parent in path.absolute().parents:
        if parent.exists() and not parent.is_dir():
            raise DestinationError(f"{path}: {parent} is a file, not a folder. Choose a different name.")
    if source is not None and any(path.resolve().is_relative_to(folder) for folder in home_folders(source)):
        raise DestinationError(f"{path}: is inside the source, which is never written to. Choose a path outside it.")
