"""The exclude list of a config: the modules that stay BF16, in a form that every engine's matcher understands."""

import re
from collections.abc import Sequence

from k2convert.checkpoint.layouts import COMPRESSED_TENSORS
from k2convert.choices import Layout


def exclude_list(unconverted: Sequence[tuple[str, bool]], *, layout: Layout) -> list[str]:
    """Return the entries for (name part, whether more may follow): globs, or `re:` entries for compressed-tensors."""
    if layout == COMPRESSED_TENSORS:
        return [f"re:.*{re.escape(part)}{'.*' if is_open else '$'}" for part, is_open in unconverted]
    return [f"*{part}*" if is_open else f"*{part}" for part, is_open in unconverted]
