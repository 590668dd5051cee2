"""Statistics of small layers that no model made."""

from __future__ import annotations

from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from k2convert.calibration.statistics import LayerStatistics, StatisticsHeader, open_statistics, write_statistics
from k2convert.checkpoint.index import open_checkpoint
from k2convert.models import detect_family
from k2convert.records.fingerprint import source_digest

if TYPE_CHECKING:
    from torch import Tensor

HEADER = StatisticsHeader(
    source_headers="ab" * 32,
    texts=(("emma.txt", "cd" * 32), ("notes of\u2028a day.jsonl", "ef" * 32)),
    tokens=8192,
    window=2048,
    windows=4,
    dropped=1,
    seed=3,
    versions={"k2convert": "0.1.0", "torch": "2.9.0"},
)


def moe_layer(number: int = 1, *, experts: int = 4, hidden: int = 64, width: int = 32) -> LayerStatistics:
    """A MoE layer with shared experts; the last expert has 63 tokens."""
    generator = np.random.default_rng(number)

    def draw(*shape: int) -> Any:
        return generator.random(shape, dtype=np.float32)

    tokens = generator.integers(64, 500, experts)
    tokens[-1] = 63
    return LayerStatistics(
        layer=number,
        norm_digest="12" * 32,
        gate_up_mean_square=draw(hidden),
        gate_up_amax=draw(1),
        down_mean_square=draw(experts, width),
        down_amax=draw(experts),
        tokens=tokens.astype(np.int64),
        saliency=draw(experts),
        router_weight=np.linspace(0.5, 1.0, experts, dtype=np.float32),
        smoothing_exponents=generator.integers(-4, 5, hidden).astype(np.int8),
        shared_down_mean_square=draw(2 * width),
        shared_down_amax=draw(1),
    )


def dense_layer(number: int = 0, *, hidden: int = 64, width: int = 128) -> LayerStatistics:
    """A dense layer with few tokens."""
    layer = moe_layer(number, experts=1, hidden=hidden, width=width)
    exponents = np.zeros(hidden, np.int8)
    return replace(layer, smoothing_exponents=exponents, shared_down_mean_square=None, shared_down_amax=None)


def write_small(path: Path) -> Path:
    """Write a file of one dense and two MoE layers."""
    write_statistics(path, [dense_layer(), moe_layer(1), moe_layer(2)], HEADER)
    return path


def random_statistics(path: Path, source: Path) -> Path:
    """Write statistics that no model made, of every layer of a checkpoint: positive mean squares, exponents -4..4.

    Every third expert has fewer than 64 tokens.
    """
    checkpoint = open_checkpoint(source)
    family = detect_family(checkpoint)
    counts = family.read_architecture(checkpoint.config, str(source))
    text = checkpoint.config.get("text_config", checkpoint.config)
    layers: list[LayerStatistics] = []
    for number in range(counts.num_layers):
        if number in counts.moe_layers:
            layer = moe_layer(
                number, experts=counts.num_experts, hidden=counts.hidden_size, width=counts.moe_intermediate_size
            )
            shared = text["n_shared_experts"] * counts.moe_intermediate_size
            tokens = np.where(np.arange(counts.num_experts) % 3 == 2, 63 - number, layer.tokens)
            mean_square = np.random.default_rng(number).random(shared, dtype=np.float32)
            layer = replace(layer, shared_down_mean_square=mean_square, tokens=tokens)
        else:
            layer = dense_layer(number, hidden=counts.hidden_size, width=text["intermediate_size"])
        tensor = checkpoint.tensors[f"{family.mlp_norm.format(layer=number)}.weight"]
        with (source / tensor.shard).open("rb") as file:
            file.seek(tensor.begin)
            raw = file.read(tensor.num_bytes)
        layers.append(replace(layer, norm_digest=blake3(raw).hexdigest()))
    header = replace(HEADER, source_headers=source_digest(checkpoint))
    write_statistics(path, layers, header)
    return path


def layers_by_pass(
    folder: Path, ids: Tensor, *, num_layers: int, chunk: int = 4, devices: tuple[str, ...] = ("cpu",), workers: int = 1
) -> tuple[Tensor, list[LayerStatistics]]:
    """The hidden states after the first layers on ids [W, T], `chunk` windows at a time, and their statistics."""
    import torch

    from k2convert.calibration.accumulate import LayerAccumulator
    from k2convert.forward.decoder import DecoderLayer, embed
    from k2convert.forward.weights import WeightReader

    found: list[LayerStatistics] = []
    with closing(WeightReader(open_checkpoint(folder))) as reader:
        hidden = embed(reader, ids)
        for number in range(num_layers):
            accumulator = LayerAccumulator(reader, number, seed=3, ids=ids.numpy())
            layer = DecoderLayer(reader, number, devices, workers)
            hidden = torch.cat([layer.run(states, accumulator) for states in hidden.split(chunk)])
            found.append(accumulator.finish())
    return hidden, found


def layers_of(path: Path) -> list[LayerStatistics]:
    found = open_statistics(path)
    return [found.layer(number) for number in found.layers]


def rewrite(statistics: Path, layers: list[LayerStatistics], path: Path, **changes: Any) -> Path:
    """Write a copy of statistics with other layers, or with other fields of the header."""
    found = open_statistics(statistics)
    header = StatisticsHeader(**{field.name: getattr(found, field.name) for field in fields(StatisticsHeader)})
    write_statistics(path, layers, replace(header, **changes))
    return path
