"""Conversions of the tiny checkpoint by the real pipeline, once for each test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from k2convert.checkpoint.index import open_checkpoint
from k2convert.job.locations import Destination, Source
from k2convert.job.prepare import choose_recipe, prepare
from k2convert.job.run import execute

Convert = Callable[..., Path]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads, above all when other tests run at the same time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """`convert(source, rule="max", layout=...)` returns the folder; the keywords are the recipe's."""
    made: dict[object, Path] = {}

    def run(source: Path, **fields: object) -> Path:
        key = (source, repr(sorted(fields.items())))
        if key not in made:
            checkpoint = open_checkpoint(source)
            destination = tmp_path_factory.mktemp("layers") / "converted"
            recipe = choose_recipe(checkpoint, None, dict(fields))
            execute(
                prepare(source=Source(checkpoint), destination=Destination(destination), recipe=recipe, device="cpu")
            )
            made[key] = destination
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
