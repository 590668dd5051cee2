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

Also here: which of the known GPUs hold a model, and in which layout.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from k2convert.choices import ServedKvCache
from k2convert.deploy.gpus import GPUS, Gpu
from k2convert.deploy.layouts import Parallelism, check_layout, possible_layouts, stage_layers
from k2convert.deploy.model import Model, WeightGroup
from k2convert.errors import FitError
from k2convert.models.names import Role

KV_BYTES: Final[dict[ServedKvCache, int]] = {"fp8": 1, "bf16": 2}

CONTEXT: Final = 8192
"""The length of a request if the user does not say."""

UTILIZATION: Final = 0.92
"""The share of memory that vLLM 0.33 uses by default."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of memory that a user can make. A request has up to `context` tokens, prompt and answer.

    `overhead_bytes` is None for the overhead that is assumed for each kind of GPU.
    """

    kv: ServedKvCache = "fp8"
    context: int = CONTEXT
    requests: int = 1
    utilization: float = UTILIZATION
    overhead_bytes: int | None = None

    def usable_bytes(self, gpu: Gpu) -> int:
        """Return the memory of a GPU that the engine may use."""
        return int(self.utilization * gpu.memory_bytes)

    def overhead_on(self, gpu: Gpu) -> int:
        """Return what the engine is assumed to use of a GPU, beside weights and KV cache."""
        return gpu.overhead_bytes if self.overhead_bytes is None else self.overhead_bytes


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
    """A model on GPUs of one kind in one layout. Figures are of the fullest GPU: the one with the fewest tokens.

    `pools` has one GPU of each pipeline stage, the fullest first.
    """

    model: Model
    gpu: Gpu
    layout: Parallelism
    settings: Settings
    weights: Mapping[Role, int]
    pools: tuple[Pool, ...]

    @property
    def memory_bytes(self) -> int:
        """The memory of all GPUs together."""
        return self.gpu.memory_bytes * self.layout.num_gpus

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def pool(self) -> Pool:
        """The pool of the fullest GPU."""
        return self.pools[0]

    @property
    def tokens(self) -> int:
        """The KV cache of all GPUs next to the states of the requests asked for."""
        return self._tokens(-(-self.settings.requests // self._groups)) * self._groups

    @property
    def longest(self) -> int:
        """The part of it that one request alone can have: with DP attention that of its own GPU."""
        return self._tokens(1)

    def _tokens(self, requests: int) -> int:
        return min(pool.tokens(requests) for pool in self.pools)

    @property
    def _groups(self) -> int:
        """GPUs, or groups of them, that have requests of their own."""
        if self.layout.data_attention:
            return self.layout.tensor
        return 1

    def slots_of(self, length: int) -> int:
        """Return how many requests of this length the cache holds at once."""
        return min(pool.slots(length) for pool in self.pools) * self._groups

    @property
    def holds(self) -> bool:
        """Return whether the requests asked for fit together."""
        return self.slots_of(self.settings.context) >= self.settings.requests

    def tokens_in(self, kv: ServedKvCache) -> int:
        """Return `tokens` for a KV cache of another type."""
        return fit_layout(self.model, self.gpu, self.layout, replace(self.settings, kv=kv)).tokens


_NOT_READ: Final = frozenset((Role.EMBEDDINGS, Role.VISION_TOWER, Role.MM_PROJECTOR))
"""Roles that a token of text does not read: of the embeddings it reads one row."""

_LAST_STAGE: Final = frozenset((Role.LM_HEAD, Role.NORM, Role.RESIDUAL))
"""Roles outside the layers that are on the last stage; all others are on the first."""


def fit_layout(model: Model, gpu: Gpu, layout: Parallelism, settings: Settings) -> Fit:
    """Return the memory of the fullest GPU of a layout that `check_layout` accepts."""
    shape = model.shape
    stages = stage_layers(shape.num_layers, layout.pipeline)
    pieces = layout.tensor // layout.expert
    padded = max(shape.expert_width, pieces * model.family.least_expert_piece if pieces > 1 else 0)
    gpus: list[tuple[Pool, dict[Role, int]]] = []
    for i, layers in enumerate(stages):
        sums: dict[Role, int] = defaultdict(int)
        for group, num_bytes in model.groups.items():
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
            num_bytes=settings.usable_bytes(gpu) - sum(by_role.values()) - settings.overhead_on(gpu),
            kv_bytes_per_token=shape.kv_values * kv_layers * KV_BYTES[settings.kv],
            state_bytes=states if layout.data_attention else -(-states // layout.tensor),
        )
        gpus.append((pool, by_role))
    gpus.sort(key=lambda entry: (entry[0].tokens(1), entry[0].num_bytes))
    return Fit(model, gpu, layout, settings, weights=gpus[0][1], pools=tuple(pool for pool, _ in gpus))


def bytes_per_token(model: Model, layout: Parallelism) -> int:
    """Return the weight bytes that a GPU reads for a token of one request.

    These are its share of the experts that the token uses, its share of what is divided, and everything that each GPU
    holds whole. Pipeline stages count one after another. Bandwidth over these bytes is more tokens a second than any
    engine has: caches, activations, kernels and all-reduces take no time in it.
    """
    total = 0.0
    for group, num_bytes in model.groups.items():
        if group.role in _NOT_READ:
            continue
        used = model.shape.experts_per_token / model.shape.num_experts if group.role == Role.EXPERTS else 1
        total += num_bytes * used / _divisor(group, layout)
    return round(total)


def _divisor(group: WeightGroup, layout: Parallelism) -> int:
    """Return how many GPUs divide the bytes: experts are divided, whole or split, whatever attention does."""
    if group.role == Role.EXPERTS or (group.is_split and not layout.data_attention):
        return layout.tensor
    return 1


MOST_GPUS: Final = 16
_USUAL_COUNTS: Final = (1, 2, 4, 8, 16)
_EXPERT_STEPS: Final = 48


def find_holders(model: Model, *, settings: Settings, gpus: Iterable[Gpu] = GPUS.values()) -> list[Fit]:
    """Return the least number of each GPU that holds the model, and the usual numbers above it, up to MOST_GPUS.

    The smallest memory is first.
    """
    fits: list[Fit] = []
    for gpu in gpus:
        is_held = False
        for count in range(1, MOST_GPUS + 1):
            if is_held and count not in _USUAL_COUNTS:
                continue
            fit = find_fit(model, gpu, count, settings=settings)
            if fit is not None:
                is_held = True
                fits.append(fit)
    return sorted(fits, key=lambda fit: (fit.memory_bytes, fit.gpu.name))


def find_fit(model: Model, gpu: Gpu, count: int, *, settings: Settings) -> Fit | None:
    """Return the usual layout of so many GPUs if it holds the model, or else the first other one that does."""
    if count * gpu.memory_bytes < model.num_bytes:
        return None
    fits = (fit_layout(model, gpu, layout, settings) for layout in possible_layouts(count, model.shape))
    return next((fit for fit in fits if fit.holds), None)


def fewest_holders(model: Model) -> list[Fit]:
    """Return the fewest GPUs of each kind that hold a model and 8,192 tokens of KV cache in BF16."""
    fewest: dict[str, Fit] = {}
    for fit in find_holders(model, settings=Settings(kv="bf16")):
        fewest.setdefault(fit.gpu.name, fit)
    return list(fewest.values())


def most_experts(whole: Model, fit: Fit, settings: Settings) -> Fit | None:
    """Return a fit with the most experts per layer that its GPUs hold in its layout; None if they hold no number.

    Numbers are round ones: multiples of 8 for K2's 384 experts.
    """
    total = whole.shape.num_experts
    step = max(total // _EXPERT_STEPS, 1)
    for count in range(total // step * step, 0, -step):
        try:
            pruned = whole.with_experts(count)
            check_layout(fit.layout, pruned.shape)
        except FitError:  # expert parallelism and routing groups divide experts evenly
            continue
        pruned_fit = fit_layout(pruned, fit.gpu, fit.layout, settings)
        if pruned_fit.holds:
            return pruned_fit
    return None


def ways_out(whole: Model, fit: Fit) -> tuple[list[Fit], int | None]:
    """Return what fits with fewer experts per layer, and how many of the same GPUs hold the whole model.

    These are the most experts for the requests asked for, then the most for one request of the model's maximum. Fewer
    than half of them are no way out: pruning costs too much.
    """
    wanted = [fit.settings]
    if (longest := whole.shape.max_context) is not None and longest > fit.settings.context:
        wanted.append(replace(fit.settings, context=longest, requests=1))
    pruned: dict[int, Fit] = {}
    for settings in wanted:
        most = most_experts(whole, fit, settings)
        if most is not None and 2 * most.model.shape.num_experts >= whole.shape.num_experts:
            pruned[most.model.shape.num_experts] = most
    counts = [holder.layout.num_gpus for holder in find_holders(whole, settings=fit.settings, gpus=(fit.gpu,))]
    larger = min((count for count in counts if count > fit.layout.num_gpus), default=None)
    return list(pruned.values()), larger


def gigabytes(num_bytes: int) -> str:
    """Format bytes as GB, with the digits that matter; MB below one."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:,.1f} GB"
    return f"{num_bytes / 1e6:,.1f} MB"
