"""How a pass uses this machine: how many windows it computes at once, and how long it will take.

The time is an estimate from one expert and one matrix product, said before the pass starts.

Both are measured on the device that computes. An expert's weights are made up, so nothing is read and a source on the
Hub can be estimated too. Reading is not measured. The rest of a layer (attention, router, shared experts, dense MLPs)
counts as matrix products. The search of smoothing exponents, which CPUs do, is measured on a few columns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from k2convert.calibrate.accumulate import SAMPLED_TOKENS
from k2convert.calibrate.computed import Work, gpu_seconds, other_flops, pass_work, walk_work
from k2convert.calibrate.scaled_tensors import SAMPLED_ROWS, GateUpRows
from k2convert.calibrate.sizes import ModelSizes, PassSize, read_sizes
from k2convert.calibrate.smoothing import STEPS, Proxy
from k2convert.checkpoint.index import Checkpoint
from k2convert.choices import BLOCK_SIZE, GROUP_SIZE
from k2convert.fit.gpus import Flops, Gpu
from k2convert.forward.decoder import allowing_tf32
from k2convert.forward.mlp import Mlp
from k2convert.forward.weights import LinearLayer, exact_weight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.gptq.factor import make_curvature
from k2convert.quantize.gptq.moments import MIN_TOKENS as FEW_TOKENS
from k2convert.quantize.gptq.moments import Moments
from k2convert.quantize.gptq.rounding import MIN_TOKENS, choose_shrinkage, kernel_for, round_gptq

CHUNK_TOKENS: Final = 4096
MEMORY_SHARE: Final = 0.4
LEAST_SHARE: Final = 0.7
MOST_SHARE: Final = 1.5
"""The range around an estimate. On a busy machine it was wrong by more."""
_HIDDEN_COPIES: Final = 6
_SCALE_BITS: Final = 0x3C00  # BF16 of 2**-7
_PRODUCT: Final = (256, 1024, 1024)
_CUDA_PRODUCT: Final = (8192, 4096, 4096)
_MOST_TOKENS: Final = 2048
_SEARCHED_COLUMNS: Final = 512
_MOST_COLUMNS: Final = 512
_ROWS: Final = 64
_CUDA_ROWS: Final = 8192


def chunk_windows(source: Checkpoint, *, window: int, gpu_bytes: int) -> int:
    """Return how many windows to compute at once: every expert is decoded once for them.

    On the CPU they have CHUNK_TOKENS tokens. On CUDA they take MEMORY_SHARE of `gpu_bytes`, the smallest device's
    memory, counted as a few hidden states and the inner activations of every expert that a token chooses.
    """
    model = read_sizes(source)
    token_bytes = 4 * (_HIDDEN_COPIES * model.hidden + (model.experts_per_token + 1) * model.width)
    return max(1, max(CHUNK_TOKENS, int(MEMORY_SHARE * gpu_bytes / token_bytes)) // window)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one core or GPU: `shared` by all of them, `search` by a few cores, and `alone`, which only one does.

    `search` is that of smoothing exponents. `alone` are the corrections and the curvature of a walk.
    """

    shared: float
    search: float
    alone: float = 0.0

    def seconds(self, *, parallel: int, cores: int) -> float:
        """Return the seconds with so many cores or GPUs at once, on a machine with `cores`."""
        return self.shared / parallel + self.search / min(len(STEPS), cores) + self.alone


def pass_cost(source: Checkpoint, size: PassSize) -> Cost:
    """Measure what a pass takes."""
    with _one_thread():
        parts = _pass_parts(read_sizes(source), size)
    return Cost(parts.experts + parts.others, parts.search)


def walk_cost(source: Checkpoint, size: PassSize) -> Cost:
    """Measure what a walk of rule gptq needs: a pass, a second stream, and rounding.

    Experts are computed three more times: with converted gate and up, by rule `mse`, and with converted down. What
    is decided for a layer or a down projection is measured on few columns; it grows with their third power, the
    rounding of a row with their second.
    """
    model = read_sizes(source)
    hidden, width, num_experts = model.hidden, model.width, model.num_experts
    device, tokens = size.devices[0], size.num_tokens
    routed = tokens * model.experts_per_token // max(num_experts, 1)
    with _one_thread():
        parts = _pass_parts(model, size)
        rate = _product_rate(device)
        rows = num_experts * (2 * width * _row_seconds(hidden, device) + hidden * _row_seconds(width, device))
        gate_up = _decide_seconds(hidden, hidden, tokens, device) + 4 * tokens * hidden * hidden / rate
        down = _decide_seconds(width, hidden, routed, device) + 2 * routed * width * (width + 2 * hidden) / rate
    num_moe = model.num_moe(size)
    shared = 4 * parts.experts + 2 * parts.others + num_moe * rows
    return Cost(shared, parts.search, num_moe * (gate_up + num_experts * down))


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
    cost = (walk_cost if is_walk else pass_cost)(source, size)
    parallel = size.workers if size.on_cpu else 1 if is_walk else len(size.devices)
    cores = size.workers if size.on_cpu else len(os.sched_getaffinity(0))
    seconds = cost.seconds(parallel=parallel, cores=cores)
    return Time(LEAST_SHARE * seconds, MOST_SHARE * seconds, cost.alone)


def computed_time(
    source: Checkpoint, size: PassSize, *, is_walk: bool, gpu: Gpu, flops: Flops, disk_bytes: int
) -> Time:
    """Compute the time on one GPU that is not here; `disk_bytes` more are read and written. Only CPUs are measured."""
    model = read_sizes(source)
    work = (walk_work if is_walk else pass_work)(model, size) + Work(read=disk_bytes)
    with _one_thread():
        search = model.num_moe(size) * _search_seconds(model.hidden) / min(len(STEPS), size.workers)
    return Time(*gpu_seconds(work, gpu, flops, search=search))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Seconds of one pass: routed experts, everything that every token passes, the search of smoothing exponents."""

    experts: float
    others: float
    search: float


@contextmanager
def _one_thread() -> Generator[None]:
    """Let torch use one thread, as a pass does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


def _pass_parts(model: ModelSizes, size: PassSize) -> _Parts:
    devices, num_moe = size.devices, model.num_moe(size)
    chunk_tokens = size.chunk_windows * size.window
    tokens = -(-chunk_tokens * model.experts_per_token // max(model.num_experts, 1))
    with allowing_tf32(devices):
        expert = _expert_seconds(model, min(tokens, _MOST_TOKENS), devices[0])
        rate = _product_rate(devices[0])
    expert *= max(tokens / _MOST_TOKENS, 1.0)
    experts = num_moe * model.num_experts * -(-size.num_windows // size.chunk) * expert
    return _Parts(experts, other_flops(model, size) / rate, num_moe * _search_seconds(model.hidden))


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
    layers = [_made_up(rows, columns) for rows, columns in shapes]
    states = torch.ones(tokens, hidden, device=device)
    return _seconds(lambda: Mlp(*(layer.to(device) for layer in layers))(states), device)


def _made_up(rows: int, columns: int) -> LinearLayer:
    return LinearLayer(exact_weight(_made_up_int4(rows, columns)))


def _made_up_int4(rows: int, columns: int) -> Int4Weight:
    packed = np.arange(rows * columns // 2, dtype=np.uint32).astype(np.uint8).reshape(rows, -1)
    scales = np.full((rows, columns // GROUP_SIZE), _SCALE_BITS, dtype=np.uint16)
    return Int4Weight(packed=packed, scale_bits=scales)


def _search_seconds(hidden_size: int) -> float:
    """Return the seconds that one thread takes for the smoothing exponents of a layer."""
    columns = _SEARCHED_COLUMNS
    rows = GateUpRows(np.ones(columns), (_made_up_int4(SAMPLED_ROWS, columns),))
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
        _wait(device)
        begin = time.perf_counter()
        run()
    _wait(device)
    return max(time.perf_counter() - begin, 1e-7)


def _wait(device: str) -> None:
    """Wait until a GPU has done what it was told."""
    if device != "cpu":
        torch.cuda.synchronize(device)
