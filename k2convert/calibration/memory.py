"""Memory of a pass through the layers of a model, counted from its headers and config.json.

A pass of `evaluate` needs what one layer needs: its weights, the states of a chunk, and the experts in work. Rule gptq
goes through a layer in phases. Each is a sum of terms in `gptq_memory`, and the largest is the peak. The numbers are
FP32 (4 bytes) unless a term says otherwise. tests/cli/test_needs.py compares the counts with the peaks of runs.

On a CPU, what grows with the tokens is in files (layer_tokens.py): only the rows that are being computed are in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from k2convert.calibration.gptq_layer import GROUPED_EXPERTS
from k2convert.calibration.smoothing import SAMPLED_TOKENS, STEPS
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.writer import NUM_STAGING, STAGING_BYTES
from k2convert.forward.decoder import CUDA_PIECE_TOKENS, PIECE_TOKENS
from k2convert.forward.layer_pass import PassText
from k2convert.machine import POOL_BYTES
from k2convert.models import detect_family
from k2convert.models.config import text_config
from k2convert.models.names import WEIGHT, WEIGHT_PACKED, Role, block_starts
from k2convert.quantize.gptq.hessian import SMALL
from k2convert.quantize.gptq.rounding import DAMPINGS
from k2convert.text.windows import experts_per_token

CUDA_BYTES: Final = 3 << 30
"""Memory that CUDA's libraries take of a process, and half of that of a GPU's: an upper bound, not measured."""

_LIBRARY_BYTES: Final = 160 << 20  # what oneDNN and threads keep
_TRANSFORMERS_BYTES: Final = 160 << 20  # imported for the first layer of rotary attention
_ATTENTION_TENSORS: Final = 8  # of all heads, that one window needs at once
_SEARCH_BYTES: Final = 24  # a number of the samples that smoothing exponents are tried on
_EXPERT_FLOATS: Final = 9  # times K I: gate and up, their targets in three forms, the packed source
_CUDA_EXPERT_FLOATS: Final = 10  # K2 on an H200: 62 GB counted, 51 GB measured
_COPIES: Final = 3  # of an expert's tokens, while it is in work
_MAPPED_COPIES: Final = 8  # with those that are files


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model that memory and work depend on.

    `head_floats` is the width of all heads together; `attention_bytes` and `dense_bytes` are the largest layer's. What
    leads to latent experts counts as attention: it is kept as long. `num_blocks` are the states that a layer reads
    besides its hidden states, and `library_bytes` what libraries keep.
    """

    hidden: int
    width: int
    dense_width: int
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    experts_per_token: int
    head_floats: int
    attention_bytes: int
    dense_bytes: int
    pool_bytes: int
    num_blocks: int
    library_bytes: int

    def num_moe(self, num_layers: int) -> int:
        """Return how many of the last `num_layers` layers have experts."""
        return sum(layer in self.moe_layers for layer in range(self.num_layers - num_layers, self.num_layers))

    def routed(self, tokens: int) -> int:
        """Return how many of these tokens an expert gets, if all experts get the same."""
        return tokens * self.experts_per_token // max(self.num_experts, 1)


@dataclass(frozen=True, slots=True)
class Memory:
    """The peak of a pass in bytes: of main memory, beyond what the process has, and of one GPU."""

    main: int
    gpu: int


def read_sizes(source: Checkpoint) -> ModelSizes:
    """Read config and headers."""
    family = detect_family(source)
    text = text_config(source.config)
    architecture = family.read_architecture(source.config, str(source.folder))
    sizes = {role: [0] * architecture.num_layers for role in (Role.ATTENTION, Role.DENSE_MLP)}
    for name, tensor in source.tensors.items():
        module, _, parameter = name.rpartition(".")
        module_place = None
        if parameter in (WEIGHT, WEIGHT_PACKED):
            module_place = family.classify(module)
        if module_place is None or module_place.layer is None or module_place.layer >= architecture.num_layers:
            continue
        role = Role.ATTENTION if module_place.role is Role.LATENT else module_place.role
        if role in sizes:
            sizes[role][module_place.layer] += tensor.num_bytes
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
        attention_bytes=max(sizes[Role.ATTENTION]),
        dense_bytes=max(sizes[Role.DENSE_MLP]),
        pool_bytes=min(POOL_BYTES, sum(tensor.num_bytes for tensor in source.tensors.values())),
        library_bytes=_LIBRARY_BYTES + (_TRANSFORMERS_BYTES if family.attention(text, 0) == "rotary" else 0),
        num_blocks=len(block_starts(architecture.num_layers - 1, architecture.residual_block)),
    )


def _field(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    return value if isinstance(value, int) else 0


def pass_memory(model: ModelSizes, text: PassText, num_layers: int) -> Memory:
    """Count the peak of a pass of one model through its last `num_layers` layers, with the buffers for reading."""
    memory = _peak(model, text, _layer_bytes(model, text, num_layers), streams=1)
    return Memory(memory.main + model.pool_bytes, memory.gpu)


def gptq_memory(
    model: ModelSizes, text: PassText, num_layers: int, *, shared_width: int = 0, fp8_bytes: int = 0
) -> Memory:
    """Count the peak of a conversion by rule gptq, without the buffers for reading, which the conversion counts.

    `num_layers` are left. `shared_width` is that of the widest MLP that is converted and that every token takes.
    `fp8_bytes` are the most FP8 weights of a layer, which the second stream has beside the source's.
    """
    square = 4 * model.hidden**2
    projection = 4 * model.hidden * model.width
    states = 4 * text.chunk_tokens * model.hidden
    routed = model.routed(text.num_tokens)
    tried = 1  # halves of the moments while their damping is chosen: one at a time, or one in every thread
    if model.hidden <= SMALL:
        tried = min(text.threads, 2 * len(DAMPINGS))
    if text.on_cpu:
        tokens = inner = 0
        mapped = 2 * states
        rows = _MAPPED_COPIES * min(routed, PIECE_TOKENS)
        experts = 1
        floats = _EXPERT_FLOATS
    else:
        tokens = 4 * text.num_tokens * model.hidden
        inner = 4 * text.num_tokens * model.experts_per_token * model.width
        mapped = 0
        rows = _COPIES * routed
        experts = GROUPED_EXPERTS
        floats = _CUDA_EXPERT_FLOATS
    pieces = 4 * rows * model.hidden  # of one expert's tokens
    in_work = experts * (text.threads * floats * projection + (text.threads + 1) * pieces)
    held = 2 * square + 2 * tokens  # moments of gate and up, and the tokens of both streams
    attention = model.attention_bytes
    phases = {
        "both streams": held + _layer_bytes(model, text, num_layers) + states,
        "collecting tokens": held + attention + 9 * states + mapped,
        "damping, in FP64": held + attention + (3 + 6 * tried) * square,
        "gate and up": held + attention + tokens // 4 + inner + in_work,
        "down": 2 * tokens + attention + inner + 8 * projection + 52 * model.width**2 + pieces,
        "down of every token": 2 * tokens
        + attention
        + inner
        + 32 * model.hidden * shared_width
        + 52 * shared_width**2
        + pieces,
    }
    memory = _peak(model, text, fp8_bytes + max(phases.values()), streams=2)
    staging = 2 * min(NUM_STAGING * STAGING_BYTES, 2 * text.num_tokens * model.hidden)  # of both streams' files
    return Memory(memory.main + staging, memory.gpu)


def _peak(model: ModelSizes, text: PassText, held: int, *, streams: int) -> Memory:
    """Return what is held where: all of it in main memory, or in a GPU with the states of a chunk in both."""
    search = len(STEPS) * (2 * SAMPLED_TOKENS) * model.hidden * _SEARCH_BYTES
    if text.on_cpu:
        return Memory(model.library_bytes + max(held, model.attention_bytes + search), 0)
    states = 4 * text.chunk_tokens * model.hidden
    return Memory(model.library_bytes + CUDA_BYTES + search + 2 * streams * states, held + CUDA_BYTES // 2)


def _layer_bytes(model: ModelSizes, text: PassText, num_layers: int) -> int:
    """Return the most bytes that one stream needs in a layer, weights included."""
    most = 0
    if model.num_moe(num_layers):
        tokens = text.chunk_tokens
        piece = min(tokens, PIECE_TOKENS if text.on_cpu else CUDA_PIECE_TOKENS)
        inner = tokens * (model.experts_per_token + 1) * model.width
        mlp = 4 * tokens * model.hidden + inner + (text.threads + 1) * piece * (model.hidden + model.width)
        most = model.attention_bytes + _block_bytes(model, tokens)
        most += max(4 * mlp, _attention_bytes(model, text, text.windows_at_once(dense=False)))
    if model.num_moe(num_layers) < num_layers:
        windows = text.windows_at_once(dense=True)
        mlp = 4 * windows * text.window * (4 * model.hidden + 2 * model.dense_width)
        others = max(model.dense_bytes + mlp, _attention_bytes(model, text, windows))
        most = max(most, model.attention_bytes + _block_bytes(model, windows * text.window) + others)
    return most


def _block_bytes(model: ModelSizes, tokens: int) -> int:
    return 4 * model.num_blocks * tokens * model.hidden


def _attention_bytes(model: ModelSizes, text: PassText, windows: int) -> int:
    at_once = min(text.threads, windows) * text.window * model.head_floats * _ATTENTION_TENSORS
    return 4 * (3 * windows * text.window * model.hidden + at_once)
