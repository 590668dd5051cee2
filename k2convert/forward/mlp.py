"""One MLP of a MoE block. Its weights stay packed until they are used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k2convert.forward.activations import quantize_activations
from k2convert.forward.weights import LinearLayer

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(silu(gate(x)) * up(x)), inputs quantized if a layer has an input scale."""

    gate: LinearLayer
    up: LinearLayer
    down: LinearLayer

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Map f32 [T, hidden] to f32 [T, hidden]."""
        return self._run(x_TK, 0)

    def on_both_inputs(self, x_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs on FP32 inputs and on quantized ones; each weight is decoded once."""
        tokens = x_TK.shape[0]
        outputs = self._run(torch.cat([x_TK, x_TK]), tokens)
        return outputs[:tokens], outputs[tokens:]

    def _run(self, x_TK: Tensor, first: int) -> Tensor:
        """Quantize the inputs of the tokens from `first` on."""
        hidden = torch.nn.functional.silu(_linear(x_TK, self.gate, first)) * _linear(x_TK, self.up, first)
        return _linear(hidden, self.down, first)


def _linear(x_TK: Tensor, layer: LinearLayer, first: int) -> Tensor:
    if layer.input_scale is not None:
        x_TK = torch.cat([x_TK[:first], quantize_activations(x_TK[first:], layer.input_scale)])
    return layer.weight.linear(x_TK)
