"""A part of a job, for the arrays of Slurm and other schedulers: each process converts some shards of one destination.

Parts may run at the same time, in any order, and overlap: each writes temporary files of its own, and a shard that two
of them write has the same bytes. Index, config and ledger are written by the run without a part.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from k2convert.errors import PlanError, quoted
from k2convert.job.resources import Item

FROM_SCHEDULER: Final = "auto"
"""The value of --part that reads the variables of a Slurm array."""

_MAX_COUNT: Final = 100_000
_TASK, _FIRST, _COUNT = (f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "COUNT"))


@dataclass(frozen=True, slots=True)
class Part:
    """Part `number` of `count`; the first has the number 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def items(self, items: Sequence[Item]) -> list[Item]:
        """Return every `count`-th shard: the small first and last shards go to different parts."""
        return list(items[self.number - 1 :: self.count])


def read_part(text: str, environment: Mapping[str, str]) -> Part:
    """Read `3/8`, or a Slurm array task (https://slurm.schedmd.com/job_array.html); raises PlanError."""
    if text == FROM_SCHEDULER:
        try:
            task, first, count = (int(environment[name]) for name in (_TASK, _FIRST, _COUNT))
            step = int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
            last = int(environment.get("SLURM_ARRAY_TASK_MAX", first + (count - 1) * step))
        except (KeyError, ValueError):
            raise PlanError(
                f"--part auto needs {_TASK}, {_FIRST} and {_COUNT}, which Slurm sets in an array job. "
                "Elsewhere write --part I/N."
            ) from None
        is_even = step > 0 and 0 < count <= _MAX_COUNT and last == first + (count - 1) * step
        if not is_even or not first <= task <= last or (task - first) % step:
            raise PlanError(
                f"{_TASK} {task} is not one of {count} tasks from {first} to {last}. Use an array without gaps, such "
                "as --array=1-8, or write --part I/N."
            )
        return Part((task - first) // step + 1, count)
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    part = None if match is None else Part(int(match[1]), int(match[2]))
    if part is None or not 1 <= part.number <= part.count <= _MAX_COUNT:
        raise PlanError(f"--part {quoted(text)}: expected I/N with I from 1 to N, such as 3/8, or auto.")
    return part
