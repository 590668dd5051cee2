"""A layer check passes good layers, fails damaged ones, names the expert, and gives the same result in every layout."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from k2convert.check.reference_layers import check_layers
from k2convert.check.results import W4A4_VARIANTS, LayersReport, LayersRequest, Variant
from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CheckpointError
from k2convert.plan.recipe import Budget
from scripts.fixture_maker.damage import edit_tensor

pytestmark = pytest.mark.usefixtures("one_thread")


def check(source: Path, converted: Path, **fields: Any) -> LayersReport:
    others = {"budget": Budget()} | {name: fields.pop(name) for name in ("budget", "events") if name in fields}
    request = LayersRequest(**({"layers": (2,), "text": None, "tokens": 64} | fields))
    return check_layers(request, source=open_checkpoint(source), converted=open_checkpoint(converted), **others)


def expert(layer: int, number: int, parameter: str, projection: str = "down") -> str:
    return f"model.layers.{layer}.mlp.experts.{number}.{projection}_proj.{parameter}"


def damaged(folder: Path, copy: Path, tensor: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    shutil.copytree(folder, copy)
    edit_tensor(copy, tensor, change)
    return copy


def test_every_layer_of_an_mse_conversion_is_within_budget(tiny: Path, mse: Path, by_max: Path) -> None:
    report = check(tiny, mse, layers=(1, 2, 3))
    assert report.passed
    for layer, other in zip(report.layers, check(tiny, by_max, layers=(1, 2, 3)).layers, strict=True):
        ours = layer.error(Variant.CONVERTED)
        usual = other.error(Variant.CONVERTED)
        assert layer.num_experts == layer.num_reached == 16
        assert 19.5 < ours.sqnr_db < 21.5
        assert ours.sqnr_db - usual.sqnr_db > 2.0
        assert ours.cosine > 0.995 > usual.cosine
        assert ours.worst_cosine < ours.cosine
        assert ours.shared_experts_sqnr_db == math.inf


def test_four_bit_activations_cost_more_than_the_conversion(tiny: Path, mse: Path) -> None:
    (layer,) = check(tiny, mse).layers
    weights = layer.error(Variant.CONVERTED)
    both = layer.error(Variant.CONVERTED_W4A4)
    alone = layer.error(Variant.ACTIVATIONS_ONLY)
    assert both.sqnr_db < alone.sqnr_db < weights.sqnr_db
    # Two independent errors add up by energy.
    expected = -10 * math.log10(10 ** (-weights.sqnr_db / 10) + 10 ** (-alone.sqnr_db / 10))
    assert both.sqnr_db == pytest.approx(expected, abs=0.3)


def poison(scales: torch.Tensor) -> torch.Tensor:
    scales.view(torch.uint8)[0, 0] = 0x7F
    return scales


@pytest.mark.parametrize(
    ("tensor", "change", "says"),
    [
        (expert(2, 7, "weight_scale_2"), lambda scale: scale * 2, "expert 7: SQNR"),
        (expert(2, 0, "weight", "gate"), lambda codes: (codes >> 4) | (codes << 4), "expert 0: SQNR"),
        (expert(2, 3, "weight_scale"), poison, "output SQNR -inf dB"),
        (expert(2, 3, "input_scale"), lambda s: s * torch.inf, "as served (W4A4): the output is not finite"),
    ],
)
def test_damage_fails_its_layer_and_is_named(
    tensor: str, change: Callable[[torch.Tensor], torch.Tensor], says: str, tiny: Path, mse: Path, tmp_path: Path
) -> None:
    report = check(tiny, damaged(mse, tmp_path / "d", tensor, change), layers=(1, 2))
    assert [bool(layer.failures) for layer in report.layers] == [False, True]
    layer = report.layers[1]
    assert any(says in failure for failure in layer.failures)
    if says.startswith("expert"):
        number = int(says[7])
        assert layer.error(Variant.CONVERTED).worst_expert == number
        assert not any(failure.startswith("expert") and says not in failure for failure in layer.failures)
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (document["layers"][1]["errors"][0]["sqnr_db"] is None) == (change is poison), "no number is null"


def test_an_expert_that_no_token_chose_cannot_hide(tiny: Path, mse: Path, tmp_path: Path) -> None:
    (layer,) = check(tiny, mse, tokens=1).layers
    assert layer.num_reached == 4
    for number in (0, 6, 11, 15):
        folder = damaged(mse, tmp_path / str(number), expert(2, number, "weight_scale_2"), torch.zeros_like)
        (layer,) = check(tiny, folder, tokens=1).layers
        assert layer.error(Variant.CONVERTED).worst_expert == number
        assert layer.failures


def test_a_tighter_budget_fails_the_same_layer(tiny: Path, by_max: Path) -> None:
    assert check(tiny, by_max).passed
    assert check(tiny, by_max) == check(tiny, by_max), "synthetic states are always the same"
    (layer,) = check(tiny, by_max, budget=Budget(layer_sqnr_db=19.0)).layers
    assert layer.failures == (
        f"output SQNR {layer.error(Variant.CONVERTED).sqnr_db:.2f} dB, under the budget of 19 dB",
    )


@pytest.mark.slow
def test_both_layouts_and_name_styles_give_the_same_figures(
    tiny: Path, k25: Path, mse: Path, by_max: Path, convert_source: Callable[..., Path]
) -> None:
    other = convert_source(tiny, rule="mse", layout="compressed-tensors")
    assert check(tiny, other).layers == check(tiny, mse).layers
    assert check(k25, convert_source(k25, rule="max")).layers == check(tiny, by_max).layers


def test_weight_only_checkpoints_have_no_w4a4_figures(
    tiny: Path, by_max: Path, convert_source: Callable[..., Path]
) -> None:
    (layer,) = check(tiny, convert_source(tiny, rule="max", activations="w4a16")).layers
    assert all(layer.error(variant) is None for variant in W4A4_VARIANTS)
    same = check(tiny, by_max).layers[0].error(Variant.CONVERTED)
    assert layer.error(Variant.CONVERTED).sqnr_db == pytest.approx(same.sqnr_db, abs=1e-4)


def test_converted_shared_experts_are_judged_too(tiny: Path, convert_source: Callable[..., Path]) -> None:
    folder = convert_source(tiny, rule="max", roles=("experts", "shared_experts"))
    (layer,) = check(tiny, folder).layers
    for variant in (Variant.CONVERTED, Variant.CONVERTED_W4A4):
        shared = layer.error(variant).shared_experts_sqnr_db
        assert 10 < shared < 20


def test_pruned_checkpoints_are_checked_by_their_own_counts(reap: Path, convert_source: Callable[..., Path]) -> None:
    report = check(reap, convert_source(reap, rule="max"))
    assert report.passed
    assert report.layers[0].num_experts == 10


def test_progress_counts_experts(tiny: Path, by_max: Path) -> None:
    calls: list[tuple[int, int, int]] = []

    class Listener:
        def experts_computed(self, layer: int, done: int, total: int) -> None:
            calls.append((layer, done, total))

    check(tiny, by_max, layers=(1, 3), events=Listener())
    assert calls == [(layer, done, 16) for layer in (1, 3) for done in range(1, 17)]


def test_what_cannot_be_computed_is_refused(tiny: Path, by_max: Path, reap: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layer 0 has no MoE block. Layers that have: 1\.\.3"):
        check(tiny, by_max, layers=(0,))
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj\.weight is missing"):
        check(tiny, tiny)
    narrow = damaged(by_max, tmp_path / "d", expert(2, 1, "weight"), lambda packed: packed[:, :-8].contiguous())
    with pytest.raises(CheckpointError, match="does not fit codes"):
        check(tiny, narrow)
