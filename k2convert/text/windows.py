"""Texts to windows of token ids, drawn by a seed, in bounded memory.

The texts are .txt (UTF-8), or .jsonl with "text" or "messages" in each line; a document a line. "conversations" of
objects with "role" and "content" are messages too. Token ids made elsewhere are .npy (integers, [tokens] or
[windows, tokens]).

How windows are drawn. Texts of up to 4 MiB together are read whole. Larger ones are cut into sections of 64 KiB, and
the seed puts the sections in an order; they are read in this order until they give four times the tokens asked for, so
a text of any size takes the same memory and time, apart from its digest. What was read is put back in the order of the
texts, one document after the other, and cut into windows; the seed draws as many as were asked for. Windows never
overlap, and their order is that of the texts. The order of a seed is that of BLAKE3 digests: the same everywhere.

Neighboring sections give every document once: a line belongs to the section in which its first byte is, and so does a
character of a plain text.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeGuard, cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from k2convert.checkpoint.files import PIECE_BYTES, file_digest, parse_json_object
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import CalibrationError, MalformedFileError, SourceReadError, counted, cut, quoted
from k2convert.models import read_architecture
from k2convert.models.config import stated_count
from k2convert.records.evaluation import EvaluationText
from k2convert.text.tokenizers import ChatTemplate, Tokenizer, open_tokenizer

MAX_LINE_BYTES: Final = 16 << 20

Ids = NDArray[np.integer[Any]]

_FORMS: Final = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]} or {"text": "..."}'
_OBJECT: Final = "python3 -c 'import json, sys; print(json.dumps(json.load(sys.stdin)))' < {} > {}.jsonl"
_ARRAY: Final = "python3 -c 'import json, sys; [print(json.dumps(d)) for d in json.load(sys.stdin)]' < {} > {}.jsonl"
_LIST: Final = (
    "python3 -c 'import json, sys; [print(json.dumps(d)) for d in next(v for v in json.load(sys.stdin).values() "
    "if isinstance(v, list))]' < {} > {}.jsonl"
)
_LINES: Final = "cp {} {}.jsonl"
_PARQUET: Final = (
    "python3 -c 'import pandas, sys; print(pandas.read_parquet(sys.argv[1])"
    """.to_json(orient="records", lines=True))' {} > {}.jsonl"""
)
_TABLE: Final = (
    """python3 -c 'import csv, json, sys; csv.field_size_limit(1 << 24); [print(json.dumps(d)) for d in """
    """csv.DictReader(open(sys.argv[1], encoding="utf-8-sig", newline=""), dialect="%s")]' {} > {}.jsonl"""
)
_CONVERSIONS: Final = {
    ".json": _ARRAY,
    ".parquet": _PARQUET,
    ".csv": _TABLE % "excel",
    ".tsv": _TABLE % "excel-tab",
    ".gz": "gunzip -k {}",
    ".bz2": "bunzip2 -k {}",
    ".xz": "unxz -k {}",
    ".zst": "zstd -d {}",
}
"""Commands that make a text that is read, by the suffix of one that is not; of its path, with and without suffix."""

_SKIPPED: Final = "with null in place of a text: skipped"
_TEXT_KEYS: Final = ("text", "messages", "conversations")
_MEDIA_KEYS: Final = ("image", "images", "video", "videos", "audio", "audios")
_MEDIA: Final = "with images or other media: their text is read, and only placeholders of the media"

Read = Callable[[Path, int, int], Ids]
"""Returns the ids of a range of bytes of a file."""


def read_plain(path: Path, start: int, stop: int, *, tokenizer: Tokenizer) -> Ids:
    """Return the ids of the characters that begin in a range of bytes of a .txt file, one document in UTF-8."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            raw = file.read(stop - start + 3)
    except OSError as error:
        raise _unreadable(path, error) from None
    first = _next_character(raw, 0) if start else 0
    last = _next_character(raw, stop - start)
    text = _decode(raw[first:last], path, start + first)
    return tokenizer.encode(text if start else text.removeprefix("\ufeff"))


def read_lines(path: Path, start: int, stop: int, *, ids_of: Callable[[str], Ids]) -> Ids:
    """Return the ids of the lines that begin in a range of bytes of a .jsonl file, one document after the other.

    `ids_of` gives the ids of a line or raises CalibrationError without a place.
    """
    documents: list[Ids] = [np.zeros(0, dtype=np.int64)]
    for offset, raw in _lines(path, start, stop):
        text = _decode(raw, path, offset).strip("\ufeff \t\r\n")
        try:
            if len(raw) > MAX_LINE_BYTES:
                raise CalibrationError(f"longer than {MAX_LINE_BYTES:,} bytes. Split the document.")
            if text:
                documents.append(ids_of(text))
        except CalibrationError as error:
            raise CalibrationError(f"{path}, line {_line_number(path, offset)}: {error}") from None
    return np.concatenate(documents)


def _lines(path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            file.seek(max(start - 1, 0))
            while start > 0 and file.tell() < stop and not file.readline(PIECE_BYTES).endswith(b"\n"):
                pass  # the rest of a line that begins before the section
            while (offset := file.tell()) < stop and (raw := file.readline(MAX_LINE_BYTES + 1)):
                yield offset, raw
    except OSError as error:
        raise _unreadable(path, error) from None


def _line_number(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        sizes = [min(PIECE_BYTES, offset - at) for at in range(0, offset, PIECE_BYTES)]
        return 1 + sum(file.read(size).count(b"\n") for size in sizes)


def read_array(path: Path, start: int, stop: int) -> Ids:
    """Return the ids of a range of bytes of an .npy file, counted without its header; it is mapped, not read."""
    try:
        mapped: object = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise _unreadable(path, error) from None
    except Exception as error:  # numpy reads the header as Python, and raises whatever it leads to
        raise CalibrationError(
            f"{path}: not an .npy file of numbers ({cut(str(error), 120)}). Save the array with numpy.save."
        ) from None
    array = cast(Ids, mapped)
    if not isinstance(mapped, np.ndarray) or array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise CalibrationError(f"{path}: not integers of the shape [tokens] or [windows, tokens].")
    return np.array(array.reshape(-1)[start // array.itemsize : stop // array.itemsize])


def text_of_line(line: str, tokenizer: Tokenizer, template: ChatTemplate, counts: Counter[str]) -> Ids:
    """Return the ids of a .jsonl line with a text or messages; raises CalibrationError without a place.

    A line with null in their place has none. `counts` counts such lines and those with images, by what is said of them.
    """
    try:
        document = parse_json_object(line, where="")
    except MalformedFileError as error:
        raise CalibrationError(f"{str(error).removeprefix(': ')} Write {_FORMS} on each line.") from None
    given = [document[key] for key in _TEXT_KEYS if key in document]
    if given and all(value is None for value in given):
        counts[_SKIPPED] += 1
        return np.zeros(0, dtype=np.int64)
    text, messages, tools = (document.get(key) for key in ("text", "messages", "tools"))
    if isinstance(text, str):
        return tokenizer.encode(text)
    conversation = document.get("conversations")
    if messages is None and _are_objects(conversation) and all("role" in m and "content" in m for m in conversation):
        messages = conversation
    if not (_are_objects(messages) and messages) or not (tools is None or _are_objects(tools)):
        raise CalibrationError(f"{_other_form(document)} Write {_FORMS} on each line.")
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if _are_objects(content) for part in content]
    if any(document.get(key) for key in _MEDIA_KEYS) or any(part.get("type", "text") != "text" for part in parts):
        counts[_MEDIA] += 1
    return tokenizer.encode(template.render(messages, tools), special=True)


def _other_form(document: Mapping[str, Any]) -> str:
    """Say what a line without text and messages has instead."""
    for keys, form in ((("conversations",), "the form of ShareGPT"), (("prompt", "completion"), "pairs")):
        if all(key in document for key in keys):
            return f"has {' and '.join(map(json.dumps, keys))} ({form}), which are not read."
    keys = cut(", ".join(map(quoted, document)) or "nothing", 120)
    return f'has neither "text", a string, nor "messages", a list of objects, but {keys}.'


def _check_form(path: Path) -> None:
    """Refuse a file that a command can convert to a text that is read, and any other unknown one (CalibrationError)."""
    suffix = path.suffix.lower()
    names = [shlex.quote(str(path)), shlex.quote(str(path.with_suffix("")))]
    try:
        with path.open("rb") as file:
            first = file.read(PIECE_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
    except OSError as error:
        raise _unreadable(path, error) from None
    command = _CONVERSIONS.get(suffix)
    if suffix == ".json" and first.startswith(b"{"):
        command = _object_command(path, first)
    if command is not None:
        needs = " `pip install pandas pyarrow` installs what reads it." if command == _PARQUET else ""
        raise CalibrationError(f"{path}: {suffix} is not read.{needs} Convert it: `{command.format(*names)}`")
    if suffix not in (".txt", ".npy", LINES):
        raise CalibrationError(
            f"{path}: its name does not end in .txt, .jsonl or .npy, so its form is unknown. Give plain text a name in "
            ".txt."
        )
    if suffix == LINES and first.startswith(b"[") and first[1:].lstrip()[:1] in (b"", b"{", b'"'):
        command = _ARRAY.format(names[0], shlex.quote(f"{path.with_suffix('')}-lines"))
        raise CalibrationError(f"{path}: is one JSON array, not a document a line. Convert it: `{command}`")


def _object_command(path: Path, first: bytes) -> str:
    """Return the command for a .json file of one object, of an object with a list of documents, or of one a line."""
    if path.stat().st_size > MAX_LINE_BYTES:  # more than one document
        return _LINES if b"}\n{" in first.replace(b"\r", b"") else _LIST
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        return _LINES if str(error).startswith("Extra data") else _OBJECT
    except RecursionError:
        return _OBJECT
    is_list = not document.keys() & set(_TEXT_KEYS) and any(map(_are_objects, document.values()))
    return _LIST if is_list else _OBJECT


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


WHOLE_BYTES: Final = 4 << 20
SECTION_BYTES: Final = 64 << 10
READ_PER_TOKEN: Final = 4
"""Tokens that are read of a large text for each one asked for, so that the windows come from many places."""

MIN_KINDS: Final = 32
"""Different token ids that a text must have for anything to be fitted to it."""

HELD_OUT_EVERY: Final = 16
"""One window in so many is kept out of a fit, to measure what the fit is worth on other tokens."""

LINES: Final = ".jsonl"

TOKENS_PER_INPUT: Final = 2
"""Tokens that an expert needs for each input of its down projection."""

_LEAST_TOKENS: Final = 131_072
_MOST_TOKENS: Final = 1 << 20  # no config asks for more by default


def experts_per_token(source: Checkpoint) -> int:
    """Return how many experts a token chooses, 1 if the config does not say."""
    return stated_count(source.config, "num_experts_per_tok") or 1


def default_tokens(source: Checkpoint, *, window: int) -> int:
    """Return the tokens of which an expert is fitted to TOKENS_PER_INPUT for each input if all experts get the same.

    They fill whole windows, held-out ones included, and are never few. Raises PlanError if the config has no counts.
    """
    architecture = read_architecture(source)
    inputs = architecture.moe_intermediate_size * architecture.num_experts
    needed = -(-TOKENS_PER_INPUT * inputs // experts_per_token(source))
    tokens = min(max(needed, _LEAST_TOKENS), _MOST_TOKENS)
    return tokens_to_fit(tokens, window=window)


def tokens_to_fit(fitted: int, *, window: int) -> int:
    """Return the least tokens, in whole windows, of which so many are not held out."""
    tokens = max(-(-fitted // window), 1) * window
    while (missing := fitted - fitted_tokens(tokens, window=window)) > 0:
        tokens += -(-missing // window) * window
    return tokens


def fitted_tokens(tokens: int, *, window: int) -> int:
    """Return how many tokens of whole windows are not held out."""
    return int(np.count_nonzero(~held_out(tokens // window))) * window


@dataclass(frozen=True, slots=True)
class Windows:
    """`ids` i64 [windows, tokens of each]; name and BLAKE3 of each text; what the user should know.

    `tokens` and `window` are what was asked for; the seed drew the windows.
    """

    ids: NDArray[np.int64]
    texts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    tokens: int
    window: int
    seed: int

    @property
    def digest(self) -> str:
        """The BLAKE3 of the token ids."""
        return blake3(self.ids.astype("<i8").tobytes()).hexdigest()

    def __str__(self) -> str:
        windows, length = self.ids.shape
        names = ", ".join(name for name, _ in self.texts)
        return f"{self.ids.size:,} tokens of {names}, in {counted(windows, 'window')} of {length:,}"

    def described(self) -> EvaluationText:
        """Return the text as a document has it, without dropped windows."""
        windows, length = self.ids.shape
        return EvaluationText(self.texts, self.digest, self.ids.size, length, windows, self.seed)


def read_windows(
    files: Sequence[Path], *, tokenizer: Path, vocab_size: int, tokens: int, window: int, seed: int
) -> Windows:
    """Draw `tokens // window` windows from texts and token ids.

    `tokenizer` is the checkpoint folder with its files; token ids need none. A text with fewer tokens than asked for
    gives what it has; with fewer than one window, one shorter window. The same bytes and options give the same windows
    on every machine. Raises CalibrationError if a file cannot be used, holds an id outside [0, vocab_size), or nothing
    holds a token.
    """
    readers: dict[Path, Read] = {}
    counts = Counter[str]()
    for path in files:
        if not path.exists():
            raise CalibrationError(f"{path}: no such file.")
        if not path.is_file():
            raise CalibrationError(f"{path}: is a folder or a device, not a file.")
        _check_form(path)
        if path.suffix.lower() == ".npy":
            readers[path] = read_array
    if texts := [path for path in files if path not in readers]:
        model = open_tokenizer(tokenizer)
        if model.num_ids > vocab_size:
            raise CalibrationError(
                f"{tokenizer}: the tokenizer has {model.num_ids:,} ids, but the embedding has {vocab_size:,} rows. Use "
                "the tokenizer of these weights, or give the embedding a row for each id."
            )
        template = ChatTemplate(tokenizer)
        of_line = partial(text_of_line, tokenizer=model, template=template, counts=counts)
        for path in texts:
            readers[path] = partial(read_plain, tokenizer=model)
            if path.suffix.lower() == LINES:
                readers[path] = partial(read_lines, ids_of=of_line)
    enough = READ_PER_TOKEN * max(tokens, window)
    stream = _read(files, readers, vocab_size=vocab_size, enough=enough, seed=seed)
    length = min(window, tokens, stream.size)
    if length == 0:
        raise CalibrationError(f"{', '.join(map(str, files))}: no token in it. Pass a text that is not empty.")
    wanted = tokens // length
    available = stream.size // length
    chosen = sorted(_shuffled(available, seed)[:wanted])
    ids = stream[: available * length].reshape(available, length)[chosen].astype(np.int64)
    names = (path.name.encode(errors="backslashreplace").decode() for path in files)  # not every name is UTF-8
    texts = tuple(zip(names, map(file_digest, files), strict=True))
    notes = [f"{counted(number, 'line')} {note}" for note, number in counts.items()]
    if ids.size < tokens - tokens % min(window, tokens):
        given = f"{ids.size:,} tokens ({counted(len(ids), 'window')} of {length:,})"
        notes.append(f"the text has only {given}; {tokens:,} are wanted")
    return Windows(ids, texts, tuple(notes), tokens, window, seed)


def is_varied(ids: NDArray[np.int64]) -> bool:
    """Return whether tokens are of enough kinds to fit anything to. A few kinds, repeated, tell nothing of others."""
    return np.unique(ids).size >= min(MIN_KINDS, ids.size) > 1


def held_out(num_windows: int) -> NDArray[np.bool_]:
    """Return which windows, bool [num_windows], measure a fit and so are kept out of it: one in HELD_OUT_EVERY.

    They are evenly spread, and at least one unless there is only one window.
    """
    first = min(num_windows, HELD_OUT_EVERY) // 2
    return (np.arange(num_windows) % HELD_OUT_EVERY == first) & (num_windows > 1)


def _read(
    files: Sequence[Path], readers: Mapping[Path, Read], *, vocab_size: int, enough: int, seed: int
) -> NDArray[np.int32]:
    """Return the ids of all files, or of enough sections of them, in the order of the files."""
    sizes = [path.stat().st_size for path in files]
    is_small = sum(sizes) <= WHOLE_BYTES
    sections = [
        (path, start, min(start + step, size))
        for path, size in zip(files, sizes, strict=True)
        for step in (size if is_small else SECTION_BYTES,)
        for start in range(0, size, step or 1)
    ]
    section_ids: dict[int, NDArray[np.int32]] = {}
    count = 0
    for index in _shuffled(len(sections), seed):
        path, start, stop = sections[index]
        ids = readers[path](path, start, stop)
        for extreme in (ids.min(), ids.max()) if ids.size else ():
            if not 0 <= int(extreme) < vocab_size:
                raise CalibrationError(
                    f"{path}: holds the token id {int(extreme)}, but the model's vocabulary is "
                    f"[0, {vocab_size}). Use the tokenizer of the same checkpoint."
                )
        section_ids[index] = ids.astype(np.int32)
        count += section_ids[index].size
        if count >= enough and not is_small:
            break
    return np.concatenate([np.zeros(0, dtype=np.int32), *(section_ids[index] for index in sorted(section_ids))])


def _shuffled(count: int, seed: int) -> list[int]:
    return sorted(range(count), key=lambda index: blake3(f"{seed}/{index}".encode()).digest())
