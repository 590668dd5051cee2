"""A KV cache in FP8 is transformers' own model with a cache that is rounded to E4M3."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grouped_queries import with_grouped_queries
from torch import Tensor
from whole_models import whole_model

import k2convert
from k2convert.records.evaluation import Evaluation
from scripts.evaluation.measure import scores_from
from scripts.fixture_maker.folder import read_small, write_small

pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")


def rounded(values: Tensor, scale: float) -> Tensor:
    """To the nearest E4M3 times a scale; what is too large becomes 448 times it."""
    return torch.clamp(values / scale, -448, 448).to(torch.float8_e4m3fn).to(torch.float32) * scale


def cache_in_fp8(keys: float, values: float, widths: list[tuple[int, ...]]) -> Any:
    """transformers' cache, which gives back everything rounded. MLA's latent comes first, then the rotary key."""
    from transformers import DynamicCache

    class Cache(DynamicCache):
        def update(self, key: Tensor, value: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
            widths.append((key.shape[-1], value.shape[-1]))
            key, value = super().update(key, value, *args, **options)
            return rounded(key, keys), rounded(value, values)

    return Cache()


@torch.inference_mode()
def logits_with_cache(folder: Path, ids: Tensor, *, keys: float = 1.0, values: float = 1.0) -> tuple[Tensor, set[Any]]:
    widths: list[tuple[int, ...]] = []
    network: Any = whole_model(folder).network
    logits = network(ids, past_key_values=cache_in_fp8(keys, values, widths), use_cache=True).logits
    return logits, set(widths)


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 2048, (4, 64)))
    return path


def evaluated(reference: Path, model: Path, ids: Path, out: Path) -> Evaluation:
    options: dict[str, Any] = {"tokens": 256, "window": 64, "device": "cpu", "kv_cache": "fp8", "out": out}
    return k2convert.evaluate(reference, [model], [ids], **options)


def with_scale(source: Path, folder: Path, scale: float) -> Path:
    """The same weights, with a scale of the cache in every layer, as ModelOpt writes it."""
    checkpoint = read_small(source)
    for tensors in checkpoint.shards.values():
        layers = {name.partition(".self_attn.")[0] for name in tensors if ".self_attn.o_proj." in name}
        tensors |= {f"{layer}.self_attn.k_proj.k_scale": torch.tensor(scale) for layer in layers}
    return write_small(checkpoint, folder)


def assert_as_with_cache(
    model: Path, ids: Path, evaluation: Evaluation, *, cached: tuple[int, int], scale: float
) -> None:
    """The figures follow from transformers' model with a rounded cache, whose entries have these widths."""
    tokens, (row,) = torch.as_tensor(np.load(ids)), evaluation.rows
    expected, widths = logits_with_cache(model, tokens, keys=scale, values=scale)
    assert widths == {cached}
    reference = whole_model(model).logits(tokens)
    scores = scores_from(reference.detach(), expected, tokens)
    assert row.figures.divergence.mean == pytest.approx(float(scores.divergence.mean()), rel=1e-3)
    assert row.figures.divergence.mean > 1e-5
    assert row.figures.top1_agreement == scores.agrees.mean()
    assert row.layers[0].relative_error > 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_latent_and_the_rotary_key_are_rounded(trained: Path, ids: Path, tmp_path: Path, scale: float) -> None:
    model = trained if scale == 1 else with_scale(trained, tmp_path / "scaled", scale)
    evaluation = evaluated(trained, model, ids, tmp_path / "evaluation.json")
    assert evaluation.rows[0].model.kv_cache == "fp8"
    assert evaluation.reference.kv_cache is None
    assert_as_with_cache(trained, ids, evaluation, cached=(64, 16), scale=scale)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_keys_and_values_of_grouped_queries_are_rounded(trained: Path, ids: Path, tmp_path: Path, scale: float) -> None:
    """A scale of keys alone is that of values too, as in vLLM and SGLang."""
    plain = with_grouped_queries(trained, tmp_path / "gqa")
    model = plain if scale == 1 else with_scale(plain, tmp_path / "scaled", scale)
    evaluation = evaluated(model, model, ids, tmp_path / "evaluation.json")
    assert_as_with_cache(plain, ids, evaluation, cached=(32, 32), scale=scale)
