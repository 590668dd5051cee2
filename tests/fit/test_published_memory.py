"""Memory and KV cache of Kimi K2 as people published them, each figure with its source.

The weights are those of the released headers, tensor by tensor (scripts/fixture_maker). Tolerance: 6 %.
"""

from dataclasses import replace

import pytest
from test_layouts import K2

from k2convert.fit.gpus import GPUS, MIB
from k2convert.fit.layouts import Parallelism, complete_layout
from k2convert.fit.memory import Fit, Settings, bytes_per_token, fit_layout
from k2convert.fit.model import Weights, weigh
from k2convert.models.kimi import K2_5, K2_THINKING
from k2convert.models.names import Role
from k2convert.plan.recipe import load_recipe
from scripts.fixture_maker.headers import k2_thinking_parts, k25_parts

TOLERANCE = 0.06
RTX = GPUS["rtx-pro-6000"].memory_bytes
RTX_PAGE = Settings(kv="fp8", utilization=0.93)


@pytest.fixture(scope="module")
def k25_weights() -> Weights:
    """Kimi-K2.5 as its recipe would convert it."""
    specs = (spec for part in k25_parts() for spec in part)
    return weigh(specs, family=K2_5, recipe=load_recipe(K2_5.recipe))


@pytest.fixture(scope="module")
def thinking_weights() -> Weights:
    specs = (spec for part in k2_thinking_parts() for spec in part)
    return weigh(specs, family=K2_THINKING, recipe=load_recipe(K2_THINKING.recipe))


def fit_on(
    count: int, weights: Weights, settings: Settings, *, experts: int = 384, memory: int = RTX, **layout: int
) -> Fit:
    shape = K2.with_experts(experts)
    chosen = complete_layout(count, shape, **layout)
    return fit_layout(weights.with_experts(experts, of=384), shape, chosen, memory_bytes=memory, settings=settings)


def test_converted_bytes_are_those_of_the_published_nvfp4_checkpoint(k25_weights: Weights) -> None:
    """nvidia/Kimi-K2.6-NVFP4 has 595.148 GB by its shard headers, K2.5's own number of bytes."""
    assert k25_weights.num_bytes == 595_148_192_736


@pytest.mark.parametrize(
    ("published", "utilization", "page"),
    [
        (449_600, 0.93, "models/kimi-k25.md: FP8 KV, gpu-util=0.93"),
        (491_200, 0.94, "models/kimi-k26-v2.md: no MTP, 0.94"),
        (478_992, 0.94, "models/kimi-k26-v4.md: MTP off, 0.94"),
    ],
)
def test_kv_pool_of_8_rtx_pro_6000(published: int, utilization: float, page: str, k25_weights: Weights) -> None:
    """github.com/local-inference-lab/rtx6kpro: vLLM, TP8, FP8 KV cache, 8 x 97,887 MiB."""
    fit = fit_on(8, k25_weights, replace(RTX_PAGE, utilization=utilization))
    assert fit.tokens == pytest.approx(published, rel=TOLERANCE), page


def test_a_token_in_bf16_takes_twice_the_cache(k25_weights: Weights) -> None:
    """The same page's table of one user: 380K tokens in FP8, 190K in BF16. It names no utilization, so only the ratio

    of the two is checked.
    """
    fp8, bf16 = (fit_on(8, k25_weights, Settings(kv=kv)) for kv in ("fp8", "bf16"))
    assert fp8.kv_bytes_per_token == 35_136
    assert bf16.kv_bytes_per_token == 70_272
    assert fp8.tokens / bf16.tokens == pytest.approx(380 / 190, rel=TOLERANCE)


def test_256_experts_do_not_fit_on_four_96_gb_cards(k25_weights: Weights) -> None:
    """A plain quarter of the weights is 101.2 GB; what every GPU keeps whole makes it 103.5 GB of 102.6 GB."""
    fit = fit_on(4, k25_weights, RTX_PAGE, experts=256)
    assert fit.weight_bytes == pytest.approx(101.2e9, rel=TOLERANCE)
    assert fit.weight_bytes > RTX
    assert not fit.holds


def test_192_experts_leave_a_long_context_on_four_96_gb_cards(k25_weights: Weights) -> None:
    """0xSero/Kimi-K2.6-519B-NVFP4 has 192 experts and 310 GB, and is served on 4 x RTX PRO 6000."""
    assert k25_weights.with_experts(192, of=384).num_bytes == pytest.approx(310e9, rel=TOLERANCE)
    assert fit_on(4, k25_weights, RTX_PAGE, experts=192).tokens == pytest.approx(384_000, rel=TOLERANCE)


def test_224_experts_barely_fit_on_four_96_gb_cards(k25_weights: Weights) -> None:
    """What is left is about 1 % of a card, so its tokens depend on every assumption: only the verdict is checked."""
    fit = fit_on(4, k25_weights, RTX_PAGE, experts=224)
    assert fit.holds
    assert fit.tokens < 64_000


def test_a_gpu_of_8_b200_agrees_with_nvidias_configurator(k25_weights: Weights, thinking_weights: Weights) -> None:
    """NVIDIA Dynamo's configurator 0.12.0, nvidia/Kimi-K2.6-NVFP4, TP8 EP8.

    It prints 79.6 "GB" a GPU. Its own parts: 3.158 GB of attention, 79.3 GB of weights with 61 MoE layers (K2 has 60),
    the embedding whole on each GPU (vLLM divides it) and no vision tower.
    """
    fit, text = (
        fit_on(8, weights, Settings(kv="fp8"), memory=GPUS["b200"].memory_bytes, expert=8)
        for weights in (k25_weights, thinking_weights)
    )
    tokens_in_use = 2000 * fit.kv_bytes_per_token
    assert fit.weight_bytes + fit.overhead_bytes + tokens_in_use == pytest.approx(79.6e9, rel=TOLERANCE)
    assert fit.weight_bytes == pytest.approx(79_342_206_976, rel=TOLERANCE)
    assert text.weights[Role.ATTENTION] == pytest.approx(3_158_179_840, rel=0.001)
    assert text.weights[Role.LM_HEAD] == 293_601_280


def test_vllm_recipe_on_8_h200(thinking_weights: Weights) -> None:
    """docs.vllm.ai/projects/recipes, Kimi-K2-Thinking, log of 2025-11-06: 46.80 GiB of KV cache, 715,072 tokens in BF16

    with TP8. The pool is what the log says, the tokens follow.
    """
    pool = int(46.80 * (1 << 30))
    memory = 143_771 * MIB
    fit = fit_on(8, thinking_weights, Settings(kv="bf16"), memory=memory)
    settings = Settings(kv="bf16", overhead_bytes=fit.usable_bytes - fit.weight_bytes - pool)
    same = fit_on(8, thinking_weights, settings, memory=memory)
    assert same.tokens == pytest.approx(715_072, rel=0.001)


def test_a_token_reads_33_gb(thinking_weights: Weights) -> None:
    """11.89 GB of experts, 12.34 of attention, 5.29 of shared experts, .79 of the dense layer, .33 of the router and

    2.35 of the head.
    """
    assert bytes_per_token(thinking_weights, K2, Parallelism()) == pytest.approx(32.98e9, rel=0.001)


@pytest.mark.parametrize(
    ("gpu", "layout", "bound"),
    [
        ("dgx-spark", Parallelism(tensor=8), 45),
        ("dgx-spark", Parallelism(tensor=8, expert=8), 45),
        ("rtx-pro-6000", Parallelism(tensor=8), 297),
        ("b200", Parallelism(tensor=8, pipeline=2), 1277),
        ("b200", Parallelism(tensor=8, expert=8, data_attention=True), 341),
        ("b200", Parallelism(pipeline=4), 233),
    ],
)
def test_what_every_gpu_reads_bounds_the_tokens_a_second(
    gpu: str, layout: Parallelism, bound: int, thinking_weights: Weights
) -> None:
    """q_a, kv_a and the router are read whole on each GPU, 2.17 GB: 8 GPUs read 6.03 GB each, not an eighth of 32.98.

    With DP attention only experts are divided. The stages of a pipeline wait for each other.
    """
    bandwidth = GPUS[gpu].bandwidth
    assert bandwidth is not None
    assert round(bandwidth / bytes_per_token(thinking_weights, K2, layout)) == bound


def test_five_sparks_have_the_bytes_and_eight_hold_the_model(k25_weights: Weights) -> None:
    """5 x 121.7 GiB is 653 GB for 595 GB, but 61 layers in five stages give one of them 13: 127.5 GB of 130.7 GB."""
    spark = GPUS["dgx-spark"]
    assert 5 * spark.memory_bytes > k25_weights.num_bytes
    settings = Settings(kv="fp8")
    five, eight = (fit_on(count, k25_weights, settings, memory=spark.memory_bytes) for count in (5, 8))
    assert str(five.layout) == "PP5"
    assert five.weight_bytes < spark.memory_bytes
    assert not five.holds
    assert str(eight.layout) == "TP8"
    assert eight.holds
