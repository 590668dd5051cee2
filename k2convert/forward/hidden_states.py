"""Inputs of a MoE block: captured from a model, or synthetic ones of the same shape.

Captured states are a safetensors file with one tensor a layer, `layers.{N}.mlp.input` [tokens, hidden], floating point:
the output of post_attention_layernorm. `scripts/eval capture` writes such a file.

Synthetic states are for machines that cannot run the model. They have what matters for quantization: RMS-normed rows,
the layer's norm weight, a log-normal spread of channels, a few much larger channels, and a mean that is not zero. They
do not depend on the router, so they choose experts more evenly than real text does.
"""

from __future__ import annotations

import zlib
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import CheckpointError, remedy
from k2convert.forward.weights import WeightReader
from k2convert.models.config import text_config

TENSOR_NAME: Final = "layers.{layer}.mlp.input"
CHANNEL_SIGMA: Final = 0.6
OUTLIER_SHARE: Final = 0.003
OUTLIER_FACTOR: Final = 8.0
MEAN_SHARE: Final = 0.3


def load_hidden_states(path: Path, *, layer: int, hidden_size: int, tokens: int) -> Tensor:
    """Read the first `tokens` captured states of a layer as f32 [<= tokens, hidden]; CheckpointError if absent."""
    with remedy("Pass a safetensors file of hidden states, such as `scripts/eval capture` writes."):
        header = read_header(path)
    name = TENSOR_NAME.format(layer=layer)
    info = header.tensors.get(name)
    if info is None:
        raise CheckpointError(
            f"{path}: no tensor {name}. It has {', '.join(sorted(header.tensors)[:3]) or 'none'}; captured hidden "
            f"states are named {TENSOR_NAME}, [tokens, hidden]."
        )
    if len(info.shape) != 2 or info.shape[1] != hidden_size or info.shape[0] == 0:
        raise CheckpointError(f"{path}: {name} has shape {list(info.shape)}, expected [tokens, {hidden_size}].")
    source = Checkpoint(path.parent, "{}", {path.name: header}, header.tensors, {}, ())
    with closing(WeightReader(source)) as reader:
        states = reader.read(name, num_rows=min(tokens, info.shape[0])).float()
    bad = np.flatnonzero(~np.isfinite(states.numpy()).all(axis=1))
    if bad.size:
        raise CheckpointError(
            f"{path}: {name} has NaN or infinite values in {bad.size} of {states.shape[0]} rows, the first is row "
            f"{bad[0]}. Capture the hidden states again, or remove these rows."
        )
    return states


def draw_hidden_states(norm_weight: Tensor, *, config: dict[str, Any], layer: int, tokens: int, seed: int) -> Tensor:
    """Draw f32 [tokens, hidden] for a layer with post_attention_layernorm weight [hidden]; a seed fixes the values."""
    hidden_size = norm_weight.numel()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{layer}".encode()))

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    channels = torch.exp(CHANNEL_SIGMA * gaussian(hidden_size))
    outliers = torch.randperm(hidden_size, generator=generator)[: max(1, round(OUTLIER_SHARE * hidden_size))]
    channels[outliers] *= OUTLIER_FACTOR
    states = (gaussian(tokens, hidden_size) + MEAN_SHARE * gaussian(hidden_size)) * channels
    epsilon = float(text_config(config).get("rms_norm_eps", 1e-6))
    return states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + epsilon) * norm_weight.float()
