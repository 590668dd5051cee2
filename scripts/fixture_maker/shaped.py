"""K2-shaped checkpoints of any size with realistic values, written as fast as the disk allows.

The values look like those of quantization-aware training: a Gaussian latent weight whose spread varies by row,
scale = bf16(amax/7) per group of 32, codes -7..7 with a 7 or -7 in every group. One expert is drawn and packed. The
other experts roll its rows and multiply its scales, so all are different and valid, at the cost of a copy.
"""

import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch

from scripts.fixture_maker.config import K2_SIDECARS, k2_config
from scripts.fixture_maker.edges import pack
from scripts.fixture_maker.inventory import GROUP_SIZE, K2Shape, TensorSpec, layer_tensors, outer_tensors
from scripts.fixture_maker.shards import write_checkpoint, write_streamed

VOCABULARY = 1024
"""Embedding rows that the command line gives `k2-shaped`; the real model has 163,840, which would only add size."""
_NOISE_NUMBERS = 1 << 22  # 8 MiB of BF16, repeated to fill the tensors that are not INT4


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")


def draw_int4(rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw codes int8 [N, K] and scales bf16 [N, K/32] that look like K2's training results."""
    spread = 0.02 * torch.exp(0.25 * torch.randn(rows, 1, generator=generator))
    latent = (torch.randn(rows, columns, generator=generator) * spread).unflatten(1, (-1, GROUP_SIZE))
    scales = (latent.abs().amax(2) / 7).bfloat16()
    codes = (latent / scales.float().unsqueeze(2)).round().clamp(-7, 7)
    return codes.flatten(1).to(torch.int8), scales


@lru_cache(maxsize=1)
def _draw(
    projections: tuple[tuple[str, tuple[int, int]], ...],
) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Draw BF16 noise and one expert of these shapes, the only random values.

    A projection is packed words int32 [N, K/8] and scales bf16 [N, K/32].
    """
    generator = torch.Generator().manual_seed(0)
    noise = (0.02 * torch.randn(_NOISE_NUMBERS, generator=generator)).bfloat16()
    drawn: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for kind, (rows, columns) in projections:
        codes, scales = draw_int4(rows, columns, generator)
        drawn[kind] = pack(codes), scales
    return noise, drawn


class _Values:
    """Gives the bytes of any tensor of the checkpoint, determined by its name."""

    def __init__(self, shape: K2Shape) -> None:
        self._shape = shape
        self._noise, self._projections = _draw(tuple(shape.projections().items()))

    def __call__(self, spec: TensorSpec) -> Iterator[memoryview]:
        if ".mlp.experts." in spec.name:
            yield from self._expert(spec)
        elif spec.dtype == "F32":
            yield _as_bytes(self._noise[: spec.shape[0]].float())
        elif "norm" in spec.name:
            yield _as_bytes(1 + self._noise[: spec.shape[0]])
        else:
            yield from self._dense(spec)

    def _dense(self, spec: TensorSpec) -> Iterator[memoryview]:
        noise = _as_bytes(self._noise)
        left = spec.num_bytes
        offset = 2 * (zlib.crc32(spec.name.encode()) % _NOISE_NUMBERS)
        while left > 0:
            piece = noise[offset : offset + left]
            yield piece
            left = left - len(piece)
            offset = 0

    def _expert(self, spec: TensorSpec) -> Iterator[memoryview]:
        module, kind, leaf = spec.name.rsplit(".", 2)
        packed, scales = self._projections[kind]
        if leaf == "weight_shape":
            yield _as_bytes(torch.tensor(self._shape.projections()[kind], dtype=torch.int32))
            return
        draw = zlib.crc32(module.encode())
        if leaf == "weight_packed":
            yield from _rolled(packed, draw)
        else:
            # Each expert has its own factor in 0.75..1.25. Rounding to BF16 keeps the scales normal.
            factor = 0.75 + 0.5 * (draw >> 16) / 0xFFFF
            yield from _rolled((scales.float() * factor).bfloat16(), draw)


def _rolled(rows: torch.Tensor, draw: int) -> Iterator[memoryview]:
    cut = draw % rows.shape[0]
    yield _as_bytes(rows[cut:])
    if cut:
        yield _as_bytes(rows[:cut])


def experts_for(num_bytes: float, shape: K2Shape) -> int:
    """Return the number of experts that makes a MoE layer of about `num_bytes`."""
    moe = (replace(shape, experts=experts, dense_layers=0) for experts in (0, 1))
    fixed, with_expert = (sum(spec.num_bytes for spec in layer_tensors(layer, 1)) for layer in moe)
    return max(1, round((num_bytes - fixed) / (with_expert - fixed)))


def _chunks(specs: list[TensorSpec], count: int) -> list[list[TensorSpec]]:
    """Cut a list of tensors into `count` runs of about the same number of bytes."""
    total = sum(spec.num_bytes for spec in specs)
    offset = 0
    chunks: list[list[TensorSpec]] = [[] for _ in range(count)]
    for spec in specs:
        chunks[min(count - 1, offset * count // total)].append(spec)
        offset += spec.num_bytes
    return [chunk for chunk in chunks if chunk]


def make_k2_shaped(out: Path, *, shape: K2Shape, shards: int | None = None) -> Path:
    """Write a K2-shaped checkpoint: one shard per layer (`shards` for all MoE layers together), then one outer shard.

    Memory holds one expert and a noise buffer, whatever the size on disk.
    """
    layers = [list(layer_tensors(shape, index)) for index in range(shape.layers)]
    dense = layers[: shape.dense_layers]
    moe = layers[shape.dense_layers :]
    if shards is not None:
        moe = _chunks([spec for layer in moe for spec in layer], shards)
    parts = [*dense, *moe, outer_tensors(shape)]
    write_shard = partial(write_streamed, data=_Values(shape))
    return write_checkpoint(out, parts, write_shard, config=k2_config(shape), sidecars=K2_SIDECARS)


def make_token_ids(out: Path, *, tokens: int) -> Path:
    """Write an .npy file of token ids drawn evenly from `k2-shaped`'s vocabulary: it has no tokenizer."""
    generator = torch.Generator().manual_seed(0)
    np.save(out, torch.randint(VOCABULARY, (tokens,), generator=generator).numpy())
    return out
