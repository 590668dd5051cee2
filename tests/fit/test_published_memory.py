"""Memory and KV cache of Kimi K2 as people published them, each figure with its source.

The weights are those of the released headers, tensor by tensor (scripts/fixture_maker). Tolerance: 6 %.
"""

from dataclasses import replace

import pytest
from test_layouts import K2

from k2convert.fit.gpus import GPUS, MIB
from k2convert.fit.layouts import complete_layout
from k2convert.fit.memory import Fit, Settings, fit_layout
from k2convert.fit.model import Weights, weigh
from k2convert.fit.speed import bytes_per_token, speed_ceiling
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
    ("published", "dcp", "utilization", "page"),
    [
        (449_600, 1, 0.93, "models/kimi-k25.md: FP8 KV, DCP=1, gpu-util=0.93"),
        (3_621_504, 8, 0.93, "models/kimi-k25.md: FP8 KV, DCP=8, gpu-util=0.93"),
        (491_200, 1, 0.94, "models/kimi-k26-v2.md: DCP=1, no MTP, 0.94"),
        (3_929_600, 8, 0.94, "models/kimi-k26-v2.md: DCP=8, no MTP, 0.94"),
        (478_992, 1, 0.94, "models/kimi-k26-v4.md: DCP1 MTP off, 0.94"),
        (953_088, 2, 0.94, "models/kimi-k26-v4.md: DCP2 MTP off, 0.94"),
        (1_906_240, 4, 0.94, "models/kimi-k26-v4.md: DCP4 MTP off, 0.94"),
        (3_811_968, 8, 0.94, "models/kimi-k26-v4.md: DCP8 MTP off, 0.94"),
    ],
)
def test_kv_pool_of_8_rtx_pro_6000(
    published: int, dcp: int, utilization: float, page: str, k25_weights: Weights
) -> None:
    """github.com/local-inference-lab/rtx6kpro: vLLM, TP8, FP8 KV cache, 8 x 97,887 MiB."""
    fit = fit_on(8, k25_weights, replace(RTX_PAGE, utilization=utilization), decode_context=dcp)
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


def test_a_gpu_of_8_b200_agrees_with_aiconfigurator(k25_weights: Weights, thinking_weights: Weights) -> None:
    """aiconfigurator-core 0.12.0, nvidia/Kimi-K2.6-NVFP4, TP8 EP8.

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

    with TP8 and 5,721,088 with DCP8. The pool is what the log says, the tokens follow.
    """
    pool = int(46.80 * (1 << 30))
    memory = 143_771 * MIB
    for dcp, published in ((1, 715_072), (8, 5_721_088)):
        fit = fit_on(8, thinking_weights, Settings(kv="bf16"), memory=memory, decode_context=dcp)
        settings = Settings(kv="bf16", overhead_bytes=fit.usable_bytes - fit.weight_bytes - pool)
        same = fit_on(8, thinking_weights, settings, memory=memory, decode_context=dcp)
        assert same.tokens == pytest.approx(published, rel=0.001)


def test_a_token_reads_33_gb(k25_weights: Weights) -> None:
    """Attention 37 %, routed experts 36 %, shared experts 16 % of 33.0 GB; 1,940 tok/s by bandwidth on 8 x B200."""
    read = bytes_per_token(k25_weights, K2)
    assert read == pytest.approx(33.0e9, rel=0.01)
    by_role = k25_weights.by_role
    assert by_role[Role.ATTENTION] / read == pytest.approx(0.37, abs=0.01)
    assert by_role[Role.SHARED_EXPERTS] / read == pytest.approx(0.16, abs=0.01)
    ceiling = speed_ceiling(k25_weights, K2, gpu=GPUS["b200"], layout=complete_layout(8, K2))
    assert ceiling == pytest.approx(1940, rel=TOLERANCE)


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
