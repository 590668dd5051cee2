"""The view of a pruned source is the source that another program pruned in memory, tensor for tensor."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k2convert.checkpoint.index import Checkpoint, open_checkpoint
from k2convert.checkpoint.reader import ShardReader
from k2convert.errors import PlanError
from k2convert.plan.plan import plan_conversion
from k2convert.plan.pruning import KeptExperts, keep_experts
from k2convert.plan.recipe import load_recipe
from scripts.fixture_maker.layouts import reap_survivors


@pytest.fixture(scope="module")
def view(tiny: Path) -> Checkpoint:
    return keep_experts(open_checkpoint(tiny), KeptExperts(reap_survivors()))


def test_the_view_has_the_tensors_of_the_pruned_checkpoint(view: Checkpoint, reap: Path) -> None:
    expected = open_checkpoint(reap)
    assert view.config == expected.config
    assert set(view.tensors) == set(expected.tensors)
    with ShardReader(view.path) as reader, ShardReader(expected.path) as other:
        for name, tensor in view.tensors.items():
            right = expected.tensors[name]
            assert (tensor.dtype, tensor.shape, tensor.num_bytes) == (right.dtype, right.shape, right.num_bytes), name
            data = reader.read(tensor)
            assert np.array_equal(data, other.read(right)), name
            assert np.array_equal(data[7:40], reader.read(tensor, begin=7, end=min(40, tensor.num_bytes))), name


def test_the_plan_of_the_view_is_the_plan_of_the_pruned_checkpoint(view: Checkpoint, reap: Path) -> None:
    recipe = load_recipe("kimi-k2-thinking-nvfp4")
    plans = [plan_conversion(source=source, recipe=recipe) for source in (view, open_checkpoint(reap))]
    outputs = [{job.name: {o.name: o for o in job.outputs} for job in plan.jobs} for plan in plans]
    assert outputs[0] == outputs[1]
    assert plans[0].data_bytes == plans[1].data_bytes == sum(j.data_bytes for j in plans[0].jobs)


def with_config(source: Checkpoint, **changes: Any) -> Checkpoint:
    return replace(source, config_text=json.dumps(source.config | changes))


LAYERS = (1, 2, 3)
EIGHT = tuple(range(8))


@pytest.mark.parametrize(
    ("layers", "config", "words"),
    [
        ({1: EIGHT, 2: EIGHT}, {}, "no layer 3"),
        ({1: EIGHT, 2: EIGHT, 3: EIGHT, 4: EIGHT}, {}, "has the layer 4"),
        ({1: EIGHT, 2: (*range(7), 16), 3: EIGHT}, {}, "layer 2: expert 16 is not in the model, which has 0..15"),
        ({1: EIGHT, 2: (-1, *range(7)), 3: EIGHT}, {}, "layer 2: expert -1 is not in the model"),
        ({1: EIGHT, 2: EIGHT, 3: (0, 0, *range(1, 7))}, {}, "layer 3: expert 0 is in the list twice"),
        ({1: EIGHT, 2: tuple(range(9)), 3: EIGHT}, {}, "layer 2 keeps 9 experts, but layer 1 keeps 8"),
        (dict.fromkeys(LAYERS, EIGHT), {"num_experts_per_tok": 9}, "each token uses 9"),
        (dict.fromkeys(LAYERS, EIGHT), {"n_group": 3}, "cannot form 3 equal groups"),
        (dict.fromkeys(LAYERS, EIGHT), {"n_group": 2}, "8 experts of group 0 are kept, but the router needs 4"),
        (
            dict.fromkeys(LAYERS, (0, 1, 8, 9)),
            {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 4},
            "1 groups .* hold fewer than the 4",
        ),
    ],
)
def test_a_list_that_does_not_fit_is_refused(
    layers: dict[int, tuple[int, ...]], config: dict[str, Any], words: str, tiny: Path
) -> None:
    source = with_config(open_checkpoint(tiny), **config)
    with pytest.raises(PlanError, match=words):
        keep_experts(source, KeptExperts(layers))


def test_groups_of_equal_size_are_accepted(tiny: Path) -> None:
    source = with_config(open_checkpoint(tiny), n_group=2, topk_group=1, num_experts_per_tok=4)
    view = keep_experts(source, KeptExperts(dict.fromkeys(LAYERS, (0, 1, 3, 7, 8, 9, 10, 15))))
    assert view.config["n_routed_experts"] == 8


def test_a_router_that_is_not_the_models_is_refused(tiny: Path) -> None:
    source = with_config(open_checkpoint(tiny), n_routed_experts=12)
    with pytest.raises(PlanError, match=r"mlp\.gate\..*: has the shape \[16.*the layer has 12 experts"):
        keep_experts(source, KeptExperts(dict.fromkeys(LAYERS, EIGHT)))
