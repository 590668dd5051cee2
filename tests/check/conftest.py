"""Conversions by the real pipeline, once for each test session. Read them only."""

from collections.abc import Callable
from pathlib import Path

import conversions
import pytest

Convert = Callable[..., Path]


@pytest.fixture(scope="session")
def convert_source(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """`convert_source(source, rule="max", layout=...)` returns the folder; the keywords are the recipe's."""
    made: dict[object, Path] = {}

    def run(source: Path, **recipe: object) -> Path:
        key = (source, repr(sorted(recipe.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp("validation") / "converted"
            made[key] = conversions.convert(source, folder, **recipe)
        return made[key]

    return run


@pytest.fixture(scope="session")
def mse(tiny: Path, convert_source: Convert) -> Path:
    """The tiny checkpoint converted by the default rule."""
    return convert_source(tiny, rule="mse")


@pytest.fixture(scope="session")
def by_max(tiny: Path, convert_source: Convert) -> Path:
    """The tiny checkpoint converted by `max`."""
    return convert_source(tiny, rule="max")
