"""Size of a pass or a walk, counted from headers: the memory that it holds at once. Nothing is measured.

The peaks are counted in FP32 numbers (4 bytes) of K inputs, I inner activations, T tokens and C tokens of a chunk:

    attention   3 C K of states, and what one window needs in every thread
    MLP         4 C K of states, the inner activations of all experts of the chunk
    collecting  a walk's second stream; 4 K K of moments stay for the layer, and 2 T K of tokens
    correcting  5 K K of moments, what is missing and an even curvature; 6 K K for each half and its factor in FP64,
                while the shrinkage is chosen: one at a time, or for a small K one in every thread
    converting  3 K K of correction and curvature, 2 T K of tokens, and the experts in work

On a CPU, what grows with T is in files (layer_tokens.py): only the rows that are being computed are in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from k2convert.calibration.gptq_layer import GROUPED_EXPERTS
from k2convert.calibration.imatrix_gain import SAMPLED_TOKENS
from k2convert.calibration.smoothing import STEPS
from k2convert.calibration.token_counts import experts_per_token
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.writer import NUM_STAGING, STAGING_BYTES
from k2convert.forward.decoder import CUDA_PIECE_TOKENS, PIECE_TOKENS
from k2convert.forward.walk import DENSE_TOKENS
from k2convert.machine import POOL_BYTES
from k2convert.models import detect_family
from k2convert.models.config import text_config
from k2convert.models.names import WEIGHT, WEIGHT_PACKED, Role
from k2convert.quantize.gptq.rounding import SHRINKAGES
from k2convert.quantize.gptq.tiles import SMALL

CUDA_BYTES: Final = 3 << 30
"""Memory that CUDA's libraries take of a process, and half of that of a GPU's: an upper bound, not measured."""

_LIBRARY_BYTES: Final = 320 << 20  # transformers, imported for the first layer, and what oneDNN and threads keep
_ATTENTION_TENSORS: Final = 8  # of all heads, that one window needs at once
_SEARCH_BYTES: Final = 24  # a number of the samples that smoothing exponents are tried on
_EXPERT_FLOATS: Final = 9  # times K I: gate and up, their targets in three forms, the packed source
_CUDA_EXPERT_FLOATS: Final = 10  # K2 on an H200: 62 GB counted, 51 GB measured
_COPIES: Final = 3  # of an expert's tokens, while it is in work
_MAPPED_COPIES: Final = 8  # with those that are files
CHUNK_TOKENS: Final = 4096
MEMORY_SHARE: Final = 0.4
_HIDDEN_COPIES: Final = 6


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
    def on_cpu(self) -> bool:
        """Return whether the CPU computes."""
        return self.devices == ("cpu",)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes beyond what the process holds already: main memory, and that of one GPU (0 without one)."""

    main: int
    gpu: int


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


def read_sizes(source: Checkpoint) -> ModelSizes:
    """Read config and headers."""
    family = detect_family(source)
    text = text_config(source.config)
    architecture = family.read_architecture(source.config, str(source.folder))
    weights = [0] * architecture.num_layers
    sizes = {role: [0] * architecture.num_layers for role in (Role.ATTENTION, Role.DENSE_MLP)}
    for name, tensor in source.tensors.items():
        module, _, parameter = name.rpartition(".")
        place = family.classify(module) if parameter in (WEIGHT, WEIGHT_PACKED) else None
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


def chunk_windows(source: Checkpoint, *, window: int, gpu_bytes: int) -> int:
    """Return how many windows to compute at once: every expert is decoded once for them.

    On the CPU they have CHUNK_TOKENS tokens. On CUDA they take MEMORY_SHARE of `gpu_bytes`, the smallest device's
    memory, counted as a few hidden states and the inner activations of every expert that a token chooses.
    """
    model = read_sizes(source)
    token_bytes = 4 * (_HIDDEN_COPIES * model.hidden + (model.experts_per_token + 1) * model.width)
    return max(1, max(CHUNK_TOKENS, int(MEMORY_SHARE * gpu_bytes / token_bytes)) // window)


def pass_memory(model: ModelSizes, size: PassSize) -> Memory:
    """Return what a pass holds at its peak."""
    held = _memory(model, size, _layer_bytes(model, size), streams=1)
    return replace(held, main=held.main + model.pool_bytes)


def walk_memory(model: ModelSizes, size: PassSize) -> Memory:
    """Return what a walk of rule gptq holds at its peak, without the buffers for reading, which a conversion counts."""
    square = 4 * model.hidden**2
    part = model.width * model.hidden
    tried = min(size.workers, 2 * len(SHRINKAGES)) if model.hidden <= SMALL else 1
    states = 4 * size.chunk_windows * size.window * model.hidden
    chosen = size.num_tokens * model.experts_per_token // max(model.num_experts, 1)
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
    held = _memory(model, size, max(phases), streams=2)
    return replace(held, main=held.main + staging)


def _memory(model: ModelSizes, size: PassSize, held: int, *, streams: int) -> Memory:
    """Return what is held where: all of it in main memory, or in a GPU with the states of a chunk in both."""
    search = len(STEPS) * (2 * SAMPLED_TOKENS) * model.hidden * _SEARCH_BYTES
    main = _LIBRARY_BYTES
    if size.on_cpu:
        return Memory(main + max(held, model.attention_bytes + search), 0)
    states = 4 * size.chunk_windows * size.window * model.hidden
    return Memory(main + CUDA_BYTES + search + 2 * streams * states, held + CUDA_BYTES // 2)


def _layer_bytes(model: ModelSizes, size: PassSize) -> int:
    """Return the most bytes that one stream needs in a layer, weights included."""
    kinds = {layer in model.moe_layers for layer in model.layers(size)}
    return max((_moe_bytes if is_moe else _dense_bytes)(model, size) for is_moe in kinds) if kinds else 0


def _moe_bytes(model: ModelSizes, size: PassSize) -> int:
    tokens = size.chunk_windows * size.window
    piece = min(tokens, PIECE_TOKENS if size.on_cpu else CUDA_PIECE_TOKENS)
    inner = tokens * (model.experts_per_token + 1) * model.width
    mlp = 4 * tokens * model.hidden + inner + (size.workers + 1) * piece * (model.hidden + model.width)
    return model.attention_bytes + max(4 * mlp, _attention_bytes(model, size, size.chunk_windows))


def _dense_bytes(model: ModelSizes, size: PassSize) -> int:
    windows = min(size.chunk_windows, max(1, DENSE_TOKENS // size.window)) if size.on_cpu else size.chunk_windows
    tokens = windows * size.window
    mlp = 4 * (4 * tokens * model.hidden + 2 * tokens * model.dense_width)
    held = model.attention_bytes + model.dense_bytes
    return max(held + mlp, model.attention_bytes + _attention_bytes(model, size, windows))


def _attention_bytes(model: ModelSizes, size: PassSize, windows: int) -> int:
    at_once = min(size.workers, windows) * size.window * model.head_floats * _ATTENTION_TENSORS
    return 4 * (3 * windows * size.window * model.hidden + at_once)
