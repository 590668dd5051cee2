"""Read a text; describe a source."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k2convert.checkpoint.index import Checkpoint, refuse_links_out
from k2convert.checkpoint.names import TOKENIZER_FILES
from k2convert.choices import Device
from k2convert.errors import CheckpointError
from k2convert.hub.client import Hub
from k2convert.job.locations import named_source, open_checkpoint_at
from k2convert.job.resources import choose_devices, gpu_memory, layer_threads
from k2convert.models import vocabulary_size
from k2convert.models.config import max_positions
from k2convert.plan.recipe import TextUse
from k2convert.records.document import shown
from k2convert.records.fingerprint import Source
from k2convert.records.ledger import find_ledger, totals_by_format

if TYPE_CHECKING:
    from k2convert.forward.layer_pass import PassText
    from k2convert.plan.inspection import Inspection
    from k2convert.text.windows import Windows

CHUNK_TOKENS: Final = 4096
MEMORY_SHARE: Final = 0.4
"""Tokens that are computed at once on a CPU, for which every expert is decoded once. On CUDA they take a share of the
smallest device's memory."""
_HIDDEN_COPIES: Final = 6


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The files of a text, and the devices that compute it, with a word on their choice."""

    files: Sequence[Path]
    devices: tuple[str, ...]
    note: str | None = None


def text_files(files: Sequence[str | PathLike[str]], *, device: Device, rounds: bool = False) -> TextFiles:
    """Return a text that this machine's devices compute; with `rounds`, one for rule gptq."""
    devices, note = choose_devices(device, rounds=rounds)
    return TextFiles([Path(file) for file in files], devices, note)


def read_text(text: TextFiles, use: TextUse, source: Source, hub: Hub) -> "PassText":
    """Read the text of a layer pass with the source's tokenizer, and token ids; raises CalibrationError."""
    from k2convert.calibration.memory import read_sizes
    from k2convert.forward.layer_pass import PassText

    refuse_links_out(source.checkpoint.folder, TOKENIZER_FILES)  # the result would not have what the text was read by
    windows = read_windows_of(source.checkpoint, text.files, use)
    for note in (*([text.note] if text.note else []), *windows.notes):
        hub.notify(f"note: {note}")
    model = read_sizes(source.checkpoint)
    # a few hidden states, and the inner activations of every expert that a token chooses
    token_bytes = 4 * (_HIDDEN_COPIES * model.hidden + (model.experts_per_token + 1) * model.width)
    tokens = max(CHUNK_TOKENS, int(MEMORY_SHARE * gpu_memory(text.devices)[1] / token_bytes))
    chunk = max(1, tokens // windows.ids.shape[1])
    windows = replace(windows, window=use.window)  # a job is known by what was asked for
    threads = layer_threads(text.devices)
    return PassText(windows, chunk, text.devices, threads, by_default=use.tokens is None)


def read_windows_of(source: Checkpoint, files: Sequence[Path], use: TextUse) -> "Windows":
    """Read files as windows of tokens, of which the model's positions allow; raises CalibrationError."""
    from k2convert.text.windows import default_tokens, read_windows  # a run without a text needs no tokenizers

    window = min(use.window, max_positions(source.config) or use.window)
    return read_windows(
        files,
        tokenizer=source.folder,
        vocab_size=vocabulary_size(source),
        tokens=use.tokens or default_tokens(source, window=window),
        window=window,
        seed=use.seed,
    )


def inspect_source(source: str, *, hub: Hub) -> "Inspection":
    """Describe a checkpoint in a folder or on the Hub from its headers; raises CheckpointError, PlanError, HubError."""
    from k2convert.plan.inspection import inspect_checkpoint

    conversion: dict[str, object] | None = None
    with open_checkpoint_at(source, hub=hub) as opened:
        ledger = None
        with suppress(CheckpointError):
            ledger = find_ledger(opened.checkpoint.folder)
        if ledger is not None:
            conversion = {name: getattr(ledger.recipe, name) for name in ("rule", "layout", "activations", "target")}
            conversion["source"] = next(iter(named_source(opened.checkpoint.folder, ledger)[1:]), None)
            if (total := next(iter(totals_by_format(ledger.totals).values()), None)) is not None:
                conversion |= {name: getattr(total, name) for name in ("sqnr_db", "relative_mse", "achieved_to_max")}
        return inspect_checkpoint(opened.checkpoint, shown_as=source, conversion=shown(conversion))
