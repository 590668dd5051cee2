"""How long a calibration will take: an estimate, before it starts.

    pass   experts, and what every token passes, in TF32; every weight decoded once for each chunk
    walk   a pass by rule gptq: a second stream, the experts three times more, all decisions in FP32, the curvature in
           FP64, and rounding, block after block

On this machine one expert and one matrix product are measured, on the device that computes. An expert's weights are
made up, so nothing is read and a source on the Hub can be estimated too. The rest of a layer (attention, router, shared
experts, dense MLPs) counts as matrix products. The search of smoothing exponents, which CPUs do, is measured on a few
columns. Reading is not measured.

For a GPU that is not here the work is counted, and divided by the rates of its data sheet. Rounding starts small
kernels one after the other. That, not arithmetic, is most of a walk on a GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import torch

from k2convert.calibration.gptq_layer import GROUPED_EXPERTS
from k2convert.calibration.imatrix_gain import SAMPLED_TOKENS
from k2convert.calibration.sizes import ModelSizes, PassSize, read_sizes
from k2convert.calibration.smoothing import SAMPLED_ROWS, STEPS, GateUpRows, Proxy
from k2convert.checkpoint.index import Checkpoint
from k2convert.choices import BLOCK_SIZE, GROUP_SIZE
from k2convert.fit.gpus import Flops, Gpu
from k2convert.forward.decoder import allowing_tf32
from k2convert.forward.moe import Mlp, one_torch_thread
from k2convert.forward.weights import LinearLayer, exact_weight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.gptq.moments import MIN_TOKENS as FEW_TOKENS
from k2convert.quantize.gptq.moments import Moments, make_curvature
from k2convert.quantize.gptq.rounding import (
    FULL_TOKENS_PER_COLUMN,
    LEAST_FULL_TOKENS,
    MIN_TOKENS,
    SHRINKAGES,
    choose_shrinkage,
    kernel_for,
    round_gptq,
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
    """Seconds of one core or GPU: routed `experts` and what every token passes, shared by all of them; `search` of
    smoothing exponents, by a few cores; and `alone`, the corrections and the curvature of a walk, which only one does.
    """

    experts: float
    others: float
    search: float
    alone: float = 0.0


def walk_cost(model: ModelSizes, size: PassSize) -> Cost:
    """Measure a walk of rule gptq: a pass, a second stream, and rounding.

    Experts are computed three more times: with converted gate and up, by rule `mse`, and with converted down. What
    is decided for a layer or a down projection is measured on few columns; it grows with their third power, the
    rounding of a row with their second.
    """
    hidden, width, num_experts = model.hidden, model.width, model.num_experts
    device, tokens = size.devices[0], size.num_tokens
    routed = tokens * model.experts_per_token // max(num_experts, 1)
    one = pass_cost(model, size)
    rate = _product_rate(device)
    rows = num_experts * (2 * width * _row_seconds(hidden, device) + hidden * _row_seconds(width, device))
    gate_up = _decide_seconds(hidden, hidden, tokens, device) + 4 * tokens * hidden * hidden / rate
    down = _decide_seconds(width, hidden, routed, device) + 2 * routed * width * (width + 2 * hidden) / rate
    num_moe = model.num_moe(size)
    alone = num_moe * (gate_up + num_experts * down)
    return Cost(4 * one.experts + num_moe * rows, 2 * one.others, one.search, alone)


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds, from the least to the most. About `alone` of them only one core works, however many there are."""

    least: float
    most: float
    alone: float = 0.0

    @property
    def middle(self) -> float:
        """Half of the range."""
        return (self.least + self.most) / 2


def measured_time(source: Checkpoint, size: PassSize, *, is_walk: bool) -> Time:
    """Measure this machine for a second; the time on `size.workers` of its cores, or on its GPUs."""
    with torch.no_grad(), one_torch_thread():
        cost = (walk_cost if is_walk else pass_cost)(read_sizes(source), size)
    parallel = size.workers if size.on_cpu else 1 if is_walk else len(size.devices)
    cores = size.workers if size.on_cpu else len(os.sched_getaffinity(0))
    seconds = (cost.experts + cost.others) / parallel + cost.search / min(len(STEPS), cores) + cost.alone
    return Time(LEAST_SHARE * seconds, MOST_SHARE * seconds, cost.alone)


def computed_time(
    source: Checkpoint, size: PassSize, *, is_walk: bool, gpu: Gpu, flops: Flops, disk_bytes: int
) -> Time:
    """Compute the time on one GPU that is not here; `disk_bytes` more are read and written. Only CPUs are measured."""
    model = read_sizes(source)
    work = (walk_work if is_walk else pass_work)(model, size) + Work(read=disk_bytes)
    with torch.no_grad(), one_torch_thread():
        search = model.num_moe(size) * _search_seconds(model.hidden) / min(len(STEPS), size.workers)
    return Time(*gpu_seconds(work, gpu, flops, search=search))


def pass_cost(model: ModelSizes, size: PassSize, *, extra_flops: float = 0.0) -> Cost:
    """Measure what a pass takes; `extra_flops` more are of matrix products."""
    devices, num_moe = size.devices, model.num_moe(size)
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
    """Return the seconds that one thread or GPU takes to round a row by rule gptq."""
    size = min(columns, _MOST_COLUMNS)
    target = torch.randn(_ROWS if device == "cpu" else _CUDA_ROWS, size, device=device)
    curvature, kernel = make_curvature(torch.eye(size, device=device), 0.5), kernel_for(device)
    seconds = _seconds(lambda: round_gptq(target, 1.0, curvature, kernel), device)
    return seconds / target.shape[0] * (columns / size) ** 2


def _decide_seconds(columns: int, rows: int, tokens: int, device: str) -> float:
    """Return the seconds to choose the shrinkage and the correction of weights [rows, columns], and to factor."""
    if tokens < MIN_TOKENS:
        return 0.0
    size = min(columns, _MOST_COLUMNS)
    kept = max(BLOCK_SIZE, rows * size // columns)
    count = max(FEW_TOKENS, 2 * size)
    moments = Moments.start(size, kept, device=device)
    inputs = torch.randn(count, size, device=device)
    moments.add(inputs, inputs[:, :1].repeat(1, kept), torch.ones(count, device=device), torch.arange(count) % 2)
    weight, kernel, is_open = torch.randn(_ROWS, size, device=device), kernel_for(device), tokens < 4 * columns

    def decide() -> None:
        if is_open:
            choose_shrinkage(moments, weight, 1.0, kernel)
        moments.correction()
        make_curvature(moments.form(), 0.5)

    return _seconds(decide, device) * (columns / size) ** 3


def _expert_seconds(model: ModelSizes, tokens: int, device: str) -> float:
    """Return the seconds that one thread or GPU takes for an expert with this many tokens; its weights are moved."""
    hidden, width = model.hidden, model.width
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    layers = [LinearLayer(exact_weight(_made_up(rows, columns))) for rows, columns in shapes]
    states = torch.ones(tokens, hidden, device=device)
    return _seconds(lambda: Mlp(*(layer.to(device) for layer in layers))(states), device)


def _made_up(rows: int, columns: int) -> Int4Weight:
    packed = np.arange(rows * columns // 2, dtype=np.uint32).astype(np.uint8).reshape(rows, -1)
    scales = np.full((rows, columns // GROUP_SIZE), _SCALE_BITS, dtype=np.uint16)
    return Int4Weight(packed=packed, scale_bits=scales)


def _search_seconds(hidden_size: int) -> float:
    """Return the seconds that one thread takes for the smoothing exponents of a layer."""
    columns = _MOST_COLUMNS
    rows = GateUpRows(np.ones(columns), (_made_up(SAMPLED_ROWS, columns),))
    proxy = Proxy(torch.ones(SAMPLED_TOKENS, columns), np.ones(columns, dtype=np.float32), rows)
    exponents = (np.arange(columns) % 2).astype(np.int8)
    tries = 1 + BLOCK_SIZE * len(STEPS)
    return _seconds(lambda: proxy.errors(exponents), "cpu") * tries * hidden_size / columns


def _product_rate(device: str) -> float:
    """Return the floating-point operations a second of one thread or GPU in a matrix product."""
    rows, inner, columns = _PRODUCT if device == "cpu" else _CUDA_PRODUCT
    left, right = torch.ones(rows, inner, device=device), torch.ones(inner, columns, device=device)
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
