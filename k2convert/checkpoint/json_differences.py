"""How two JSON objects differ, field by field."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.errors import shortened

ABSENT: Final = object()


def is_same_json(left: Any, right: Any) -> bool:
    """Return whether two values are equal as JSON: True is not 1, and 1 is not 1.0."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def config_differences(
    before: Any, after: Any, path: str = "", *, unread: Sequence[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (place, value before, value after) of each field that differs, except those called as in `unread`."""
    left, right = mapping_or_empty(before), mapping_or_empty(after)
    for key in (*left, *(key for key in right if key not in left)):
        if key in unread:
            continue
        place = f"{path}.{shortened(key)}" if path else shortened(key)
        one, other = left.get(key, ABSENT), right.get(key, ABSENT)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from config_differences(cast(object, one), cast(object, other), place, unread=unread)
        elif one is ABSENT or other is ABSENT or not is_same_json(one, other):
            yield place, one, other
