"""The command that resumes an unfinished job, for `status` and for the line that an interrupt leaves.

DEST/.k2convert/command.json    the words of the command and the folder it was given in; removed when the job is done
"""

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from k2convert.checkpoint.files import read_json_file, write_atomically, writing
from k2convert.checkpoint.folders import opened_folder, remove_file
from k2convert.checkpoint.names import COMMAND_NAME, WORK_FOLDER
from k2convert.errors import K2ConvertError


@dataclass(frozen=True, slots=True)
class JobCommand:
    """The words of the command that began or last resumed a job, and the folder in which it was given."""

    words: tuple[str, ...]
    folder: str

    def line(self, *, here: str) -> str:
        """Return what to paste into a shell whose working folder is `here`."""
        command = shlex.join(self.words)
        return command if self.folder == here else f"cd {shlex.quote(self.folder)} && {command}"


def keep_command(destination: Path, command: JobCommand) -> None:
    """Keep the command that resumes the job, until `forget_command`."""
    write_atomically(_path(destination), json.dumps(asdict(command)).encode(), root=destination)


def forget_command(destination: Path) -> None:
    """Remove the command: the job is done."""
    path = _path(destination)
    with writing(path), opened_folder(path.parent, root=destination) as folder:
        remove_file(path, folder)


def read_command(destination: Path) -> JobCommand | None:
    """Return the command that was kept, or None if there is none that can be shown."""
    try:
        stated = read_json_file(_path(destination))
    except K2ConvertError:
        return None
    words, folder = stated.get("words"), stated.get("folder")
    if not isinstance(words, list) or not isinstance(folder, str):
        return None
    if not all(isinstance(word, str) for word in cast(list[Any], words)):
        return None
    return JobCommand(tuple(cast(list[str], words)), folder)


def _path(destination: Path) -> Path:
    return destination / WORK_FOLDER / COMMAND_NAME
