"""Rule `gptq`: calibration and conversion in one pass over the layers.

    embedding ->  h of the source's model                 -> layer -> ...
              ->  h - missing: what is converted so far   -> layer -> ... -> quantized weights

Every layer reads both streams. What is missing is small, so this difference is what is kept: rounded to BF16 on their
own, the two streams would differ by more than that. In a MoE layer the experts are converted so that the other stream
comes out as this one (gptq_layer.py); so are the shared experts and the dense MLP, if the recipe has their role.
What becomes FP8 is FP8 in the second stream, inputs included, so that later layers make up for it. Router and what is
not converted are the source's in both streams, and no activation is rounded to 4 bits: one result serves W4A16 and
W4A4. All tokens of a layer are on the first device at a time, or in files if that is a CPU (layer_tokens.py).

Some windows are kept out of everything that is fitted. They are the last ones of both streams, and each layer's error
is measured on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.calibration.gptq_layer import LayerConverter, MlpWeights
from k2convert.calibration.layer_files import CODES, RESIDUAL, LayerResult, writing_quantized_layers
from k2convert.calibration.layer_tokens import LayerInputs, Scratch
from k2convert.calibration.smoothing import LayerAccumulator, token_weights
from k2convert.errors import CalibrationError
from k2convert.forward.decoder import BlockObserver, DecoderLayer
from k2convert.forward.layer_pass import LayerPass
from k2convert.forward.layers import Layer, each_layer, finite_windows
from k2convert.forward.moe import MlpTokens, Routing, shared_module
from k2convert.forward.weights import WeightReader
from k2convert.forward.work import HIDDEN, HiddenStates
from k2convert.machine import return_free_memory
from k2convert.models import detect_family, read_architecture
from k2convert.plan.recipe import Recipe
from k2convert.quantize.gptq.device_kernel import check_device
from k2convert.quantize.gptq.hessian import CheckStop, Team
from k2convert.quantize.gptq.moments import Moments, WeightedTokens
from k2convert.records.calibration import GptqLayer
from k2convert.text.windows import held_out, is_varied

Save = Callable[[int, LayerResult], None]
"""Declares a layer done, by its number."""


@torch.no_grad()
def gptq_pass(layer_pass: LayerPass, recipe: Recipe, *, check_stop: CheckStop, save: Save) -> None:
    """Convert the layers that are not done, in order; `save` declares one done, `check_stop` is called often.

    Raises PlanError if a device does not round as the CPU does, CalibrationError if too many windows have to be
    dropped, what `check_stop` raises, and what reading and writing raise.
    """
    text = layer_pass.text
    for device in text.devices:
        if device != "cpu":
            check_device(device)
    windows = replace(text.windows, ids=text.windows.ids[np.argsort(held_out(len(text.windows.ids)), kind="stable")])
    ordered = replace(layer_pass, text=replace(text, windows=windows))
    with (
        closing(each_layer(ordered)) as layers,
        Team(text.threads, check_stop) as team,
    ):
        for layer in layers:
            result = _LayerConversion(layer, recipe, team).run()
            save(layer.number, replace(result, dropped=layer.dropped))


class _LayerConversion:
    """One layer of the layer pass."""

    def __init__(self, layer: Layer, recipe: Recipe, team: Team) -> None:
        self._layer = layer
        self._recipe = recipe
        self._layer_pass = layer.layer_pass
        self._decoder = layer.decoder
        self._work = layer.layer_pass.work
        self._scratch = Scratch(self._work.folder, self._layer_pass.text.devices[0])
        self._held_out = int(held_out(self._layer_pass.shape[0]).sum())
        self._num_fitted = self._layer_pass.shape[0] - self._held_out
        self._team = team
        self._is_varied = is_varied(self._layer_pass.ids[: self._num_fitted])
        source = layer.reader.checkpoint
        self._converted = self._decoder
        if recipe.fp8:
            self._converted = _decoder_of_result(layer, recipe)
        self._mlp = f"{detect_family(source).layer.format(layer=layer.number)}.mlp"
        is_dense = self._decoder.is_dense
        self._num_experts = 0 if is_dense else read_architecture(source).num_experts
        seed = self._layer_pass.text.windows.seed
        self._accumulator = LayerAccumulator(layer.number, num_experts=self._num_experts, seed=seed)
        self._shared = None
        if is_dense and "dense_mlp" in recipe.roles:
            self._shared = self._mlp
        elif not is_dense and "shared_experts" in recipe.roles:
            self._shared = shared_module(layer.reader, self._mlp)

    def run(self) -> LayerResult:
        """Compute both streams and convert the layer's MLPs; returns what was decided."""
        if self._decoder.is_dense and self._shared is None:
            self._run_unconverted()
            return LayerResult(dropped=0)
        self._layer.progress.share = 1 / 3
        retained = np.zeros(self._layer_pass.shape[0], dtype=np.bool_)
        layer_pass = self._layer_pass
        collected = _CollectedTokens(
            layer_pass.ids.size, layer_pass.hidden_size, layer_pass.text.devices[0], self._scratch, self._team
        )
        with self._layer.writing() as write:
            for first, states, converted in self._chunks():
                retained[first : first + states.shape[0]] = self._collect_chunk(first, states, converted, collected)
                write(states)
        exponents_K = None
        if self._recipe.smoothing and self._is_varied and not self._decoder.is_dense:
            exponents_K = self._accumulator.find_exponents(self._layer.reader)
        decided, residual_TK = self._convert(collected.finish(), exponents_K)
        if not self._layer.is_last:
            self._write_residual(residual_TK, retained)
        return LayerResult(
            dropped=0,
            tokens=tuple(self._accumulator.tokens_E.tolist()),
            exponents=() if exponents_K is None else tuple(exponents_K.tolist()),
            gptq=decided,
        )

    def _chunks(self) -> Iterator[tuple[int, HiddenStates, HiddenStates]]:
        """Yield the first window and both streams of every chunk. A window that is not finite is so in both."""
        streams = (HIDDEN, RESIDUAL) if self._layer.number else (HIDDEN,)  # nothing is missing in the embedding
        for first, (states, *residual) in self._layer.chunks(streams, apart=self._held_out):
            self._team.check_stop()
            converted = np.subtract(states, residual[0], out=residual[0]) if residual else states.copy()
            states[~finite_windows(converted)] = np.nan
            yield first, states, converted

    def _run_unconverted(self) -> None:
        """Run both streams through a dense layer that stays as it is."""
        layer = self._layer
        with layer.writing() as write, layer.writing(RESIDUAL) as write_missing:
            for first, states, converted in self._chunks():
                layer.run(first, states, self._tee(first))
                retained = finite_windows(states)
                if retained.any():
                    converted[retained] = self._converted.run(torch.as_tensor(converted[retained])).cpu().numpy()
                write(states)
                write_missing(states - converted)  # NaN where a window is dropped
        layer.progress.reach(self._layer_pass.ids.size)

    def _collect_chunk(
        self, first: int, states: HiddenStates, converted: HiddenStates, collected: _CollectedTokens
    ) -> NDArray[np.bool_]:
        """Run the INT4 stream of a chunk through the layer, the other one up to its experts, and collect its tokens.

        Returns which windows are kept. Its tensors are gone before the next.
        """
        layer = self._layer
        tee = self._tee(first)
        layer.run(first, states, tee)
        retained = finite_windows(states)
        if not retained.any():
            return retained
        after_TK, x_TK, routing = self._converted.attend(torch.as_tensor(converted[retained]))
        residual_TK = tee.hidden - after_TK
        if self._shared is None:
            residual_TK -= self._converted.shared_output(x_TK)
        if routing is None:
            routing = _no_routing(x_TK)
        if not (x_TK.isfinite().all() and residual_TK.isfinite().all()):
            raise CalibrationError(
                f"layer {layer.number}: the hidden states of the converted model are not finite, those of the "
                "source are. Use a different text, or leave out --calibrate."
            )
        halves = None
        if first < self._num_fitted:
            halves = self._halves(first + np.flatnonzero(retained))
        collected.add(x_TK, residual_TK, routing, tee.weights, halves)
        return retained

    def _tee(self, first: int) -> _Tee:
        """Return the observer of a chunk: windows that are kept out are not accumulated."""
        return _Tee(self._team.check_stop, self._accumulator if first < self._num_fitted else None)

    def _halves(self, windows: NDArray[np.int64]) -> Tensor:
        """Deal the tokens of windows to two halves, uint8 [T]: windows in turn, or one window in the middle."""
        length = self._layer_pass.shape[1]
        if self._num_fitted == 1:
            return (torch.arange(length) >= length // 2).to(torch.uint8)
        return torch.as_tensor(windows % 2).to(torch.uint8).repeat_interleave(length)

    def _convert(self, inputs: LayerInputs, exponents_K: NDArray[np.int8] | None) -> tuple[GptqLayer, Tensor]:
        """Convert the MLPs and keep their weights; returns what was decided, and the residual f32 [T, K]."""
        return_free_memory()
        path = self._work.path(CODES, self._layer.number)
        record = self._work.record
        weights = MlpWeights(self._layer.reader, self._mlp, self._num_experts, self._shared, exponents_K)
        with writing_quantized_layers(path, weights.shapes(), record=record) as write:
            converter = LayerConverter(
                weights=weights,
                devices=self._layer_pass.text.devices,
                scratch=self._scratch,
                team=self._team,
                is_varied=self._is_varied,
                write=write,
                advance=self._reach,
            )
            decided, residual_TK = converter.convert(inputs)
        if (held_out := decided.held_out) is not None and held_out.is_worse:
            self._layer_pass.shards.events.note(
                f"warning: layer {self._layer.number}: on the windows that were kept out of the fit, the squared error "
                f"of the outputs is {held_out.gptq_error:.5f}; by rule mse it would be {held_out.mse_error:.5f}"
            )
        return decided, residual_TK

    def _reach(self, gates_and_ups: float, downs: float) -> None:
        """Report how far the layer is: a third for both streams, for gates and ups, and for downs, which come last."""
        self._team.check_stop()
        self._layer.progress.share = 1.0
        self._layer.progress.reach(int(self._layer_pass.ids.size * (1 + gates_and_ups + downs) / 3))

    def _write_residual(self, residual_TK: Tensor, retained: NDArray[np.bool_]) -> None:
        """Write what the converted layer lacks, which the next layer reads; NaN for dropped windows."""
        layer_pass = self._layer_pass
        done = 0
        with self._layer.writing(RESIDUAL) as write:
            for is_retained in retained.tolist():
                residual = np.full((1, *layer_pass.shape[1:]), np.nan, dtype=np.float32)
                if is_retained:
                    residual[0] = residual_TK[done : done + layer_pass.shape[1]].cpu().numpy()
                    done += layer_pass.shape[1]
                write(residual)
                self._scratch.release()


def _decoder_of_result(layer: Layer, recipe: Recipe) -> DecoderLayer:
    """Return the layer with the FP8 weights that the result will have; its files are closed with those of the layer."""
    source = layer.reader.checkpoint
    family = detect_family(source)
    reader = WeightReader(source, becomes_fp8=lambda module: family.becomes_fp8(module, recipe.fp8))
    layer.opened.callback(reader.close)
    text = layer.layer_pass.text
    return DecoderLayer(reader, layer.number, text.devices, text.threads)


def _no_routing(x_TK: Tensor) -> Routing:
    """Return the routing of a layer without experts."""
    none_T0 = x_TK.new_empty(x_TK.shape[0], 0)
    return Routing(experts=none_T0.long(), weights=none_T0, scores=none_T0)


class _Tee(BlockObserver):
    """Keeps the output `hidden` f32 [T, K] of a chunk and the `weights` f64 [T] of its tokens.

    An accumulator gets a chunk when its output is reported: windows that are not finite are computed again before.
    """

    def __init__(self, check_stop: CheckStop, accumulator: LayerAccumulator | None) -> None:
        self.hidden = self.weights = self._x_TK = torch.empty(0)
        self._check_stop = check_stop
        self._accumulator = accumulator
        self._routing: Routing | None = None

    def block(self, x_TK: Tensor, routing: Routing | None) -> None:
        self._x_TK = x_TK
        self._routing = routing

    def expert(self, mlp: MlpTokens) -> None:  # noqa: ARG002
        self._check_stop()

    def output(self, h_TK: Tensor) -> None:
        self.hidden = h_TK
        self.weights = token_weights(h_TK)
        if self._accumulator is not None and self._routing is not None:
            self._accumulator.add(self._x_TK, self._routing, self.weights)


class _CollectedTokens:
    """Tokens of all chunks of a layer, on one device. It has space for `tokens` of them."""

    def __init__(self, tokens: int, hidden_size: int, device: str, scratch: Scratch, team: Team) -> None:
        self._scratch = scratch
        self._x, self._residual = (scratch.empty(tokens, hidden_size) for _ in range(2))
        self._routings: list[Routing] = []
        self._weights: list[Tensor] = []
        self._halves: list[Tensor] = []
        self._moments = Moments.start(hidden_size, device=device)
        self._team = team
        self._count = 0

    def add(self, x_TK: Tensor, residual_TK: Tensor, routing: Routing, weights: Tensor, halves: Tensor | None) -> None:
        """Add the tokens of one chunk; those that nothing is fitted to come last, and have no halves."""
        rows = slice(self._count, self._count + x_TK.shape[0])
        self._x[rows], self._residual[rows] = x_TK, residual_TK
        self._count = rows.stop
        self._scratch.release()
        self._routings.append(replace(routing, scores=routing.scores.new_empty(0, routing.scores.shape[1])))
        self._weights.append(weights)
        if halves is not None:
            halves = halves.to(x_TK.device)
            self._moments.add(x_TK, WeightedTokens.by_halves(weights, halves), self._team)
            self._halves.append(halves)

    def finish(self) -> LayerInputs:
        """Return everything, and keep nothing of it."""
        moments = self._moments
        del self._moments
        return LayerInputs(
            x=self._x[: self._count],
            residual=self._residual[: self._count],
            routing=Routing.concatenate(self._routings),
            token_weights=torch.cat(self._weights),
            halves=torch.cat(self._halves),
            gate_up=moments,
        )
