"""Whole K2 checkpoints of the real size that take a few MB on disk: real headers, index and config, sparse data.

weight_shape tensors hold their real values; every other tensor reads as zeros. The order of the tensors and the
division into shards are those of the released repositories.
"""

from pathlib import Path
from typing import Any

from scripts.fixture_maker.config import K2_SIDECARS, K25_SIDECARS, k2_config, k25_config
from scripts.fixture_maker.inventory import (
    K2_SHAPE,
    K2Shape,
    TensorSpec,
    layer_tensors,
    outer_tensors,
    projector_tensors,
    vision_tensors,
)
from scripts.fixture_maker.shards import write_checkpoint, write_sparse


def _write(
    out: Path, shape: K2Shape, parts: list[list[TensorSpec]], config: dict[str, Any], sidecars: dict[str, str]
) -> Path:
    sizes = {kind: b"".join(size.to_bytes(4, "little") for size in of) for kind, of in shape.projections().items()}

    def write_shard(path: Path, specs: list[TensorSpec]) -> None:
        names = [spec.name for spec in specs if spec.name.endswith(".weight_shape")]
        write_sparse(path, specs, {name: sizes[name.split(".")[-2]] for name in names})

    return write_checkpoint(out, parts, write_shard, config=config, sidecars=sidecars)


def k2_thinking_parts(shape: K2Shape = K2_SHAPE) -> list[list[TensorSpec]]:
    """Return Kimi-K2-Thinking's tensors, by shard: one shard per layer, then embedding, head and norm."""
    layers = [list(layer_tensors(shape, index)) for index in range(shape.layers)]
    return [*layers, outer_tensors(shape)]


def k25_parts() -> list[list[TensorSpec]]:
    """Return Kimi-K2.5's tensors, by shard: the language model's shards, the projector, the vision tower."""
    prefix = "language_model.model"
    head = "language_model.lm_head"
    layers = [list(layer_tensors(K2_SHAPE, index, prefix=prefix)) for index in range(K2_SHAPE.layers)]
    tower = vision_tensors(1152, 4304, 27, positions=64)
    outer = outer_tensors(K2_SHAPE, prefix=prefix, head=head)
    return [*layers, outer, projector_tensors(1152, K2_SHAPE.hidden), tower]


def make_k2_thinking_headers(out: Path, *, shape: K2Shape = K2_SHAPE) -> Path:
    """Write Kimi-K2-Thinking: 62 shards, 208,215 tensors, 594,205,904,896 tensor bytes."""
    return _write(out, shape, k2_thinking_parts(shape), k2_config(shape), K2_SIDECARS)


def make_k25_headers(out: Path) -> Path:
    """Write Kimi-K2.5: 64 shards, 208,550 tensors, 595,148,192,736 tensor bytes."""
    return _write(out, K2_SHAPE, k25_parts(), k25_config(k2_config(K2_SHAPE), vision={}), K25_SIDECARS)
