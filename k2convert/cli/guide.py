"""`guide` and `recipes`: what comes with k2convert. The pages of the manual are the Markdown files of guide/."""

import textwrap
from importlib import resources
from typing import Annotated

import typer

from k2convert.cli.options import Json, argument
from k2convert.errors import quoted


def guide(topic: Annotated[str | None, argument("[TOPIC]", "Topic of a page.")] = None) -> None:
    """Show the manual: a list of its pages, or the page of a topic."""
    from k2convert.cli.console import print_markdown, print_next, print_table

    pages = read_pages()
    if topic is None:
        print_table("pages of the guide", ("topic", "about"), [(t, summary(p)) for t, p in pages.items()], left=(0, 1))
        print_next("k2convert guide TOPIC")
    elif topic in pages:
        print_markdown(pages[topic])
    else:
        raise typer.BadParameter(f"{quoted(topic)} is not a guide topic. Topics: {', '.join(pages)}.")


def read_pages() -> dict[str, str]:
    """Return the text of every page by its topic, in alphabetical order."""
    files = (resources.files("k2convert") / "guide").iterdir()
    return {
        file.name.removesuffix(".md"): file.read_text(encoding="utf-8") for file in sorted(files, key=lambda f: f.name)
    }


def summary(page: str) -> str:
    """Return the first paragraph of a page, one sentence on one line."""
    return page.split("\n", 3)[2]


def recipes(json: Json = False) -> None:
    """List the recipes that come with k2convert."""
    from k2convert.cli import console
    from k2convert.plan.recipe import load_recipe, shipped_recipes

    console.set_output(json=json)
    shipped = [load_recipe(name) for name in shipped_recipes()]
    lines: list[str] = []
    for recipe in shipped:
        family = recipe.family or "any family"
        roles = ", ".join(recipe.roles)
        if recipe.fp8:
            roles += f"; in FP8 {', '.join(recipe.fp8)}"
        terms = f"{family}; {roles}; rule {recipe.rule}; {recipe.activations}; layout {recipe.layout}"
        lines.append(recipe.name)
        for text in (recipe.purpose, terms):  # lines have at most 80 columns
            wrapped = textwrap.wrap(text, 76, break_long_words=False, break_on_hyphens=False)
            lines += [f"    {line}" for line in wrapped]
    console.show([recipe.document() | {"purpose": recipe.purpose} for recipe in shipped], *lines)
