"""Pruned results: two of the four experts of each MoE layer of a small source are kept."""

from pathlib import Path
from typing import Any

from conversions import convert

from k2convert.calibration.statistics import open_statistics
from k2convert.checkpoint.index import open_checkpoint
from k2convert.records.fingerprint import Source
from k2convert.records.pruning import PruningRecord
from scripts.fixture_maker import damage, make_cut, make_short

KEPT = {1: (0, 3), 2: (1, 2)}
SCORES = "REAP saliency on <novels> | of 1813"


def make_whole(folder: Path, *, is_split: bool = False) -> Path:
    """Write a source with four experts per layer, of which a token uses two.

    Two MoE layers; or one, whose partners lie in different shards.
    """
    path = make_cut(folder) if is_split else make_short(folder)
    damage.edit_config(path, num_experts_per_tok=2)
    return path


def convert_pruned(
    source: Path, folder: Path, *, scores: str | None = SCORES, statistics: Path | None = None, **recipe: Any
) -> Path:
    """Convert the kept experts of a source, with its statistics or without; returns the result's folder."""
    checkpoint = open_checkpoint(source)
    num_layers = checkpoint.config.get("text_config", checkpoint.config)["num_hidden_layers"]
    record = PruningRecord({n: KEPT[n] for n in range(1, num_layers)}, 4, scores)
    found = None if statistics is None else open_statistics(statistics)
    return convert(
        Source(checkpoint).pruned(record), folder, statistics=found, **{"keep_experts": "kept.json"} | recipe
    )
