"""Odd but harmless words in config and index do not stop anything, and never end in a traceback."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import run_here

from scripts.fixture_maker.damage import edit_config, edit_json

INDEX = "model.safetensors.index.json"

ODDITIES: dict[str, Callable[[Path], object]] = {
    "config_groups a list": lambda s: edit_config(s, quantization_config={"config_groups": [1]}),
    "config_groups of numbers": lambda s: edit_config(s, quantization_config={"config_groups": {"group_0": 1}}),
    "weights a list": lambda s: edit_config(s, quantization_config={"config_groups": {"group_0": {"weights": [1]}}}),
    "quantization_config a string": lambda s: edit_config(s, quantization_config="int4"),
    "architectures a number": lambda s: edit_config(s, architectures=7),
    "architectures missing": lambda s: edit_config(s, architectures=None),
    "text_config a list": lambda s: edit_config(s, text_config=[1]),
    "total_size a string": lambda s: edit_json(s / INDEX, lambda i: i["metadata"].update(total_size="7453760")),
    "total_size wrong": lambda s: edit_json(s / INDEX, lambda i: i["metadata"].update(total_size=1)),
    "total_size missing": lambda s: edit_json(s / INDEX, lambda i: i.update(metadata={})),
    "metadata null": lambda s: edit_json(s / INDEX, lambda i: i.update(metadata=None)),
    "a shard the index does not know": lambda s: (s / "stray.safetensors").write_bytes(b"not even a header"),
    "a folder called like a shard": lambda s: (s / "old.safetensors").mkdir(),
    "a download's leftovers": lambda s: (s / ".cache").mkdir(),
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", ODDITIES)
def test_odd_words_are_shown_or_passed_over(name: str, source: Path, dest: Path) -> None:
    ODDITIES[name](source)
    assert json.loads(run_here("inspect", source, "--json", code=0).stdout)["int4_projections"] == 144
    run_here("inspect", source, code=0)
    run_here("run", source, dest, "--dry-run", code=0)
