"""Files of text or token ids, read in sections: a range of a file's bytes gives the token ids that begin in it.

Neighboring sections give every document once: a line belongs to the section in which its first byte is, and so does a
character of a plain text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from k2convert.calibrate.chat import ChatTemplate
from k2convert.calibrate.tokenizers import Tokenizer
from k2convert.checkpoint.files import PIECE_BYTES, parse_json, parse_json_object
from k2convert.errors import CalibrationError, MalformedFileError, SourceReadError, cut, quoted

MAX_LINE_BYTES: Final = 16 << 20

Ids = NDArray[np.integer[Any]]

_FORMS: Final = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]} or {"text": "..."}'
_IDS: Final = 'a list of token ids, or an object with the list "input_ids"'


class Source(Protocol):
    """A file that gives token ids."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    def read(self, start: int, stop: int) -> Ids:
        """Return the ids [tokens] of a range of the file's bytes; raises CalibrationError, SourceReadError."""
        ...


@dataclass(frozen=True, slots=True)
class PlainFile:
    """A .txt file: one document in UTF-8."""

    path: Path
    tokenizer: Tokenizer

    def read(self, start: int, stop: int) -> Ids:
        """Return the ids of the characters that begin in a range of bytes."""
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                raw = file.read(stop - start + 3)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        first = _next_character(raw, 0) if start else 0
        last = _next_character(raw, stop - start)
        text = _decode(raw[first:last], self.path, start + first)
        return self.tokenizer.encode(text if start else text.removeprefix("\ufeff"))


@dataclass(frozen=True, slots=True)
class LineFile:
    """A .jsonl file: a document a line. `ids_of` gives the ids of a line or raises CalibrationError without a place."""

    path: Path
    ids_of: Callable[[str], Ids]

    def read(self, start: int, stop: int) -> Ids:
        """Return the ids of the lines that begin in a range of bytes, one document after the other."""
        found: list[Ids] = [np.zeros(0, dtype=np.int64)]
        for offset, raw in self._lines(start, stop):
            text = _decode(raw, self.path, offset).strip("\ufeff \t\r\n")
            try:
                if len(raw) > MAX_LINE_BYTES:
                    raise CalibrationError(f"longer than {MAX_LINE_BYTES:,} bytes. Split the document.")
                if text:
                    found.append(self.ids_of(text))
            except CalibrationError as error:
                raise CalibrationError(f"{self.path}, line {self._number_of(offset)}: {error}") from None
        return np.concatenate(found)

    def _lines(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                file.seek(max(start - 1, 0))
                while start > 0 and file.tell() < stop and not file.readline(PIECE_BYTES).endswith(b"\n"):
                    pass  # the rest of a line that begins before the section
                while (offset := file.tell()) < stop and (raw := file.readline(MAX_LINE_BYTES + 1)):
                    yield offset, raw
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def _number_of(self, offset: int) -> int:
        """The number of the line that begins at an offset."""
        with self.path.open("rb") as file:
            sizes = [min(PIECE_BYTES, offset - at) for at in range(0, offset, PIECE_BYTES)]
            return 1 + sum(file.read(size).count(b"\n") for size in sizes)


@dataclass(frozen=True, slots=True)
class TokenArray:
    """An .npy file of token ids, [tokens] or [windows, tokens]; it is mapped, not read."""

    path: Path

    def read(self, start: int, stop: int) -> Ids:
        """Return the ids of a range of bytes, counted without the file's header."""
        try:
            mapped: object = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        except Exception as error:  # numpy reads the header as Python, and raises whatever it leads to
            raise CalibrationError(
                f"{self.path}: not an .npy file of numbers ({cut(str(error), 120)}). Save the array with numpy.save."
            ) from None
        array = cast(Ids, mapped)
        if not isinstance(mapped, np.ndarray) or array.dtype.kind not in "iu" or array.ndim not in (1, 2):
            raise CalibrationError(f"{self.path}: not integers of the shape [tokens] or [windows, tokens].")
        return np.array(array.reshape(-1)[start // array.itemsize : stop // array.itemsize])


def text_of_line(line: str, tokenizer: Tokenizer, template: ChatTemplate) -> Ids:
    """Return the ids of a .jsonl line with "text" or "messages"; raises CalibrationError without a place."""
    try:
        document = parse_json_object(line, where="")
    except MalformedFileError as error:
        raise CalibrationError(str(error).removeprefix(": ")) from None
    text, messages, tools = (document.get(key) for key in ("text", "messages", "tools"))
    if isinstance(text, str):
        return tokenizer.encode(text)
    if not (_are_objects(messages) and messages) or not (tools is None or _are_objects(tools)):
        raise CalibrationError(f"{_other_form(document)} Write {_FORMS} on each line.")
    return tokenizer.encode(template.render(messages, tools), special=True)


def _other_form(document: Mapping[str, Any]) -> str:
    """Say what a line without text and messages has instead."""
    for keys, form in ((("conversations",), "the form of ShareGPT"), (("prompt", "completion"), "pairs")):
        if all(key in document for key in keys):
            return f"has {' and '.join(map(json.dumps, keys))} ({form}), which are not read."
    return 'has neither "text", a string, nor "messages", a list of objects.'


def has_ids(path: Path) -> bool:
    """Return whether a .jsonl file holds token ids, not text, by its first line."""
    try:
        with path.open("rb") as file:
            first = next((line for line in iter(lambda: file.readline(MAX_LINE_BYTES), b"") if line.strip()), b"")
    except OSError as error:
        raise _unreadable(path, error) from None
    is_text = b'"text"' in first or b'"messages"' in first
    return first.lstrip(b"\xef\xbb\xbf \t").startswith(b"[") or (b'"input_ids"' in first and not is_text)


def ids_of_line(line: str) -> Ids:
    """Return the ids of a .jsonl line that holds a list of them; raises CalibrationError without a place."""
    try:
        document: object = parse_json(line)
        ids = cast(dict[str, Any], document).get("input_ids") if isinstance(document, dict) else document
        array = np.array(ids)
    except (ValueError, OverflowError) as error:
        raise CalibrationError(f"not {_IDS} ({error}).") from None
    if not isinstance(ids, list) or array.ndim != 1 or (array.size and array.dtype.kind != "i"):
        raise CalibrationError(f"not {_IDS}, but {quoted(cast(object, document))}.")
    return array.astype(np.int64)


def _are_objects(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and all(isinstance(item, dict) for item in cast(list[object], value))


def _next_character(raw: bytes, at: int) -> int:
    """Return where the next character begins: up to three bytes that continue one are passed over."""
    return next((i for i in range(at, min(at + 3, len(raw))) if raw[i] & 0xC0 != 0x80), min(at + 3, len(raw)))


def _decode(raw: bytes, path: Path, offset: int) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise CalibrationError(
            f"{path}: not UTF-8 text (byte {at:,} is {raw[error.start]:#04x}). Convert it."
        ) from None
    if (at := raw.find(0)) >= 0:
        raise CalibrationError(f"{path}: not text (byte {offset + at:,} is zero). Pass .txt or .jsonl files.")
    return text


def _unreadable(path: Path, error: OSError) -> SourceReadError:
    return SourceReadError(f"{path}: cannot be read ({error.strerror}). Check permissions and disk.")
