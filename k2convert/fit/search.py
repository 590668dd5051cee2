"""Which of the known GPUs hold a model, and in which layout."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from k2convert.errors import FitError
from k2convert.fit.gpus import GPUS, Gpu
from k2convert.fit.layouts import check_layout, complete_layout
from k2convert.fit.memory import KV_BYTES, Fit, Settings, fit_layout
from k2convert.fit.shape import ModelShape
from k2convert.fit.subject import Subject
from k2convert.fit.weights import Weights

_EXPERT_STEPS: Final = 48


@dataclass(frozen=True, slots=True)
class Holder:
    """A kind of GPU, and what its count in `fit` holds."""

    gpu: Gpu
    fit: Fit

    @property
    def memory_bytes(self) -> int:
        """The memory of all GPUs together."""
        return self.fit.memory_bytes * self.fit.layout.num_gpus


def find_holders(
    weights: Weights, shape: ModelShape, *, settings: Settings, gpus: Iterable[Gpu] = GPUS.values()
) -> list[Holder]:
    """Return each GPU and usual count that holds the model, the smallest memory first."""
    found: list[Holder] = []
    for gpu in gpus:
        for count in gpu.counts:
            try:
                layout = complete_layout(count, shape)
            except FitError:  # a small model has fewer heads than GPUs
                continue
            fit = fit_layout(weights, shape, layout, memory_bytes=gpu.memory_bytes, settings=settings)
            if fit.holds:
                found.append(Holder(gpu, fit))
    return sorted(found, key=lambda holder: (holder.memory_bytes, holder.gpu.name))


def fp8_and_bf16_tokens(weights: Weights, shape: ModelShape, holder: Holder, *, settings: Settings) -> tuple[int, int]:
    """Return the tokens of KV cache that the GPUs of a holder have in FP8 and in BF16."""
    fits = [
        fit_layout(
            weights,
            shape,
            holder.fit.layout,
            memory_bytes=holder.fit.memory_bytes,
            settings=replace(settings, kv=kv),
        )
        for kv in KV_BYTES
    ]
    return fits[0].tokens, fits[1].tokens


def most_experts(subject: Subject, holder: Holder, *, settings: Settings) -> tuple[int, Fit] | None:
    """Return the most experts per layer that GPUs hold in their layout, and that fit; None if they hold no number.

    Numbers are round ones: multiples of 8 for K2's 384 experts.
    """
    total = subject.shape.num_experts
    step = max(total // _EXPERT_STEPS, 1)
    for count in range(total // step * step, 0, -step):
        try:
            pruned = subject.with_experts(count)
            check_layout(holder.fit.layout, pruned.shape)
        except FitError:  # expert parallelism and routing groups divide experts evenly
            continue
        fit = fit_layout(
            pruned.weights, pruned.shape, holder.fit.layout, memory_bytes=holder.fit.memory_bytes, settings=settings
        )
        if fit.holds:
            return count, fit
    return None


def fewest_gpus(subject: Subject, holder: Holder, *, settings: Settings) -> int | None:
    """Return the smallest usual count above a holder's that holds the model; None if none does."""
    larger = find_holders(subject.weights, subject.shape, settings=settings, gpus=(holder.gpu,))
    counts = [found.fit.layout.num_gpus for found in larger]
    return min((count for count in counts if count > holder.fit.layout.num_gpus), default=None)


@dataclass(frozen=True, slots=True)
class WaysOut:
    """What would fit where a model does not: fewer experts per layer, with what then fits, or more of the same GPUs.

    `experts` has the most experts for the requests asked for, then the most for one request of the model's maximum.
    """

    experts: tuple[tuple[int, Fit], ...]
    gpus: int | None


def ways_out(subject: Subject, holder: Holder, *, settings: Settings) -> WaysOut:
    """Return what to do about a model that GPUs do not hold."""
    wanted = [settings]
    if (longest := subject.shape.max_context) is not None and longest > settings.context:
        wanted.append(replace(settings, context=longest, requests=1))
    found = [most_experts(subject, holder, settings=one) for one in wanted]
    known = {one[0]: one for one in found if one is not None}
    return WaysOut(tuple(known.values()), fewest_gpus(subject, holder, settings=settings))
