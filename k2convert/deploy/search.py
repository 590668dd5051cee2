"""Which of the known GPUs hold a model, and in which layout."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from k2convert.deploy.gpus import GPUS, Gpu
from k2convert.deploy.layouts import check_layout, possible_layouts
from k2convert.deploy.memory import KV_BYTES, Fit, Settings, fit_layout
from k2convert.deploy.model import Model
from k2convert.errors import FitError

_EXPERT_STEPS: Final = 48

MOST_GPUS: Final = 16
_USUAL_COUNTS: Final = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Holder:
    """A kind of GPU, and what its count in `fit` holds."""

    gpu: Gpu
    fit: Fit

    @property
    def memory_bytes(self) -> int:
        """The memory of all GPUs together."""
        return self.fit.memory_bytes * self.fit.layout.num_gpus


def find_holders(model: Model, *, settings: Settings, gpus: Iterable[Gpu] = GPUS.values()) -> list[Holder]:
    """Return the least number of each GPU that holds the model, and the usual numbers above it, up to MOST_GPUS.

    The smallest memory is first.
    """
    found: list[Holder] = []
    for gpu in gpus:
        holders: list[Holder] = []
        for count in range(1, MOST_GPUS + 1):
            if holders and count not in _USUAL_COUNTS:
                continue
            fit = find_fit(model, gpu, count, settings=settings)
            if fit is not None:
                holders.append(Holder(gpu, fit))
        found += holders
    return sorted(found, key=lambda holder: (holder.memory_bytes, holder.gpu.name))


def find_fit(model: Model, gpu: Gpu, count: int, *, settings: Settings) -> Fit | None:
    """Return the usual layout of so many GPUs if it holds the model, or else the first other one that does."""
    if count * gpu.memory_bytes < model.weights.num_bytes:
        return None
    for layout in possible_layouts(count, model.shape):
        fit = fit_layout(model.weights, model.shape, layout, memory_bytes=gpu.memory_bytes, settings=settings)
        if fit.holds:
            return fit
    return None


def fp8_and_bf16_tokens(model: Model, holder: Holder, *, settings: Settings) -> tuple[int, int]:
    """Return the tokens of KV cache that the GPUs of a holder have in FP8 and in BF16."""
    fp8, bf16 = (_fit_like(model, holder, settings=replace(settings, kv=kv)) for kv in KV_BYTES)
    return fp8.tokens, bf16.tokens


def _fit_like(model: Model, holder: Holder, *, settings: Settings) -> Fit:
    fit = holder.fit
    return fit_layout(model.weights, model.shape, fit.layout, memory_bytes=fit.memory_bytes, settings=settings)


def most_experts(model: Model, holder: Holder, *, settings: Settings) -> tuple[int, Fit] | None:
    """Return the most experts per layer that GPUs hold in their layout, and that fit; None if they hold no number.

    Numbers are round ones: multiples of 8 for K2's 384 experts.
    """
    total = model.shape.num_experts
    step = max(total // _EXPERT_STEPS, 1)
    for count in range(total // step * step, 0, -step):
        try:
            pruned = model.with_experts(count)
            check_layout(holder.fit.layout, pruned.shape)
        except FitError:  # expert parallelism and routing groups divide experts evenly
            continue
        fit = _fit_like(pruned, holder, settings=settings)
        if fit.holds:
            return count, fit
    return None


def ways_out(model: Model, holder: Holder, *, settings: Settings) -> tuple[list[tuple[int, Fit]], int | None]:
    """Return fewer experts per layer, with what then fits, and how many of the same GPUs hold a model.

    These are the most experts for the requests asked for, then the most for one request of the model's maximum. Fewer
    than half of them are no way out: pruning costs too much.
    """
    wanted = [settings]
    if (longest := model.shape.max_context) is not None and longest > settings.context:
        wanted.append(replace(settings, context=longest, requests=1))
    found = [most_experts(model, holder, settings=one) for one in wanted]
    known = {one[0]: one for one in found if one is not None and 2 * one[0] >= model.shape.num_experts}
    counts = [one.fit.layout.num_gpus for one in find_holders(model, settings=settings, gpus=(holder.gpu,))]
    larger = min((count for count in counts if count > holder.fit.layout.num_gpus), default=None)
    return list(known.values()), larger


def fewest_holders(model: Model) -> list[Holder]:
    """Return the fewest GPUs of each kind that hold a model and 8,192 tokens of KV cache in BF16."""
    fewest: dict[str, Holder] = {}
    for holder in find_holders(model, settings=Settings(kv="bf16")):
        fewest.setdefault(holder.gpu.name, holder)
    return list(fewest.values())


def gigabytes(num_bytes: int) -> str:
    """Format bytes as GB, with the digits that matter; MB below one."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:,.1f} GB"
    return f"{num_bytes / 1e6:,.1f} MB"
