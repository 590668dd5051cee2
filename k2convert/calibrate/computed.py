"""The work of a pass or a walk, counted, and how long a GPU that is not here takes for it: computed, not measured.

    pass   experts, and what every token passes, in TF32; every weight decoded once for each chunk
    walk   the experts three times more and all decisions, in FP32; the curvature in FP64; rounding, block after block

Rounding starts small kernels one after the other. That, not arithmetic, is most of a walk on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from k2convert.calibrate.gptq_layer import GROUPED_EXPERTS
from k2convert.calibrate.sizes import ModelSizes, PassSize
from k2convert.choices import BLOCK_SIZE
from k2convert.fit.gpus import Flops, Gpu
from k2convert.quantize.gptq.rounding import (
    FULL_TOKENS_PER_COLUMN,
    LEAST_FULL_TOKENS,
    MIN_TOKENS,
    SHRINKAGES,
)

CORRECTION_PRODUCTS: Final = 76
"""Floating-point operations of a correction over K^3: six strengths on two halves, and their inverses."""

_DECODED_BYTES: Final = 20  # moved for a weight that is decoded
_ROUNDED_BYTES: Final = 16_000  # moved for a column of a row: 16 scales of a block, three times
_SEARCH_KERNELS: Final = 330  # started to search the scales of a block
_ROUND_KERNELS: Final = 1500  # started for a block in all: a search, and two sweeps
_EXPERT_KERNELS: Final = 60
_INT4_BYTES: Final = 0.5625  # of a weight, with its part of the scales

_BEST: Final = (0.7, 4e-6, 5e9)  # share of the peak rates, seconds to start a kernel, bytes a second of the disk
_WORST: Final = (0.2, 12e-6, 0.5e9)


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations by kind, bytes that a GPU moves in its memory, kernels started, bytes read or written.

    The bytes of the disk are those of the source; `read` may be raised by what else a job reads and writes.
    """

    tf32: float = 0.0
    fp32: float = 0.0
    fp64: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0
    read: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def times(self, count: float) -> Work:
        """Return this work so many times."""
        return Work(*(getattr(self, field.name) * count for field in fields(self)))


def other_flops(model: ModelSizes, size: PassSize) -> float:
    """Return the operations of a pass outside of routed experts: what every token passes, and attention."""
    layers = model.layers(size)
    scores = model.scores * size.window // 2
    return 2 * size.num_tokens * (sum(model.other_weights[layer] for layer in layers) + len(layers) * scores)


def _expert_flops(model: ModelSizes, size: PassSize) -> float:
    return 6.0 * size.num_tokens * model.experts_per_token * model.hidden * model.width


def pass_work(model: ModelSizes, size: PassSize) -> Work:
    """Return the work of a pass."""
    num_moe, num_chunks = model.num_moe(size), -(-size.num_windows // size.chunk)
    weights = 3 * model.num_experts * model.hidden * model.width
    moe = Work(
        tf32=_expert_flops(model, size),
        moved=num_chunks * weights * _DECODED_BYTES,
        kernels=num_chunks * model.num_experts * _EXPERT_KERNELS,
        read=num_chunks * weights * _INT4_BYTES,
    )
    others = 2.0 * sum(model.other_weights[layer] for layer in model.layers(size))
    return moe.times(num_moe) + Work(tf32=other_flops(model, size), read=others)


def walk_work(model: ModelSizes, size: PassSize) -> Work:
    """Return the work of a walk of rule gptq."""
    hidden, width, experts, tokens = model.hidden, model.width, model.num_experts, size.num_tokens
    weights = 3 * experts * hidden * width
    again = Work(
        fp32=3 * _expert_flops(model, size),
        moved=3 * weights * _DECODED_BYTES,
        kernels=3 * experts * _EXPERT_KERNELS,
        read=weights * _INT4_BYTES,
    )
    groups = -(-experts // GROUPED_EXPERTS)
    gate_up = _decided(hidden, hidden, tokens) + _rounded(hidden, 2 * width * experts, calls=groups)
    gate_up += Work(fp32=4.0 * width * experts * hidden**2)
    down = _decided(width, hidden, tokens * model.experts_per_token // max(experts, 1)) + _rounded(width, hidden)
    layer = again + gate_up + down.times(experts)
    one = pass_work(model, size)
    return one + Work(tf32=other_flops(model, size)) + layer.times(model.num_moe(size))


def _decided(columns: int, rows: int, tokens: int) -> Work:
    """Return the work to sum moments of weights [rows, columns], to choose shrinkage and correction, and to factor."""
    if tokens < MIN_TOKENS:
        return Work()
    is_open = tokens < max(LEAST_FULL_TOKENS, FULL_TOKENS_PER_COLUMN * columns)
    tries = 2 * len(SHRINKAGES) if is_open else 0
    square = float(columns) ** 2
    correction = CORRECTION_PRODUCTS * square * columns if rows == columns else square * (16 * rows + 56 * columns)
    return Work(
        fp32=2.0 * tokens * columns * (columns + rows) + correction,
        fp64=(1 + tries) * square * columns,
        kernels=(tries + (1 if tries else 0)) * columns / BLOCK_SIZE * _SEARCH_KERNELS,
    )


def _rounded(columns: int, rows: int, *, calls: int = 1) -> Work:
    """Return the work to round rows by rule gptq."""
    return Work(
        fp32=7.0 * rows * columns**2,
        moved=float(_ROUNDED_BYTES) * rows * columns,
        kernels=calls * columns / BLOCK_SIZE * _ROUND_KERNELS,
    )


def gpu_seconds(work: Work, gpu: Gpu, flops: Flops, *, search: float) -> tuple[float, float]:
    """Return the least and the most seconds that one GPU takes; `search` seconds of it are the CPU's."""
    bandwidth = gpu.bandwidth or 0.0
    found: list[float] = []
    for share, start, disk in (_BEST, _WORST):
        compute = work.tf32 / flops.tf32 + work.fp32 / flops.fp32 + work.fp64 / flops.fp64
        moving = max(work.moved / bandwidth / share, work.kernels * start)
        found.append(compute / share + moving + work.read / disk + search)
    return found[0], found[1]
