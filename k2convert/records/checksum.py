"""A checksum in each record of the journal, over everything else in it: a damaged record is not trusted."""

import json
from collections.abc import Mapping
from typing import Any, Final

from blake3 import blake3

_KEY: Final = "checksum"


def seal(document: Mapping[str, Any]) -> bytes:
    """Encode a record as JSON with its checksum."""
    return json.dumps({_KEY: _checksum(document)} | dict(document)).encode()


def unseal(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parsed record without its checksum; raises ValueError if it has none or a wrong one."""
    content = {key: value for key, value in document.items() if key != _KEY}
    if document.get(_KEY) != _checksum(content):
        raise ValueError("its checksum is missing or wrong")
    return content


def _checksum(document: Mapping[str, Any]) -> str:
    return blake3(json.dumps(document).encode()).hexdigest()
