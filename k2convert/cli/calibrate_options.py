"""The options of `calibrate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from k2convert.choices import MAX_SEED, Device
from k2convert.cli.options import (
    TEXT_FORMS,
    TOKENS,
    WINDOW,
    CoresOption,
    GpuOption,
    JsonOption,
    MaxDiskOption,
    QuietOption,
    SourceArgument,
    local_folder,
)


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """Arguments and options of `calibrate`, in the order of its help."""

    source: SourceArgument
    statistics: Annotated[
        Path,
        typer.Argument(
            help="Statistics file to write. An unfinished pass is kept in STATISTICS.work.",
            callback=local_folder,
            show_default=False,
        ),
    ]
    text: Annotated[
        list[Path] | None,
        typer.Option(help=f"Text: {TEXT_FORMS}. May be repeated.", show_default=False),
    ] = None
    token_ids: Annotated[
        list[Path] | None,
        typer.Option(help="Token ids instead of text: .npy or .jsonl. May be repeated.", show_default=False),
    ] = None
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to use.")] = TOKENS
    window: Annotated[int, typer.Option(min=1, help="Tokens that are seen together.")] = WINDOW
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Decides which windows of the text are used.")] = 0
    device: Annotated[Device, typer.Option(help="Where to compute.")] = "auto"
    max_disk: MaxDiskOption = None
    yes: Annotated[bool, typer.Option("--yes", help="Start a pass of more than 12 hours too.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the pass takes, and write nothing.")] = False
    gpu: GpuOption = None
    cores: CoresOption = None
    as_json: JsonOption = False
    quiet: QuietOption = False
