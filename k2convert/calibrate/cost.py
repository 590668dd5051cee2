"""How a pass uses this machine: how many windows it computes at one time, and how long it will take.

The time is an estimate from one expert and one matrix product, said before the pass starts.

Both are measured on the device that computes. An expert's weights are made up, so nothing is read and a source on the
Hub can be estimated too. Reading is not measured. The rest of a layer (attention, router, shared experts, dense MLPs)
counts as matrix products. The search of norm exponents, which CPUs do, is measured on a few columns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from k2convert.calibrate.accumulate import SAMPLED_TOKENS
from k2convert.calibrate.norm_scaling import STEPS, Proxy
from k2convert.calibrate.scaled_tensors import SAMPLED_ROWS, GateUpRows
from k2convert.checkpoint.index import Checkpoint
from k2convert.choices import BLOCK_SIZE, GROUP_SIZE
from k2convert.forward.decoder import allowing_tf32
from k2convert.forward.mlp import Mlp
from k2convert.forward.weights import LinearLayer, exact_weight
from k2convert.models import detect_family
from k2convert.models.config import text_config
from k2convert.models.names import WEIGHT, WEIGHT_PACKED, Architecture, Role
from k2convert.quantize.feedback.factor import make_curvature
from k2convert.quantize.feedback.moments import MIN_TOKENS as FEW_TOKENS
from k2convert.quantize.feedback.moments import Moments
from k2convert.quantize.feedback.rounding import kernel_for, round_with_feedback
from k2convert.quantize.feedback.shrinkage import MIN_TOKENS, choose_shrinkage
from k2convert.quantize.formats.int4 import Int4Weight

CHUNK_TOKENS: Final = 4096
MEMORY_SHARE: Final = 0.4
_HIDDEN_COPIES: Final = 6
_SCALE_BITS: Final = 0x3C00  # BF16 of 2**-7
_PRODUCT: Final = (256, 1024, 1024)
_CUDA_PRODUCT: Final = (8192, 4096, 4096)
_MOST_TOKENS: Final = 2048
_SEARCHED_COLUMNS: Final = 512
_MOST_COLUMNS: Final = 512
_ROWS: Final = 64
_CUDA_ROWS: Final = 8192


def chunk_windows(source: Checkpoint, *, window: int, devices: tuple[str, ...]) -> int:
    """Return how many windows to compute at one time: every expert is decoded once for them.

    On the CPU they have CHUNK_TOKENS tokens. On CUDA they take MEMORY_SHARE of the smallest device's memory, counted as
    a few hidden states and the inner activations of every expert that a token chooses.
    """
    tokens = CHUNK_TOKENS
    if devices != ("cpu",):
        architecture = detect_family(source).read_architecture(source.config, str(source.folder))
        width = (_experts_per_token(source) + 1) * architecture.moe_intermediate_size
        token_bytes = 4 * (_HIDDEN_COPIES * architecture.hidden_size + width)
        memory = min(torch.cuda.mem_get_info(device)[1] for device in devices)
        tokens = max(tokens, int(MEMORY_SHARE * memory / token_bytes))
    return max(1, tokens // window)


@dataclass(frozen=True, slots=True)
class PassSize:
    """What is estimated: the last `num_layers` layers over some windows, `chunk` of them at one time.

    `parallel` experts are computed at one time. Only the first of `devices` is measured.
    """

    num_windows: int
    window: int
    chunk: int
    devices: tuple[str, ...]
    parallel: int
    num_layers: int

    @property
    def num_tokens(self) -> int:
        """The tokens of all windows."""
        return self.num_windows * self.window


@dataclass(frozen=True, slots=True)
class _Parts:
    """Seconds of one pass: routed experts, everything that every token passes, the search of norm exponents."""

    experts: float
    others: float
    search: float


def pass_seconds(source: Checkpoint, size: PassSize) -> float:
    """Return about how many seconds a pass takes."""
    with _one_thread():
        parts = _pass_parts(source, size)
    return parts.experts + parts.others + parts.search


def walk_seconds(source: Checkpoint, size: PassSize) -> float:
    """Return about how many seconds a walk with feedback takes: a pass, a second stream, and rounding.

    Experts are computed three more times: with converted gate and up, by rule `optimal`, and with converted down. What
    is decided for a layer or a down projection is measured on few columns; it grows with their third power, the
    rounding of a row with their second.
    """
    family = detect_family(source)
    architecture = family.read_architecture(source.config, str(source.folder))
    hidden, width, num_experts = architecture.hidden_size, architecture.moe_intermediate_size, architecture.num_experts
    device, tokens = size.devices[0], size.num_tokens
    routed = tokens * _experts_per_token(source) // max(num_experts, 1)
    with _one_thread():
        parts = _pass_parts(source, size)
        rate = _product_rate(device)
        rows = num_experts * (2 * width * _row_seconds(hidden, device) + hidden * _row_seconds(width, device))
        gate_up = _decide_seconds(hidden, hidden, tokens, device) + 4 * tokens * hidden * hidden / rate
        down = _decide_seconds(width, hidden, routed, device) + 2 * routed * width * (width + 2 * hidden) / rate
    layer = gate_up + num_experts * down + rows / size.parallel
    return 4 * parts.experts + 2 * parts.others + parts.search + _num_moe(architecture, size) * layer


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


def _pass_parts(source: Checkpoint, size: PassSize) -> _Parts:
    family, devices = detect_family(source), size.devices
    architecture = family.read_architecture(source.config, str(source.folder))
    chunk_tokens = min(size.chunk, size.num_windows) * size.window
    tokens = -(-chunk_tokens * _experts_per_token(source) // max(architecture.num_experts, 1))
    with allowing_tf32(devices):
        expert = _expert_seconds(architecture, min(tokens, _MOST_TOKENS), devices[0])
        rate = _product_rate(devices[0])
    expert *= max(tokens / _MOST_TOKENS, 1.0)
    search = _search_seconds(architecture.hidden_size) / min(len(STEPS), len(os.sched_getaffinity(0)))
    layers = range(architecture.num_layers - size.num_layers, architecture.num_layers)
    num_moe = _num_moe(architecture, size)
    experts = num_moe * architecture.num_experts * -(-size.num_windows // size.chunk) * expert
    flops = 2 * size.num_tokens * (_other_weights(source, layers) + len(layers) * _scores(source.config, size.window))
    return _Parts(experts / size.parallel, flops / rate / size.parallel, num_moe * search)


def _num_moe(architecture: Architecture, size: PassSize) -> int:
    return sum(layer >= architecture.num_layers - size.num_layers for layer in architecture.moe_layers)


def _row_seconds(columns: int, device: str) -> float:
    """Return the seconds that one thread or GPU takes to round a row with feedback."""
    size = min(columns, _MOST_COLUMNS)
    target = torch.randn(_ROWS if device == "cpu" else _CUDA_ROWS, size, device=device)
    curvature, kernel = make_curvature(torch.eye(size, device=device), 0.5), kernel_for(device)
    seconds = _seconds(lambda: round_with_feedback(target, 1.0, curvature, kernel), device)
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


def _experts_per_token(source: Checkpoint) -> int:
    return int(text_config(source.config).get("num_experts_per_tok") or 1)


def _other_weights(source: Checkpoint, layers: range) -> int:
    """Return the weights of these layers that every token passes."""
    family, total = detect_family(source), 0
    for name, tensor in source.tensors.items():
        module, _, parameter = name.rpartition(".")
        if parameter not in (WEIGHT, WEIGHT_PACKED):
            continue
        place = family.classify(module)
        if place is not None and place.layer in layers and place.role is not Role.EXPERTS:
            total += tensor.num_bytes * 2 if parameter == WEIGHT_PACKED else tensor.num_bytes // 2
    return total


def _scores(config: dict[str, Any], window: int) -> int:
    """Return the multiplications of one token with the keys and values of its window."""
    text = text_config(config)

    def field(name: str) -> int:
        value = text.get(name)
        return value if isinstance(value, int) else 0

    heads = field("num_attention_heads")
    one_head = field("head_dim") or field("hidden_size") // max(heads, 1)
    keys = field("qk_nope_head_dim") + field("qk_rope_head_dim") or one_head
    return heads * (keys + (field("v_head_dim") or one_head)) * window // 2


def _expert_seconds(architecture: Architecture, tokens: int, device: str) -> float:
    """Return the seconds that one thread or GPU takes for an expert with this many tokens; its weights are moved."""
    hidden, width = architecture.hidden_size, architecture.moe_intermediate_size
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
    """Return the seconds that one thread takes for the norm exponents of a layer."""
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
