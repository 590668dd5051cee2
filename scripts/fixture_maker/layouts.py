"""The trained tiny checkpoint in other layouts: K2.5's, partners in different shards, pruned, I64 shapes.

The INT4 values remain the trained ones; only names, shards and counts change.
"""

from pathlib import Path

import torch

from scripts.fixture_maker.config import K25_SIDECARS, complete_config, k25_config, write_sidecars
from scripts.fixture_maker.folder import Shards, SmallCheckpoint, random_bf16, read_small, write_small
from scripts.fixture_maker.inventory import projector_tensors, vision_tensors
from scripts.fixture_maker.shards import shard_name

TINY = Path(__file__).resolve().parents[2] / "tests" / "data" / "k2-tiny"
_VISION = {"hidden": 32, "intermediate": 80, "blocks": 2, "positions": 8}
_NUM_KEPT = 10  # experts that make_reap leaves in a layer
_NUM_CUT = 4  # and make_cut and make_short


def make_tiny(out: Path) -> Path:
    """Copy the tiny checkpoint, with a config.json that has every field of the published ones."""
    return write_small(read_tiny(), out)


def read_tiny() -> SmallCheckpoint:
    """Read the tiny checkpoint; its config gets the fields that it lacks of the published ones, yarn among them."""
    checkpoint = read_small(TINY)
    checkpoint.config = complete_config(checkpoint.config)
    return checkpoint


def k25_shards(checkpoint: SmallCheckpoint, hidden: int, intermediate: int, blocks: int, positions: int) -> Shards:
    """Return the shards under Kimi-K2.5's names, then a small random projector and vision tower of these sizes."""
    generator = torch.Generator().manual_seed(0)
    parts = [{f"language_model.{name}": tensor for name, tensor in s.items()} for s in checkpoint.shards.values()]
    parts.append(random_bf16(projector_tensors(hidden, checkpoint.config["hidden_size"]), generator))
    parts.append(random_bf16(vision_tensors(hidden, intermediate, blocks, positions), generator))
    return {shard_name(number, len(parts)): tensors for number, tensors in enumerate(parts, start=1)}


def make_k25(out: Path, source: Path = TINY) -> Path:
    """Give a checkpoint of the tiny one's form Kimi-K2.5's names, nested config, vision tower and projector."""
    checkpoint = read_small(source)
    checkpoint.config = complete_config(checkpoint.config)
    checkpoint.shards = k25_shards(checkpoint, **_VISION)
    vision = {
        "mm_hidden_size": _VISION["hidden"],
        "vt_hidden_size": _VISION["hidden"],
        "vt_intermediate_size": _VISION["intermediate"],
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": _VISION["blocks"],
        "init_pos_emb_height": _VISION["positions"],
        "init_pos_emb_width": _VISION["positions"],
    }
    checkpoint.config = k25_config(checkpoint.config, vision=vision)
    write_small(checkpoint, out)
    write_sidecars(out, K25_SIDECARS)
    return out


def make_split(out: Path) -> Path:
    """Scatter partners over shards: gate and up differ, and so do packed words, scales and shapes of one projection."""
    checkpoint = read_tiny()
    shards = list(checkpoint.shards)
    for name in sorted(checkpoint.tensors()):
        if ".mlp.experts." not in name:
            continue
        expert = int(name.split(".mlp.experts.")[1].split(".")[0])
        home = shards.index(checkpoint.shard_of(name))
        if ".up_proj." in name and expert % 2 == 0:
            checkpoint.move(name, shards[(home + 1) % len(shards)])
        elif (name.endswith(".weight_scale") and expert % 4 == 1) or (
            name.endswith(".weight_shape") and expert % 4 == 3
        ):
            checkpoint.move(name, shards[(home + 2) % len(shards)])
        elif name.endswith(".down_proj.weight_packed") and expert % 8 == 5:
            checkpoint.move(name, shards[0])
    return write_small(checkpoint, out)


def reap_survivors() -> dict[int, tuple[int, ...]]:
    """Return the experts that `make_reap` keeps, by MoE layer: numbers in the tiny checkpoint, ascending."""
    config = read_tiny().config
    generator = torch.Generator().manual_seed(0)
    return {
        layer: tuple(torch.randperm(config["n_routed_experts"], generator=generator)[:_NUM_KEPT].sort().values.tolist())
        for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"])
    }


def make_reap(out: Path) -> Path:
    """Prune every layer to 10 experts, renumbered 0..9, and cut router rows, bias and config to match."""
    checkpoint = read_tiny()
    survivors_of = reap_survivors()
    for shard, members in checkpoint.shards.items():
        pruned = {}
        for name, tensor in members.items():
            if ".mlp.experts." in name:
                head, tail = name.split(".mlp.experts.")
                expert, rest = tail.split(".", 1)
                survivors = survivors_of[int(head.rsplit(".", 1)[1])]
                if int(expert) in survivors:
                    pruned[f"{head}.mlp.experts.{survivors.index(int(expert))}.{rest}"] = tensor
            elif ".mlp.gate." in name:
                pruned[name] = tensor[list(survivors_of[int(name.split(".layers.")[1].split(".")[0])])]
            else:
                pruned[name] = tensor
        checkpoint.shards[shard] = pruned
    checkpoint.config["n_routed_experts"] = _NUM_KEPT
    return write_small(checkpoint, out)


def make_cut(out: Path) -> Path:
    """Keep the dense layer and one MoE layer of four experts; gate and up of every other expert in different shards."""
    checkpoint = _first_layers(2)
    *_, last = checkpoint.shards
    for name in checkpoint.tensors():
        if ".up_proj.weight_" in name and int(name.partition(".experts.")[2].partition(".")[0]) % 2 == 0:
            checkpoint.move(name, last)
    return write_small(checkpoint, out)


def make_short(out: Path) -> Path:
    """Keep the dense layer and two MoE layers of four experts, each in a shard of its own."""
    return write_small(_first_layers(3), out)


def _first_layers(num_layers: int) -> SmallCheckpoint:
    """Return the first layers, with four experts."""
    checkpoint = read_tiny()
    checkpoint.config |= {"num_hidden_layers": num_layers, "n_routed_experts": _NUM_CUT}
    for shard, members in checkpoint.shards.items():
        checkpoint.shards[shard] = {
            name: tensor[:_NUM_CUT].clone() if ".mlp.gate." in name else tensor
            for name, tensor in members.items()
            if int(name.partition(".layers.")[2].partition(".")[0] or 0) < num_layers
            and int(name.partition(".experts.")[2].partition(".")[0] or 0) < _NUM_CUT
        }
    checkpoint.shards = {shard: members for shard, members in checkpoint.shards.items() if members}
    return checkpoint


def make_i64(out: Path) -> Path:
    """Store weight_shape as I64, which is what compressed-tensors writes."""
    checkpoint = read_tiny()
    for name, tensor in checkpoint.tensors().items():
        if name.endswith(".weight_shape"):
            checkpoint.replace(name, tensor.long())
    return write_small(checkpoint, out)
