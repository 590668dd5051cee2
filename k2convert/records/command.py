"""The command of a job: it resumes an unfinished one, and says what a finished one was made from.

DEST/.k2convert/command.json    the words of the command as they were typed, the folder it was given in, relative to
                                DEST, and its source as it was typed
"""

import json
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from k2convert.checkpoint.files import TEMPORARY_SUFFIX, write_atomically
from k2convert.checkpoint.names import COMMAND_NAME, WORK_FOLDER, WORK_SUFFIX
from k2convert.errors import K2ConvertError
from k2convert.records.document import read_document


@dataclass(frozen=True, slots=True)
class JobCommand:
    """The command that began or last resumed a job: its words, the folder it was given in (absolute), its source."""

    words: tuple[str, ...]
    folder: str
    source: str = ""

    def line(self, *, here: str) -> str:
        """Return what to paste into a shell whose working folder is `here`."""
        command = shell_line(self.words)
        if self.folder == here:
            return command
        return f"cd {shell_line([self.folder])} && {command}"

    def names(self, folders: Iterable[Path]) -> bool:
        """Return whether one of these folders, which may have been moved since, is a word. hf:// is not looked for."""
        resolved = {folder.resolve() for folder in folders}
        paths = (Path(self.folder, word.rpartition("=")[2]).expanduser() for word in self.words)
        return any("://" in word for word in self.words) or any(path.resolve() in resolved for path in paths)

    def address(self, word: str, *, here: str) -> str:
        """Return a path or an address of the command, as it is written in the folder `here`."""
        if self.folder == here or "://" in word:
            return word
        return str(Path(self.folder) / word)

    def verifying(self) -> "JobCommand":
        """Return the command with --verify, which hashes finished shards: a damaged one can have its size and time."""
        if {"--verify", "--part"} & {word.partition("=")[0] for word in self.words}:
            return self
        return replace(self, words=(*self.words, "--verify"))


def shell_line(words: Iterable[str]) -> str:
    """Return words as a line that can be pasted into a shell. What a terminal cannot show is written as bytes."""
    return " ".join(shlex.quote(word) if _is_shown(word) else _in_bytes(word) for word in words)


def _is_shown(word: str) -> bool:
    try:
        word.encode(getattr(sys.stderr, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return word.isprintable() or not word


def _in_bytes(word: str) -> str:
    """Return a word as bash and zsh read it: with \\xe9 for a byte that is no plain character."""
    shown = [chr(b) if 0x20 <= b < 0x7F and b not in b"\\'" else f"\\x{b:02x}" for b in os.fsencode(word)]
    return f"$'{''.join(shown)}'"


def keep_command(destination: Path, command: JobCommand, *, suffix: str = TEMPORARY_SUFFIX) -> None:
    # Whoever gets the folder should not learn where it was made. In ASCII: the name of a file need not be UTF-8.
    saved = replace(command, folder=os.path.relpath(command.folder, destination.resolve()))
    content = json.dumps(asdict(saved)).encode()
    write_atomically(_path(destination), content, suffix=suffix)


def say_own_command(destination: Path) -> str:
    """Return the sentence that names the command of the job in a folder, with a space after it; "" without one."""
    command = read_command(destination)
    if command is None:
        return ""
    return f"Its own command is `{command.line(here=str(Path.cwd()))}`. "


def read_command(destination: Path) -> JobCommand | None:
    """Return the command that was saved; None if there is none that can be shown, or the folder was moved since."""
    try:
        saved = read_document(JobCommand, _path(destination))
    except K2ConvertError:
        return None
    command = replace(saved, folder=os.path.normpath(destination.resolve() / saved.folder))
    beside = destination.with_name(destination.name.removesuffix(WORK_SUFFIX))
    folders = (destination, beside, destination.parent.parent)
    return command if command.names(folders) else None


def _path(destination: Path) -> Path:
    return destination / WORK_FOLDER / COMMAND_NAME
