"""Statistics of one layer, summed while its MLP runs. It is the observer of forward/decoder.py.

A token's weight is 1 / ||h||^2 of the layer's output h, which is known last, so the inner activations of a chunk are
kept until then. Sums are FP64, added in the order of the tokens, and divided once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from k2convert.calibration.channels import MIN_LAYER_TOKENS, MIN_TOKENS, drawn_to_even
from k2convert.calibration.layer_files import gather_statistics, write_layer
from k2convert.calibration.plan import CalibrationPlan
from k2convert.calibration.smoothing import (
    MIN_HELD_OUT,
    SAMPLED_TOKENS,
    TokenSample,
    find_exponents,
    imatrix_gains,
    sampled_experts,
)
from k2convert.calibration.statistics import LayerStatistics, StatisticsHeader
from k2convert.calibration.text import held_out_tokens, is_varied
from k2convert.errors import CalibrationError
from k2convert.forward.attention import NOTHING_CACHED, CachedValues, add_cached
from k2convert.forward.moe import Routing
from k2convert.forward.walk import States, Walk, walk_layers
from k2convert.forward.weights import WeightReader
from k2convert.models import detect_family
from k2convert.models.names import WEIGHT
from k2convert.quantize.rules.search_bf16 import block_importance
from k2convert.records.command import JobCommand
from k2convert.records.events import SILENT, Events

_CHUNK_ROWS: Final = 64  # in FP64 they fit into a core's cache
_CUDA_CHUNK_ROWS: Final = 1 << 15

Save = Callable[[LayerStatistics, int], None]
"""Declares a layer done: accepts its statistics, and how many windows are dropped so far."""


@torch.no_grad()
def collect_statistics(walk: Walk, states: States, *, seed: int, save: Save, events: Events) -> None:
    """Collect the statistics of the layers that are not done, in order; `save` declares one done.

    Raises CalibrationError if too many windows have to be dropped, and what reading and writing raise.
    """
    with closing(walk_layers(walk, states, events=events)) as layers:
        for layer in layers:
            accumulator = LayerAccumulator(layer.reader, layer.number, seed=seed, ids=walk.ids)
            with layer.writing() as write:
                for first, (hidden,) in layer.chunks():
                    layer.run(first, hidden, accumulator)
                    write(hidden)
            statistics = accumulator.finish()
            layer.progress.reach(walk.ids.size)
            save(statistics, layer.dropped)


def calibrate(plan: CalibrationPlan, *, command: JobCommand | None = None, events: Events = SILENT) -> StatisticsHeader:
    """Do what is left of a calibration; returns the header of the statistics file. Can be called again after a failure.

    `command` is what the user typed. Raises any K2ConvertError.
    """
    work = plan.walk.work
    text = plan.walk.text
    assert text.saved is not None

    def save(layer: LayerStatistics, dropped: int) -> None:
        write_layer(work, layer, replace(plan.header, dropped=dropped))

    with plan.walk.resumed(command=command, layer_costs=plan.layer_costs(), events=events) as walk:
        collect_statistics(walk, work, seed=text.windows.seed, save=save, events=events)
        header = gather_statistics(work, text.saved, plan.header, num_layers=walk.num_layers)
    work.remove()
    return header


@dataclass(slots=True)
class _Sums:
    """Sums over the tokens of one expert: weighted squares f64 [I], p * ||f(x)||, p; the largest magnitude."""

    tokens: int = 0
    squares: Tensor | None = None
    amax: float = 0.0
    saliency: float = 0.0
    router_weight: float = 0.0

    def add(self, values: Tensor, weights: Tensor) -> None:
        """Add values f32 [t, I] with weights f64 [t]."""
        added = torch.zeros(values.shape[1], dtype=torch.float64, device=values.device)
        for rows in _chunks(values):
            added += values[rows].double().square_().mul_(weights[rows, None]).sum(dim=0)
        self.squares = added if self.squares is None else self.squares + added
        least, largest = values.aminmax()
        self.amax = max(self.amax, -float(least), float(largest))
        self.tokens += values.shape[0]

    def importance_without(self, held_out: _Sums, *, few: int) -> NDArray[np.uint8]:
        """Return the importance uint8 [I] by the tokens that are not held out, as for fewer than `few` tokens."""
        assert self.squares is not None
        assert held_out.squares is not None
        tokens = self.tokens - held_out.tokens
        squares = (self.squares - held_out.squares).clamp_(min=0)  # a difference of sums may be a little below
        mean_square = (squares / max(1, tokens)).float().cpu().numpy()
        return block_importance(drawn_to_even(mean_square, tokens, few=few))


class LayerAccumulator:
    """Sums the statistics of layer number `layer` over chunks of the tokens `ids` int64 [windows, tokens], in order.

    `seed` draws what choices are made by. Tokens that are not varied say nothing of others: nothing is chosen by them.
    A chunk counts when its `output` is reported; without that, the next `block` begins it again.
    """

    def __init__(self, reader: WeightReader, layer: int, *, seed: int, ids: NDArray[np.int64]) -> None:
        self.is_varied = is_varied(ids)
        self._reader = reader
        self._layer = layer
        self._seed = seed
        self._is_held_out = held_out_tokens(ids.shape)
        self._weight = 0.0
        self._num_experts = 1
        self._is_moe = False
        self._input = _Sums()
        self._shared = _Sums()
        self._experts: dict[int, _Sums] = {}
        self._sample = TokenSample(f"tokens/{seed}/{layer}")
        self._held_out: dict[int | None, tuple[_Sums, TokenSample]] = {}
        self._cached = self._cached_now = NOTHING_CACHED
        self._x = torch.empty(0)
        # Expert, tokens int64 [t], router weights f32 [t], inner activations f32 [t, I] and output norms f64 [t].
        self._calls: list[tuple[int | None, Tensor, Tensor | None, Tensor, Tensor]] = []

    def block(self, x_TK: Tensor, routing: Routing | None, cached: CachedValues) -> None:
        """Begin a chunk with the MLP's input f32 [T, K], and what a KV cache holds of its tokens."""
        self._x = x_TK
        self._calls = []
        self._cached_now = cached
        if routing is not None:
            self._is_moe = True
            self._num_experts = routing.scores.shape[1]

    def expert(
        self, expert: int | None, tokens_t: Tensor, weights_t: Tensor | None, inner_tI: Tensor, output_tK: Tensor
    ) -> None:
        """Keep what one MLP did until the token weights are known."""
        self._calls.append((expert, tokens_t, weights_t, inner_tI, _square_sums(output_tK).sqrt()))

    def output(self, h_TK: Tensor) -> None:
        """End a chunk with the hidden states f32 [T, K] after the layer, all finite: add it to the sums."""
        weights = token_weights(h_TK)
        done = self._input.tokens
        is_held_out = torch.as_tensor(self._is_held_out[done : done + h_TK.shape[0]]).to(h_TK.device)
        self._hold_out(None, self._x, weights, is_held_out)
        sampled = sampled_experts(self._num_experts)
        self._weight += float(weights.sum())
        self._input.add(self._x, weights)
        self._sample.add(self._x, weights)
        for expert, tokens, weights_t, inner, norms in self._calls:
            sums = self._shared
            if expert is not None:
                sums = self._experts.setdefault(expert, _Sums())
            own = weights[tokens]
            routed = float(tokens.numel())
            if weights_t is not None:
                p = weights_t.double()
                own = own * p.square()
                norms = norms * p
                routed = float(p.sum())
            sums.add(inner, own)
            if expert in sampled:
                self._hold_out(expert, inner, own, is_held_out[tokens])
            sums.router_weight += routed
            sums.saliency += float(norms.sum())
        self._x = torch.empty(0)
        self._calls = []
        self._cached = add_cached((self._cached, self._cached_now))

    def _hold_out(self, expert: int | None, values: Tensor, weights: Tensor, is_held_out: Tensor) -> None:
        """Keep the held-out tokens at the input of gate and up (None), or of down of an expert."""
        if is_held_out.any():
            name = f"held out/{self._seed}/{self._layer}/{expert}"
            for kept in self._held_out.setdefault(expert, (_Sums(), TokenSample(name))):
                kept.add(values[is_held_out], weights[is_held_out])

    def finish(self) -> LayerStatistics:
        """Return the layer's statistics; searches the smoothing exponents of a MoE layer with SAMPLED_TOKENS tokens.

        Raises CalibrationError if there is nothing to divide by, and what reading the source raises.
        """
        if not self._weight > 0:
            raise CalibrationError(
                f"layer {self._layer}: no hidden state is finite and not zero. Check the source and the text."
            )
        found = replace(self._statistics(), imatrix=self._choose_imatrix())
        # 64 tokens made k2-tiny worse by 2 %.
        if not (self._is_moe and self.is_varied) or self._input.tokens < SAMPLED_TOKENS:
            return found
        inputs = self._sample.weighted(self._weight / self._input.tokens)
        exponents = find_exponents(
            self._reader, self._layer, inputs=inputs, mean_square=found.gate_up_mean_square, seed=self._seed
        )
        return replace(found, smoothing_exponents=exponents)

    def _choose_imatrix(self) -> NDArray[np.uint8]:
        """Return where rule `imatrix` gains, uint8 [2]; searches nothing."""
        if not self.is_varied or None not in self._held_out or self._held_out[None][0].tokens < MIN_HELD_OUT:
            return np.zeros(2, dtype=np.uint8)
        inputs: dict[int | None, tuple[Tensor, NDArray[np.uint8]]] = {}
        for expert, (held_out, sample) in self._held_out.items():
            sums = self._input if expert is None else self._experts[expert]
            few = MIN_LAYER_TOKENS
            if self._is_moe and expert is not None:
                few = MIN_TOKENS
            inputs[expert] = (sample.weighted(1.0), sums.importance_without(held_out, few=few))
        mlp = f"{detect_family(self._reader.checkpoint).layer.format(layer=self._layer)}.mlp"
        return imatrix_gains(self._reader, mlp, inputs, is_dense=not self._is_moe)

    def _statistics(self) -> LayerStatistics:
        kv = self._cached
        norm = detect_family(self._reader.checkpoint).mlp_norm.format(layer=self._layer)
        experts = [self._experts.get(expert, _Sums()) for expert in range(self._num_experts)]
        width = next(sums.squares.shape[0] for sums in experts if sums.squares is not None)
        has_shared = self._shared.squares is not None
        gate_up = self._mean_square(self._input)
        return LayerStatistics(
            layer=self._layer,
            norm_digest=blake3(self._reader.raw(f"{norm}.{WEIGHT}").numpy().tobytes()).hexdigest(),
            gate_up_mean_square=gate_up,
            gate_up_amax=np.array([self._input.amax], dtype=np.float32),
            down_mean_square=np.stack([self._mean_square(sums, width) for sums in experts]),
            down_amax=np.array([sums.amax for sums in experts], dtype=np.float32),
            tokens=np.array([sums.tokens for sums in experts], dtype=np.int64),
            saliency=np.array([sums.saliency / max(1, sums.tokens) for sums in experts], dtype=np.float32),
            router_weight=np.array([sums.router_weight / self._input.tokens for sums in experts], dtype=np.float32),
            smoothing_exponents=np.zeros(gate_up.size, dtype=np.int8),
            shared_down_mean_square=self._mean_square(self._shared) if has_shared else None,
            shared_down_amax=np.array([self._shared.amax], dtype=np.float32) if has_shared else None,
            kv_amax=np.array([part.amax for part in kv], dtype=np.float32),
            kv_subnormal_share=np.array([part.subnormal / max(1, part.count) for part in kv], dtype=np.float32),
            kv_saturated_share=np.array([part.saturated / max(1, part.count) for part in kv], dtype=np.float32),
        )

    def _mean_square(self, sums: _Sums, width: int = 0) -> NDArray[np.float32]:
        """Return the mean over the tokens of `sums`, f32 [I], with token weights of mean 1 over the layer."""
        if sums.squares is None:
            return np.zeros(width, dtype=np.float32)
        mean_weight = self._weight / self._input.tokens
        return (sums.squares / (mean_weight * sums.tokens)).float().cpu().numpy()


def token_weights(h_TK: Tensor) -> Tensor:
    """Return 1 / ||h||^2 of each token, f64 [T]; 0 for a hidden state of zeros."""
    squares = _square_sums(h_TK)
    return torch.where(squares > 0, 1 / squares, 0.0)


def _square_sums(values: Tensor) -> Tensor:
    """Return the sum of squares of each row of f32 [t, K], f64 [t]."""
    sums = torch.empty(values.shape[0], dtype=torch.float64, device=values.device)
    for rows in _chunks(values):
        sums[rows] = values[rows].double().square_().sum(dim=1)
    return sums


def _chunks(values: Tensor) -> Iterator[slice]:
    """Yield rows of f32 [t, I] that are summed in FP64 at once: few on a CPU, many on a GPU."""
    step = _CUDA_CHUNK_ROWS
    if values.device.type == "cpu":
        step = _CHUNK_ROWS
    for start in range(0, values.shape[0], step):
        yield slice(start, start + step)
