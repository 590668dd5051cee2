"""What `calibrate` and `run --calibrate` share: reading the text, and refusing what would take too long."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k2convert.cli.console import format_span
from k2convert.errors import CalibrationError
from k2convert.job.locations import Source
from k2convert.models import vocabulary_size
from k2convert.models.config import max_positions

if TYPE_CHECKING:
    from k2convert.calibrate.cost import Time
    from k2convert.calibrate.text import Windows

MAX_HOURS: Final = 12


def read_texts(source: Source, files: Sequence[Path], *, tokens: int, window: int, seed: int) -> "Windows":
    """Read texts with the source's tokenizer, and token ids, in windows that the model's positions allow."""
    from k2convert.calibrate.text import read_windows

    return read_windows(
        files,
        tokenizer=source.checkpoint.folder,
        vocab_size=vocabulary_size(source.checkpoint),
        tokens=tokens,
        window=min(window, max_positions(source.checkpoint.config) or window),
        seed=seed,
    )


def check_time(time: "Time", *, source: str, yes: bool) -> None:
    """Refuse a pass of more than half a day, unless the user agreed; raises CalibrationError."""
    if time.middle > MAX_HOURS * 3600 and not yes:
        raise CalibrationError(
            f"{source}: the pass would take {format_span(time.least, time.most)} on this machine, more than "
            f"{MAX_HOURS} hours. Use a machine with a GPU, or fewer tokens, or repeat the command with --yes."
        )
