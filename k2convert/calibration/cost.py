"""Estimate of the time of a calibration, before it starts.

    pass   experts, and what every token passes, in TF32; every weight decoded once for each chunk
    walk   a pass by rule gptq: a second stream, the experts once more, all decisions in FP32, the curvature in FP64,
           and rounding, block after block

On this machine one expert, one matrix product and a few rounded rows are measured, on the device that computes. An
expert's weights are made up, so nothing is read and a source on the Hub can be estimated too. The rest of a layer
(attention, router, shared experts, dense MLPs, the moments and the factors of a walk) counts as matrix products. The
search of smoothing exponents, which CPUs do, is measured on a few columns. Reading is not measured.

Progress counts the same operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from k2convert.calibration.imatrix_gain import SAMPLED_TOKENS
from k2convert.calibration.sizes import ModelSizes, PassSize, read_sizes
from k2convert.calibration.smoothing import SAMPLED_ROWS, STEPS, GateUpRows, Proxy
from k2convert.calibration.text import HELD_OUT_EVERY
from k2convert.checkpoint.index import Checkpoint
from k2convert.choices import BLOCK_SIZE, GROUP_SIZE
from k2convert.forward.decoder import allowing_tf32
from k2convert.forward.moe import Mlp, one_torch_thread
from k2convert.forward.weights import LinearLayer, exact_weight
from k2convert.machine import num_cores
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.gptq.curvature import make_curvature
from k2convert.quantize.gptq.moments import MIN_TOKENS as FEW_TOKENS
from k2convert.quantize.gptq.moments import SKETCHED_ROWS, STRENGTHS
from k2convert.quantize.gptq.rounding import (
    FULL_TOKENS_PER_COLUMN,
    LEAST_FULL_TOKENS,
    MIN_TOKENS,
    SHRINKAGES,
    kernel_for,
    round_gptq,
)

MEASURED_SHARE: Final = 2 / HELD_OUT_EVERY
"""The share of the tokens on which a walk measures errors."""

_MEASURED_STEPS: Final = ("experts, converted", "codes of gate and up", "codes of down")


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations of a step, in FP32 and in FP64."""

    fp32: float = 0.0
    fp64: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.fp32 + other.fp32, self.fp64 + other.fp64)

    @property
    def operations(self) -> float:
        """All operations, in those of FP32: one in FP64 takes as long as two."""
        return self.fp32 + 2 * self.fp64

    def times(self, count: float) -> Work:
        """Return this work so many times."""
        return Work(self.fp32 * count, self.fp64 * count)


def other_flops(model: ModelSizes, size: PassSize) -> float:
    """Return the operations of a pass outside of routed experts."""
    return sum(_other_flops(model, size, layer) for layer in model.layers(size))


def _other_flops(model: ModelSizes, size: PassSize, layer: int) -> float:
    """Return the operations of a layer outside of routed experts: what every token passes, and attention."""
    return 2 * size.num_tokens * (model.other_weights[layer] + model.scores * size.window // 2)


def _expert_flops(model: ModelSizes, size: PassSize) -> float:
    return 6.0 * size.num_tokens * model.experts_per_token * model.hidden * model.width


def pass_flops(model: ModelSizes, size: PassSize) -> float:
    """Return the operations of a pass."""
    return model.num_moe(size) * _expert_flops(model, size) + other_flops(model, size)


def layer_operations(model: ModelSizes, size: PassSize, *, is_walk: bool) -> tuple[float, ...]:
    """Return the operations of each layer of a pass or of a walk of rule gptq: what its progress counts."""
    steps = sum(walk_steps(model, size).values(), Work()).operations if is_walk else 0.0
    expert = _expert_flops(model, size) + steps
    streams = 2 if is_walk else 1
    others = [streams * _other_flops(model, size, layer) for layer in range(model.num_layers)]
    return tuple(own + expert * (layer in model.moe_layers) for layer, own in enumerate(others))


def walk_shares(model: ModelSizes, size: PassSize) -> tuple[float, float, float]:
    """Return the share of a MoE layer's walk that is done before it is decided how gate and up are rounded, before
    they are rounded, and before down is.
    """
    steps = {name: work.operations for name, work in walk_steps(model, size).items()}
    layers = layer_operations(model, size, is_walk=True)
    total = layers[model.moe_layers[0]]
    streams = total - sum(steps.values()) + steps["moments of gate and up"]
    prepared = streams + steps["shrinkage and factor of gate and up"]
    rounded = prepared + steps["experts, converted"] + steps["codes of gate and up"]
    return streams / total, prepared / total, rounded / total


def walk_steps(model: ModelSizes, size: PassSize) -> dict[str, Work]:
    """Return the work of each step that a walk of rule gptq does in a MoE layer beyond the two streams."""
    hidden = model.hidden
    width = model.width
    experts = model.num_experts
    tokens = size.num_tokens
    routed = tokens * model.experts_per_token // max(experts, 1)
    return {
        "experts, converted": Work(fp32=(1 + 2 * MEASURED_SHARE) * _expert_flops(model, size)),
        "moments of gate and up": _summed(hidden, 0, tokens),
        "shrinkage and factor of gate and up": _trusted(hidden, tokens),
        "codes of gate and up": _rounded(hidden, 2 * width * experts),
        "moments of down": _summed(width, hidden, routed).times(experts),
        "shrinkage and factor of down": _trusted(width, routed).times(experts),
        "correction of down": _corrected(width, hidden, routed).times(experts),
        "codes of down": _rounded(width, hidden).times(experts) + Work(fp32=2.0 * routed * width * hidden * experts),
    }


def _summed(columns: int, rows: int, tokens: int) -> Work:
    """Return the work to sum the moments of an input and of what outputs [rows] lack."""
    return Work(fp32=float(tokens) * columns * (columns + 2 * rows) if tokens >= MIN_TOKENS else 0.0)


def shrinkage_tries(columns: int, tokens: int) -> int:
    """Return how many curvatures are factored to choose the shrinkage of an input."""
    is_open = MIN_TOKENS <= tokens < max(LEAST_FULL_TOKENS, FULL_TOKENS_PER_COLUMN * columns)
    return 2 * len(SHRINKAGES) if is_open else 0


def _trusted(columns: int, tokens: int) -> Work:
    """Return the work to choose a shrinkage, and to factor."""
    if tokens < MIN_TOKENS:
        return Work()
    return Work(fp64=(1 + shrinkage_tries(columns, tokens)) * 2 / 3 * float(columns) ** 3)


def _corrected(columns: int, rows: int, tokens: int) -> Work:
    """Return the work to choose and to make a correction of outputs [rows]; sums of these decide."""
    if tokens < FEW_TOKENS:
        return Work()
    square = float(columns) ** 2
    sums = min(rows, SKETCHED_ROWS)
    factors = (len(STRENGTHS) + 1) * square * columns / 3
    seen = 4.0 * rows * columns * sums
    losses = 8 * square * len(STRENGTHS) * sums
    return Work(fp32=factors + seen + losses + 2 * rows * square)


def _rounded(columns: int, rows: int) -> Work:
    """Return the work to round rows by rule gptq."""
    return Work(fp32=6.0 * rows * columns**2)


LEAST_SHARE: Final = 0.7
MOST_SHARE: Final = 1.5
"""The range around an estimate. On a busy machine it was wrong by more."""
_SCALE_BITS: Final = 0x3C00  # BF16 of 2**-7
_PRODUCT: Final = (256, 1024, 1024)
_CUDA_PRODUCT: Final = (8192, 4096, 4096)
_MOST_TOKENS: Final = 2048
_MOST_COLUMNS: Final = 512
_ROWS: Final = 64
_CUDA_ROWS: Final = 8192


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one core or GPU: routed `experts` and what every token passes, shared by all of them; and the `search`
    of smoothing exponents, by a few cores.
    """

    experts: float
    others: float
    search: float


def walk_cost(model: ModelSizes, size: PassSize) -> Cost:
    """Measure a walk of rule gptq: a pass, a second stream, and rounding.

    Experts are computed with converted gate and up, and some tokens twice more, for the errors.
    """
    device = size.devices[0]
    steps = walk_steps(model, size)
    one = pass_cost(model, size)
    decided = sum((work for name, work in steps.items() if name not in _MEASURED_STEPS), Work())
    fp32 = _product_rate(device)
    fp64 = _product_rate(device, torch.float64)
    layer = decided.fp32 / fp32 + decided.fp64 / fp64
    gate_up = _row_seconds(model.hidden, device)
    down = _row_seconds(model.width, device)
    layer += model.num_experts * (2 * model.width * gate_up + model.hidden * down)
    return Cost((2 + 2 * MEASURED_SHARE) * one.experts + model.num_moe(size) * layer, 2 * one.others, one.search)


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds, from the least to the most."""

    least: float
    most: float

    @property
    def middle(self) -> float:
        """Half of the range."""
        return (self.least + self.most) / 2


def measured_time(source: Checkpoint, size: PassSize, *, is_walk: bool) -> Time:
    """Measure this machine for a second; the time on `size.workers` of its cores, or on its GPUs."""
    with torch.no_grad(), one_torch_thread():
        cost = (walk_cost if is_walk else pass_cost)(read_sizes(source), size)
    parallel = size.workers if size.on_cpu else 1 if is_walk else len(size.devices)
    cores = size.workers if size.on_cpu else num_cores()
    seconds = (cost.experts + cost.others) / parallel + cost.search / min(len(STEPS), cores)
    return Time(LEAST_SHARE * seconds, MOST_SHARE * seconds)


def pass_cost(model: ModelSizes, size: PassSize, *, extra_flops: float = 0.0) -> Cost:
    """Measure what a pass takes; `extra_flops` more are of matrix products."""
    devices = size.devices
    num_moe = model.num_moe(size)
    chunk_tokens = size.chunk_windows * size.window
    tokens = -(-chunk_tokens * model.experts_per_token // max(model.num_experts, 1))
    with allowing_tf32(devices):
        expert = _expert_seconds(model, min(tokens, _MOST_TOKENS), devices[0])
        rate = _product_rate(devices[0])
    expert *= max(tokens / _MOST_TOKENS, 1.0)
    experts = num_moe * model.num_experts * -(-size.num_windows // size.chunk) * expert
    others = (other_flops(model, size) + extra_flops) / rate
    return Cost(experts, others, num_moe * _search_seconds(model.hidden))


def _row_seconds(columns: int, device: str) -> float:
    """Return the seconds that one thread or GPU takes to round a row by rule gptq.

    Each block is searched, and its columns meet all others: a part grows with the columns, a part with their square.
    """
    if columns <= _MOST_COLUMNS:
        return _rounding_seconds(columns, device)
    few, many = (_rounding_seconds(size, device) for size in (_MOST_COLUMNS, 3 * _MOST_COLUMNS))
    squares = max(0.0, (many - 3 * few) / 6)
    factor = columns / _MOST_COLUMNS
    return (few - squares) * factor + squares * factor**2


def _rounding_seconds(columns: int, device: str) -> float:
    target = torch.randn(_ROWS if device == "cpu" else _CUDA_ROWS, columns, device=device)
    curvature = make_curvature(torch.eye(columns, device=device), 0.5)
    kernel = kernel_for(device)
    return _seconds(lambda: round_gptq(target, 1.0, curvature, kernel), device) / target.shape[0]


def _expert_seconds(model: ModelSizes, tokens: int, device: str) -> float:
    """Return the seconds that one thread or GPU takes for an expert with this many tokens; its weights are moved."""
    return _seconds(made_up_expert(model, tokens, device), device)


def made_up_expert(model: ModelSizes, tokens: int, device: str) -> Callable[[], torch.Tensor]:
    """Return what decodes and computes an expert with this many tokens."""
    hidden = model.hidden
    width = model.width
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    layers = [LinearLayer(exact_weight(_made_up(rows, columns))) for rows, columns in shapes]
    states = torch.ones(tokens, hidden, device=device)
    return lambda: Mlp(*(layer.to(device) for layer in layers))(states)


def _made_up(rows: int, columns: int) -> Int4Weight:
    packed = np.arange(rows * columns // 2, dtype=np.uint32).astype(np.uint8).reshape(rows, -1)
    scales = np.full((rows, columns // GROUP_SIZE), _SCALE_BITS, dtype=np.uint16)
    return Int4Weight(packed=packed, scale_bits=scales)


def _search_seconds(hidden: int) -> float:
    """Return the seconds that one thread takes for the smoothing exponents of a layer."""
    search, tries = exponent_search(hidden)
    return _seconds(search, "cpu") * tries


def exponent_search(hidden: int) -> tuple[Callable[[], object], float]:
    """Return one try of smoothing exponents, and how many of them the search in a layer takes."""
    columns = _MOST_COLUMNS
    rows = GateUpRows(np.ones(columns), (_made_up(SAMPLED_ROWS, columns),))
    proxy = Proxy(torch.ones(SAMPLED_TOKENS, columns), np.ones(columns, dtype=np.float32), rows)
    exponents = (np.arange(columns) % 2).astype(np.int8)
    return lambda: proxy.errors(exponents), (1 + BLOCK_SIZE * len(STEPS)) * hidden / columns


def _product_rate(device: str, dtype: torch.dtype = torch.float32) -> float:
    """Return the floating-point operations a second of one thread or GPU in a matrix product."""
    rows, inner, columns = _PRODUCT if device == "cpu" else _CUDA_PRODUCT
    left, right = (torch.ones(*shape, device=device, dtype=dtype) for shape in ((rows, inner), (inner, columns)))
    return 2 * rows * inner * columns / _seconds(lambda: left @ right, device)


def _seconds(run: Callable[[], object], device: str) -> float:
    """Return the seconds that the second call takes on a device; the first one warms up."""
    begin = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize(device)
    return max(time.perf_counter() - begin, 1e-7)
