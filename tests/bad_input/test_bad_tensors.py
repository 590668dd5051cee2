"""Tensors that do not fit together are refused before anything is made, bad values when they are read."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.reader import ShardReader
from k2convert.errors import SourceReadError
from scripts.fixture_maker.damage import edit_checkpoint, edit_config, edit_tensor
from scripts.fixture_maker.folder import SmallCheckpoint

SHARD = "model-00002-of-000005.safetensors"
LAYER = "model.layers.1"
GATE = f"{LAYER}.mlp.experts.3.gate_proj"
DOWN = f"{LAYER}.mlp.experts.3.down_proj"

Damage = Callable[[Path], object]
Refuse = Callable[..., str]


def without(name: str) -> Damage:
    return lambda source: edit_tensor(source, name, lambda _: None)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return lambda source: edit_tensor(source, name, change)


def added(name: str, tensor: torch.Tensor) -> Damage:
    return lambda source: edit_checkpoint(source, lambda c: c.shards[SHARD].update({name: tensor}))


def cut_columns(source: Path) -> None:
    """248 input columns: not a multiple of 32, in packed words, scales and shape alike."""

    def change(checkpoint: SmallCheckpoint) -> None:
        tensors = checkpoint.tensors()
        checkpoint.replace(f"{GATE}.weight_packed", tensors[f"{GATE}.weight_packed"][:, :31])
        checkpoint.replace(f"{GATE}.weight_shape", torch.tensor([128, 248], dtype=torch.int32))

    edit_checkpoint(source, change)


def cut_rows(source: Path) -> None:
    """96 of 128 rows, in packed words, scales and shape alike: consistent, but not what config.json says."""

    def change(checkpoint: SmallCheckpoint) -> None:
        for leaf in ("weight_packed", "weight_scale"):
            checkpoint.replace(f"{GATE}.{leaf}", checkpoint.tensors()[f"{GATE}.{leaf}"][:96])
        checkpoint.replace(f"{GATE}.weight_shape", torch.tensor([96, 256], dtype=torch.int32))

    edit_checkpoint(source, change)


def without_module(module: str) -> Damage:
    def change(checkpoint: SmallCheckpoint) -> None:
        for members in checkpoint.shards.values():
            for name in [name for name in members if name.startswith(module + ".")]:
                del members[name]

    return lambda source: edit_checkpoint(source, change)


BIAS = f"{LAYER}.mlp.gate.e_score_correction_bias"
MISFITS: dict[str, tuple[Damage, list[str]]] = {
    "missing scale": (without(f"{GATE}.weight_scale"), [SHARD, f"{GATE}.weight_scale", "missing", "ownload"]),
    "missing shape": (without(f"{GATE}.weight_shape"), [SHARD, f"{GATE}.weight_shape", "missing", "group_size 32"]),
    "missing packed words": (without(f"{GATE}.weight_packed"), [SHARD, GATE, "weight_packed", "ownload"]),
    "packed words as I64": (changed(f"{GATE}.weight_packed", torch.Tensor.long), [SHARD, GATE, "I64", "I32"]),
    "packed words in one dimension": (changed(f"{GATE}.weight_packed", torch.Tensor.flatten), [SHARD, GATE, "2 dim"]),
    "scale as F16": (changed(f"{GATE}.weight_scale", torch.Tensor.half), [SHARD, GATE, "F16", "BF16"]),
    "scale of another group size": (
        changed(f"{GATE}.weight_scale", lambda t: t[:, ::2]),
        [SHARD, f"{GATE}.weight_scale", "[128, 4]", "[128, 8]"],
    ),
    "shape as F32": (changed(f"{GATE}.weight_shape", torch.Tensor.float), [SHARD, GATE, "F32", "I32"]),
    "shape of three": (
        changed(f"{GATE}.weight_shape", lambda t: torch.cat([t, t[:1]])),
        [SHARD, f"{GATE}.weight_shape", "[3]", "[2]"],
    ),
    "columns no multiple of 32": (cut_columns, [SHARD, GATE, "248", "32"]),
    "rows that config.json does not know": (cut_rows, [SHARD, GATE, "96", "moe_intermediate_size"]),
    "asymmetric": (added(f"{GATE}.weight_zero_point", torch.zeros(1)), [SHARD, f"{GATE}.weight_zero_point"]),
    "act-order": (added(f"{GATE}.weight_g_idx", torch.zeros(256)), [SHARD, f"{GATE}.weight_g_idx"]),
    "missing projection": (without_module(DOWN), [f"{DOWN} is missing", "ownload"]),
    "missing expert": (without_module(f"{LAYER}.mlp.experts.3"), ["layer 1", "15 experts", "n_routed_experts = 16"]),
    "missing layer": (without_module("model.layers.2"), ["layers", "config.json"]),
    "expert count of another model": (lambda s: edit_config(s, n_routed_experts=384), ["n_routed_experts = 384"]),
    "layer count of another model": (lambda s: edit_config(s, num_hidden_layers=61), ["1..60", "config.json"]),
    "hidden size of another model": (lambda s: edit_config(s, hidden_size=7168), ["hidden_size", "7168", "256"]),
    "count that is a string": (lambda s: edit_config(s, n_routed_experts="16"), ["n_routed_experts", "'16'", "config"]),
    "router short of rows": (changed(f"{LAYER}.mlp.gate.weight", lambda t: t[:15]), [f"{LAYER}.mlp.gate.weight", "15"]),
    "bias short of entries": (changed(BIAS, lambda t: t[:15]), [BIAS, "15"]),
    "missing bias": (without(BIAS), [BIAS, "missing"]),
    "unknown tensor": (added(f"{LAYER}.mlp.experts.3.side_proj.weight", torch.zeros(2)), ["side_proj", "Kimi K2"]),
}


@pytest.mark.quick(10)
@pytest.mark.parametrize("name", MISFITS)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_made(name: str, refuse_at_once: Refuse) -> None:
    refuse_at_once(*MISFITS[name])


def one_scale(value: float) -> Damage:
    def change(scales: torch.Tensor) -> torch.Tensor:
        scales[5, 2] = value
        return scales

    return changed(f"{DOWN}.weight_scale", change)


BAD_VALUES: dict[str, tuple[Damage, list[str]]] = {
    "scale NaN": (one_scale(float("nan")), [f"{DOWN}.weight_scale", "[5, 2]", "nan", "ownload"]),
    "scale infinite": (one_scale(float("inf")), [f"{DOWN}.weight_scale", "[5, 2]", "inf", "ownload"]),
    "scale negative": (one_scale(-0.5), [f"{DOWN}.weight_scale", "[5, 2]", "-0.5", "ownload"]),
    "weight_shape that disagrees": (
        changed(f"{DOWN}.weight_shape", lambda t: t.flip(0)),
        [f"{DOWN}.weight_shape", "[128, 256]", "[256, 128]", "ownload"],
    ),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_found_bad_on_the_way_leave_no_half_shard(name: str, source: Path, dest: Path, refuse: Refuse) -> None:
    damage, words = BAD_VALUES[name]
    damage(source)
    refuse(source=source, dest=dest, says=[SHARD, *words])
    assert not (dest / SHARD).exists()


@pytest.mark.parametrize("harm", ["cut", "removed"])
def test_shard_harmed_after_the_start_is_named_with_its_tensor(harm: str, source: Path) -> None:
    checkpoint = open_checkpoint(source)
    tensor = checkpoint.tensors[f"{DOWN}.weight_packed"]
    path = source / SHARD
    if harm == "cut":
        os.truncate(path, tensor.begin + 100)
    else:
        path.unlink()
    with ShardReader(checkpoint.path) as reader, pytest.raises(SourceReadError) as raised:
        reader.read(tensor)
    assert str(path) in str(raised.value)
    assert tensor.name in str(raised.value)
    assert "run the same command again" in str(raised.value)
