"""One MLP of a MoE block. Its weights stay packed until they are used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k2convert.forward.activations import quantize_activations
from k2convert.forward.weights import LinearLayer, WeightReader, exact_weight

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(silu(gate(x)) * up(x)), inputs quantized if a layer has an input scale."""

    gate: LinearLayer
    up: LinearLayer
    down: LinearLayer

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Map f32 [T, hidden] to f32 [T, hidden]."""
        return self.outer(self.inner(x_TK))

    def on_both_inputs(self, x_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs on FP32 inputs and on quantized ones; each weight is decoded once."""
        tokens = x_TK.shape[0]
        outputs = self.outer(self.inner(torch.cat([x_TK, x_TK]), tokens), tokens)
        return outputs[:tokens], outputs[tokens:]

    def inner(self, x_TK: Tensor, first: int = 0) -> Tensor:
        """Return the input f32 [T, I] of down. Inputs of the tokens from `first` on are quantized."""
        gate = torch.nn.functional.silu(_linear(x_TK, self.gate, first), inplace=True)
        return gate.mul_(_linear(x_TK, self.up, first))

    def outer(self, inner_TI: Tensor, first: int = 0) -> Tensor:
        """Return down's output f32 [T, hidden]. Inputs of the tokens from `first` on are quantized."""
        return _linear(inner_TI, self.down, first)


def read_mlp(reader: WeightReader, stem: str, *, device: str = "cpu") -> Mlp:
    """Read the MLP `stem` (a module name without its last part) of an INT4 source; CheckpointError if unusable."""
    exact = (LinearLayer(exact_weight(reader.read_source(f"{stem}.{name}"))) for name in PROJECTIONS)
    return Mlp(*(layer.to(device) for layer in exact))


def _linear(x_TK: Tensor, layer: LinearLayer, first: int) -> Tensor:
    if layer.input_scale is not None:
        x_TK = torch.cat([x_TK[:first], quantize_activations(x_TK[first:], layer.input_scale)])
    return layer.weight.linear(x_TK)
