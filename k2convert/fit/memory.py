"""The memory of each GPU: weights by role, the engine's overhead, and the tokens of KV cache that the rest holds.

    pool = utilization x memory - weights - overhead
    tokens = pool / (kv_values x layers x bytes of a value), times what splits the cache

Tensor parallelism divides attention heads, experts, MLPs, embeddings and output head. Low-rank down-projections (q_a,
kv_a), router, norms, vision tower and projector are whole on every GPU (vLLM 0.33, models/deepseek_v2.py), and so is
the KV cache of multi-head latent attention, which has one head. Decode context parallelism divides the cache. With DP
attention each GPU has its own requests, and only experts are divided: vLLM runs it as data parallelism.

SGLang keeps kv_b_proj a second time for absorbed attention (models/deepseek_v2.py, w_kc and w_vc), 1.0 GB of K2 over
the GPUs of tensor parallelism. vLLM keeps views of it. It counts as overhead.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from k2convert.choices import ServedKvCache
from k2convert.fit.layouts import Parallelism, stage_layers
from k2convert.fit.model import ModelShape, Part, Weights
from k2convert.models.names import Role

KV_BYTES: Final[dict[ServedKvCache, int]] = {"fp8": 1, "bf16": 2}

CONTEXT: Final = 8192
"""The length of a request if the user does not say."""

UTILIZATION: Final = 0.92
"""The share of memory that vLLM 0.33 uses by default."""

OVERHEAD_BYTES: Final = 3_000_000_000
"""Activations, CUDA graphs, NCCL and libraries on one GPU: an assumption.

vLLM's published pools on 8 RTX PRO 6000 leave 2.5 to 3.5 GB for it, with 4,096 and 8,192 tokens a batch
(github.com/local-inference-lab/rtx6kpro, models/kimi-k25.md and kimi-k26-v2.md, kimi-k26-v4.md, 2026-05). It is more
with larger batches: 8.7 GB in vLLM's Kimi-K2-Thinking recipe for 8 H200 (2025-11). AIConfigurator 0.12.0 assumes 4.2 GB
and activations.
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user can set about memory. A request has up to `context` tokens, prompt and answer."""

    kv: ServedKvCache = "fp8"
    context: int = CONTEXT
    requests: int = 1
    utilization: float = UTILIZATION
    overhead_bytes: int = OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class Fit:
    """One layout on GPUs of `memory_bytes` each. Figures are of the fullest GPU: the one with the fewest tokens.

    `pool_bytes` is negative by what is missing. `tokens` is the KV cache of all GPUs, `longest` the part that one
    request can have (a GPU's own with DP attention). `request_slots` is how many requests of the wanted length fit.
    """

    layout: Parallelism
    memory_bytes: int
    usable_bytes: int
    weights: Mapping[Role, int]
    overhead_bytes: int
    kv_bytes_per_token: int
    tokens: int
    longest: int
    context: int
    requests: int

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def pool_bytes(self) -> int:
        return self.usable_bytes - self.weight_bytes - self.overhead_bytes

    @property
    def request_slots(self) -> int:
        """Requests of `context` tokens that the cache holds at once."""
        return self.slots_of(self.context)

    def slots_of(self, length: int) -> int:
        """Return how many requests of this length the cache holds at once."""
        groups = self.tokens // self.longest if self.longest else 0
        return groups * (self.longest // length)

    @property
    def holds(self) -> bool:
        """Whether the requests asked for fit together."""
        return self.request_slots >= self.requests


def fit_layout(
    weights: Weights, shape: ModelShape, layout: Parallelism, *, memory_bytes: int, settings: Settings
) -> Fit:
    """Return the memory of the fullest GPU of a layout that `check_layout` accepts."""
    stages = stage_layers(shape.num_layers, layout.pipeline)
    fits = [
        _fit_stage(
            _stage_bytes(weights.parts, layers, layout, is_first=i == 0, is_last=i == len(stages) - 1),
            shape.kv_values * len(layers) * KV_BYTES[settings.kv],
            layout,
            memory_bytes=memory_bytes,
            settings=settings,
        )
        for i, layers in enumerate(stages)
    ]
    return min(fits, key=lambda fit: (fit.tokens, fit.pool_bytes))


def _fit_stage(
    weights: dict[Role, int], kv_bytes: int, layout: Parallelism, *, memory_bytes: int, settings: Settings
) -> Fit:
    usable = int(settings.utilization * memory_bytes)
    pool = usable - sum(weights.values()) - settings.overhead_bytes
    longest = max(pool, 0) // kv_bytes * layout.decode_context
    return Fit(
        layout=layout,
        memory_bytes=memory_bytes,
        usable_bytes=usable,
        weights=weights,
        overhead_bytes=settings.overhead_bytes,
        kv_bytes_per_token=kv_bytes,
        tokens=longest * (layout.tensor if layout.data_attention else 1),
        longest=longest,
        context=settings.context,
        requests=settings.requests,
    )


_LAST_STAGE: Final = frozenset((Role.LM_HEAD, Role.NORM))  # outside the layers; all else there is on the first stage


def _stage_bytes(
    parts: tuple[Part, ...], layers: range, layout: Parallelism, *, is_first: bool, is_last: bool
) -> dict[Role, int]:
    sums: dict[Role, int] = defaultdict(int)
    for part in parts:
        is_outer_here = is_last if part.role in _LAST_STAGE else is_first
        if is_outer_here if part.layer is None else part.layer in layers:
            sums[part.role] += -(-part.num_bytes // _share(part, layout))
    return dict(sorted(sums.items(), key=lambda entry: -entry[1]))


def _share(part: Part, layout: Parallelism) -> int:
    """Return among how many GPUs a part is divided. Experts are, whole or split, whatever attention does."""
    if part.role == Role.EXPERTS:
        return layout.tensor
    return layout.tensor if part.is_split and not layout.data_attention else 1
