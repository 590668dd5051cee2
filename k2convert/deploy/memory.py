"""The memory of each GPU: weights by role, the engine's overhead, and the tokens of KV cache that the rest holds.

    pool = utilization x memory - weights - overhead
    tokens = (pool - states) / (kv_values x layers x bytes of a value)
    states = requests x state_bytes x layers of linear attention, over the GPUs of tensor parallelism

Tensor parallelism divides attention heads, experts, MLPs, embeddings and output head. Low-rank down-projections (q_a,
kv_a; f_a of KDA), router, latent projections, norms, vision tower and projector are whole on every GPU (vLLM 0.33,
models/deepseek_v2.py and models/kimi_k3), and so is the KV cache of multi-head latent attention, which has one head.
The states of linear attention are divided by heads. Only requests in flight are counted: an engine that keeps states
of earlier prompts (prefix caching) uses what is free. With DP attention each GPU has its own requests, and only experts
are divided: vLLM runs it as data parallelism.

vLLM pads what a GPU has of a split expert of Kimi K3 to 256 columns (models/kimi_k3/common/moe_padding.py). With TP16
and no expert parallelism, experts need 4/3 of their bytes.

SGLang keeps kv_b_proj a second time for absorbed attention (models/deepseek_v2.py, w_kc and w_vc), 1.0 GB of K2 over
the GPUs of tensor parallelism. vLLM keeps views of it. It counts as overhead.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from k2convert.choices import ServedKvCache
from k2convert.deploy.layouts import Parallelism, stage_layers
from k2convert.deploy.model import ModelShape, WeightGroup, Weights
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
with larger batches: 8.7 GB in vLLM's Kimi-K2-Thinking recipe for 8 H200 (2025-11).
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of memory that a user can make. A request has up to `context` tokens, prompt and answer."""

    kv: ServedKvCache = "fp8"
    context: int = CONTEXT
    requests: int = 1
    utilization: float = UTILIZATION
    overhead_bytes: int = OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class Pool:
    """The memory of one GPU that weights and overhead leave; negative by what is missing.

    A token uses `kv_bytes_per_token` of it, a request `state_bytes`, whatever its length.
    """

    num_bytes: int
    kv_bytes_per_token: int
    state_bytes: int

    def tokens(self, requests: int) -> int:
        """Return the tokens that fit next to the states of some requests."""
        left = max(self.num_bytes - requests * self.state_bytes, 0)
        if self.kv_bytes_per_token:
            return left // self.kv_bytes_per_token
        return _NO_LIMIT * (left > 0)

    def slots(self, tokens: int) -> int:
        """Return how many requests of that length fit."""
        return max(self.num_bytes, 0) // (tokens * self.kv_bytes_per_token + self.state_bytes)


_NO_LIMIT: Final = 1 << 40
"""Tokens that a pipeline stage without KV cache holds: more than any other stage."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One layout on GPUs of `memory_bytes` each. Figures are of the fullest GPU: the one with the fewest tokens.

    `pools` has one GPU of each pipeline stage, the fullest first. `tokens` is the KV cache of all GPUs next to the
    states of the requests asked for, `longest` the part that one request alone can have (a GPU's own with DP
    attention). `request_slots` is how many requests of the wanted length fit.
    """

    layout: Parallelism
    memory_bytes: int
    usable_bytes: int
    weights: Mapping[Role, int]
    overhead_bytes: int
    pools: tuple[Pool, ...]
    context: int
    requests: int

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def pool_bytes(self) -> int:
        return self.pools[0].num_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.pools[0].kv_bytes_per_token

    @property
    def state_bytes(self) -> int:
        return self.pools[0].state_bytes

    @property
    def tokens(self) -> int:
        return self._tokens(-(-self.requests // self._groups)) * self._groups

    @property
    def longest(self) -> int:
        return self._tokens(1)

    def _tokens(self, requests: int) -> int:
        return min(pool.tokens(requests) for pool in self.pools)

    @property
    def _groups(self) -> int:
        """GPUs, or groups of them, that have requests of their own."""
        if self.layout.data_attention:
            return self.layout.tensor
        return 1

    @property
    def request_slots(self) -> int:
        """Requests of `context` tokens that the cache holds at once."""
        return self.slots_of(self.context)

    def slots_of(self, length: int) -> int:
        """Return how many requests of this length the cache holds at once."""
        return min(pool.slots(length) for pool in self.pools) * self._groups

    @property
    def holds(self) -> bool:
        """Return whether the requests asked for fit together."""
        return self.request_slots >= self.requests


_NOT_READ: Final = frozenset((Role.EMBEDDINGS, Role.VISION_TOWER, Role.MM_PROJECTOR))
"""Roles that a token of text does not read: of the embeddings it reads one row."""

_LAST_STAGE: Final = frozenset((Role.LM_HEAD, Role.NORM, Role.RESIDUAL))
"""Roles outside the layers that are on the last stage; all others are on the first."""


def fit_layout(
    weights: Weights, shape: ModelShape, layout: Parallelism, *, memory_bytes: int, settings: Settings
) -> Fit:
    """Return the memory of the fullest GPU of a layout that `check_layout` accepts."""
    usable = int(settings.utilization * memory_bytes)
    stages = stage_layers(shape.num_layers, layout.pipeline)
    pieces = layout.tensor // layout.expert
    padded = max(shape.expert_width, pieces * shape.least_expert_piece if pieces > 1 else 0)
    gpus: list[tuple[Pool, dict[Role, int]]] = []
    for i, layers in enumerate(stages):
        sums: dict[Role, int] = defaultdict(int)
        for group, num_bytes in weights.groups.items():
            if group.layer is None:
                is_here = i == (len(stages) - 1 if group.role in _LAST_STAGE else 0)
            else:
                is_here = group.layer in layers
            if is_here:
                sums[group.role] += -(-num_bytes // _divisor(group, layout))
        by_role = dict(sorted(sums.items(), key=lambda entry: -entry[1]))
        if Role.EXPERTS in by_role:
            by_role[Role.EXPERTS] = by_role[Role.EXPERTS] * padded // shape.expert_width
        kv_layers = shape.kv_layers(layers)
        states = shape.state_bytes * (len(layers) - kv_layers)
        pool = Pool(
            num_bytes=usable - sum(by_role.values()) - settings.overhead_bytes,
            kv_bytes_per_token=shape.kv_values * kv_layers * KV_BYTES[settings.kv],
            state_bytes=states if layout.data_attention else -(-states // layout.tensor),
        )
        gpus.append((pool, by_role))
    gpus.sort(key=lambda entry: (entry[0].tokens(1), entry[0].num_bytes))
    return Fit(
        layout=layout,
        memory_bytes=memory_bytes,
        usable_bytes=usable,
        weights=gpus[0][1],
        overhead_bytes=settings.overhead_bytes,
        pools=tuple(pool for pool, _ in gpus),
        context=settings.context,
        requests=settings.requests,
    )


def bytes_per_token(weights: Weights, shape: ModelShape, layout: Parallelism) -> int:
    """Return the weight bytes that a GPU reads for a token of one request.

    These are its share of the experts that the token uses, its share of what is divided, and everything that each GPU
    holds whole. Pipeline stages count one after another. Bandwidth over these bytes is more tokens a second than any
    engine has: caches, activations, kernels and all-reduces take no time in it.
    """
    total = 0.0
    for group, num_bytes in weights.groups.items():
        if group.role in _NOT_READ:
            continue
        used = shape.experts_per_token / shape.num_experts if group.role == Role.EXPERTS else 1
        total += num_bytes * used / _divisor(group, layout)
    return round(total)


def _divisor(group: WeightGroup, layout: Parallelism) -> int:
    """Return how many GPUs divide the bytes: experts are divided, whole or split, whatever attention does."""
    if group.role == Role.EXPERTS or (group.is_split and not layout.data_attention):
        return layout.tensor
    return 1
