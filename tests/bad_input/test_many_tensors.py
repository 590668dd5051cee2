"""The number of tensors is bounded as their bytes are: an empty tensor costs what its entry in the header costs."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import peak_of

from scripts.fixture_maker.damage import edit_header, edit_json

INDEX = "model.safetensors.index.json"
NUM_TENSORS = 16_000


def peak_megabytes(*words: object) -> float:
    return peak_of(*words, "--json") / 2**20


def add_empty_tensors(folder: Path) -> int:
    """Add tensors without bytes to the first shard and the index; return how many bytes of JSON they take."""
    shard = min(folder.glob("*.safetensors"))
    before = (folder / INDEX).stat().st_size + shard.stat().st_size
    names = [f"model.layers.0.self_attn.empty{i}.k_scale" for i in range(NUM_TENSORS)]

    def change(header: dict[str, Any]) -> None:
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        header.update({name: {"dtype": "BF16", "shape": [0], "data_offsets": [end, end]} for name in names})

    edit_header(shard, change)
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(dict.fromkeys(names, shard.name)))
    return (folder / INDEX).stat().st_size + shard.stat().st_size - before


@pytest.mark.slow
def test_empty_tensors_take_no_more_memory_than_their_entries(source: Path, dest: Path, tmp_path: Path) -> None:
    few = peak_megabytes("run", source, tmp_path / "few", "--device", "cpu")
    few_checked = peak_megabytes("validate", tmp_path / "few", "--source", source)
    megabytes = add_empty_tensors(source) / 1e6
    many = peak_megabytes("run", source, dest, "--device", "cpu")
    many_checked = peak_megabytes("validate", dest, "--source", source)
    assert many - few < 15 * megabytes, (few, many, megabytes)
    assert many_checked - few_checked < 2 * 15 * megabytes, "of two checkpoints"
    assert len(json.loads((dest / INDEX).read_text())["weight_map"]) > NUM_TENSORS
