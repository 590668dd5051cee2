"""Conversions of the tiny checkpoint by the real pipeline, once for each test session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import conversions
import pytest

Convert = Callable[..., Path]


@pytest.fixture(scope="session")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """`convert(source, rule="max", layout=...)` returns the folder; the keywords are the recipe's."""
    made: dict[object, Path] = {}

    def run(source: Path, **fields: object) -> Path:
        key = (source, repr(sorted(fields.items())))
        if key not in made:
            made[key] = conversions.convert(source, tmp_path_factory.mktemp("layers") / "converted", **fields)
        return made[key]

    return run


@pytest.fixture(scope="session")
def mse(tiny: Path, convert: Convert) -> Path:
    """The tiny checkpoint converted by the default rule."""
    return convert(tiny, rule="mse")


@pytest.fixture(scope="session")
def by_max(tiny: Path, convert: Convert) -> Path:
    """The tiny checkpoint converted by `max`."""
    return convert(tiny, rule="max")
