"""One MoE layer converted with gptq: its experts are rounded so that what comes out is what the INT4 layer gave.

    x    the MLP's input in the converted model; x - missing is what the INT4 model has there
    R    what the converted model still lacks after the layer, while experts are converted one after the other

Gate and up see the same input, so they share one second moment, one correction and one factor. A down projection has
its own: its inputs are the expert's inner activations, times the router's weight p, as the converted gate and up make
them. Each one is corrected for what all experts before it left over.

Gate and up of the experts are dealt out to the devices; the first one has everything else. What has a row for each
token is in files if that is a CPU (layer_tokens.py). The large matrices are cut into tiles (quantize/gptq/tiles.py) and
sums are made in a fixed order, so the number of workers does not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from k2convert.calibration.gptq_weights import (
    DOWN,
    GATE,
    UP,
    ExpertWeights,
    GateUpRule,
    SourceProjection,
    by_mse,
    decoded,
    shared_scale,
)
from k2convert.calibration.layer_files import Write
from k2convert.calibration.layer_tokens import LayerInputs, Scratch, output_errors
from k2convert.forward.moe import Mlp, Routing, run_in_order
from k2convert.forward.weights import DenseWeight, LinearLayer
from k2convert.models import read_architecture
from k2convert.quantize.formats.bf16 import Magnitude
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.gptq.curvature import Curvature, make_curvature
from k2convert.quantize.gptq.moments import Missing, Moments, Ridge, WeightedTokens, correct
from k2convert.quantize.gptq.rounding import RoundingKernel, choose_shrinkage, kernel_for, round_gptq
from k2convert.quantize.gptq.tiles import CheckStop, Team, cut
from k2convert.records.calibration import GptqLayer, OutputErrors

SAMPLED_EXPERTS: Final = 16
SAMPLED_ROWS: Final = 1024
"""The correction and the shrinkage of a layer are chosen by these rows of gate and up, of these experts."""

SHRINKAGE_ROWS: Final = 64
GROUPED_EXPERTS: Final = 8

MIN_TOKENS: Final = 64
"""With fewer tokens a down projection is converted by rule `mse`. With 64 tokens in all, rule `imatrix` gave those
of k2-tiny 12 % more error on other tokens."""

_TOKENS: Final = 256  # that a thread computes at a time


@dataclass(frozen=True, slots=True, eq=False)
class _Routed:
    """The tokens int64 [t] of an expert, and what its down projection gets from them, times p, f32 [t, I]."""

    tokens: Tensor
    inner: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Expert:
    """An expert whose gate and up are converted.

    `output` f32 [t, K] is what the source's down makes of `routed`. `measured` f32 [m, K] are what the expert gives in
    the source and by rule `mse`, for the last m of these tokens.
    """

    gate: Nvfp4Weight
    up: Nvfp4Weight
    routed: _Routed
    output: Tensor
    measured: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Down:
    """A down projection that is not converted yet. `trusted`: moments, shrinkage and curvature; None for rule `mse`."""

    weight: SourceProjection
    magnitude: Magnitude
    global_scale: float
    trusted: tuple[Moments, float, Curvature] | None


@dataclass(slots=True)
class LayerConverter:
    """Converts the routed experts of a layer.

    `write` gets every projection, `advance` the share of gates and ups that is done, and that of downs.

    `scratch` gives the tensors that have a row for each token, on the first device.
    If the tokens are not `is_varied` they count as none: every expert is converted by rule `mse`.
    """

    weights: ExpertWeights
    devices: tuple[str, ...]
    scratch: Scratch
    workers: int
    team: Team
    is_varied: bool
    write: Write
    advance: Callable[[float, float], None]
    check_stop: CheckStop

    @property
    def device(self) -> str:
        """The device of everything that is not dealt out."""
        return self.devices[0]

    @torch.no_grad()
    def convert(self, inputs: LayerInputs) -> tuple[GptqLayer, Tensor]:
        """Convert all experts; returns what was decided, and the residual f32 [T, K] after the layer.

        Raises what reading the source raises.
        """
        residual_TK = inputs.residual
        moments, missing = inputs.take_gate_up()
        if (exponents := self.weights.exponents) is not None:
            factors_K = torch.exp2(torch.as_tensor(exponents).to(moments.forms))
            for rows in self.scratch.pieces(inputs.x.shape[0]):
                inputs.x[rows].mul_(factors_K)
            for sums in (moments, missing):
                sums.scale(torch.as_tensor(exponents))
        num_experts = inputs.routing.scores.shape[1]
        shrinkage, ridge, gate_up = self._prepare_gate_up(moments, missing, num_experts)
        del moments, missing
        first = inputs.first_measured
        exact_mK, mse_mK = (self.scratch.copy(residual_TK[first:]) for _ in range(2))
        inputs.inner = self._room_for_inner(inputs.routing)
        experts: list[_Routed] = []
        with closing(self._gates_and_ups(num_experts, inputs, gate_up)) as converted:
            for expert in converted:
                for kind, codes in ((GATE, expert.gate), (UP, expert.up)):
                    self.write(self.weights.module(len(experts), kind), codes)
                self.scratch.subtract(residual_TK, expert.routed.tokens, expert.output)
                for left, output in zip((exact_mK, mse_mK), expert.measured, strict=True):
                    places = expert.routed.tokens[expert.routed.tokens.shape[0] - output.shape[0] :] - first
                    self.scratch.subtract(left, places, output)
                experts.append(expert.routed)
                self.advance(len(experts) / num_experts, 0.0)
        inherited, mse = (output_errors(left, inputs, self.scratch) for left in (exact_mK, mse_mK))
        del exact_mK, mse_mK, gate_up
        shrinkages: list[float | None] = []
        ridges: list[float | None] = []
        calls = (partial(self._prepare_down, number, expert, inputs) for number, expert in enumerate(experts))
        with run_in_order(lambda call: call(), calls, workers=self.workers) as downs:
            for number, down in enumerate(downs):
                shrinkages.append(None if down.trusted is None else down.trusted[1])
                ridges.append(self._convert_down(number, down, experts[number], inputs, residual_TK))
                self.advance(1.0, (number + 1) / num_experts)
        fitted, held_out = map(OutputErrors, inherited, mse, output_errors(residual_TK[first:], inputs, self.scratch))
        decided = GptqLayer(
            ridge=ridge.strength,
            ridge_gain=ridge.gain,
            shrinkage=shrinkage,
            down_ridges=tuple(ridges),
            down_shrinkages=tuple(shrinkages),
            fitted=fitted,
            held_out=held_out if inputs.halves.shape[0] < residual_TK.shape[0] else None,
        )
        return decided, residual_TK

    def _gates_and_ups(self, num_experts: int, inputs: LayerInputs, gate_up: GateUpRule | None) -> Generator[_Expert]:
        """Convert gate and up of every expert, some experts at a time on each device; yields them in order."""
        copies = [None if gate_up is None else gate_up.to(device) for device in self.devices]
        size = 1 if self.device == "cpu" else GROUPED_EXPERTS
        groups = (range(start, min(start + size, num_experts)) for start in range(0, num_experts, size))
        dealt = ((group, number % len(copies)) for number, group in enumerate(groups))
        calls = (partial(self._convert_group, group, inputs, copies[on], self.devices[on]) for group, on in dealt)
        with run_in_order(lambda call: call(), calls, workers=self.workers) as found:
            for group in found:
                yield from group

    def _room_for_inner(self, routing: Routing) -> list[Tensor]:
        """Return room for the inner activations f32 [t, I] of every expert."""
        num_experts = routing.scores.shape[1]
        stops = np.bincount(routing.experts.flatten().cpu().numpy(), minlength=num_experts).cumsum().tolist()
        width = read_architecture(self.weights.reader.checkpoint).moe_intermediate_size
        room = self.scratch.empty(stops[-1], width)
        return [room[start:stop] for start, stop in pairwise([0, *stops])]

    def _kernel(self, device: str, threads: int = 1) -> RoundingKernel:
        return kernel_for(device, threads, self.check_stop)

    def _sample(self, num_experts: int) -> tuple[Tensor, Tensor]:
        """Return rows f32 [n, K] of gate and up of some experts, evenly spread, and the global scale [n] of each."""
        chosen = np.unique(np.linspace(0, num_experts - 1, min(num_experts, SAMPLED_EXPERTS)).round().astype(int))
        count = max(1, SAMPLED_ROWS // (2 * chosen.size))
        rows: list[Tensor] = []
        scales: list[Tensor] = []
        for expert in chosen.tolist():
            weights = [self.weights.read(expert, kind, self.device) for kind in (GATE, UP)]
            _, global_scale = shared_scale(weights)
            for weight in weights:
                rows.append(weight.values[:: -(-weight.values.shape[0] // count)].clone())
                scales.append(torch.full((rows[-1].shape[0],), global_scale, device=self.device))
        return torch.cat(rows), torch.cat(scales)

    def _prepare_gate_up(
        self, moments: Moments, missing: Missing, num_experts: int
    ) -> tuple[float | None, Ridge, GateUpRule | None]:
        """Choose the shrinkage and the correction of a layer; returns them, and how gate and up are rounded."""
        rows, scales = self._sample(num_experts)
        step = max(1, rows.shape[0] // SHRINKAGE_ROWS)
        few = rows[::step] / scales[::step, None]
        shrinkage = None
        moments.complete(self.team)
        if self.is_varied:
            shrinkage = choose_shrinkage(moments, few, 1.0, self._kernel(self.device), self.team)
        if shrinkage is None:
            return None, Ridge(None, 0.0), None
        correction, ridge = correct(moments, missing, rows, team=self.team)
        missing.clear()
        return shrinkage, ridge, GateUpRule(correction, make_curvature(moments.form(), shrinkage, self.team))

    def _convert_group(
        self, group: range, inputs: LayerInputs, gate_up: GateUpRule | None, device: str
    ) -> list[_Expert]:
        """Convert gate and up of some experts on a device, and compute what each makes of its tokens."""
        pairs = [[self.weights.read(number, kind, device) for kind in (GATE, UP)] for number in group]
        scales = [shared_scale(pair) for pair in pairs]
        weights = [(weight, *scale) for pair, scale in zip(pairs, scales, strict=True) for weight in pair]
        if gate_up is None:
            codes = [by_mse(*weight) for weight in weights]
        else:
            codes = gate_up.round(weights, self._kernel(device))
        found: list[_Expert] = []
        for place, number in enumerate(group):
            gate, up = codes[2 * place : 2 * place + 2]
            without_data = [by_mse(weight, *scales[place]) for weight in pairs[place]]
            found.append(self._compute(number, gate, up, pairs[place], without_data, inputs))
        return found

    def _compute(
        self,
        number: int,
        gate: Nvfp4Weight,
        up: Nvfp4Weight,
        source: list[SourceProjection],
        without_data: list[Nvfp4Weight],
        inputs: LayerInputs,
    ) -> _Expert:
        """Compute what an expert makes of its tokens, by these codes of gate and up, in the source, and by a rule."""
        tokens, p = inputs.routing.tokens_of(number)
        device = str(source[0].values.device)
        down = self.weights.read(number, DOWN, device)
        exact = [LinearLayer(DenseWeight(weight.values)) for weight in (*source, down)]
        mlp = Mlp(decoded(gate, device), decoded(up, device), exact[2])
        without_data.append(by_mse(down, *shared_scale([down])))
        others = (Mlp(*exact), Mlp(*(decoded(codes, device) for codes in without_data)))
        inner = inputs.inner[number]
        output = self.scratch.empty(tokens.shape[0], inputs.x.shape[1])
        for rows in self.scratch.pieces(tokens.shape[0]):
            x = self.scratch.take(inputs.x, tokens[rows]).to(device)
            activations = mlp.inner(x) * p[rows, None].to(device)
            inner[rows] = activations
            output[rows] = mlp.outer(activations)
        last = slice(int((tokens < inputs.first_measured).sum()), None)
        x = self.scratch.take(inputs.x, tokens[last]).to(device)
        weights = p[last, None].to(device)
        of_source, of_mse = ((other(x) * weights).to(self.device) for other in others)
        return _Expert(gate, up, _Routed(tokens, inner), output, (of_source, of_mse))

    def _prepare_down(self, number: int, expert: _Routed, inputs: LayerInputs) -> _Down:
        """Do what converting a down projection needs and no other expert changes."""
        down = self.weights.read(number, DOWN, self.device)
        magnitude, global_scale = shared_scale([down])
        fitted = _fitted(expert, inputs)
        if fitted < MIN_TOKENS or not self.is_varied:
            return _Down(down, magnitude, global_scale, None)
        moments = Moments.start(expert.inner.shape[1], device=self.device)
        for rows in self.scratch.pieces(fitted):
            moments.add(expert.inner[rows], _halves(expert.tokens[rows], inputs))
        moments.complete()
        shrinkage = choose_shrinkage(moments, down.values, global_scale, self._kernel(self.device))
        if shrinkage is None:
            return _Down(down, magnitude, global_scale, None)
        trusted = moments, shrinkage, make_curvature(moments.form(), shrinkage)
        return _Down(down, magnitude, global_scale, trusted)

    def _convert_down(
        self, number: int, down: _Down, expert: _Routed, inputs: LayerInputs, residual_TK: Tensor
    ) -> float | None:
        """Convert down of an expert, and take what that changes off the residual; returns the ridge's strength."""
        strength = None
        if down.trusted is None:
            codes = by_mse(down.weight, down.magnitude, down.global_scale)
        else:
            moments, _, curvature = down.trusted
            missing = Missing.start(moments.forms.shape[1], residual_TK.shape[1], device=self.device)
            for rows in self.scratch.pieces(_fitted(expert, inputs)):
                left = self.scratch.take(residual_TK, expert.tokens[rows])
                halves = _halves(expert.tokens[rows], inputs)
                missing.add(expert.inner[rows], left, halves, self.team)
            correction, ridge = correct(moments, missing, team=self.team)
            strength = ridge.strength
            target = down.weight.values if correction is None else down.weight.values + correction
            codes = round_gptq(target, down.global_scale, curvature, self._kernel(self.device, threads=self.workers))
        self.write(self.weights.module(number, DOWN), codes)
        change = DenseWeight(decoded(codes, self.device).weight.decode() - down.weight.values)

        def update(rows: slice) -> None:
            self.scratch.subtract(residual_TK, expert.tokens[rows], change.linear(expert.inner[rows]))

        self.team.run([partial(update, rows) for rows in cut(expert.tokens.shape[0], _TOKENS, residual_TK)])
        return strength


def _fitted(expert: _Routed, inputs: LayerInputs) -> int:
    """Return how many of an expert's tokens it is fitted to: they come first."""
    return int((expert.tokens < inputs.halves.shape[0]).sum())


def _halves(tokens: Tensor, inputs: LayerInputs) -> tuple[WeightedTokens, WeightedTokens]:
    return WeightedTokens.by_halves(inputs.token_weights[tokens], inputs.halves[tokens])
