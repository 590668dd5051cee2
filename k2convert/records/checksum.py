"""A checksum in each record of the journal, over everything else in it: a damaged record is not trusted."""

import json
from collections.abc import Mapping
from typing import Any, Final

from blake3 import blake3

_KEY: Final = "checksum"


def seal(document: Mapping[str, Any]) -> bytes:
    """Encode a record as JSON with its checksum."""
    return json.dumps({_KEY: _checksum(document)} | dict(document)).encode()


def unseal(document: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a parsed record without its checksum, and whether it has one; raises ValueError if that is wrong.

    Version 0.1 wrote records without one.
    """
    content = {key: value for key, value in document.items() if key != _KEY}
    if _KEY not in document:
        return content, False
    if document[_KEY] != _checksum(content):
        raise ValueError("its checksum is wrong")
    return content, True


def _checksum(document: Mapping[str, Any]) -> str:
    return blake3(json.dumps(document).encode()).hexdigest()
