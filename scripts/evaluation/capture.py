"""Writes real hidden states for `k2convert validate --hidden-states`: the MoE blocks' inputs on a text."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from k2convert.forward.hidden_states import TENSOR_NAME
from scripts.evaluation.models import build_model, source_mlps


@torch.inference_mode()
def capture(source: Path, windows: Tensor, out: Path) -> Path:
    """Run the INT4 model on ids [W, T] and write the inputs of every MoE block, f32 [W * T, hidden]."""
    model = build_model(source)
    model.install(source_mlps(source))
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.setdefault(name, []).append(inputs[0].flatten(0, 1))

    for number, layer in enumerate(model.network.model.layers):  # type: ignore[union-attr, arg-type]
        if hasattr(layer.mlp, "experts"):
            layer.mlp.register_forward_pre_hook(partial(keep, TENSOR_NAME.format(layer=number)))
    for window in windows:
        model.logits(window.unsqueeze(0))
    save_file({name: torch.cat(parts) for name, parts in seen.items()}, out)
    return out
