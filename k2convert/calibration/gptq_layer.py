"""One MoE layer converted with gptq: its experts are rounded so that what comes out is what the INT4 layer gave.

    x    the MLP's input in the converted model; x - missing is what the INT4 model has there
    R    what the converted model still lacks after the layer, while experts are converted one after the other

Gate and up see the same input, so they share one second moment and one factor. A down projection has its own: its
inputs are the expert's inner activations, times the router's weight p, as the converted gate and up make them. Each one
is corrected for what all experts before it left over. The MLP that every token takes comes last, with p = 1: shared
experts, or a dense layer's MLP without any others.

Gate and up of the experts are assigned to the devices in turn; the first one has everything else. What has a row for
each token is in files if that is a CPU (layer_tokens.py). Large matrices are cut into tiles (gptq/hessian.py), and sums
are made in a fixed order, so the number of workers does not change them. A GPU multiplies in TF32 while it rounds gate
and up, as in the streams, and in FP32 for everything that is summed over tokens, factored or solved.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial, reduce
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.calibration.layer_files import Write
from k2convert.calibration.layer_tokens import LayerInputs, Scratch, output_errors
from k2convert.forward.decoder import allowing_tf32
from k2convert.forward.moe import Mlp, run_in_order
from k2convert.forward.weights import DenseWeight, LinearLayer, WeightReader, exact_weight, nvfp4_weight
from k2convert.models import read_architecture
from k2convert.models.names import WEIGHT, WEIGHT_PACKED
from k2convert.quantize.formats.bf16 import Bf16Weight, Magnitude, SourceWeight
from k2convert.quantize.gptq.device_kernel import kernel_for
from k2convert.quantize.gptq.hessian import ONE_THREAD, DampedHessian, Team, cut, damp_hessian, identity_hessian
from k2convert.quantize.gptq.moments import CrossMoments, Moments, WeightedTokens, correct
from k2convert.quantize.gptq.rounding import SWEEPS, Codes, RoundingKernel, choose_damping, round_gptq
from k2convert.quantize.kernels import cpu
from k2convert.quantize.quantizer import NativeQuantizer
from k2convert.records.calibration import MIN_TOKENS, GptqLayer, OutputErrors, SharedDown

SAMPLED_EXPERTS: Final = 16
SAMPLED_ROWS: Final = 64
"""The damping of gate and up is chosen by these rows of them, of these experts."""

GROUPED_EXPERTS: Final = 8
"""Experts whose gate and up a GPU rounds together."""

_TOKENS: Final = 256  # that a thread computes at a time

GATE = "gate_proj"
UP = "up_proj"
DOWN = "down_proj"


@dataclass(frozen=True, slots=True, eq=False)
class SourceProjection:
    """One projection: as the source has it, with smoothing, and its values f32 [N, K] on a device."""

    module: str
    source: SourceWeight
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """The MLPs of the block `mlp`: its routed experts, then the module `shared` that every token takes, if converted.

    The columns of gate and up are divided by 2**exponents, int8 [K], if given.
    """

    reader: WeightReader
    mlp: str
    num_experts: int
    shared: str | None
    exponents: NDArray[np.int8] | None

    @property
    def count(self) -> int:
        """The number of MLPs that are converted."""
        return self.num_experts + (self.shared is not None)

    def module(self, number: int, projection: str) -> str:
        """Return the name of a projection's module, by the number of its MLP."""
        if number < self.num_experts:
            return f"{self.mlp}.experts.{number}.{projection}"
        return f"{self.shared}.{projection}"

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shapes [N, K] of all projections in the order in which they are converted."""
        architecture = read_architecture(self.reader.checkpoint)
        hidden = architecture.hidden_size
        widths = [architecture.moe_intermediate_size] * self.num_experts
        if self.shared is not None:
            gate = self.module(self.num_experts, GATE)
            parameter = WEIGHT_PACKED if self.reader.has(f"{gate}.{WEIGHT_PACKED}") else WEIGHT
            widths.append(self.reader.info(f"{gate}.{parameter}").shape[0])
        inner = {self.module(n, kind): (width, hidden) for n, width in enumerate(widths) for kind in (GATE, UP)}
        return inner | {self.module(n, DOWN): (hidden, width) for n, width in enumerate(widths)}

    def read(self, expert: int, projection: str, device: str) -> SourceProjection:
        """Read a projection; raises what reading the source raises, FormatError if it cannot be divided exactly."""
        module = self.module(expert, projection)
        stored = self.reader.read_source(module)
        source = Bf16Weight(stored.view(torch.uint16).numpy()) if isinstance(stored, Tensor) else stored
        values = exact_weight(stored).to(device).decode()
        if self.exponents is not None and projection != DOWN:
            source = source.divide_columns(self.exponents, name=module)
            values /= torch.exp2(torch.as_tensor(self.exponents).to(values))
        return SourceProjection(module, source, values)


def shared_scale(weights: Sequence[SourceProjection]) -> float:
    """Return the global scale that projections share."""
    quantizer = NativeQuantizer("mse")
    magnitudes = [quantizer.measure(weight.source, name=weight.module) for weight in weights]
    return quantizer.global_scale(reduce(Magnitude.merge, magnitudes))


def by_mse(weight: SourceProjection, global_scale: float) -> Codes:
    """Convert a projection by rule `mse`, without data; the codes are on the projection's device."""
    converted = cpu.convert(weight.source, rule="mse", global_scale=global_scale).weight
    packed, scales = (torch.as_tensor(p).to(weight.values.device) for p in (converted.packed, converted.block_scales))
    return Codes(packed, scales, global_scale)


def decoded(codes: Codes) -> LinearLayer:
    """Return a converted projection as a layer, its inputs not quantized."""
    return LinearLayer(nvfp4_weight(codes.packed, codes.block_scales, codes.global_scale))


def round_together(
    weights: Sequence[tuple[SourceProjection, float]],
    hessian: DampedHessian,
    kernel: RoundingKernel,
    *,
    sweeps: int = SWEEPS,
) -> list[Codes]:
    """Round projections that read one input, each with its global scale."""
    targets = torch.cat([weight.values / global_scale for weight, global_scale in weights])
    codes = round_gptq(targets, 1.0, hessian, kernel, sweeps=sweeps)
    parts = list[Codes]()
    done = 0
    for weight, global_scale in weights:
        stop = done + weight.values.shape[0]
        parts.append(codes.rows(done, stop, global_scale))
        done = stop
    return parts


@dataclass(frozen=True, slots=True, eq=False)
class _Routed:
    """An expert's tokens int64 [t], ascending, the router's weights p f32 [t], and the input f32 [t, I] of down.

    The first `fitted` of them are fitted to; errors are measured on those from `first_measured` on.
    """

    tokens: Tensor
    p: Tensor
    inner: Tensor
    fitted: int
    first_measured: int


@dataclass(frozen=True, slots=True, eq=False)
class _GateUp:
    """Gate and up of an expert, converted, and what comes out of the expert.

    codes       of gate and of up
    output      what the source's down makes of their inner activations, f32 [t, K]
    of_source   what the expert gives in the source for the last m of its tokens, f32 [m, K]
    of_mse      the same by rule `mse`
    """

    codes: list[Codes]
    output: Tensor
    of_source: Tensor
    of_mse: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Down:
    """A down projection before it is rounded. Without moments and Hessian, rule `mse` converts it."""

    source: SourceProjection
    global_scale: float
    moments: Moments | None = None
    hessian: DampedHessian | None = None


@dataclass(slots=True)
class LayerConverter:
    """Converts the MLPs of a layer.

    `write` gets every projection, `advance` the share of gates and ups that is done, and that of downs.

    `scratch` gives the tensors that have a row for each token, on the first device.
    If the tokens are not `is_varied` they count as none: every MLP is converted by rule `mse`.
    """

    weights: MlpWeights
    devices: tuple[str, ...]
    scratch: Scratch
    team: Team
    is_varied: bool
    write: Write
    advance: Callable[[float, float], None]

    @property
    def device(self) -> str:
        """The device of everything that is not assigned."""
        return self.devices[0]

    @torch.no_grad()
    def convert(self, inputs: LayerInputs) -> tuple[GptqLayer, Tensor]:
        """Convert all MLPs; returns what was decided, and the residual f32 [T, K] after the layer.

        Raises what reading the source raises.
        """
        residual_TK = inputs.residual
        moments = inputs.gate_up
        inputs.gate_up = None  # 0.4 GB for K2
        assert moments is not None
        if (exponents := self.weights.exponents) is not None:
            factors_K = torch.exp2(torch.as_tensor(exponents).to(moments.sums))
            for rows in self.scratch.pieces(inputs.x.shape[0]):
                inputs.x[rows].mul_(factors_K)
            moments.scale(torch.as_tensor(exponents))
        hessian = self._prepare_gate_up(moments)
        damping = None if hessian is None else hessian.damping
        del moments
        first = inputs.first_measured
        exact_mK, mse_mK = (self.scratch.copy(residual_TK[first:]) for _ in range(2))
        experts = self._route(inputs)
        with allowing_tf32(self.devices), closing(self._gates_and_ups(experts, inputs, hessian)) as converted:
            for number, gate_up in enumerate(converted):
                tokens = experts[number].tokens
                for kind, codes in zip((GATE, UP), gate_up.codes, strict=True):
                    self.write(self.weights.module(number, kind), codes.weight())
                self.scratch.subtract(residual_TK, tokens, gate_up.output)
                measured = tokens[experts[number].first_measured :] - first
                self.scratch.subtract(exact_mK, measured, gate_up.of_source)
                self.scratch.subtract(mse_mK, measured, gate_up.of_mse)
                self.advance((number + 1) / len(experts), 0.0)
        inherited, mse = (output_errors(left, inputs, self.scratch) for left in (exact_mK, mse_mK))
        del exact_mK, mse_mK, hessian
        dampings: list[float | None] = []
        ridges: list[float | None] = []
        calls = (partial(self._prepare_down, number, expert, inputs) for number, expert in enumerate(experts))
        with run_in_order(lambda call: call(), calls, workers=self.team.workers) as downs:
            for number, down in enumerate(downs):
                dampings.append(None if down.hessian is None else down.hessian.damping)
                ridges.append(self._convert_down(number, down, experts[number], inputs, residual_TK))
                self.advance(1.0, (number + 1) / len(experts))
        fitted, held_out = map(OutputErrors, inherited, mse, output_errors(residual_TK[first:], inputs, self.scratch))
        num_experts = self.weights.num_experts
        decided = GptqLayer(
            shrinkage=damping,
            down_ridges=tuple(ridges[:num_experts]),
            down_shrinkages=tuple(dampings[:num_experts]),
            shared_down=None if self.weights.shared is None else SharedDown(ridges[-1], dampings[-1]),
            fitted=fitted,
            held_out=held_out if inputs.halves.shape[0] < residual_TK.shape[0] else None,
        )
        return decided, residual_TK

    def _route(self, inputs: LayerInputs) -> list[_Routed]:
        """Sort the tokens by expert, and make space for the inner activations."""
        chosen = inputs.routing.experts
        num_experts = self.weights.num_experts
        order = torch.argsort(chosen.flatten(), stable=True)
        tokens = order // max(chosen.shape[1], 1)
        p = inputs.routing.weights.flatten()[order]
        ends = [inputs.x.shape[0], inputs.halves.shape[0], inputs.first_measured]
        host = chosen.cpu().numpy()
        counts = [np.bincount(host[:end].ravel(), minlength=num_experts).tolist() for end in ends]
        widths = [shape[1] for name, shape in self.weights.shapes().items() if name.endswith(DOWN)]
        inner = self.scratch.empty(order.shape[0], widths[0])
        routed: list[_Routed] = []
        start = 0
        for count, fitted, first_measured in zip(*counts, strict=True):
            own = slice(start, start + count)
            routed.append(_Routed(tokens[own], p[own], inner[own], fitted, first_measured))
            start = own.stop
        if self.weights.shared is not None:
            every = torch.arange(ends[0], device=inputs.x.device)
            inner = self.scratch.empty(ends[0], widths[-1])
            routed.append(_Routed(every, p.new_ones(ends[0]), inner, ends[1], ends[2]))
        return routed

    def _gates_and_ups(
        self, experts: list[_Routed], inputs: LayerInputs, hessian: DampedHessian | None
    ) -> Generator[_GateUp]:
        """Convert gate and up of every expert, some experts at a time on each device; yields them in order."""
        copies = [None if hessian is None else hessian.to(device) for device in self.devices]
        size = 1 if self.device == "cpu" else GROUPED_EXPERTS
        groups = (range(start, min(start + size, len(experts))) for start in range(0, len(experts), size))
        assigned = ((group, number % len(copies)) for number, group in enumerate(groups))
        calls = (
            partial(self._convert_group, group, experts, inputs, copies[on], self.devices[on]) for group, on in assigned
        )
        with run_in_order(lambda call: call(), calls, workers=self.team.workers) as results:
            for group in results:
                yield from group

    def _kernel(self, device: str, threads: int = 1) -> RoundingKernel:
        return kernel_for(device, threads, self.team.check_stop)

    def _sample(self) -> Tensor:
        """Return rows f32 [n, K] of gate and up of some experts, evenly spread, in units of their global scales.

        Without experts they are the dense MLP's.
        """
        num_experts = max(self.weights.num_experts, 1)
        chosen = np.unique(np.linspace(0, num_experts - 1, min(num_experts, SAMPLED_EXPERTS)).round().astype(int))
        count = max(1, SAMPLED_ROWS // (2 * chosen.size))
        rows: list[Tensor] = []
        for expert in chosen.tolist():
            weights = [self.weights.read(expert, kind, self.device) for kind in (GATE, UP)]
            global_scale = shared_scale(weights)
            rows += [weight.values[:: -(-weight.values.shape[0] // count)] / global_scale for weight in weights]
        return torch.cat(rows)

    def _prepare_gate_up(self, moments: Moments) -> DampedHessian | None:
        """Return the damped Hessian of a layer's gate and up, None for rule `mse`."""
        moments.complete(self.team)
        if not self.is_varied:
            return None
        rows = self._sample()
        damping = choose_damping(moments, rows, 1.0, self._kernel(self.device), self.team)
        if damping is None:
            return None
        return damp_hessian(moments.hessian(), damping, self.team)

    def _convert_group(
        self, group: range, experts: list[_Routed], inputs: LayerInputs, hessian: DampedHessian | None, device: str
    ) -> list[_GateUp]:
        """Convert gate and up of some experts on a device, and compute what each makes of its tokens."""
        inner: list[tuple[SourceProjection, float]] = []
        downs: list[tuple[SourceProjection, float]] = []
        for number in group:
            pair = [self.weights.read(number, kind, device) for kind in (GATE, UP)]
            scale = shared_scale(pair)
            inner += [(weight, scale) for weight in pair]
            down = self.weights.read(number, DOWN, device)
            downs.append((down, shared_scale([down])))
        without_data = self._without_data(inner, device)
        codes = without_data
        if hessian is not None:
            codes = round_together(inner, hessian, self._kernel(device))
        of_mse = self._without_data(downs, device)
        gate_ups: list[_GateUp] = []
        for index, number in enumerate(group):
            own = slice(2 * index, 2 * index + 2)
            source = [weight.values for weight, _ in (*inner[own], downs[index])]
            mse = Mlp(*map(decoded, (*without_data[own], of_mse[index])))
            gate_ups.append(self._compute(experts[number], codes[own], source, mse, inputs))
        return gate_ups

    def _without_data(self, weights: list[tuple[SourceProjection, float]], device: str) -> list[Codes]:
        """Convert projections with one input without data: INT4 as it is by rule `mse`, smoothed with gptq's scales.

        A GPU has gptq's scales for both.
        """
        is_smoothed = any(weight.source.channel_exponents is not None for weight, _ in weights)
        if device == "cpu" and not is_smoothed:
            return [by_mse(*weight) for weight in weights]
        columns = weights[0][0].values.shape[1]
        return round_together(weights, identity_hessian(columns, device=device), self._kernel(device), sweeps=0)

    def _compute(
        self, expert: _Routed, codes: list[Codes], source: list[Tensor], mse: Mlp, inputs: LayerInputs
    ) -> _GateUp:
        """Compute what an expert makes of its tokens, by these codes of gate and up, in the source, and by a rule."""
        gate, up = codes
        exact = Mlp(*(LinearLayer(DenseWeight(values)) for values in source))
        mlp = Mlp(decoded(gate), decoded(up), exact.down)
        device = source[0].device
        output = self.scratch.empty(expert.tokens.shape[0], inputs.x.shape[1])
        for rows in self.scratch.pieces(expert.tokens.shape[0]):
            x = self.scratch.gather(inputs.x, expert.tokens[rows]).to(device)
            activations = mlp.inner(x) * expert.p[rows, None].to(device)
            expert.inner[rows] = activations
            output[rows] = mlp.outer(activations)
        last = slice(expert.first_measured, None)
        x = self.scratch.gather(inputs.x, expert.tokens[last]).to(device)
        p = expert.p[last, None].to(device)
        of_source, of_mse = ((other(x) * p).to(self.device) for other in (exact, mse))
        return _GateUp(codes, output, of_source, of_mse)

    def _prepare_down(self, number: int, expert: _Routed, inputs: LayerInputs) -> _Down:
        """Do what converting a down projection needs and no other expert changes."""
        down = self.weights.read(number, DOWN, self.device)
        global_scale = shared_scale([down])
        if expert.fitted < MIN_TOKENS or not self.is_varied:
            return _Down(down, global_scale)
        is_last = number == self.weights.num_experts  # the others are prepared beside each other
        team = self.team if is_last else ONE_THREAD
        moments = Moments.start(expert.inner.shape[1], device=self.device)
        for rows in self.scratch.pieces(expert.fitted):
            moments.add(expert.inner[rows], _halves(expert.tokens[rows], inputs))
        moments.complete(team)
        damping = choose_damping(moments, down.values, global_scale, self._kernel(self.device), team)
        if damping is None:
            return _Down(down, global_scale)
        return _Down(down, global_scale, moments, damp_hessian(moments.hessian(), damping, team))

    def _convert_down(
        self, number: int, down: _Down, expert: _Routed, inputs: LayerInputs, residual_TK: Tensor
    ) -> float | None:
        """Convert down of an expert, and take what that changes off the residual; returns the ridge's strength."""
        weight = down.source
        strength = None
        if down.moments is None or down.hessian is None:
            codes = by_mse(weight, down.global_scale)
        else:
            residual = CrossMoments.start(expert.inner.shape[1], residual_TK.shape[1], device=self.device)
            for rows in self.scratch.pieces(expert.fitted):
                left = self.scratch.gather(residual_TK, expert.tokens[rows])
                halves = _halves(expert.tokens[rows], inputs)
                residual.add(expert.inner[rows], left, halves, self.team)
            correction, strength = correct(down.moments, residual, self.team)
            target = weight.values
            if correction is not None:
                target = weight.values + correction
            kernel = self._kernel(self.device, threads=self.team.workers)
            codes = round_gptq(target, down.global_scale, down.hessian, kernel)
        self.write(self.weights.module(number, DOWN), codes.weight())
        change = DenseWeight(decoded(codes).weight.decode() - weight.values)

        def update(rows: slice) -> None:
            self.scratch.subtract(residual_TK, expert.tokens[rows], change.linear(expert.inner[rows]))

        self.team.run([partial(update, rows) for rows in cut(expert.tokens.shape[0], _TOKENS, residual_TK)])
        return strength


def _halves(tokens: Tensor, inputs: LayerInputs) -> tuple[WeightedTokens, WeightedTokens]:
    return WeightedTokens.by_halves(inputs.token_weights[tokens], inputs.halves[tokens])
