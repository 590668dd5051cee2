"""Where the mean squares of a layer are used: where they have less error than rule mse on tokens that are kept out."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from statistics_makers import layers_by_pass
from torch import Tensor

from k2convert.calibration.accumulate import token_weights
from k2convert.calibration.text import held_out, held_out_tokens
from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward.decoder import DecoderLayer, embed
from k2convert.forward.weights import WeightReader, exact_weight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import dequantize_nvfp4
from k2convert.quantize.quantizer import NativeQuantizer
from k2convert.quantize.rules.search_bf16 import block_importance
from scripts.evaluation.measure import encode
from tests.forward.observers import Seen

pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")


@pytest.fixture(scope="module")
def halves(trained: Path) -> tuple[Tensor, Tensor]:
    """Windows of 128 tokens of the two texts that k2-tiny knows."""
    text = (trained / "eval.txt").read_text(encoding="utf-8")
    found = [encode(trained, part, tokens=1024).view(-1, 128) for part in (text, text[-60_000:])]
    return found[0], found[1]


def straightforward(folder: Path, ids: Tensor, number: int) -> list[int]:
    """Which projections of a layer gain, by whole weights with their own global scales and all held-out tokens."""
    away = torch.as_tensor(held_out_tokens((ids.shape[0], ids.shape[1])))
    errors = np.zeros((2, 2))
    with closing(WeightReader(open_checkpoint(folder))) as reader:
        hidden = embed(reader, ids)
        for layer in range(number + 1):
            seen = Seen()
            hidden = DecoderLayer(reader, layer).run(hidden, seen)

        def add(place: int, module: str, x: Tensor, weights: Tensor, fits: Tensor) -> None:
            source = reader.read_source(module)
            assert isinstance(source, Int4Weight)
            mean_square = (weights[fits, None] * x[fits] ** 2).mean(dim=0).float().numpy()
            for rule, importance in (("mse", None), ("imatrix", block_importance(mean_square))):
                quantizer = NativeQuantizer(rule)
                magnitude = quantizer.measure(source, name=module)
                scale = quantizer.global_scale(magnitude)
                codes, _ = quantizer.quantize(
                    source, name=module, magnitude=magnitude, global_scale=scale, importance=importance
                )
                error = torch.as_tensor(dequantize_nvfp4(codes)) - exact_weight(source).decode().double()
                lost = weights[~fits, None] * (x[~fits] @ error.T) ** 2
                errors[place, int(rule == "imatrix")] += float(lost.sum())

        x = seen.inputs[0].double()
        weights = token_weights(seen.outputs[0])
        for expert, tokens, p, inner, _ in seen.experts:
            stem = f"model.layers.{number}.mlp.experts.{expert}"
            if expert is None or int((~away[tokens]).sum()) < 64:
                continue
            for name in ("gate_proj", "up_proj"):
                add(0, f"{stem}.{name}", x, weights, ~away)
            add(1, f"{stem}.down_proj", inner.double(), weights[tokens] * p.double() ** 2, ~away[tokens])
    return [int(imatrix < mse) for mse, imatrix in errors]


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_gain_on_held_out_windows_decides(trained: Path, halves: tuple[Tensor, Tensor], is_foreign: bool) -> None:
    """On the same text imatrix gains in each layer of k2-tiny. On windows of its other text it loses in down."""
    ids = halves[0].clone()
    is_held_out = torch.as_tensor(held_out(8))
    if is_foreign:
        ids[is_held_out] = halves[1][is_held_out]
    _, layers = layers_by_pass(trained, ids, num_layers=2, chunk=8)
    found = [layer.imatrix.tolist() for layer in layers if layer.imatrix is not None]
    assert found[1] == straightforward(trained, ids, 1)
    assert found[1][1] == (not is_foreign)


def test_what_nothing_can_be_learned_from_is_not_used(trained: Path, halves: tuple[Tensor, Tensor]) -> None:
    """Few held-out tokens decide nothing, and a text that repeats itself would always be right about itself."""
    few = halves[0][:1]
    repeated = halves[0][:1, :8].repeat(8, 16)
    for ids in (few, repeated):
        _, (layer,) = layers_by_pass(trained, ids, num_layers=1)
        assert layer.without_imatrix == ("gate_up", "down")


def test_one_window_is_held_out_of_sixteen_and_a_part_of_one() -> None:
    assert held_out_tokens((1, 8)).tolist() == [False] * 6 + [True] * 2
    assert held_out_tokens((2, 3)).tolist() == [False] * 3 + [True] * 3
    for windows in (3, 16, 40):
        found = held_out_tokens((windows, 5)).reshape(windows, 5)
        assert (found == held_out(windows)[:, None]).all()
        assert found.any()
