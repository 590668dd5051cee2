"""Conversions by the real pipeline, once for each test session. Read them only."""

from collections.abc import Callable
from pathlib import Path

import conversions
import pytest
from blake3 import blake3
from made_once import made_once

Convert = Callable[..., Path]


@pytest.fixture(scope="session")
def convert_source(checkpoints: Path) -> Convert:
    """`convert_source(source, rule="max", layout=...)` returns the folder; the keywords are the recipe's."""

    def run(source: Path, **recipe: object) -> Path:
        key = blake3(repr((source, sorted(recipe.items()))).encode()).hexdigest()
        folder = checkpoints / "converted" / key[:16]
        return made_once(folder, lambda folder: conversions.convert(source, folder, **recipe))

    return run


@pytest.fixture(scope="session")
def mse(tiny: Path, convert_source: Convert) -> Path:
    """The tiny checkpoint converted by the default rule."""
    return convert_source(tiny, rule="mse")


@pytest.fixture(scope="session")
def by_max(tiny: Path, convert_source: Convert) -> Path:
    """The tiny checkpoint converted by `max`."""
    return convert_source(tiny, rule="max")
