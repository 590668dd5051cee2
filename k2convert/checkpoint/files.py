"""Small files: JSON objects read strictly, files written atomically.

Readers raise MalformedFileError without a remedy: they do not know where a file came from (see errors.remedy).
A file is written as NAME.tmp, synced and renamed, and its folder is synced: it is complete or absent.
"""

import errno
import json
import os
import re
import secrets
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, Final, cast

from blake3 import blake3

from k2convert.checkpoint.folders import create_file, place_first, remove_file, replace_file
from k2convert.checkpoint.names import BLOBS_FOLDER, LOST_FOUND
from k2convert.errors import (
    DestinationError,
    DestinationWriteError,
    DiskFullError,
    K2ConvertError,
    MalformedFileError,
    SourceReadError,
    quoted,
    shortened,
)
from k2convert.machine import num_cores

TEMPORARY_SUFFIX: Final = ".tmp"
_SHA256: Final = re.compile("[0-9a-f]{64}")
_OWN_SUFFIX: Final = re.compile(r"\.[0-9a-f]{16}\.tmp")
PIECE_BYTES: Final = 8 << 20
MAX_SMALL_FILE_BYTES: Final = 256 << 20  # the largest of a Kimi checkpoint, the index of K3's NVFP4 form, has 130 MB
MAX_FILES: Final = 100_000  # of a folder; links of a checkpoint could lead to a whole disk
MAX_NESTING: Final = 100  # a deeper document would exhaust the stack of code that recurses; real ones have ten levels

_LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"

Content = bytes | Path  # content to write: bytes, or the bytes of another file, which is copied in pieces


class DuplicateKeyError(ValueError):
    """A JSON object with the same key twice."""


def mode_of(path: Path) -> int:
    """Return the mode of what a path or a link leads to; 0 if it leads to nothing that can be looked at."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


def check_plain_file(path: Path) -> None:
    """Refuse folders, pipes, devices, also behind links (MalformedFileError). A missing file passes."""
    mode = mode_of(path)
    if S_ISREG(mode):
        return
    if path.is_symlink():
        problem = "leads to no file"
        if mode:
            problem = "is a folder or a device, not a file"
        raise MalformedFileError(f"{path}: is a link to {quoted(str(path.readlink()))}, which {problem}.")
    if mode:
        raise MalformedFileError(f"{path}: is a folder or a device, not a file.")


def check_no_pointer(path: Path, start: bytes) -> None:
    """Refuse the text that Git leaves in place of a large file (MalformedFileError). `start` is how the file begins."""
    if start.startswith(_LFS_POINTER):
        raise MalformedFileError(
            f"{path}: is a Git LFS pointer, not the file itself. `git lfs pull` in its folder fetches it."
        )


def check_fetched(path: Path) -> None:
    """The same for a file that is not open; raises SourceReadError too."""
    with reading(path), path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
    check_no_pointer(path, start)


@contextmanager
def reading(path: Path, *, missing: str = "") -> Generator[None]:
    """Turn an OSError in the block into SourceReadError; MalformedFileError that says `missing` if there is no file."""
    try:
        yield
    except OSError as error:
        if missing and isinstance(error, FileNotFoundError):
            raise MalformedFileError(f"{path}: {missing}") from None
        raise SourceReadError(f"{path}: cannot be read ({error.strerror}). Check permissions and disk.") from None


def parse_json(text: str) -> Any:
    """Parse JSON; raises ValueError that says why it is none, also for a lone surrogate, which is not text."""
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError as error:
        near = error.object[max(error.start - 60, 0) : error.start + 10]
        raise ValueError(f"half of a surrogate pair in {quoted(near)}") from None
    return document


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys: set[str] = set()
        raise DuplicateKeyError(f"duplicate key {quoted(next(k for k, _ in pairs if k in keys or keys.add(k)))}")
    return result


def parse_json_object(text: str, *, where: str) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys; raises MalformedFileError that names `where`."""
    try:
        document = parse_json(text)
    except DuplicateKeyError as error:
        raise MalformedFileError(f"{where}: {error}.") from None
    except ValueError as error:
        raise MalformedFileError(f"{where}: not JSON ({error}).") from None
    if not isinstance(document, dict):
        raise MalformedFileError(f"{where}: not a JSON object.")
    if _is_deep(cast(dict[str, Any], document)):
        raise MalformedFileError(f"{where}: not JSON that any tool writes (nested more than {MAX_NESTING} levels).")
    return cast(dict[str, Any], document)


def _is_deep(document: dict[str, Any]) -> bool:
    level: list[Any] = [document]
    for _ in range(MAX_NESTING):
        below: list[Any] = [child for node in level for child in _children(node)]
        level = [child for child in below if isinstance(child, dict | list)]
    return bool(level)


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return cast(dict[str, Any], node).values()
    return cast(list[Any], node)


def read_json_file(path: Path) -> dict[str, Any]:
    """Read one JSON object from a regular file; raises MalformedFileError, or SourceReadError if reading fails."""
    return parse_json_object(read_text_file(path), where=str(path))


def read_text_file(path: Path) -> str:
    """Read a small regular file of UTF-8; raises MalformedFileError, SourceReadError."""
    try:
        check_plain_file(path)
        return read_small_file(path).decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedFileError(f"{path}: not UTF-8 text.") from None


def read_small_file(path: Path, *, limit: int = MAX_SMALL_FILE_BYTES) -> bytes:
    """Read a file of at most `limit` bytes; raises MalformedFileError, or SourceReadError if reading fails."""
    with reading(path, missing="missing."), path.open("rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise MalformedFileError(f"{path}: larger than {limit:,} bytes, which no file of its kind is.")
    check_no_pointer(path, raw)
    return raw


def list_folder(folder: Path) -> list[Path]:
    """Return the files of a folder, sorted; none without a folder. Raises SourceReadError if it cannot be read."""
    with reading(folder):
        try:
            return sorted(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []


def walk_folder(folder: Path) -> list[Path]:
    """Return what is below a folder, sorted, through links, but not those that lead back, hidden ones and lost+found.

    Raises SourceReadError, and MalformedFileError if there are more files than a checkpoint has.
    """
    paths: list[Path] = []
    waiting: list[tuple[Path, tuple[str, ...]]] = [(folder, (os.path.realpath(folder),))]
    while waiting:
        entered, above = waiting.pop()
        for path in list_folder(entered):
            paths.append(path)
            if len(paths) > MAX_FILES:
                raise MalformedFileError(f"{entered}: is one of more than {MAX_FILES:,} files and folders.")
            if path.name.startswith(".") or path.name == LOST_FOUND or not S_ISDIR(mode_of(path)):
                continue
            real = os.path.realpath(path)
            if not path.is_symlink() or not any(Path(ancestor).is_relative_to(real) for ancestor in above):
                waiting.append((path, (*above, real)))
    return sorted(paths)


def mapping_or_empty(value: object) -> dict[str, Any]:
    """Return a part of a JSON document if it is an object, else an empty one."""
    if isinstance(value, dict):
        return cast(dict[str, Any], value)
    return {}


def dump_json(document: dict[str, Any]) -> bytes:
    """Encode JSON as checkpoints have it: indented by two spaces, UTF-8, a final newline."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def pieces(content: Content) -> Iterator[bytes]:
    """Yield the bytes of `content` in order; raises SourceReadError if a file cannot be read."""
    if isinstance(content, bytes):
        yield content
        return
    with reading(content), content.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def file_digest(path: Path) -> str:
    """Return the blake3 of a file as hex, computed in pieces, of a large file on all cores; raises SourceReadError."""
    with reading(path):
        is_large = path.stat().st_size > PIECE_BYTES
    digest = blake3(max_threads=num_cores() if is_large else 1)  # more threads can be refused, and blake3 then panics
    for piece in pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def known_sha256(path: Path) -> str | None:
    """Return the sha256 that a download left for a file; None if it left none, or the file was changed since.

    In the Hub's cache it is the name of the file that a link leads to. `hf download --local-dir` writes three lines
    beside the files: commit, hash, time. Files that are not in LFS have a shorter hash, of git.
    """
    blob = path.resolve()
    notes = path.parent / ".cache" / "huggingface" / "download"
    if blob.parent.name == BLOBS_FOLDER:
        if _SHA256.fullmatch(blob.name):
            return blob.name
        return None
    try:
        _, sha256, seconds = (notes / f"{path.name}.metadata").read_text().split()
        is_current = path.stat().st_mtime <= float(seconds) + 1  # as huggingface_hub decides it
    except (OSError, ValueError):
        return None
    if is_current and _SHA256.fullmatch(sha256):
        return sha256
    return None


def is_there(path: Path) -> bool:
    """Return whether a file, a folder or a link has this name; raises OSError if that cannot be found out."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def num_bytes_of(content: Content) -> int:
    """Return the length of `content`; raises OSError if the file does not exist."""
    if isinstance(content, bytes):
        return len(content)
    return content.stat().st_size


def own_suffix() -> str:
    """Return a suffix for temporary files that no other process uses, for a folder that several processes write to."""
    return f".{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"


def is_temporary(name: str, *, of: str) -> bool:
    """Return whether a file of this name is the file `of` half written, by one process or by one of several."""
    rest = name.removeprefix(of)
    return name.startswith(of) and (rest == TEMPORARY_SUFFIX or _OWN_SUFFIX.fullmatch(rest) is not None)


def write_atomically(
    path: Path,
    content: Content,
    *,
    mtime_ns: int | None = None,
    suffix: str = TEMPORARY_SUFFIX,
    is_first: bool = False,
) -> None:
    """Write `content` to `path`: complete and on disk, or not at all.

    A link at `path` is replaced. `mtime_ns` becomes the file's time of modification if the filesystem allows it.
    `suffix` is that of the temporary file. With `is_first` a file that is already there stays as it is. Raises
    DiskFullError, DestinationWriteError, DestinationError.
    """
    temporary = path.with_name(path.name + suffix)
    with writing(path):
        descriptor = create_file(temporary)
        try:
            try:
                for piece in pieces(content):
                    view = memoryview(piece)
                    while len(view):
                        view = view[os.write(descriptor, view) :]
                if mtime_ns is not None:
                    with suppress(OSError):
                        os.utime(descriptor, ns=(mtime_ns, mtime_ns))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if is_first:
                place_first(temporary, path)
            else:
                replace_file(temporary, path)
        except BaseException:
            with suppress(OSError, DestinationError):  # in a read-only folder removing fails too
                remove_file(temporary)
            raise


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Turn an OSError in the block into DiskFullError or DestinationWriteError that names `path`."""
    try:
        yield
    except K2ConvertError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            words = "the disk is full. Finished work is kept: free space, run the command again."
            raise DiskFullError(f"{path}: {words}") from error
        raise DestinationWriteError(
            f"{path}: writing failed ({error.strerror}). Finished work is kept: check permissions, limits and the "
            "disk, or start again in a folder on a different disk."
        ) from error


def write_all(descriptor: int, data: memoryview, position: int) -> None:
    """Write all of `data` at `position`; raises OSError."""
    while data:
        count = os.pwrite(descriptor, data, position)
        data = data[count:]
        position = position + count


def holds_exactly(path: Path, content: Content) -> bool:
    """Return whether `path` is a regular file with exactly these bytes."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size != num_bytes_of(content):
            return False
        with path.open("rb") as file:
            return all(file.read(len(piece)) == piece for piece in pieces(content))
    except OSError:
        return False


ABSENT: Final = object()


def is_same_json(left: Any, right: Any) -> bool:
    """Return whether two values are equal as JSON: True is not 1, and 1 is not 1.0."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def config_differences(
    before: Any, after: Any, path: str = "", *, unread: Sequence[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, value before, value after) of each field that differs, except those called as in `unread`."""
    left = mapping_or_empty(before)
    right = mapping_or_empty(after)
    for key in (*left, *(key for key in right if key not in left)):
        if key in unread:
            continue
        field = f"{path}.{shortened(key)}" if path else shortened(key)
        left_value = left.get(key, ABSENT)
        right_value = right.get(key, ABSENT)
        if isinstance(left_value, dict) and isinstance(right_value, dict):
            yield from config_differences(cast(object, left_value), cast(object, right_value), field, unread=unread)
        elif left_value is ABSENT or right_value is ABSENT or not is_same_json(left_value, right_value):
            yield field, left_value, right_value


def discard_file(path: Path) -> None:
    """Remove a file if it exists; raises DestinationWriteError, DestinationError for a folder."""
    with writing(path):
        remove_file(path)
