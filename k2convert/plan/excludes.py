"""plan.excludes."""

import re

from k2convert.checkpoint.layouts import COMPRESSED_TENSORS
from k2convert.models.names import Architecture, Family
from k2convert.plan.recipe import Recipe


def exclude_list(recipe: Recipe, architecture: Architecture, family: Family) -> list[str]:
    """Modules that stay BF16, in the form every engine's matcher takes: globs, or `re:` for compressed-tensors."""
    stems: list[tuple[str, bool]] = [("self_attn", True)]
    if "shared_experts" not in recipe.roles:
        stems.append(("shared_experts", True))
    if "dense_mlp" not in recipe.roles:
        stems += [(f"layers.{layer}.mlp", True) for layer in range(architecture.num_dense_layers)]
    stems += [("lm_head", True), ("mlp.gate", False)]
    if family is Family.K2_5:
        stems += [("vision_tower", True), ("mm_projector", True)]
    if recipe.layout == COMPRESSED_TENSORS:
        return [f"re:.*{re.escape(stem)}{'.*' if open_end else '$'}" for stem, open_end in stems]
    return [f"*{stem}*" if open_end else f"*{stem}" for stem, open_end in stems]
