"""Rules 1, 2 and 3 find their faults in names and forms of an otherwise good checkpoint, and no other rule does."""

import pytest
import torch
from converted import Converted, add_tensor, change, change_tensor, check, only

from scripts.fixture_maker.folder import SmallCheckpoint


def test_rule_1_a_left_over_shape(breakable: Converted) -> None:
    module = breakable.expert(1, 0, "up")
    beside = f"{module}.{breakable.names.block_scale}"
    add_tensor(breakable, f"{module}.weight_shape", torch.tensor([128, 256], dtype=torch.int32), beside=beside)
    assert only(breakable.check(), 1).offenders[0].name == f"{module}.weight_shape"


def test_rule_1_an_input_scale_where_activations_are_16_bit(weight_only: Converted) -> None:
    module = weight_only.expert(1, 0, "up")
    add_tensor(weight_only, f"{module}.input_scale", torch.tensor(1.0), beside=f"{module}.weight_scale")
    assert only(weight_only.check(), 1).offenders[0].name == f"{module}.input_scale"


@pytest.mark.parametrize("name", ["model.layers.1.mlp.gate.bias", "something.new", "lm_head.bias"])
def test_rule_1_a_new_name_anywhere(modelopt: Converted, name: str) -> None:
    add_tensor(modelopt, name, torch.zeros(4, dtype=torch.bfloat16), beside="model.norm.weight")
    assert only(modelopt.check(), 1).offenders[0].name == name


def test_rule_1_a_whole_projection_missing(breakable: Converted) -> None:
    module = breakable.expert(3, 2, "up")

    def drop(checkpoint: SmallCheckpoint) -> None:
        for members in checkpoint.shards.values():
            for name in [n for n in members if n.startswith(f"{module}.")]:
                del members[name]

    change(breakable, drop)
    assert only(breakable.check(), 1).offenders[0].name == module
    assert 1 in check(breakable.folder).failed  # seen without the source too


def test_rule_1_a_router_in_nvfp4(modelopt: Converted) -> None:
    module = "model.layers.1.mlp.gate"

    def quantize(checkpoint: SmallCheckpoint) -> None:
        members = checkpoint.shards[checkpoint.shard_of(f"{module}.weight")]
        rows, columns = members[f"{module}.weight"].shape
        members[f"{module}.weight"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        members[f"{module}.weight_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
        members[f"{module}.weight_scale_2"] = torch.tensor(1.0)
        members[f"{module}.input_scale"] = torch.tensor(1.0)

    change(modelopt, quantize)
    assert only(modelopt.check(), 1).offenders[0].name == module


@pytest.mark.parametrize("part", ["layers.1.", ""], ids=["one layer", "all"])
def test_rule_2_legacy_names(breakable: Converted, part: str) -> None:
    stem = breakable.layers.removesuffix("layers")

    def rename(checkpoint: SmallCheckpoint) -> None:
        for shard, members in checkpoint.shards.items():
            checkpoint.shards[shard] = {
                n.replace(stem, "language_model.", 1) if n.startswith(stem + part) else n: t for n, t in members.items()
            }

    change(breakable, rename)
    rule = only(breakable.check(), 2)
    assert rule.offenders[0].name.startswith("language_model.")
    assert only(check(breakable.folder), 2).count == rule.count


def test_rule_3_takes_scalars_of_either_shape(breakable: Converted) -> None:
    name = f"{breakable.expert(1, 3, 'gate')}.{breakable.names.global_scale}"
    change_tensor(breakable, name, lambda t: t.reshape(() if t.shape == (1,) else (1,)))
    assert breakable.check().passed
