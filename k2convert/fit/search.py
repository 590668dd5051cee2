"""Which of the known GPUs hold a model, and in which layout."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from k2convert.errors import FitError
from k2convert.fit.gpus import GPUS, Gpu
from k2convert.fit.layouts import complete_layout
from k2convert.fit.memory import KV_BYTES, Fit, Settings, fit_layout
from k2convert.fit.shape import ModelShape
from k2convert.fit.weights import Weights


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
