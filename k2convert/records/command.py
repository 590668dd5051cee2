"""The command of a job: it resumes an unfinished one, and says what a finished one was made from.

DEST/.k2convert/command.json    the words of the command and the folder it was given in
"""

import json
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from k2convert.checkpoint.files import TEMPORARY_SUFFIX, write_atomically
from k2convert.checkpoint.names import COMMAND_NAME, WORK_FOLDER, WORK_SUFFIX
from k2convert.errors import K2ConvertError
from k2convert.records.document import read_document


@dataclass(frozen=True, slots=True)
class JobCommand:
    """The words of the command that began or last resumed a job, and the folder in which it was given."""

    words: tuple[str, ...]
    folder: str

    def line(self, *, here: str) -> str:
        """Return what to paste into a shell whose working folder is `here`."""
        command = shlex.join(self.words)
        return command if self.folder == here else f"cd {shlex.quote(self.folder)} && {command}"

    def moved(self, place: Path) -> "JobCommand":
        """Return the command for the job as it lies at `place` now: its folder may have been moved or copied."""
        if len(self.words) < 4 or "://" in self.words[3]:
            return self
        if (Path(self.folder) / self.words[3]).resolve() == place.resolve():
            return self
        here = place if self.folder == str(Path.cwd()) else place.absolute()
        return replace(self, words=(*self.words[:3], str(here), *self.words[4:]))

    def place(self, word: str, *, here: str) -> str:
        """Return a path or an address of the command, as it is written in the folder `here`."""
        is_same = self.folder == here or "://" in word
        return word if is_same else str(Path(self.folder) / word)

    def value(self, option: str) -> str | None:
        """Return what was given with an option; None without it."""
        return dict(zip(self.words, self.words[1:], strict=False)).get(option)


def keep_command(destination: Path, command: JobCommand, *, suffix: str = TEMPORARY_SUFFIX) -> None:
    """Keep the command of a job. `suffix` is that of the temporary file."""
    # In ASCII: the name of a file need not be UTF-8.
    content = json.dumps(asdict(command)).encode()
    write_atomically(_path(destination), content, root=destination, suffix=suffix)


def say_own_command(destination: Path) -> str:
    """Return the sentence that names the command of the job in a folder, with a space after it; "" without one."""
    command = read_command(destination)
    if command is None:
        return ""
    if command.words[1:2] != ("evaluate",):
        command = command.moved(destination.with_name(destination.name.removesuffix(WORK_SUFFIX)))
    return f"Its own command is `{command.line(here=str(Path.cwd()))}`. "


def read_command(destination: Path) -> JobCommand | None:
    """Return the command that was kept, or None if there is none that can be shown."""
    try:
        return read_document(JobCommand, _path(destination))
    except K2ConvertError:
        return None


def _path(destination: Path) -> Path:
    return destination / WORK_FOLDER / COMMAND_NAME
