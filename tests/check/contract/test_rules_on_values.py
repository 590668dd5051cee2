"""Rules 1, 3 to 10 and 18 find their own faults in values and counts of a good checkpoint, and no other rule does."""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from converted import GOOD, Converted, change, change_tensor, check, next_number, on_all, only, set_byte, verdicts

from k2convert.check.results import ContractReport, Verdict
from scripts.fixture_maker import damage
from scripts.fixture_maker.folder import SmallCheckpoint

Apply = Callable[[torch.Tensor], torch.Tensor | None]


def missing(_tensor: torch.Tensor) -> None:
    return None


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def filled(value: float) -> Apply:
    return lambda tensor: torch.full_like(tensor, value)


def two_bytes(byte: int) -> Apply:
    return lambda tensor: set_byte(set_byte(tensor, 5, byte), 700, byte)


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    return set_byte(tensor, 3, int(tensor.view(torch.uint8).view(-1)[3]) ^ 1)


PARAMETERS = ("weight", "block_scale", "global_scale", "input_scale")
"""Parameters of an expert; other names are those of tensors."""
FAULTS: list[tuple[int, str, Apply, int, str]] = [
    *((1, parameter, missing, 1, "missing") for parameter in PARAMETERS),
    (3, "block_scale", lambda t: t.view(torch.uint8), 1, ""),
    (3, "block_scale", lambda t: t.reshape(-1), 1, ""),
    (3, "weight", lambda t: t.reshape(t.shape[0] // 2, -1), 1, ""),
    (3, "weight", lambda t: t.view(torch.int16), 1, ""),
    (3, "global_scale", lambda t: t.reshape(1, 1), 1, ""),
    (3, "global_scale", lambda t: t.to(torch.bfloat16), 1, ""),
    (3, "input_scale", lambda t: t.repeat(2), 1, ""),
    *((4, "block_scale", two_bytes(byte), 2, "") for byte in (0x7F, 0xFF, 0x80, 0xB8)),
    *((6, p, filled(v), 1, "") for p in PARAMETERS[2:] for v in (0.0, -1.0, float("inf"), float("nan"))),
    (6, "global_scale", next_number, 1, "gate and up differ"),
    (7, "layers.1.input_layernorm.weight", flipped, 1, ""),
    (7, "layers.0.mlp.up_proj.weight", flipped, 1, ""),
    (7, "layers.2.self_attn.kv_b_proj.weight", flipped, 1, ""),
    (7, "layers.1.mlp.gate.e_score_correction_bias", lambda t: t.to(torch.bfloat16), 1, ""),
    (8, "norm.weight", missing, 1, ""),
    (8, "layers.1.self_attn.o_proj.weight", missing, 1, ""),
]


@pytest.mark.parametrize(
    ("breakable", "number", "tensor", "apply", "count", "words"),
    [
        pytest.param(kind, *fault, marks=[pytest.mark.slow] if (number + index) % 2 else [])
        for number, fault in enumerate(FAULTS)
        for index, kind in enumerate((GOOD[0], GOOD[-1]))
    ],
    indirect=["breakable"],
)
def test_a_fault_of_one_tensor_is_found_by_its_rule_alone(
    breakable: Converted, number: int, tensor: str, apply: Apply, count: int, words: str
) -> None:
    if tensor in PARAMETERS:
        projection = "gate" if apply is next_number else "down"
        name = f"{breakable.expert(2, 0, projection)}.{getattr(breakable.names, tensor)}"
    else:
        name = breakable.layers.removesuffix("layers") + tensor
    change_tensor(breakable, name, apply)
    rule = only(breakable.check(), number)
    assert (rule.count, rule.offenders[0].name) == (count, name)
    assert words in rule.offenders[0].problem


@pytest.mark.parametrize("parameter", ["weight", "e_score_correction_bias"])
def test_rule_9_router_of_another_size(breakable: Converted, parameter: str) -> None:
    name = f"{breakable.layers}.2.mlp.gate.{parameter}"
    change_tensor(breakable, name, lambda t: t[:-1])
    assert only(check(breakable.folder), 9).offenders[0].name == name


def test_rule_4_zero_blocks_have_zero_codes(breakable: Converted) -> None:
    module = breakable.expert(2, 0, "gate")
    scales = f"{module}.{breakable.names.block_scale}"
    codes = f"{module}.{breakable.names.weight}"
    change_tensor(breakable, scales, lambda t: set_byte(set_byte(t, 9, 0), 40, 0))

    def clear(index: int) -> None:
        change_tensor(
            breakable, codes, lambda t: t.view(-1).index_fill(0, torch.arange(8) + 8 * index, 0).view(t.shape)
        )

    clear(9)
    rule = only(breakable.check(), 4)
    assert (rule.count, rule.offenders[0].name) == (1, codes)
    clear(40)
    assert breakable.check().passed


def test_rule_5_counts_block_scales_that_hopper_flushes(breakable: Converted) -> None:
    before = breakable.check().rules[4]
    name = f"{breakable.expert(2, 0, 'gate')}.{breakable.names.block_scale}"
    change_tensor(breakable, name, lambda t: set_byte(set_byte(t, 9, 0x01), 40, 0x07))
    rule = only(breakable.check(), 5, Verdict.WARN)
    assert rule.count == before.count + 2
    assert breakable.check().passed


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_rule_6_an_input_scale_that_is_not_the_recipes(breakable: Converted, projection: str) -> None:
    name = f"{breakable.expert(2, 0, projection)}.{breakable.names.input_scale}"
    change_tensor(breakable, name, next_number)
    for rule in (only(breakable.check(), 6), only(check(breakable.folder), 6)):
        assert (rule.count, rule.offenders[0].name) == (1, name)
        assert "the recipe's input scale is 1.0" in rule.offenders[0].problem


def test_rule_6_input_scales_that_are_all_the_same_but_not_the_recipes(breakable: Converted) -> None:
    change(breakable, on_all(double, f".{breakable.names.input_scale}"))
    assert only(check(breakable.folder), 6).count == 36


def test_rule_6_without_a_recipe_warns_of_input_scales_that_vary_within_a_layer(breakable: Converted) -> None:
    (breakable.folder / "k2convert.json").unlink()
    gate, up, down = (f"{kind}_proj.{breakable.names.input_scale}" for kind in ("gate", "up", "down"))
    damage.edit_checkpoint(breakable.folder, on_all(double, down))  # may differ from those of gate and up
    assert breakable.check().rules[5].verdict is Verdict.PASS
    damage.edit_checkpoint(breakable.folder, on_all(double, gate, up, part=".experts.0."))
    rule = breakable.check().rules[5]
    assert rule.verdict is Verdict.WARN
    assert rule.offenders[0].name == "layer 1 gate and up"


@pytest.mark.parametrize("expert", [0, 3], ids=["first", "last"])
def test_rule_9_an_expert_is_missing(breakable: Converted, expert: int) -> None:
    stem = f"{breakable.layers}.2.mlp.experts.{expert}."

    def drop(checkpoint: SmallCheckpoint) -> None:
        for shard, members in checkpoint.shards.items():
            checkpoint.shards[shard] = {n: t for n, t in members.items() if not n.startswith(stem)}

    change(breakable, drop)
    assert only(breakable.check(), 9).offenders[0].name == stem.removesuffix(".")
    assert only(check(breakable.folder), 9).count == 1


def test_rule_9_an_expert_too_many(breakable: Converted) -> None:
    stem = f"{breakable.layers}.2.mlp.experts."

    def add(checkpoint: SmallCheckpoint) -> None:
        for members in checkpoint.shards.values():
            for name in [n for n in members if n.startswith(f"{stem}0.")]:
                members[name.replace(f"{stem}0.", f"{stem}4.")] = members[name].clone()

    change(breakable, add)
    assert only(breakable.check(), 9).offenders[0].name == f"{stem}4"


def test_rule_9_pruned_weights_under_the_unpruned_config(breakable: Converted) -> None:
    damage.edit_json(breakable.folder / "config.json", lambda c: c.get("text_config", c).update(n_routed_experts=16))
    rule = only(check(breakable.folder), 9)
    assert rule.count == 1 + 3 * (12 + 2)
    assert "Set n_routed_experts to 4" in rule.offenders[0].problem


@pytest.mark.parametrize(
    ("flag", "verdict"),
    [
        ("--tensor-parallel-size 16", Verdict.FAIL),
        ("--tp-size=3", Verdict.FAIL),
        ("-tp 4", Verdict.WARN),
        ("--tp 2", None),
    ],
)
def test_rule_10_tensor_parallel_sizes_named_on_the_card(
    breakable: Converted, flag: str, verdict: Verdict | None
) -> None:
    (breakable.folder / "README.md").write_text(f"# A model\n\n    vllm serve here {flag} --trust-remote-code\n")
    assert {n: v for n, v in verdicts(breakable.check()).items() if n != 5} == ({10: verdict} if verdict else {})


def test_rule_10_hidden_size(breakable: Converted) -> None:
    damage.edit_json(breakable.folder / "config.json", lambda c: c.get("text_config", c).update(hidden_size=250))
    report = check(breakable.folder)
    assert report.failed == [9, 10]  # the tensors have 256
    assert report.rules[9].offenders[0].name == "hidden_size"


def check_with(converted: Converted, up: float | None) -> ContractReport:
    """Check with 20 dB for every expert's projection, and another figure, or none, for one `up`."""
    experts = product((1, 2, 3), range(4), ("gate", "up", "down"))
    figures: dict[str, float | None] = {converted.expert(*expert): 20.0 for expert in experts}
    figures[converted.expert(1, 2, "up")] = up
    known = {module: value for module, value in figures.items() if value is not None}
    errors = {
        module: SimpleNamespace(sqnr_db=value, changed_codes=None, is_zero=False) for module, value in known.items()
    }
    return check(converted.folder, source=converted.source, errors=errors)


def test_rule_18_a_tensor_below_the_budget(breakable: Converted) -> None:
    rule = only(check_with(breakable, 12.5), 18)
    assert (rule.count, rule.offenders[0].name) == (1, breakable.expert(1, 2, "up"))
    assert "12.50" in rule.offenders[0].problem


def test_rule_18_takes_the_budget_from_the_ledgers_recipe(breakable: Converted) -> None:
    ledger = breakable.folder / "k2convert.json"
    damage.edit_json(ledger, lambda document: document["recipe"]["budget"].update(tensor_sqnr_db=12.0))
    assert check_with(breakable, 12.5).passed
    assert only(check_with(breakable, 11.9), 18).count == 1


def test_rule_18_a_figure_that_is_not_a_number_or_not_there(breakable: Converted) -> None:
    assert only(check_with(breakable, float("nan")), 18).count == 1
    assert only(check_with(breakable, None), 18).offenders[0].problem == "not measured"
