"""The inside of layers: as an observer of this package sees it, and as hooks on transformers' network see it."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from whole_models import whole_model

from k2convert.forward.moe import MlpTokens, Routing


class Recorder:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.routings: list[Routing | None] = []
        self.experts: list[MlpTokens] = []
        self.outputs: list[Tensor] = []

    def block(self, x_TK: Tensor, routing: Routing | None) -> None:
        self.inputs.append(x_TK.clone())
        self.routings.append(routing)

    def expert(self, mlp: MlpTokens) -> None:
        self.experts.append(mlp)

    def output(self, h_TK: Tensor) -> None:
        self.outputs.append(h_TK.clone())


class NetworkStates(NamedTuple):
    """Of transformers' network: hidden states before the first and after every layer, inputs of the MLPs, routing."""

    states: list[Tensor]
    inputs: list[Tensor]
    routings: dict[int, tuple[Tensor, Tensor]]
    """The experts and their weights [T, k] of every MoE layer."""


def transformers_states(folder: Path, ids: Tensor) -> NetworkStates:
    """What transformers' network with a checkpoint's weights computes, in FP32."""
    network: Any = whole_model(folder).network
    record = NetworkStates([], [], {})
    for number, layer in enumerate(network.model.layers):
        layer.register_forward_pre_hook(lambda _m, args: record.states.append(args[0]))
        layer.mlp.register_forward_pre_hook(lambda _m, args: record.inputs.append(args[0]))
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate.register_forward_hook(
                lambda _m, _a, output, number=number: record.routings.update({number: (output[2], output[1])})
            )
    network.model.norm.register_forward_pre_hook(lambda _m, args: record.states.append(args[0]))
    with torch.inference_mode():
        network(ids, use_cache=False)
    return record
