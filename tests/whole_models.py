"""Whole models by transformers: logits of a checkpoint, and the scores that follow from them, token by token."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.checkpoint.index import open_checkpoint
from k2convert.evaluation.scores import TokenScores
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
    found = converted_mlps(folder)
    return found if w4a4 else without_input_scales(found)


def whole_model(folder: Path, *, w4a4: bool = False) -> EvaluatedModel:
    """transformers' own network with a checkpoint's weights: attention, norms, routers and head are its own too."""
    model = build_model(folder)
    model.install(mlps_of(folder, w4a4=w4a4))
    return model


@torch.inference_mode()
def logits_of(folder: Path, ids: Tensor, *, w4a4: bool = False) -> Tensor:
    """Logits f32 [W, T, V]."""
    return whole_model(folder, w4a4=w4a4).logits(ids)


def scores_from(reference: Tensor, model: Tensor, ids: Tensor) -> TokenScores:
    """The scores of every predicted token, from all logits at once."""
    log_r, log_m = (logits[:, :-1].double().log_softmax(dim=-1) for logits in (reference, model))
    best = log_r.argmax(dim=-1)
    top5 = log_m.topk(5, dim=-1).indices
    return TokenScores(
        divergence=(log_r.exp() * (log_r - log_m)).sum(dim=-1).numpy(),
        loss=loss_of(log_m, ids),
        reference_loss=loss_of(log_r, ids),
        agrees=(best == log_m.argmax(dim=-1)).numpy(),
        left_top5=(top5 != best[..., None]).all(dim=-1).numpy(),
    )


def loss_of(log_p: Tensor, ids: Tensor) -> NDArray[np.float64]:
    return -log_p.gather(-1, ids[:, 1:, None])[..., 0].numpy()
