"""One MoE layer converted with gptq: its experts are rounded so that what comes out is what the INT4 layer gave.

    x    the MLP's input in the converted model; x - missing is what the INT4 model has there
    R    what the converted model still lacks after the layer, while experts are converted one after the other

Gate and up see the same input, so they share one second moment, one correction and one factor. A down projection has
its own: its inputs are the expert's inner activations, times the router's weight p, as the converted gate and up make
them. Each one is corrected for what all experts before it left over.

Everything is on one device. What has a row for each token is in files if that is a CPU (layer_tokens.py). Sums are made
in one thread each and in a fixed order, so the number of workers does not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.calibration.layer_files import Write
from k2convert.calibration.layer_tokens import LayerInputs, Scratch, output_errors
from k2convert.forward.moe import Mlp, Routing, run_in_order
from k2convert.forward.weights import DenseWeight, LinearLayer, WeightReader, exact_weight, nvfp4_weight
from k2convert.models import read_architecture
from k2convert.quantize.formats.channels import divide_columns
from k2convert.quantize.formats.int4 import Bf16Weight, Int4Weight, SourceWeight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.gptq.moments import Curvature, Moments, Ridge, make_curvature
from k2convert.quantize.gptq.rounding import choose_shrinkage, kernel_for, round_gptq
from k2convert.quantize.quantizer import create_native_quantizer
from k2convert.quantize.rules.max import Magnitude
from k2convert.records.calibration import GptqLayer, OutputErrors

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
SAMPLED_EXPERTS: Final = 16
SAMPLED_ROWS: Final = 4096
"""The correction and the shrinkage of a layer are chosen by these rows of gate and up, of these experts."""

SHRINKAGE_ROWS: Final = 64
GROUPED_EXPERTS: Final = 8

MIN_TOKENS: Final = 64
"""With fewer tokens a down projection is converted by rule `mse`. With 64 tokens in all, rule `imatrix` gave those
of k2-tiny 12 % more error on other tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    """One projection: as the source has it, with smoothing, and its values f32 [N, K]."""

    module: str
    source: SourceWeight
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Routed:
    """The tokens int64 [t] of an expert, and what its down projection gets from them, times p, f32 [t, I]."""

    tokens: Tensor
    inner: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Expert:
    """An expert whose gate and up are converted.

    `outputs` f32 [3, t, K] are what the source's down makes of `routed`, and what the whole expert gives for these
    tokens in the source and by rule `mse`.
    """

    gate: Nvfp4Weight
    up: Nvfp4Weight
    routed: _Routed
    outputs: Tensor


_ToCodes = Callable[[list[tuple[_Weight, Magnitude, float]]], list[Nvfp4Weight]]
"""Converts gates and ups, given the magnitude and the global scale that gate and up of an expert share."""


@dataclass(slots=True)
class LayerConverter:
    """Converts the routed experts of a layer. `write` gets every projection, `advance` the share that is done.

    `scratch` gives the tensors that have a row for each token.

    If the tokens are not `is_varied` they count as none: every expert is converted by rule `mse`.
    """

    reader: WeightReader
    mlp: str
    exponents: NDArray[np.int8] | None
    device: str
    scratch: Scratch
    workers: int
    is_varied: bool
    write: Write
    advance: Callable[[float], None]
    _scale: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.exponents is not None:
            self._scale = torch.as_tensor(np.ldexp(np.float32(1), self.exponents.astype(np.int32))).to(self.device)

    @torch.no_grad()
    def convert(self, inputs: LayerInputs) -> tuple[GptqLayer, Tensor]:
        """Convert all experts; returns what was decided, and the residual f32 [T, K] after the layer.

        Raises what reading the source raises.
        """
        x_TK, residual_TK = inputs.x, inputs.residual
        moments = inputs.take_gate_up()
        if self.exponents is not None and self._scale is not None:
            for rows in self.scratch.pieces(x_TK.shape[0]):
                x_TK[rows].mul_(self._scale)
            moments = moments.scaled(torch.as_tensor(self.exponents))
        num_experts = inputs.routing.scores.shape[1]
        shrinkage, ridge, to_codes = self._prepare_gate_up(moments, num_experts)
        del moments
        exact_TK, mse_TK = self.scratch.copy(residual_TK), self.scratch.copy(residual_TK)
        inner = self._room_for_inner(inputs.routing)
        experts: list[_Routed] = []
        size = 1 if self.device == "cpu" else GROUPED_EXPERTS
        groups = (range(first, min(first + size, num_experts)) for first in range(0, num_experts, size))
        calls = (partial(self._convert_group, group, inputs, to_codes, inner) for group in groups)
        for group in run_in_order(lambda call: call(), calls, workers=self.workers):
            for expert in group:
                for kind, codes in ((GATE, expert.gate), (UP, expert.up)):
                    self.write(self._module(len(experts), kind), codes)
                self._take_off((residual_TK, exact_TK, mse_TK), expert)
                experts.append(expert.routed)
            self.advance(0.5 * len(experts) / num_experts)
        inherited, mse = output_errors(exact_TK, inputs, self.scratch), output_errors(mse_TK, inputs, self.scratch)
        del exact_TK, mse_TK
        shrinkages: list[float | None] = []
        ridges: list[float | None] = []
        for number, expert in enumerate(experts):
            found = self._convert_down(number, expert, inputs, residual_TK)
            shrinkages.append(found[0])
            ridges.append(found[1])
            self.advance(0.5 + 0.5 * (number + 1) / num_experts)
        fitted, held_out = map(OutputErrors, inherited, mse, output_errors(residual_TK, inputs, self.scratch))
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

    def _room_for_inner(self, routing: Routing) -> list[Tensor]:
        """Return room for the inner activations f32 [t, I] of every expert."""
        num_experts = routing.scores.shape[1]
        stops = np.bincount(routing.experts.flatten().cpu().numpy(), minlength=num_experts).cumsum().tolist()
        room = self.scratch.empty(stops[-1], read_architecture(self.reader.checkpoint).moe_intermediate_size)
        return [room[start:stop] for start, stop in pairwise([0, *stops])]

    def _take_off(self, residuals: tuple[Tensor, ...], expert: _Expert) -> None:
        """Take each of an expert's outputs off the residual f32 [T, K] that it belongs to."""
        tokens = expert.routed.tokens
        for left, output in zip(residuals, expert.outputs, strict=True):
            self.scratch.subtract(left, tokens, output)

    def _module(self, expert: int, projection: str) -> str:
        return f"{self.mlp}.experts.{expert}.{projection}"

    def _read(self, module: str) -> _Weight:
        found = self.reader.read_source(module)
        source = Bf16Weight(found.view(torch.uint16).numpy()) if isinstance(found, Tensor) else found
        values = exact_weight(found).to(self.device).decode()
        if self.exponents is not None and self._scale is not None and not module.endswith(DOWN):
            source = divide_columns(source, self.exponents, name=module)
            values /= self._scale
        return _Weight(module, source, values)

    def _global_scale(self, weights: Sequence[_Weight]) -> tuple[Magnitude, float]:
        """Return the magnitude and the global scale that weights share."""
        quantizer = create_native_quantizer("mse", "cpu")  # which device measures a weight makes no difference
        magnitudes = [quantizer.measure(weight.source, name=weight.module) for weight in weights]
        shared = magnitudes[0]
        for magnitude in magnitudes[1:]:
            shared = shared.merge(magnitude)
        return shared, quantizer.global_scale(shared, is_int4=isinstance(weights[0].source, Int4Weight))

    def _by_mse(self, weight: _Weight, magnitude: Magnitude, global_scale: float) -> Nvfp4Weight:
        """Convert a weight by rule `mse`, without data."""
        quantizer = create_native_quantizer("mse", self.device if self.device.startswith("cuda") else "cpu")
        return quantizer.quantize(weight.source, name=weight.module, magnitude=magnitude, global_scale=global_scale)[0]

    def _decoded(self, weight: Nvfp4Weight) -> LinearLayer:
        packed, scales = torch.as_tensor(weight.packed), torch.as_tensor(weight.block_scales)
        return LinearLayer(nvfp4_weight(packed, scales, weight.global_scale)).to(self.device)

    def _sample(self, num_experts: int) -> tuple[Tensor, Tensor]:
        """Return rows f32 [n, K] of gate and up of some experts, evenly spread, and the global scale [n] of each."""
        chosen = np.unique(np.linspace(0, num_experts - 1, min(num_experts, SAMPLED_EXPERTS)).round().astype(int))
        count = max(1, SAMPLED_ROWS // (2 * chosen.size))
        rows: list[Tensor] = []
        scales: list[Tensor] = []
        for expert in chosen.tolist():
            weights = [self._read(self._module(expert, kind)) for kind in (GATE, UP)]
            _, global_scale = self._global_scale(weights)
            for weight in weights:
                rows.append(weight.values[:: -(-weight.values.shape[0] // count)].clone())
                scales.append(torch.full((rows[-1].shape[0],), global_scale, device=self.device))
        return torch.cat(rows), torch.cat(scales)

    def _prepare_gate_up(self, moments: Moments, num_experts: int) -> tuple[float | None, Ridge, _ToCodes]:
        """Choose the correction and the shrinkage of a layer; returns them, and how gate or up becomes codes."""
        rows, scales = self._sample(num_experts)
        step = max(1, rows.shape[0] // SHRINKAGE_ROWS)
        few = rows[::step] / scales[::step, None]
        gram = rows.T @ rows
        del rows
        kernel = kernel_for(self.device)
        shrinkage = choose_shrinkage(moments, few, 1.0, kernel) if self.is_varied else None
        if shrinkage is None:
            return None, Ridge(None, 0.0), lambda weights: [self._by_mse(*weight) for weight in weights]
        correction, ridge = moments.correction(gram)
        del gram
        curvature = make_curvature(moments.form(), shrinkage)

        def to_codes(weights: list[tuple[_Weight, Magnitude, float]]) -> list[Nvfp4Weight]:
            targets = torch.cat([weight.values / global_scale for weight, _, global_scale in weights])
            if ridge.strength is not None:
                targets += targets @ correction
            codes, found, done = round_gptq(targets, 1.0, curvature, kernel), list[Nvfp4Weight](), 0
            for weight, _, global_scale in weights:
                rows = slice(done, done + weight.values.shape[0])
                found.append(Nvfp4Weight(codes.packed[rows], codes.block_scales[rows], global_scale))
                done = rows.stop
            return found

        return shrinkage, ridge, to_codes

    def _convert_group(
        self, group: range, inputs: LayerInputs, to_codes: _ToCodes, inner: Sequence[Tensor]
    ) -> list[_Expert]:
        """Convert gate and up of some experts, and compute what each makes of its tokens, in its room of `inner`."""
        pairs = [[self._read(self._module(number, kind)) for kind in (GATE, UP)] for number in group]
        scales = [self._global_scale(pair) for pair in pairs]
        codes = to_codes([(weight, *scale) for pair, scale in zip(pairs, scales, strict=True) for weight in pair])
        found: list[_Expert] = []
        for place, number in enumerate(group):
            gate, up = codes[2 * place : 2 * place + 2]
            by_mse = [self._by_mse(weight, *scales[place]) for weight in pairs[place]]
            found.append(self._compute(number, gate, up, pairs[place], by_mse, inputs, inner[number]))
        return found

    def _compute(
        self,
        number: int,
        gate: Nvfp4Weight,
        up: Nvfp4Weight,
        source: list[_Weight],
        by_mse: list[Nvfp4Weight],
        inputs: LayerInputs,
        inner: Tensor,
    ) -> _Expert:
        """Compute what an expert makes of its tokens, by these codes of gate and up, in the source, and by a rule."""
        tokens, p = inputs.routing.tokens_of(number)
        down = self._read(self._module(number, DOWN))
        exact = [LinearLayer(DenseWeight(weight.values)) for weight in (*source, down)]
        mlp = Mlp(self._decoded(gate), self._decoded(up), exact[2])
        by_mse.append(self._by_mse(down, *self._global_scale([down])))
        others = (Mlp(*exact), Mlp(*map(self._decoded, by_mse)))
        shape = (3, tokens.shape[0], inputs.x.shape[1])
        outputs = self.scratch.empty(shape[0] * shape[1], shape[2]).view(shape)
        for rows in self.scratch.pieces(tokens.shape[0]):
            x, weights = self.scratch.take(inputs.x, tokens[rows]), p[rows, None]
            inner[rows] = mlp.inner(x) * weights
            outputs[0, rows] = mlp.outer(inner[rows])
            outputs[1, rows], outputs[2, rows] = others[0](x) * weights, others[1](x) * weights
        return _Expert(gate, up, _Routed(tokens, inner), outputs)

    def _convert_down(
        self, number: int, expert: _Routed, inputs: LayerInputs, residual_TK: Tensor
    ) -> tuple[float | None, float | None]:
        """Convert down of an expert, and take what that changes off the residual; returns shrinkage and ridge."""
        down = self._read(self._module(number, DOWN))
        magnitude, global_scale = self._global_scale([down])
        tokens, inner = expert.tokens, expert.inner
        if (decided := self._decide_down(expert, down, global_scale, inputs, residual_TK)) is None:
            shrinkage, strength = None, None
            codes = self._by_mse(down, magnitude, global_scale)
        else:
            shrinkage, strength, target, curvature = decided
            kernel = kernel_for(self.device, threads=self.workers)
            codes = round_gptq(target, global_scale, curvature, kernel)
        self.write(self._module(number, DOWN), codes)
        change = LinearLayer(DenseWeight(self._decoded(codes).weight.decode() - down.values))
        for rows in self.scratch.pieces(tokens.shape[0]):
            self.scratch.subtract(residual_TK, tokens[rows], change.weight.linear(inner[rows]))
        return shrinkage, strength

    def _decide_down(
        self, expert: _Routed, down: _Weight, global_scale: float, inputs: LayerInputs, residual_TK: Tensor
    ) -> tuple[float, float | None, Tensor, Curvature] | None:
        """Return shrinkage, ridge, target f32 [K, I] and curvature of a down projection; None for no correction."""
        fitted = int((expert.tokens < inputs.halves.shape[0]).sum())  # tokens are in order
        tokens, inner = expert.tokens[:fitted], expert.inner[:fitted]
        if fitted < MIN_TOKENS or not self.is_varied:
            return None
        moments = Moments.start(inner.shape[1], residual_TK.shape[1], device=self.device)
        for rows in self.scratch.pieces(fitted):
            few = tokens[rows]
            left = self.scratch.take(residual_TK, few)
            moments.add(inner[rows], left, inputs.token_weights[few], inputs.halves[few])
        kernel = kernel_for(self.device, threads=self.workers)
        shrinkage = choose_shrinkage(moments, down.values, global_scale, kernel)
        if shrinkage is None:
            return None
        correction, ridge = moments.correction()
        return shrinkage, ridge.strength, down.values + correction, make_curvature(moments.form(), shrinkage)
