"""JSON files as values: the form of a file is that of a frozen dataclass, which pydantic checks strictly.

Unknown, missing and mistyped fields are refused in one line that names the file and the field. A dataclass checks what
its types cannot say in __post_init__, by raising ValueError. Fields that equal their default are not written.

A sealed file is {"checksum":"HEX","field":...}, where HEX is the blake3 of {"field":...}: a changed byte is noticed.
"""

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from blake3 import blake3
from pydantic import BeforeValidator, Field, JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from k2convert.checkpoint.files import dump_json, parse_json_object, read_text_file
from k2convert.choices import MAX_COLUMN_EXPONENT
from k2convert.errors import MalformedFileError, quoted, shortened

T = TypeVar("T")

JsonObject = dict[str, JsonValue]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Real = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Exponent = Annotated[int, Field(ge=-MAX_COLUMN_EXPONENT, le=MAX_COLUMN_EXPONENT)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def _as_written(key: object) -> object:
    """Refuse a number that is written differently elsewhere, such as 02: two keys could mean one layer."""
    if not isinstance(key, str) or not re.fullmatch("0|[1-9][0-9]{0,5}", key):
        raise ValueError(f"{quoted(key)} is not the number of a layer")
    return int(key)


LayerNumber = Annotated[int, BeforeValidator(_as_written)]

_SEAL: Final = re.compile(r'\{"checksum":"([0-9a-f]{64})",')
_MAX_PROBLEMS: Final = 3  # in one message
_WORDS: Final = {"missing": "is missing", "unexpected_keyword_argument": "is unknown", "extra_forbidden": "is unknown"}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def plain(value: object) -> dict[str, Any]:
    """Return the plain data of a document, as its file has it."""
    return _adapter(type(value)).dump_python(value, mode="json", by_alias=True, exclude_defaults=True)


def shown(value: object) -> Any:
    """Return dataclasses, their fields and their elements as plain data for --json; infinite and NaN become None."""
    return to_jsonable_python(value, inf_nan_mode="null")


def encode(value: object) -> bytes:
    """Return the content of a document's file, for people too."""
    return dump_json(plain(value))


def seal(value: object) -> bytes:
    """Return the content of a sealed file."""
    content = _adapter(type(value)).dump_json(value, by_alias=True, exclude_defaults=True)
    return b'{"checksum":"%s",%s' % (blake3(content).hexdigest().encode(), content[1:])


def parse(kind: type[T], text: str, *, where: str, extra: Literal["forbid", "ignore"] = "forbid") -> T:
    """Return the document in a text; raises MalformedFileError that names `where` and the wrong fields."""
    parse_json_object(text, where=where)  # refuses what pydantic lets pass, such as a key that is there twice
    try:
        return _adapter(kind).validate_json(text, strict=True, extra=extra)
    except ValidationError as error:
        raise MalformedFileError(f"{where}: {_explain(error)}.") from None


def unseal(kind: type[T], text: str, *, where: str) -> T:
    """Return the document in the text of a sealed file; raises MalformedFileError."""
    match = _SEAL.match(text)
    content = "{" + text[match.end() :] if match else ""
    if match is None or blake3(content.encode()).hexdigest() != match[1]:
        raise MalformedFileError(f"{where}: its checksum is missing or wrong.")
    return parse(kind, content, where=where)


def read_document(kind: type[T], path: Path) -> T:
    """Read a file; raises MalformedFileError, SourceReadError."""
    return parse(kind, read_text_file(path), where=str(path))


def read_sealed(kind: type[T], path: Path) -> T:
    """Read a sealed file; raises MalformedFileError, SourceReadError."""
    return unseal(kind, read_text_file(path), where=str(path))


def _explain(error: ValidationError) -> str:
    lines: list[str] = []
    for problem in error.errors(include_url=False)[:_MAX_PROBLEMS]:
        location = ".".join(shortened(str(part)) for part in problem["loc"] if part != "[key]")
        kind = problem["type"]
        reason = problem["msg"].removeprefix("Value error, ")
        if kind in _WORDS:
            lines.append(f"{location} {_WORDS[kind]}")
        elif kind == "value_error":
            lines.append(f"{location}: {reason}" if location else reason)
        else:
            lines.append(f"{location} is {quoted(problem['input'])} ({reason[0].lower()}{reason[1:]})")
    return "; ".join(lines)
