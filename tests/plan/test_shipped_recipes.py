"""`k2convert recipes` says whom each shipped recipe serves, and every name can be read and copied."""

import json

import pytest
from command import RunCli

from k2convert.plan.recipe import Recipe, load_recipe, shipped_recipes


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_says_whom_it_serves(name: str) -> None:
    purpose = load_recipe(name).purpose
    assert purpose.startswith("For ")
    assert purpose.endswith(".")
    assert 30 < len(purpose) < 160


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_names_are_whole_and_lines_are_short(columns: str, run_cli: RunCli) -> None:
    done = run_cli("recipes", COLUMNS=columns, code=0)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if not line.startswith(" ")] == shipped_recipes()
    words = " ".join(done.stdout.split())
    assert all(load_recipe(name).purpose in words for name in shipped_recipes())


def test_json_has_the_recipes_and_whom_they_serve(run_cli: RunCli) -> None:
    documents = json.loads(run_cli("recipes", "--json").stdout)
    assert [Recipe.model_validate(document) for document in documents] == [load_recipe(n) for n in shipped_recipes()]
