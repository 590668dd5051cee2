"""`recipes`: the recipes that come with k2convert."""

import textwrap

from k2convert.cli import console
from k2convert.plan.recipe import load_recipe, shipped_recipes


def recipes(*, as_json: bool) -> None:
    """Show each recipe by its name: its purpose, and how it converts what. Lines have at most 80 columns."""
    found = [load_recipe(name) for name in shipped_recipes()]
    if as_json:
        console.print_json([recipe.document() | {"purpose": recipe.purpose} for recipe in found])
        return
    for recipe in found:
        family = recipe.family or "any family"
        roles = ", ".join(recipe.roles)
        terms = f"{family}; {roles}; rule {recipe.rule}; {recipe.activations}; layout {recipe.layout}"
        console.print_line(recipe.name)
        for text in (recipe.purpose, terms):
            for line in textwrap.wrap(text, 76, break_long_words=False, break_on_hyphens=False):
                console.print_line(f"    {line}")
