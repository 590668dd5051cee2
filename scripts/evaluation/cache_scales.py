"""Does a scale of an FP8 KV cache gain? `python -m scripts.evaluation.cache_scales SOURCE STATISTICS TEXT --work OUT`.

Copies a checkpoint with scales of every layer, by the amax in statistics of `k2convert calibrate`, under the names that
vLLM reads, and evaluates the source with scale 1 and the copies, all with `--kv-cache fp8`. Weights are the same.
Powers of two change only what is below the normal range. Other scales also move where values lie between two numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

import k2convert
from k2convert.calibration.statistics import open_statistics
from scripts.fixture_maker.folder import read_small, write_small

E4M3_MAX = 448


SCALES: dict[str, Callable[[float], float]] = {
    "amax / 448": lambda amax: amax / E4M3_MAX,
    "the power of two above": lambda amax: 2.0 ** math.ceil(math.log2(amax / E4M3_MAX)),
    "amax / 336": lambda amax: amax / (0.75 * E4M3_MAX),
    "amax / 299": lambda amax: 1.5 * amax / E4M3_MAX,
}
"""How each scale follows from the largest value."""


def with_scales(source: Path, statistics: Path, folder: Path, scale_of: Callable[[float], float]) -> Path:
    """Write a copy of a small checkpoint with a scale of each layer's cache; MLA has one for both of its parts."""
    checkpoint = read_small(source)
    found = open_statistics(statistics)
    is_mla = "kv_lora_rank" in checkpoint.config
    shards = {
        layer: tensors for tensors in checkpoint.shards.values() for layer in found.layers if _has(tensors, layer)
    }
    for layer, tensors in shards.items():
        amax = found.layer(layer).kv_amax
        assert amax is not None
        keys, values = (amax.max(), amax.max()) if is_mla else amax
        for name, scale in (("k_proj.k_scale", keys), ("v_proj.v_scale", values)):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale_of(float(scale)))
    write_small(checkpoint, folder)
    for path in source.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def _has(tensors: dict[str, torch.Tensor], layer: int) -> bool:
    return any(name.startswith(f"model.layers.{layer}.self_attn.") for name in tensors)


def main() -> None:
    """Print one line of JSON for each scale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("statistics", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16_384)
    options = parser.parse_args()
    scaled = [
        with_scales(options.source, options.statistics, options.work / f"scaled-{number}", scale_of)
        for number, scale_of in enumerate(SCALES.values())
    ]
    found = k2convert.evaluate(
        options.source,
        [options.source, *scaled],
        [options.text],
        tokens=options.tokens,
        window=256,
        kv_cache="fp8",
        out=options.work / "cache-scales.json",
        any_text=True,
    )
    for scale, row in zip(("1", *SCALES), found.rows, strict=True):
        divergence = row.figures.divergence
        print(json.dumps({"scale": scale, "mean KL": divergence.mean, "top-1 agreement": row.figures.top1_agreement}))


if __name__ == "__main__":
    main()
