"""One layer of every model against the reference's, and the files in which a layer pass keeps what was found.

layer-003.safetensors       the figures of layer 3
    norm                    F64 [windows]: sum |h|^2 of the reference; NaN for a dropped window
    error                   F64 [models, windows]: sum |h - h'|^2
    agreeing                I64 [models, windows]: choices of experts that agree; -1 if that is not known
    choices                 I64 [1]: choices of experts in a window; 0 for a dense layer
layer-061.safetensors       after the last layer: the arrays of head.score_tokens, [models, windows, tokens - 1]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor

from k2convert.forward.decoder import BlockObserver
from k2convert.forward.layers import Layer, finite_windows
from k2convert.forward.moe import Routing
from k2convert.forward.work import HIDDEN
from k2convert.models import detect_family
from k2convert.models.names import WEIGHT
from k2convert.records.evaluation import LayerFigures

Arrays = Mapping[str, NDArray[Any]]


class _Choices(BlockObserver):
    """An observer that keeps the experts int64 [T, k] that the tokens of a chunk chose; None in a dense layer."""

    experts: NDArray[np.int64] | None = None

    def block(self, x_TK: Tensor, routing: Routing | None) -> None:  # noqa: ARG002
        self.experts = None if routing is None else routing.experts.cpu().numpy()


class LayerComparison:
    """Sums of one layer over windows, of `num_models` models, the reference counted. It runs them one by one."""

    def __init__(self, num_models: int, num_windows: int) -> None:
        self._norm = np.full(num_windows, np.nan)
        self._error = np.zeros((num_models, num_windows))
        self._agreeing = np.zeros((num_models, num_windows), dtype=np.int64)
        self._chosen: dict[int, NDArray[np.int16]] = {}
        self._rows: list[bytes] = []

    def run_reference(self, layer: Layer) -> None:
        """Run the reference through the layer, and keep what it chose."""
        self._rows = _router_rows(layer)
        observer = _Choices()
        with layer.writing() as write:
            for first, (states,) in layer.chunks():
                layer.run(first, states, observer)
                kept = first + np.flatnonzero(finite_windows(states))
                self._norm[kept] = [_energy(states[window - first]) for window in kept]
                if kept.size and observer.experts is not None:
                    experts = observer.experts.reshape(kept.size, -1, observer.experts.shape[1])
                    self._chosen |= zip(kept.tolist(), experts.astype(np.int16), strict=True)
                write(states)
        layer.progress.reach(layer.layer_pass.ids.size)

    def run(self, number: int, layer: Layer) -> None:
        """Run another model through the layer, and compare it."""
        observer = _Choices()
        numbers = self._expert_numbers(layer)
        shape = layer.layer_pass.shape
        after = layer.number + 1
        with layer.layer_pass.work.reading(HIDDEN, after, shape) as read, layer.writing() as write:
            for first, (states,) in layer.chunks():
                reference = read(first, first + states.shape[0])
                kept = np.flatnonzero(finite_windows(reference))
                states[~finite_windows(reference)] = np.nan
                layer.run(first, states, observer)
                for place, window in enumerate(kept.tolist()):
                    self._error[number, first + window] = _energy(states[window], reference[window])
                    if observer.experts is not None:
                        experts = observer.experts[place * shape[1] : (place + 1) * shape[1]]
                        self._agreeing[number, first + window] = self._agreement(first + window, experts, numbers)
                write(states)
        layer.progress.reach(layer.layer_pass.ids.size)

    def encode(self) -> bytes:
        """Return the content of the layer's file."""
        choices = next((chosen.size for chosen in self._chosen.values()), 0)
        arrays = {"norm": self._norm, "error": self._error, "agreeing": self._agreeing}
        return save(arrays | {"choices": np.array([choices])})

    def _expert_numbers(self, layer: Layer) -> NDArray[np.int64] | None:
        """Return which of the reference's experts each of a model's is, int64 [E]: None if that cannot be told.

        The rows of a pruned model's router are some of the reference's, unless it was smoothed.
        """
        rows = _router_rows(layer)
        if len(rows) == len(self._rows):
            return np.arange(len(rows))
        places = {row: expert for expert, row in enumerate(self._rows)}
        if len(places) == len(self._rows) and places.keys() >= set(rows):
            return np.array([places[row] for row in rows])
        return None

    def _agreement(self, window: int, experts: NDArray[np.int64], numbers: NDArray[np.int64] | None) -> int:
        if numbers is None or (chosen := self._chosen.get(window)) is None:
            return -1
        return int((chosen[:, :, None] == numbers[experts][:, None, :]).any(axis=2).sum())


def _router_rows(layer: Layer) -> list[bytes]:
    """Return the rows of a layer's router; nothing for a dense layer."""
    reader = layer.reader
    name = f"{detect_family(reader.checkpoint).router.format(layer=layer.number)}.{WEIGHT}"
    if layer.decoder.is_dense:
        return []
    return [row.tobytes() for row in reader.raw(name).numpy().reshape(reader.info(name).shape[0], -1)]


def _energy(states: NDArray[np.float32], other: NDArray[np.float32] | None = None) -> float:
    """Return sum |h|^2 of one window f32 [T, K], or of the difference of two, in FP64."""
    total = 0.0
    for start in range(0, states.shape[0], 64):  # in FP64 they fit into a core's cache
        rows = states[start : start + 64].astype(np.float64)
        if other is not None:
            rows -= other[start : start + 64]
        total += float(np.vdot(rows, rows))
    return total


def kept_windows(arrays: Arrays) -> NDArray[np.bool_]:
    """Return which windows were not dropped up to a layer, by its file."""
    return np.isfinite(arrays["norm"])


def layer_figures(arrays: Arrays, number: int, kept: NDArray[np.bool_]) -> LayerFigures:
    """Return the figures of one model and layer over the windows that were kept until the end."""
    agreeing = arrays["agreeing"][number, kept]
    choices = int(arrays["choices"][0])
    norm = float(arrays["norm"][kept].sum())
    error = float(arrays["error"][number, kept].sum())
    agreement = None
    if choices > 0 and (agreeing >= 0).all():
        agreement = float(agreeing.sum()) / (choices * agreeing.size)
    return LayerFigures(error / norm if norm else 0.0, agreement)
