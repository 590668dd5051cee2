"""A small checkpoint in memory: read from a folder, changed as Python values, written by safetensors."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from scripts.fixture_maker.config import write_json
from scripts.fixture_maker.inventory import TensorSpec
from scripts.fixture_maker.shards import INDEX_NAME, fresh_folder

Shards = dict[str, dict[str, torch.Tensor]]


@dataclass(slots=True)
class SmallCheckpoint:
    """Config, shards as {file name: {tensor name: tensor}}, and the folder that holds their sidecars."""

    config: dict[str, Any]
    shards: Shards
    sidecars: Path

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name, without copying."""
        return {name: tensor for shard in self.shards.values() for name, tensor in shard.items()}

    def shard_of(self, name: str) -> str:
        """Return the file name of the shard that holds `name`."""
        return next(shard for shard, members in self.shards.items() if name in members)

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Replace the tensor called `name`."""
        self.shards[self.shard_of(name)][name] = tensor

    def move(self, name: str, shard: str) -> None:
        """Move a tensor to another shard."""
        self.shards[shard][name] = self.shards[self.shard_of(name)].pop(name)


def read_small(folder: Path) -> SmallCheckpoint:
    """Read a checkpoint that fits in memory."""
    shards = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return SmallCheckpoint(config=config, shards=shards, sidecars=folder)


def write_small(checkpoint: SmallCheckpoint, out: Path) -> Path:
    """Write shards, index, config and sidecars into the new folder `out`."""
    fresh_folder(out)
    for path in sorted(checkpoint.sidecars.iterdir()) if checkpoint.sidecars.is_dir() else ():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in ("config.json", INDEX_NAME):
            shutil.copyfile(path, out / path.name)
    weight_map = {}
    total = 0
    for shard, members in checkpoint.shards.items():
        save_file({name: tensor.contiguous() for name, tensor in members.items()}, out / shard, {"format": "pt"})
        (out / shard).chmod(0o644)
        weight_map |= dict.fromkeys(members, shard)
        total += sum(tensor.nbytes for tensor in members.values())
    write_json(out / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    write_json(out / "config.json", checkpoint.config)
    return out


def random_bf16(specs: list[TensorSpec], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Fill BF16 specs with small gaussian numbers."""
    return {spec.name: (0.02 * torch.randn(spec.shape, generator=generator)).bfloat16() for spec in specs}
