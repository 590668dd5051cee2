"""Whole models by transformers: the logits of a checkpoint."""

from pathlib import Path

import torch
from torch import Tensor

from k2convert.checkpoint.index import open_checkpoint
from scripts.evaluation.models import (
    EvaluatedModel,
    Mlps,
    build_model,
    converted_mlps,
    source_mlps,
    without_input_scales,
)


def is_int4(folder: Path) -> bool:
    return any(name.endswith(".weight_shape") for name in open_checkpoint(folder).tensors)


def mlps_of(folder: Path, *, w4a4: bool) -> Mlps:
    """Every MLP of a checkpoint, decoded to FP32, with its input scales for W4A4."""
    if is_int4(folder):
        return source_mlps(folder)
    mlps = converted_mlps(folder)
    return mlps if w4a4 else without_input_scales(mlps)


def whole_model(folder: Path, *, w4a4: bool = False) -> EvaluatedModel:
    """transformers' own network with a checkpoint's weights: attention, norms, routers and head are its own too."""
    model = build_model(folder)
    model.install(mlps_of(folder, w4a4=w4a4))
    return model


@torch.inference_mode()
def logits_of(folder: Path, ids: Tensor, *, w4a4: bool = False) -> Tensor:
    """Logits f32 [W, T, V]."""
    return whole_model(folder, w4a4=w4a4).logits(ids)
