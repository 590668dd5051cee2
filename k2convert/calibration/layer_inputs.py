"""What the tokens of a text bring to a layer that rule gptq converts, and the error of the layer's outputs on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from k2convert.calibration.scratch import Scratch
from k2convert.forward.moe import Routing
from k2convert.quantize.gptq.moments import Moments

_CHUNK_ROWS: Final = 256
_NOISE: Final = 1e-12  # FP32 sums in another order: there is nothing before the first MoE layer


@dataclass(slots=True, eq=False)
class LayerInputs:
    """What T tokens bring to a MoE layer, all on one device; smoothing is not in them yet.

    `x` f32 [T, K] is the MLP's input in the converted model, `residual` f32 [T, K] what the model lacks after the layer
    without routed experts. `token_weights` f64 [T] are 1 / ||h||^2. `halves` uint8 [F] deals the first F tokens to two
    halves. Everything is fitted to these; the others are only measured. `gate_up` has their moments of x, and of what x
    lacks, with these weights.
    """

    x: Tensor
    residual: Tensor
    routing: Routing
    token_weights: Tensor
    halves: Tensor
    gate_up: Moments | None

    def take_gate_up(self) -> Moments:
        """Return the moments of gate and up, which are not kept: 0.8 GB for K2."""
        taken, self.gate_up = self.gate_up, None
        assert taken is not None
        return taken


def output_errors(residual_TK: Tensor, inputs: LayerInputs, scratch: Scratch) -> tuple[float, float]:
    """Return the mean of ||R||^2 / ||h||^2 over the tokens that were fitted to, and over the others."""
    end, fitted = residual_TK.shape[0], inputs.halves.shape[0]
    first, second = (_error(residual_TK, inputs, scratch, tokens) for tokens in (range(fitted), range(fitted, end)))
    return first, second


def _error(residual_TK: Tensor, inputs: LayerInputs, scratch: Scratch, tokens: range) -> float:
    total = 0.0
    for start in tokens[::_CHUNK_ROWS]:
        rows = slice(start, min(start + _CHUNK_ROWS, tokens.stop))
        total += float((residual_TK[rows].double().square().sum(dim=1) * inputs.token_weights[rows]).sum())
        scratch.release()
    mean = total / max(len(tokens), 1)
    return mean if mean > _NOISE else 0.0
