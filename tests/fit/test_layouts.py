"""A layout that cannot be is refused with the number that it does not divide and the nearest that work."""

from dataclasses import replace
from typing import Any

import pytest
from fit_models import K2_SHAPE as K2
from fit_models import k3_shape

from k2convert.deploy.layouts import Parallelism, check_layout, complete_layout, stage_layers
from k2convert.deploy.model import ModelShape
from k2convert.errors import FitError


@pytest.mark.parametrize(
    ("shape", "layout", "message"),
    [
        (K2, {"tensor": 5}, "--tp 5: it must divide the 64 attention heads. Nearest: --tp 4 or --tp 8."),
        (K2, {"tensor": 128}, "--tp 128: it must divide the 64 attention heads. Nearest: --tp 64."),
        (K2, {"tensor": 8, "expert": 3},
         "--ep 3: it must divide the 8 GPUs that hold a layer. Nearest: --ep 2 or --ep 4."),
        (K2, {"tensor": 5, "expert": 5, "data_attention": True},
         "--ep 5: it must divide the 384 experts. Nearest: --tp 4 or --tp 6."),
        (K2, {"tensor": 64}, "--tp 64 without --ep: 64 GPUs would split an expert, but pieces of its 2048 "
         "columns must be multiples of 64. Nearest: --ep 2."),
        (K2, {"pipeline": 62}, "--pp 62: stages hold whole layers of 61. Nearest: --pp 61."),
        (replace(K2, num_experts=200), {"tensor": 16, "expert": 16},
         "--ep 16: it must divide the 200 experts. Nearest: --ep 8."),
        (k3_shape(), {"tensor": 3}, "--tp 3: it must divide the 96 attention heads and be one of 1, 2, 4, 8, 16, 32. "
         "Nearest: --tp 2 or --tp 4."),
    ],
)  # fmt: skip
def test_an_impossible_layout_names_the_divisor_and_the_nearest(
    shape: ModelShape, layout: dict[str, Any], message: str
) -> None:
    with pytest.raises(FitError) as raised:
        check_layout(Parallelism(**layout), shape)
    assert str(raised.value) == message


def test_what_is_open_is_filled_by_tensor_parallelism_of_one_machine() -> None:
    check_layout(Parallelism(tensor=16, expert=16), K2)
    for count, layout in ((1, "TP1"), (4, "TP4"), (5, "PP5"), (6, "TP2 PP3"), (8, "TP8"), (16, "TP8 PP2")):
        assert str(complete_layout(count, K2)) == layout
    assert str(complete_layout(8, K2, data_attention=True)) == "DP8 EP8"
    with pytest.raises(FitError) as raised:
        complete_layout(8, K2, tensor=4, pipeline=1)
    assert str(raised.value) == (
        "--tp 4 and --pp 1 use 4 GPUs, not --count 8. Nearest: --count 4, or leave out --tp and --pp: TP8."
    )


@pytest.mark.parametrize(
    ("stages", "counts"), [(1, [61]), (2, [31, 30]), (4, [15, 15, 16, 15]), (5, [12, 12, 12, 13, 12])]
)
def test_stages_hold_layers_as_vllm_assigns_them(stages: int, counts: list[int]) -> None:
    assigned = stage_layers(61, stages)
    assert [len(layers) for layers in assigned] == counts
    assert [layer for layers in assigned for layer in layers] == list(range(61))
