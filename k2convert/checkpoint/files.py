"""checkpoint.files."""

import errno
import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from k2convert.errors import CheckpointError, DestinationWriteError, DiskFullError, K2ConvertError, SourceReadError


def check_plain_file(path: Path) -> None:
    """Refuse links, folders, pipes and devices (CheckpointError); a missing file passes, opening it will tell."""
    if path.is_symlink():
        raise CheckpointError(
            f"{path}: is a link, and links are not followed. Put the file itself there "
            "(`hf download REPO --local-dir FOLDER` does), or pass the folder that holds the real files."
        )
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: is a folder or a device, not a file. Download the file again.")


class _DuplicateKeyError(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKeyError(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return result


def parse_json_object(text: str, *, where: str) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys; `where` names the file in messages."""
    try:
        document: Any = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON ({error}). Download the file again.") from None
    except _DuplicateKeyError as error:
        raise CheckpointError(f"{where}: the key {error.key!r} stands twice. Download the file again.") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{where}: not a JSON object. Download the file again.")
    return cast(dict[str, Any], document)


def mapping_or_empty(value: object) -> dict[str, Any]:
    """A part of a JSON document where an object belongs: it, or nothing where somebody put something else there."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def read_json_file(path: Path) -> dict[str, Any]:
    """Read one JSON object from a real file (no link); raises CheckpointError naming the file."""
    try:
        check_plain_file(path)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing. A checkpoint needs it: download it again.") from None
    except OSError as error:
        raise SourceReadError(f"{path}: cannot be read ({error.strerror}). Check permissions and disk.") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: not UTF-8 text. Download the file again.") from None
    return parse_json_object(text, where=str(path))


def dump_json(document: dict[str, Any]) -> bytes:
    """JSON as the checkpoint's own files are written: two spaces, UTF-8, a final newline."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


TEMPORARY_SUFFIX = ".tmp"


PIECE_BYTES = 1 << 20


Content = bytes | Path
"""What a file is to hold: bytes, or those of another file, which are never all in memory."""


def pieces(content: Content) -> Iterator[bytes]:
    """The bytes of `content` in order; raises SourceReadError where a file cannot be read."""
    if isinstance(content, bytes):
        yield content
        return
    try:
        with content.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
    except OSError as error:
        raise SourceReadError(f"{content}: cannot be read ({error.strerror}). Check permissions and disk.") from None


def num_bytes_of(content: Content) -> int:
    """The length of `content`; raises OSError where a file is not there."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def write_atomically(path: Path, content: Content) -> None:
    """Put `content` under `path`: complete and on disk, or not at all."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            for piece in pieces(content):
                view = memoryview(piece)
                while len(view):
                    view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _publish(temporary, path)
    except OSError as error:
        with suppress(OSError):  # in a folder that is read-only, removing fails too
            temporary.unlink(missing_ok=True)
        raise _write_error(path, error) from error


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Turn the system's errors within the block into DiskFullError or DestinationWriteError that name `path`."""
    try:
        yield
    except K2ConvertError:
        raise
    except OSError as error:
        raise _write_error(path, error) from error


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; DestinationWriteError where that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DestinationWriteError(
            f"{folder}: cannot be made ({error.strerror}). Name a folder you may write to."
        ) from None


def holds_exactly(path: Path, content: Content) -> bool:
    """Whether `path` is a real file with these bytes already."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size != num_bytes_of(content):
            return False
        with path.open("rb") as file:
            return all(file.read(len(piece)) == piece for piece in pieces(content))
    except OSError:
        return False


def _publish(temporary: Path, path: Path) -> None:
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_error(path: Path, error: OSError) -> OSError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"{path}: no room left on the disk. Finished shards are kept: free space and run the same command again."
        )
    if isinstance(error, K2ConvertError):
        return error
    return DestinationWriteError(
        f"{path}: writing failed ({error.strerror}). Finished shards are kept: check permissions, limits and the disk, "
        "or start over in a folder on another one."
    )
