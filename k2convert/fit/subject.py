"""What `fit` asks about: a source as it would be converted, or a checkpoint as it is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from k2convert.checkpoint.index import Checkpoint
from k2convert.choices import ServedKvCache
from k2convert.fit.shape import ModelShape, read_shape
from k2convert.fit.weights import Tensor, Weights, is_int4, weigh
from k2convert.models import detect_family
from k2convert.models.config import find_quantization_config
from k2convert.models.names import Family
from k2convert.plan.recipe import Recipe, load_recipe


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and its weights. `recipe` is the one an INT4 source is weighed by; None for weights as they are."""

    family: Family
    shape: ModelShape
    weights: Weights
    recipe: Recipe | None
    kv: ServedKvCache
    """What engines take without an option: FP8 if config.json declares it, else BF16."""

    @property
    def kv_values(self) -> int:
        """Values that the KV cache keeps for one token."""
        return self.shape.kv_values * self.shape.num_layers

    def with_experts(self, count: int) -> "Subject":
        """Return the pruned model; raises FitError for an impossible count."""
        shape = self.shape.with_experts(count)
        return replace(self, shape=shape, weights=self.weights.with_experts(count, of=self.shape.num_experts))


def read_subject(checkpoint: Checkpoint) -> Subject:
    """Weigh an opened checkpoint; raises PlanError for one of no known family, FitError for one that is not MLA."""
    family = detect_family(checkpoint)
    shape = read_shape(checkpoint.config, family=family, where=str(checkpoint.folder))
    recipe = load_recipe(family.recipe) if is_int4(checkpoint.tensors.values()) else None
    weights = weigh(checkpoint.tensors.values(), family=family, recipe=recipe)
    return Subject(family, shape, weights, recipe, _declared_kv(checkpoint.config))


def read_result(tensors: Iterable[Tensor], *, family: Family, config: Mapping[str, Any], where: str) -> Subject:
    """Weigh a result by the tensors of its shards, which need not be here; raises as `read_subject` does."""
    shape = read_shape(config, family=family, where=where)
    return Subject(family, shape, weigh(tensors, family=family), None, _declared_kv(config))


def _declared_kv(config: Mapping[str, Any]) -> ServedKvCache:
    found = find_quantization_config(config)
    return "fp8" if found is not None and found[1].get("kv_cache_scheme") else "bf16"
