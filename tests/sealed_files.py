"""Change sealed records of a job, as a program would: with a new checksum, or without one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k2convert.records.document import seal


def edit_sealed(path: Path, change: Callable[[dict[str, Any]], object], *, is_sealed: bool = True) -> None:
    document = json.loads(path.read_text())
    del document["checksum"]
    change(document)
    path.write_bytes(seal(document) if is_sealed else json.dumps(document).encode())
