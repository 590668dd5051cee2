"""The tokenizer of a source folder, and its chat template, without running the folder's code.

tokenizer.json is read by tokenizers. Kimi's checkpoints have tiktoken.model instead, and a Python file that says how it
is to be used; what that file does is written here: its pattern, its special tokens, its limits on one call.

A text is encoded as plain text: the name of a special token in it (`<|im_end|>`) becomes ordinary tokens. A rendered
chat is encoded with its special tokens, as transformers does. No token is added at the beginning or end.

tokenizers and tiktoken run in this process. A tokenizer file is a small program: its normalizer, added tokens and
patterns can make any amount of text of a letter. The size of the file is bounded; its time and memory are not.

A chat template is a program too. It is rendered as transformers does: in jinja2's immutable sandbox, which lets it
reach no file and no object of Python's. The sandbox bounds neither time nor memory.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from k2convert.checkpoint.files import (
    check_plain_file,
    is_there,
    mapping_or_empty,
    read_json_file,
    read_small_file,
    read_text_file,
)
from k2convert.checkpoint.index import NUM_SPECIAL_TOKENS
from k2convert.checkpoint.names import CHAT_TEMPLATE_NAME, TIKTOKEN_NAME, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from k2convert.errors import CalibrationError, cut, quoted, remedy, require_extra

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

KIMI_PATTERN: Final = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Pattern by which Kimi's tokenization_kimi.py cuts a text before the byte pairs are merged, character by character."""

MAX_CALL_CHARS: Final = 400_000
MAX_RUN_CHARS: Final = 25_000
"""Kimi's tokenizer cuts a longer text, and a longer run of (non-)whitespace, because tiktoken would overflow there."""

PIECE_CHARS: Final = 2 << 20
"""tokenizers needs 160 bytes of memory a character, so it gets a longer text in pieces that end with a line."""

MAX_FILE_BYTES: Final = 64 << 20
"""The largest tokenizer.json of a published model that was looked at has 33 MB, Kimi's tiktoken.model 3 MB."""

_PANIC: Final = "PanicException"  # of tokenizers and tiktoken, whose code is Rust; it is not an Exception

BAD_FILE: Final = "Download the checkpoint's tokenizer files again, or pass token ids (.npy) instead of text."


def open_tokenizer(folder: Path) -> Tokenizer:
    """Open the tokenizer of a checkpoint folder.

    tokenizer.json comes before tiktoken.model, unless it has other ids for the special tokens of tokenizer_config.json:
    some conversions of Kimi's file renumber them, and the engines use tiktoken.model.

    Raises CalibrationError if there is none or it cannot be used, MissingDependencyError without its library.
    """
    require_extra("calibrate", purpose="text to calibrate on")
    has_json = is_there(folder / TOKENIZER_NAME)
    has_kimi = is_there(folder / TIKTOKEN_NAME)
    names = _special_tokens(folder / TOKENIZER_CONFIG_NAME) if has_kimi else {}
    if has_json and not (has_kimi and _is_renumbered(folder / TOKENIZER_NAME, names)):
        return _JsonTokenizer(folder / TOKENIZER_NAME)
    if has_kimi:
        return _KimiTokenizer(folder / TIKTOKEN_NAME, names)
    raise CalibrationError(f"{folder}: has neither {TOKENIZER_NAME} nor {TIKTOKEN_NAME}. {BAD_FILE}")


class Tokenizer(Protocol):
    """The tokenizer of a checkpoint folder. Its ids are below `num_ids`."""

    num_ids: int

    def encode(self, text: str, *, special: bool = False) -> NDArray[np.int64]:
        """Return the ids i64 [tokens] of a text. `special`: names of special tokens become these tokens."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, special tokens by their names. Bytes that are no text become U+FFFD."""
        ...


class _JsonTokenizer:
    """tokenizer.json, by tokenizers."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        self._path = path
        text = _read_small_file(path)
        with _in_one_line(path):
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(text)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self.num_ids = 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    def encode(self, text: str, *, special: bool = False) -> NDArray[np.int64]:
        with _in_one_line(self._path):
            self._tokenizer.encode_special_tokens = not special
            piece_ids = [
                self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0].ids  # pyright: ignore[reportUnknownMemberType]
                for piece in _line_pieces(text)
            ]
        return np.concatenate([np.array(ids, dtype=np.int64) for ids in piece_ids])

    def decode(self, ids: list[int]) -> str:
        with _in_one_line(self._path):
            return self._tokenizer.decode(ids, skip_special_tokens=False)


class _KimiTokenizer:
    """tiktoken.model and the special tokens of tokenizer_config.json, by tiktoken, as tokenization_kimi.py does."""

    def __init__(self, path: Path, names: dict[int, str]) -> None:
        import tiktoken

        self._path = path
        ranks = _read_ranks(path)
        ids = range(len(ranks), len(ranks) + NUM_SPECIAL_TOKENS)
        special = {names.get(i, f"<|reserved_token_{i}|>"): i for i in ids} | {name: i for i, name in names.items()}
        below = [name for name, i in special.items() if i < len(ranks)]
        if below or len(special) < len({*ids, *names}):
            raise CalibrationError(
                f"{path.with_name(TOKENIZER_CONFIG_NAME)}: its special tokens do not fit {path.name}, which has "
                f"{len(ranks):,} tokens ({quoted(below[0]) if below else 'a name is given twice'}). {BAD_FILE}"
            )
        with _in_one_line(path):
            self._encoding: tiktoken.Encoding = tiktoken.Encoding(
                path.name, pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=special
            )
        self.num_ids = self._encoding.n_vocab

    def encode(self, text: str, *, special: bool = False) -> NDArray[np.int64]:
        allowed = self._encoding.special_tokens_set if special else set[str]()
        with _in_one_line(self._path):
            piece_ids = [
                self._encoding.encode_to_numpy(piece, allowed_special=allowed, disallowed_special=())
                for start in range(0, len(text), MAX_CALL_CHARS)
                for piece in _short_runs(text[start : start + MAX_CALL_CHARS])
            ]
        return np.concatenate([np.zeros(0, dtype=np.int64), *piece_ids]).astype(np.int64)

    def decode(self, ids: list[int]) -> str:
        with _in_one_line(self._path):
            return self._encoding.decode(ids)


def _line_pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most PIECE_CHARS, which end with a line where there is one."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        stop = text.rfind("\n", start, start + PIECE_CHARS) + 1 or start + PIECE_CHARS
        yield text[start:stop]
        start = stop
    yield text[start:]


def _short_runs(text: str) -> Iterator[str]:
    """Yield a text in pieces without a run of more than MAX_RUN_CHARS characters that are all, or all not, spaces."""
    start = run = 0
    is_space = False
    for i, character in enumerate(text):
        if character.isspace() is is_space:
            run += 1
        else:
            is_space = not is_space
            run = 1
        if run > MAX_RUN_CHARS:
            yield text[start:i]
            start = i
            run = 1
    yield text[start:]


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Read tiktoken.model: a line a token, its bytes in base64 and its rank; ranks are 0, 1, 2, ..."""
    ranks: dict[bytes, int] = {}
    lines = _read_small_file(path).splitlines()
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CalibrationError(f"{path}: line {number} is not a token in base64 and its rank. {BAD_FILE}") from None
    complete = set(ranks.values()) == set(range(len(ranks))) and all(bytes([i]) in ranks for i in range(256))
    if not complete or len(ranks) < len([line for line in lines if line]):
        raise CalibrationError(
            f"{path}: is not a whole tiktoken file: a rank or one of the 256 bytes is missing, or a token is there "
            f"twice. {BAD_FILE}"
        )
    return ranks


def _special_tokens(path: Path) -> dict[int, str]:
    """Return id -> name of tokenizer_config.json's added_tokens_decoder."""
    with remedy(BAD_FILE):
        added = mapping_or_empty(read_json_file(path).get("added_tokens_decoder"))
    names: dict[int, str] = {}
    for key, entry in added.items():
        name = mapping_or_empty(entry).get("content")
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and isinstance(name, str) and name):
            raise CalibrationError(
                f"{path}: added_tokens_decoder has the entry {quoted(key)}: {quoted(entry)}, expected a token id and "
                f"an object with its content. {BAD_FILE}"
            )
        names[int(key)] = name
    return names


def _is_renumbered(path: Path, names: dict[int, str]) -> bool:
    """Return whether tokenizer.json has other ids for special tokens; false for a file that is damaged or has none."""
    try:
        added: object = mapping_or_empty(json.loads(_read_small_file(path))).get("added_tokens")
    except ValueError:
        return False
    entries = map(mapping_or_empty, cast(list[Any], added) if isinstance(added, list) else [])
    ids = {entry.get("content"): entry.get("id") for entry in entries}
    return bool(ids) and any(ids.get(name) != number for number, name in names.items())


def _read_small_file(path: Path) -> bytes:
    with remedy(BAD_FILE):
        check_plain_file(path)
        return read_small_file(path, limit=MAX_FILE_BYTES)


@contextmanager
def _in_one_line(path: Path) -> Generator[None]:
    """Turn what a tokenizer's library raises, a panic too, into a CalibrationError that names the file."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        reason = cut(str(cast(Any, error)) or type(error).__name__, 200)
        raise CalibrationError(f"{path}: the tokenizer failed ({reason}). {BAD_FILE}") from None


_MAX_CHARACTERS: Final = 64 << 20
_DATE: Final = datetime(2026, 1, 1)
_NAMED_TOKENS: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_KIMI_TOKENIZER: Final = "TikTokenTokenizer"
"""The class of Kimi's tokenizers. Their code sorts the keys of tools before the template gets them."""
_TYPESCRIPT: Final = "tools_ts_str"
"""The variable in which the code of K2.5's tokenizer, 480 lines that are not run, gives its template the tools."""
_NO_CHAT: Final = 'Use lines with "text", or a checkpoint with a working chat template.'


class ChatTemplate:
    """The chat template of a folder, which is read with the first conversation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._templates: dict[str, str] = {}
        self._variables: dict[str, str] = {}
        self._sorts_tools = False

    def render(self, messages: list[Any], tools: list[Any] | None) -> str:
        """Return a conversation as the model sees it, as transformers' apply_chat_template does.

        Raises CalibrationError if there is no template, or it fails.
        """
        if not self._templates:
            self._templates, self._variables, tokenizer = read_templates(self._folder)
            self._sorts_tools = tokenizer == _KIMI_TOKENIZER
        if tools and any(_TYPESCRIPT in template for template in self._templates.values()):
            raise CalibrationError(
                "this checkpoint declares tools in TypeScript, which only its own code writes, and that is not run. "
                "Leave out conversations with tools, or pass token ids (.npy)."
            )
        if tools and self._sorts_tools:
            tools = json.loads(json.dumps(tools, sort_keys=True))
        name = "default" if tools is None or "tool_use" not in self._templates else "tool_use"
        from transformers.utils.chat_template_utils import (  # which loads torch
            render_jinja_template,  # pyright: ignore[reportUnknownVariableType]
        )

        variables: dict[str, Any] = {**self._variables, "strftime_now": _DATE.strftime}
        try:
            [text], _ = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self._templates[name],
                **variables,
            )
        except Exception as error:  # a template can raise anything
            reason = cut(f"{type(error).__name__}: {error}", 200)
            raise CalibrationError(f"the chat template failed ({reason}). {_NO_CHAT}") from None
        if len(text) > _MAX_CHARACTERS:
            raise CalibrationError(f"the chat template makes more than {_MAX_CHARACTERS:,} characters. {_NO_CHAT}")
        return text


def read_templates(folder: Path) -> tuple[dict[str, str], dict[str, str], object]:
    """Return a folder's chat templates by name, the named special tokens they may use, and the tokenizer's class.

    Raises CalibrationError.

    chat_template.jinja comes before tokenizer_config.json's chat_template, which is one template or a list of named
    ones: `tool_use` is for conversations with tools, `default` for all others.
    """
    config_path = folder / TOKENIZER_CONFIG_NAME
    path = folder / CHAT_TEMPLATE_NAME
    with remedy(_NO_CHAT):
        config = read_json_file(config_path) if is_there(config_path) else {}
        chat_template = (read_text_file(path) if is_there(path) else "") or config.get("chat_template")
    entries = (
        cast(list[Any], chat_template)
        if isinstance(chat_template, list)
        else [{"name": "default", "template": chat_template}]
    )
    templates: dict[str, str] = {}
    for name, template in ((entry.get("name"), entry.get("template")) for entry in map(mapping_or_empty, entries)):
        if not isinstance(name, str):
            raise CalibrationError(
                f"{config_path}: chat_template has a template with the name {quoted(name)}, expected text. {_NO_CHAT}"
            )
        if isinstance(template, str):
            templates[name] = template
    if "default" not in templates:
        raise CalibrationError(
            f"{folder}: has no chat template, neither {CHAT_TEMPLATE_NAME} nor a chat_template in "
            f'{TOKENIZER_CONFIG_NAME}. Use lines with "text" instead of "messages".'
        )
    variables = {key: _content(config.get(key)) for key in _NAMED_TOKENS}
    return templates, {key: value for key, value in variables.items() if value}, config.get("tokenizer_class")


def _content(token: object) -> str:
    """A named token is a string, or an object with a content."""
    value = mapping_or_empty(token).get("content", token)
    return value if isinstance(value, str) else ""
