"""`recipes`: the recipes that come with k2convert."""

import textwrap

from k2convert.cli import console
from k2convert.cli.verbs import RecipesOptions
from k2convert.plan.recipe import load_recipe, shipped_recipes


def recipes(_: RecipesOptions) -> None:
    """Show each recipe by its name: its purpose, and how it converts what. Lines have at most 80 columns."""
    found = [load_recipe(name) for name in shipped_recipes()]
    lines: list[str] = []
    for recipe in found:
        family = recipe.family or "any family"
        roles = ", ".join(recipe.roles)
        terms = f"{family}; {roles}; rule {recipe.rule}; {recipe.activations}; layout {recipe.layout}"
        lines.append(recipe.name)
        for text in (recipe.purpose, terms):
            wrapped = textwrap.wrap(text, 76, break_long_words=False, break_on_hyphens=False)
            lines += [f"    {line}" for line in wrapped]
    console.show([recipe.document() | {"purpose": recipe.purpose} for recipe in found], *lines)
