"""A layout that cannot be is refused with the number that it does not divide and the nearest that work."""

from dataclasses import replace

import pytest

from k2convert.errors import FitError
from k2convert.fit.layouts import Parallelism, check_layout, complete_layout, stage_layers
from k2convert.fit.model import ModelShape

K2 = ModelShape(61, 64, 384, 8, 1, 2048, 576, 262144)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Parallelism(tensor=5), "--tp 5: it must divide the 64 attention heads. Nearest: --tp 4 or --tp 8."),
        (Parallelism(tensor=128), "--tp 128: it must divide the 64 attention heads. Nearest: --tp 64."),
        (
            Parallelism(tensor=8, expert=3),
            "--ep 3: it must divide the 8 GPUs that hold a layer. Nearest: --ep 2 or --ep 4.",
        ),
        (
            Parallelism(tensor=5, expert=5, data_attention=True),
            "--ep 5: it must divide the 384 experts. Nearest: --tp 4 or --tp 6.",
        ),
        (
            Parallelism(tensor=64),
            "--ep 1: 64 GPUs would split an expert, but pieces of its 2048 columns must be multiples of 64. Nearest: "
            "--ep 2.",
        ),
        (Parallelism(pipeline=62), "--pp 62: stages hold whole layers of 61. Nearest: --pp 61."),
    ],
)
def test_an_impossible_layout_names_the_divisor_and_the_nearest(layout: Parallelism, message: str) -> None:
    with pytest.raises(FitError) as raised:
        check_layout(layout, K2)
    assert str(raised.value) == message


def test_expert_parallelism_divides_the_experts_that_are_left() -> None:
    check_layout(Parallelism(tensor=16, expert=16), K2)
    with pytest.raises(FitError, match=r"divide the 200 experts\. Nearest: --ep 8\."):
        check_layout(Parallelism(tensor=16, expert=16), replace(K2, num_experts=200))


@pytest.mark.parametrize(
    ("count", "layout"), [(1, "TP1"), (4, "TP4"), (5, "PP5"), (6, "TP2 PP3"), (8, "TP8"), (16, "TP8 PP2")]
)
def test_what_is_open_is_filled_by_tensor_parallelism_of_one_machine(count: int, layout: str) -> None:
    assert str(complete_layout(count, K2)) == layout


def test_dp_attention_gives_whole_experts_to_every_gpu() -> None:
    assert str(complete_layout(8, K2, data_attention=True)) == "DP8 EP8"


def test_a_layout_must_use_all_gpus() -> None:
    with pytest.raises(FitError) as raised:
        complete_layout(8, K2, tensor=4, pipeline=1)
    assert str(raised.value) == (
        "--tp 4 and --pp 1 use 4 GPUs, not --count 8. Nearest: --count 4, or leave out --tp and --pp: TP8."
    )


@pytest.mark.parametrize(
    ("stages", "counts"), [(1, [61]), (2, [31, 30]), (4, [15, 15, 16, 15]), (5, [12, 12, 12, 13, 12])]
)
def test_stages_hold_layers_as_vllm_deals_them_out(stages: int, counts: list[int]) -> None:
    dealt = stage_layers(61, stages)
    assert [len(layers) for layers in dealt] == counts
    assert [layer for layers in dealt for layer in layers] == list(range(61))
