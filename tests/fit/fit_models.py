"""Kimi K2 and K3 as `fit` sees them: the released headers, tensor by tensor (scripts/fixture_maker)."""

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from k2convert.checkpoint.files import read_json_file
from k2convert.deploy.gpus import Gpu
from k2convert.deploy.layouts import complete_layout
from k2convert.deploy.memory import Fit, Settings, fit_layout
from k2convert.deploy.model import Model, ModelShape, read_shape, weigh
from k2convert.models.kimi import K2_5, K2_THINKING
from k2convert.models.kimi_k3 import K3
from k2convert.models.names import Family
from k2convert.plan.recipe import load_recipe
from scripts.fixture_maker.headers import k2_thinking_parts, k25_parts
from scripts.fixture_maker.k3 import k3_parts

K2_SHAPE = ModelShape(61, 64, 384, 8, 1, 2048, 576, 262144)
K3_CONFIG = Path(__file__).parents[1] / "data" / "published-configs" / "moonshotai--Kimi-K3_config.json"


def k3_shape() -> ModelShape:
    return read_shape(read_json_file(K3_CONFIG), family=K3, where="Kimi-K3")


def _model(family: Family, shape: ModelShape, parts: Callable[[], Iterable[Any]], *, is_converted: bool) -> Model:
    recipe = load_recipe(family.recipe) if is_converted else None
    groups = weigh((spec for part in parts() for spec in part), family=family, recipe=recipe)
    return Model(family, shape, groups, recipe, is_nvfp4=True, kv="bf16")


@cache
def k25() -> Model:
    """Kimi-K2.5 as its recipe would convert it."""
    return _model(K2_5, K2_SHAPE, k25_parts, is_converted=True)


@cache
def thinking() -> Model:
    return _model(K2_THINKING, K2_SHAPE, k2_thinking_parts, is_converted=True)


@cache
def k3_source() -> Model:
    return _model(K3, k3_shape(), k3_parts, is_converted=False)


@cache
def k3() -> Model:
    return _model(K3, k3_shape(), k3_parts, is_converted=True)


def fit_on(count: int, model: Model, gpu: Gpu, settings: Settings, **layout: Any) -> Fit:
    """Fit a model on a count of GPUs, in their usual layout or another."""
    chosen = complete_layout(count, model.shape, **layout)
    return fit_layout(model, gpu, chosen, settings)
