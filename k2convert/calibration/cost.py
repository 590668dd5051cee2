"""Needs of a calibration or an evaluation: memory, counted from headers, and time, measured on this machine.

    pass   experts, and what every token passes, in TF32; every weight decoded once for each chunk
    walk   a pass by rule gptq: a second stream, the experts once more, all decisions in FP32, the curvature in FP64,
           and rounding, block after block

One expert, one matrix product and a few rounded rows are measured, on the device that computes. The expert's weights
are made up, so nothing is read and a source on the Hub can be estimated too. The rest counts as matrix products; one
operation in FP64 takes as long as two. Reading is not measured, nor is the search of smoothing exponents: 4 seconds of
a core for a layer of K2, of 10 minutes. Progress counts the same operations.

The peaks of the memory are counted in FP32 numbers (4 bytes) of K inputs, I inner activations, T tokens and C tokens of
a chunk:

    attention   3 C K of states, and what one window needs in every thread
    MLP         4 C K of states, the inner activations of all experts of the chunk
    collecting  a walk's second stream; 4 K K of moments stay for the layer, and 2 T K of tokens
    correcting  5 K K of moments, what is missing and an even curvature; 6 K K for each half and its factor in FP64,
                while the shrinkage is chosen: one at a time, or for a small K one in every thread
    converting  3 K K of correction and curvature, 2 T K of tokens, and the experts in work

On a CPU, what grows with T is in files (layer_tokens.py): only the rows that are being computed are in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from k2convert.calibration.gptq_layer import GROUPED_EXPERTS
from k2convert.calibration.smoothing import SAMPLED_TOKENS, STEPS
from k2convert.calibration.text import HELD_OUT_EVERY, experts_per_token
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.writer import NUM_STAGING, STAGING_BYTES
from k2convert.choices import GROUP_SIZE
from k2convert.forward.decoder import CUDA_PIECE_TOKENS, PIECE_TOKENS, allowing_tf32
from k2convert.forward.moe import Mlp, one_torch_thread
from k2convert.forward.walk import DENSE_TOKENS
from k2convert.forward.weights import LinearLayer, exact_weight
from k2convert.machine import POOL_BYTES
from k2convert.models import detect_family
from k2convert.models.config import text_config
from k2convert.models.names import WEIGHT, WEIGHT_PACKED, Role
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.gptq.curvature import SMALL, make_curvature
from k2convert.quantize.gptq.device_kernel import kernel_for
from k2convert.quantize.gptq.moments import MIN_TOKENS as FEW_TOKENS
from k2convert.quantize.gptq.moments import SKETCHED_ROWS, STRENGTHS
from k2convert.quantize.gptq.rounding import (
    FULL_TOKENS_PER_COLUMN,
    LEAST_FULL_TOKENS,
    MIN_TOKENS,
    SHRINKAGES,
    round_gptq,
)

MEASURED_SHARE: Final = 2 / HELD_OUT_EVERY
"""The share of the tokens on which a walk measures errors."""

LEAST_SHARE: Final = 0.7
MOST_SHARE: Final = 1.5
"""The range around an estimate. On a busy machine it was wrong by more."""

CUDA_BYTES: Final = 3 << 30
"""Memory that CUDA's libraries take of a process, and half of that of a GPU's: an upper bound, not measured."""

_LIBRARY_BYTES: Final = 320 << 20  # transformers, imported for the first layer, and what oneDNN and threads keep
_ATTENTION_TENSORS: Final = 8  # of all heads, that one window needs at once
_SEARCH_BYTES: Final = 24  # a number of the samples that smoothing exponents are tried on
_EXPERT_FLOATS: Final = 9  # times K I: gate and up, their targets in three forms, the packed source
_CUDA_EXPERT_FLOATS: Final = 10  # K2 on an H200: 62 GB counted, 51 GB measured
_COPIES: Final = 3  # of an expert's tokens, while it is in work
_MAPPED_COPIES: Final = 8  # with those that are files
_SCALE_BITS: Final = 0x3C00  # BF16 of 2**-7
_PRODUCT: Final = (256, 1024, 1024)
_CUDA_PRODUCT: Final = (8192, 4096, 4096)
_MOST_TOKENS: Final = 2048
_MOST_COLUMNS: Final = 512
_ROWS: Final = 64
_CUDA_ROWS: Final = 8192


@dataclass(frozen=True, slots=True)
class PassSize:
    """Size of a pass: the last `num_layers` layers over some windows, `chunk` of them at once.

    `workers` threads compute. Only the first of `devices` is measured.
    """

    num_windows: int
    window: int
    chunk: int
    devices: tuple[str, ...]
    workers: int
    num_layers: int

    @property
    def num_tokens(self) -> int:
        """The tokens of all windows."""
        return self.num_windows * self.window

    @property
    def chunk_windows(self) -> int:
        """The windows of a chunk: fewer if there are no more."""
        return min(self.chunk, self.num_windows)

    @property
    def chunk_tokens(self) -> int:
        """The tokens of a chunk."""
        return self.chunk_windows * self.window

    @property
    def on_cpu(self) -> bool:
        """Return whether the CPU computes."""
        return self.devices == ("cpu",)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model that time and memory depend on.

    `other_weights` has for each layer the number of weights that every token passes. `scores` are the multiplications
    of a token with a key and its value, in all heads; `head_floats` is the width of all heads together.
    """

    hidden: int
    width: int
    dense_width: int
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    experts_per_token: int
    head_floats: int
    scores: int
    other_weights: tuple[int, ...]
    attention_bytes: int
    dense_bytes: int
    pool_bytes: int

    def layers(self, size: PassSize) -> range:
        """The layers that are left."""
        return range(self.num_layers - size.num_layers, self.num_layers)

    def num_moe(self, size: PassSize) -> int:
        """Return how many of the layers that are left have experts."""
        return sum(layer in self.moe_layers for layer in self.layers(size))

    def routed(self, tokens: int) -> int:
        """Return how many of these tokens an expert gets, if all experts get the same."""
        return tokens * self.experts_per_token // max(self.num_experts, 1)


def read_sizes(source: Checkpoint) -> ModelSizes:
    """Read config and headers."""
    family = detect_family(source)
    text = text_config(source.config)
    architecture = family.read_architecture(source.config, str(source.folder))
    weights = [0] * architecture.num_layers
    sizes = {role: [0] * architecture.num_layers for role in (Role.ATTENTION, Role.DENSE_MLP)}
    for name, tensor in source.tensors.items():
        module, _, parameter = name.rpartition(".")
        place = None
        if parameter in (WEIGHT, WEIGHT_PACKED):
            place = family.classify(module)
        if place is None or place.layer is None or place.role is Role.EXPERTS:
            continue
        if place.layer < architecture.num_layers:
            weights[place.layer] += tensor.num_bytes * 2 if parameter == WEIGHT_PACKED else tensor.num_bytes // 2
            if place.role in sizes:
                sizes[place.role][place.layer] += tensor.num_bytes
    heads = _field(text, "num_attention_heads")
    one_head = _field(text, "head_dim") or _field(text, "hidden_size") // max(heads, 1)
    keys = _field(text, "qk_nope_head_dim") + _field(text, "qk_rope_head_dim") or one_head
    return ModelSizes(
        hidden=architecture.hidden_size,
        width=architecture.moe_intermediate_size,
        dense_width=_field(text, "intermediate_size"),
        num_layers=architecture.num_layers,
        moe_layers=architecture.moe_layers,
        num_experts=architecture.num_experts,
        experts_per_token=experts_per_token(source),
        head_floats=heads * keys,
        scores=heads * (keys + (_field(text, "v_head_dim") or one_head)),
        other_weights=tuple(weights),
        attention_bytes=max(sizes[Role.ATTENTION]),
        dense_bytes=max(sizes[Role.DENSE_MLP]),
        pool_bytes=min(POOL_BYTES, sum(tensor.num_bytes for tensor in source.tensors.values())),
    )


def _field(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    return value if isinstance(value, int) else 0


def pass_memory(model: ModelSizes, size: PassSize) -> tuple[int, int]:
    """Return the bytes that a pass holds at its peak beyond what the process has: in main memory, and in one GPU."""
    main, gpu = _memory(model, size, _layer_bytes(model, size), streams=1)
    return main + model.pool_bytes, gpu


def walk_memory(model: ModelSizes, size: PassSize) -> tuple[int, int]:
    """Return the same of a walk of rule gptq, without the buffers for reading, which a conversion counts."""
    square = 4 * model.hidden**2
    part = model.width * model.hidden
    tried = 1
    if model.hidden <= SMALL:
        tried = min(size.workers, 2 * len(SHRINKAGES))
    states = 4 * size.chunk_tokens * model.hidden
    chosen = model.routed(size.num_tokens)
    if size.on_cpu:
        tokens = inner = 0
        chosen = min(chosen, PIECE_TOKENS)
        mapped = 2 * states
        copies = _MAPPED_COPIES
        experts = 1
        floats = _EXPERT_FLOATS
    else:
        tokens = 4 * size.num_tokens * model.hidden
        inner = 4 * size.num_tokens * model.experts_per_token * model.width
        mapped = 0
        copies = _COPIES
        experts = GROUPED_EXPERTS
        floats = _CUDA_EXPERT_FLOATS
    pieces = 4 * copies * chosen * model.hidden
    in_work = 4 * experts * (size.workers * floats * part) + experts * (size.workers + 1) * pieces
    phases = (
        2 * square + 2 * tokens + _layer_bytes(model, size) + states,
        2 * square + 2 * tokens + model.attention_bytes + 9 * states + mapped,
        (5 + 6 * tried) * square + 2 * tokens + model.attention_bytes,
        2 * square + 2 * tokens + tokens // 4 + inner + model.attention_bytes + in_work,
        2 * tokens + inner + model.attention_bytes + 32 * part + 52 * model.width**2 + pieces,
    )
    staging = 2 * min(NUM_STAGING * STAGING_BYTES, 2 * size.num_tokens * model.hidden)  # of both streams' files
    main, gpu = _memory(model, size, max(phases), streams=2)
    return main + staging, gpu


def _memory(model: ModelSizes, size: PassSize, held: int, *, streams: int) -> tuple[int, int]:
    """Return what is held where: all of it in main memory, or in a GPU with the states of a chunk in both."""
    search = len(STEPS) * (2 * SAMPLED_TOKENS) * model.hidden * _SEARCH_BYTES
    if size.on_cpu:
        return _LIBRARY_BYTES + max(held, model.attention_bytes + search), 0
    states = 4 * size.chunk_tokens * model.hidden
    return _LIBRARY_BYTES + CUDA_BYTES + search + 2 * streams * states, held + CUDA_BYTES // 2


def _layer_bytes(model: ModelSizes, size: PassSize) -> int:
    """Return the most bytes that one stream needs in a layer, weights included."""
    most = 0
    if model.num_moe(size):
        tokens = size.chunk_tokens
        piece = min(tokens, PIECE_TOKENS if size.on_cpu else CUDA_PIECE_TOKENS)
        inner = tokens * (model.experts_per_token + 1) * model.width
        mlp = 4 * tokens * model.hidden + inner + (size.workers + 1) * piece * (model.hidden + model.width)
        most = model.attention_bytes + max(4 * mlp, _attention_bytes(model, size, size.chunk_windows))
    if model.num_moe(size) < size.num_layers:
        windows = min(size.chunk_windows, max(1, DENSE_TOKENS // size.window)) if size.on_cpu else size.chunk_windows
        mlp = 4 * windows * size.window * (4 * model.hidden + 2 * model.dense_width)
        others = max(model.dense_bytes + mlp, _attention_bytes(model, size, windows))
        most = max(most, model.attention_bytes + others)
    return most


def _attention_bytes(model: ModelSizes, size: PassSize, windows: int) -> int:
    at_once = min(size.workers, windows) * size.window * model.head_floats * _ATTENTION_TENSORS
    return 4 * (3 * windows * size.window * model.hidden + at_once)


def other_flops(model: ModelSizes, size: PassSize) -> float:
    """Return the operations of a pass outside of routed experts: what every token passes, and attention."""
    return sum(_other_flops(model, size, layer) for layer in model.layers(size))


def _other_flops(model: ModelSizes, size: PassSize, layer: int) -> float:
    return 2 * size.num_tokens * (model.other_weights[layer] + model.scores * size.window // 2)


def _expert_flops(model: ModelSizes, size: PassSize) -> float:
    return 6.0 * size.num_tokens * model.experts_per_token * model.hidden * model.width


def pass_flops(model: ModelSizes, size: PassSize) -> float:
    """Return the operations of a pass."""
    return model.num_moe(size) * _expert_flops(model, size) + other_flops(model, size)


def layer_operations(model: ModelSizes, size: PassSize, *, is_walk: bool) -> tuple[float, ...]:
    """Return the operations of each layer of a pass or of a walk of rule gptq: what its progress counts."""
    expert = _expert_flops(model, size)
    streams = 1
    if is_walk:
        expert += sum(walk_steps(model, size).values())
        streams = 2
    others = [streams * _other_flops(model, size, layer) for layer in range(model.num_layers)]
    return tuple(own + expert * (layer in model.moe_layers) for layer, own in enumerate(others))


def walk_shares(model: ModelSizes, size: PassSize) -> tuple[float, float, float]:
    """Return the share of a MoE layer's walk that is done before it is decided how gate and up are rounded, before
    they are rounded, and before down is.
    """
    steps = walk_steps(model, size)
    total = layer_operations(model, size, is_walk=True)[model.moe_layers[0]]
    streams = total - sum(steps.values()) + steps["moments of gate and up"]
    prepared = streams + steps["shrinkage and factor of gate and up"]
    rounded = prepared + steps["experts, converted"] + steps["codes of gate and up"]
    return streams / total, prepared / total, rounded / total


def walk_steps(model: ModelSizes, size: PassSize) -> dict[str, float]:
    """Return the operations of each step that a walk of rule gptq does in a MoE layer beyond the two streams.

    They are counted in those of FP32: one in FP64 takes as long as two.
    """
    hidden = model.hidden
    width = model.width
    experts = model.num_experts
    tokens = size.num_tokens
    routed = model.routed(tokens)
    summed = tokens * hidden**2 if tokens >= MIN_TOKENS else 0
    summed_of_down = 0
    if routed >= MIN_TOKENS:
        summed_of_down = routed * width * (width + 2 * hidden)
    sums = min(hidden, SKETCHED_ROWS)
    corrected = width**2 * ((len(STRENGTHS) + 1) * width / 3 + 8 * len(STRENGTHS) * sums + 2 * hidden)
    corrected += 4 * hidden * width * sums
    return {
        "experts, converted": (1 + 2 * MEASURED_SHARE) * _expert_flops(model, size),
        "moments of gate and up": float(summed),
        "shrinkage and factor of gate and up": 2 * _factor_flops(hidden, tokens),
        "codes of gate and up": 6.0 * 2 * width * experts * hidden**2,
        "moments of down": float(experts * summed_of_down),
        "shrinkage and factor of down": 2 * experts * _factor_flops(width, routed),
        "correction of down": experts * corrected if routed >= FEW_TOKENS else 0.0,
        "codes of down": experts * (6.0 * hidden * width**2 + 2.0 * routed * width * hidden),
    }


def _factor_flops(columns: int, tokens: int) -> float:
    """Return the operations of the factor of an input, and of those that are tried to choose its shrinkage."""
    if tokens < MIN_TOKENS:
        return 0.0
    tries = 2 * len(SHRINKAGES) * (tokens < max(LEAST_FULL_TOKENS, FULL_TOKENS_PER_COLUMN * columns))
    return (1 + tries) * 2 / 3 * float(columns) ** 3


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds, from the least to the most."""

    least: float
    most: float

    @property
    def middle(self) -> float:
        """Half of the range."""
        return (self.least + self.most) / 2


def measured_time(
    model: ModelSizes, size: PassSize, *, is_walk: bool = False, models: int = 1, head_flops: float = 0.0
) -> Time:
    """Measure this machine for a second; the time of so many models on `size.workers` of its cores, or on its GPUs."""
    if size.num_layers == 0:
        return Time(0.0, 0.0)
    device = size.devices[0]
    num_moe = model.num_moe(size)
    tokens = -(-size.chunk_tokens * model.experts_per_token // max(model.num_experts, 1))
    with torch.no_grad(), one_torch_thread():
        with allowing_tf32(size.devices):
            expert = _seconds(made_up_expert(model, min(tokens, _MOST_TOKENS), device), device)
            rate = _product_rate(device)
        expert *= max(tokens / _MOST_TOKENS, 1.0)
        experts = num_moe * model.num_experts * -(-size.num_windows // size.chunk) * expert
        seconds = models * (experts + (other_flops(model, size) + head_flops) / rate)
        if is_walk:
            # Experts are computed with converted gate and up once more, and some tokens twice more, for the errors.
            seconds = 2 * seconds + 2 * MEASURED_SHARE * experts + num_moe * _deciding_seconds(model, size, device)
    if size.on_cpu:
        seconds /= size.workers
    elif not is_walk:
        seconds /= len(size.devices)
    return Time(LEAST_SHARE * seconds, MOST_SHARE * seconds)


def _deciding_seconds(model: ModelSizes, size: PassSize, device: str) -> float:
    """Measure what one core or GPU takes in a MoE layer for all decisions, and to round by them."""
    rate = _product_rate(device)
    steps = walk_steps(model, size)
    for name in ("experts, converted", "codes of gate and up", "codes of down"):
        del steps[name]
    seconds = sum(steps.values()) / rate
    for columns, rows in ((model.hidden, 2 * model.width), (model.width, model.hidden)):
        seconds += model.num_experts * rows * _row_seconds(columns, device, rate)
    return seconds


def _row_seconds(columns: int, device: str, rate: float) -> float:
    """Measure a row rounded by rule gptq with few columns; what more columns add goes at the rate of a product."""
    few = min(columns, _MOST_COLUMNS)
    target = torch.randn(_ROWS if device == "cpu" else _CUDA_ROWS, few, device=device)
    curvature = make_curvature(torch.eye(few, device=device), 0.5)
    seconds = _seconds(lambda: round_gptq(target, 1.0, curvature, kernel_for(device)), device) / target.shape[0]
    return seconds * columns / few + 6 * columns * (columns - few) / rate


def made_up_expert(model: ModelSizes, tokens: int, device: str) -> Callable[[], torch.Tensor]:
    """Return what decodes and computes an expert with this many tokens."""
    gate_shape = (model.width, model.hidden)
    shapes = (gate_shape, gate_shape, gate_shape[::-1])
    layers = [LinearLayer(exact_weight(made_up_weight(rows, columns))) for rows, columns in shapes]
    states = torch.ones(tokens, model.hidden, device=device)
    return lambda: Mlp(*(layer.to(device) for layer in layers))(states)


def made_up_weight(rows: int, columns: int) -> Int4Weight:
    packed = np.arange(rows * columns // 2, dtype=np.uint32).astype(np.uint8).reshape(rows, -1)
    scales = np.full((rows, columns // GROUP_SIZE), _SCALE_BITS, dtype=np.uint16)
    return Int4Weight(packed=packed, scale_bits=scales)


def _product_rate(device: str) -> float:
    """Return the floating-point operations a second of one thread or GPU in a matrix product."""
    rows, inner, columns = _PRODUCT if device == "cpu" else _CUDA_PRODUCT
    left = torch.ones(rows, inner, device=device)
    right = torch.ones(inner, columns, device=device)
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
