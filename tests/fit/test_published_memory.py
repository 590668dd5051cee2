"""Memory and KV cache of Kimi K2 and K3 as people published them, each figure with its source.

Layers of linear attention (KDA) of Kimi K3 keep a state per request instead of a KV cache.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fit_models import K2_SHAPE, fit_on, k3, k3_shape, k3_source, k25, thinking

from k2convert.checkpoint.index import open_checkpoint
from k2convert.choices import ServedKvCache
from k2convert.deploy.gpus import GIB, GPUS, MIB, Gpu
from k2convert.deploy.layouts import Parallelism, check_layout
from k2convert.deploy.memory import Fit, Settings, bytes_per_token, find_holders, fit_layout
from k2convert.deploy.model import Model, read_model, read_result
from k2convert.errors import FitError
from k2convert.models import find_family
from k2convert.models.names import Role
from k2convert.plan.plan import plan_conversion
from k2convert.plan.recipe import load_recipe

GUIDE = Path(__file__).parents[2] / "k2convert" / "guide"
RTX = GPUS["rtx-pro-6000"]
B300 = GPUS["b300"]
KDA_LAYERS = 69
CONVOLUTIONS = 3 * 96 * 128 * 3  # the last inputs of q, k and v: heads, width, kernel - 1


def on_rtx(count: int, experts: int = 384, utilization: float = 0.93, kv: ServedKvCache = "fp8") -> Fit:
    """Kimi-K2.5 on RTX PRO 6000."""
    return fit_on(count, k25().with_experts(experts), RTX, Settings(kv=kv, utilization=utilization))


def used_on_b200() -> int:
    """What a GPU of 8 B200 uses with 2,000 tokens in its cache."""
    fit = fit_on(8, k25(), GPUS["b200"], Settings(kv="fp8"), expert=8)
    return fit.weight_bytes + GPUS["b200"].overhead_bytes + 2000 * fit.pool.kv_bytes_per_token


def tokens_of_pool(gib: float) -> int:
    """The tokens in BF16 of a KV cache of that size on 8 H200."""
    gpu = replace(GPUS["h200"], memory_bytes=143_771 * MIB)
    fit = fit_on(8, thinking(), gpu, Settings(kv="bf16"))
    overhead = fit.settings.usable_bytes(gpu) - fit.weight_bytes - int(gib * GIB)
    return fit_on(8, thinking(), gpu, Settings(kv="bf16", overhead_bytes=overhead)).tokens


def k3_on_8() -> Fit:
    return fit_on(8, k3_source(), B300, Settings(kv="fp8"))


def read_for_a_token(layout: Parallelism) -> int:
    """The bytes of Kimi-K2-Thinking that a GPU reads."""
    return bytes_per_token(thinking(), layout)


def holders(model: Model, settings: Settings) -> set[tuple[str, int]]:
    return {(fit.gpu.name, fit.layout.num_gpus) for fit in find_holders(model, settings=settings)}


RTX6KPRO = "github.com/local-inference-lab/rtx6kpro, vLLM, TP8, FP8 KV cache, 8 x 97,887 MiB, models/"
CONFIGURATOR = "NVIDIA Dynamo's configurator 0.12.0, "
PUBLISHED: dict[str, tuple[Callable[[], float], float, float]] = {
    # source: (computed, published, tolerance)
    "nvidia/Kimi-K2.6-NVFP4, shard headers": (lambda: k25().num_bytes, 595_148_192_736, 0),
    f"{RTX6KPRO}kimi-k25.md: 0.93": (lambda: on_rtx(8).tokens, 449_600, 0.06),
    f"{RTX6KPRO}kimi-k26-v2.md: no MTP, 0.94": (lambda: on_rtx(8, utilization=0.94).tokens, 491_200, 0.06),
    f"{RTX6KPRO}kimi-k26-v4.md: MTP off, 0.94": (lambda: on_rtx(8, utilization=0.94).tokens, 478_992, 0.06),
    f"{RTX6KPRO}, one user: 380K tokens in FP8, 190K in BF16": (
        lambda: on_rtx(8).tokens / on_rtx(8, kv="bf16").tokens, 380 / 190, 0.06),
    "0xSero/Kimi-K2.6-519B-NVFP4: 192 experts": (lambda: k25().with_experts(192).num_bytes, 310e9, 0.06),
    "0xSero/Kimi-K2.6-519B-NVFP4: served on 4 x RTX PRO 6000": (lambda: on_rtx(4, 192).tokens, 384_000, 0.06),
    # It has 61 MoE layers (K2 has 60), the embedding whole on each GPU (vLLM divides it) and no vision tower.
    f"{CONFIGURATOR}nvidia/Kimi-K2.6-NVFP4, TP8 EP8": (used_on_b200, 79.6e9, 0.06),
    f"{CONFIGURATOR}its attention": (lambda: fit_on(8, thinking(), B300, Settings()).weights[Role.ATTENTION],
        3_158_179_840, 0.001),
    "docs.vllm.ai/projects/recipes, Kimi-K2-Thinking on 8 H200, log of 2025-11-06: 46.80 GiB of BF16 cache, TP8": (
        lambda: tokens_of_pool(46.80), 715_072, 0.001),
    "the same log, with vLLM's default of then, 0.9 of the memory": (
        lambda: fit_on(8, thinking(), GPUS["h200"], Settings(kv="bf16", utilization=0.9)).tokens, 715_072, 0.06),
    # 11.89 GB of experts, 12.34 of attention, 5.29 of shared experts, .79 of the dense layer, .33 of the router, 2.35
    # of the head
    "the sum of what a token of K2 reads": (lambda: read_for_a_token(Parallelism()), 32.98e9, 0.001),
    "unslothai/unsloth, pull request 7616 (2026-07-29): 27.0 GiB of cache of K3 at 1,048,576 tokens in 16 bits": (
        lambda: k3_shape().kv_values * k3_shape().kv_layers() * 2 * 1_048_576, 27.0 * GIB, 0.001),
    # llama.cpp keeps the inputs of the convolutions in FP32 too
    "unslothai/unsloth, pull request 7616: 443.11 MiB of states per sequence in llama.cpp": (
        lambda: KDA_LAYERS * (k3_shape().state_bytes + CONVOLUTIONS * 2), 443.11 * MIB, 1e-4),
    "a census of K3's 96 headers": (lambda: k3_source().num_bytes, 1_560_860_324_864, 0),
    "vllm-project/recipes, pull request 744 (2026-08-04): RedHatAI/Kimi-K3-NVFP4": (
        lambda: k3().num_bytes, 1645.9e9, 1e-4),
    "vllm-project/vllm, pull request 50855 (2026-08-03): 0.75 MiB of state per layer with TP8": (
        lambda: fit_on(8, k3(), B300, Settings()).pool.state_bytes,
        KDA_LAYERS * (0.75 * MIB + CONVOLUTIONS * 2 // 8), 0),
    "SemiAnalysisAI/InferenceX, pull request 2351 (2026-07-27): 195 GB on each of 8": (
        lambda: k3_on_8().weight_bytes, 195e9, 0.06),
    f"{CONFIGURATOR}moonshotai/Kimi-K3, TP8: one slot of states": (
        lambda: k3_on_8().pool.state_bytes, 56_171_520, 0),
    f"{CONFIGURATOR}moonshotai/Kimi-K3: a token": (lambda: k3_on_8().pool.kv_bytes_per_token, 13_824, 0),
    f"{CONFIGURATOR}moonshotai/Kimi-K3: latent": (lambda: k3_on_8().weights[Role.LATENT], 2 * 4_726_980_608, 0),
    f"{CONFIGURATOR}moonshotai/Kimi-K3: shared experts": (
        lambda: k3_on_8().weights[Role.SHARED_EXPERTS], 2_025_848_832 + 1_012_924_416, 0),
    f"{CONFIGURATOR}moonshotai/Kimi-K3: router": (lambda: k3_on_8().weights[Role.ROUTER], 1_181_745_152, 0.001),
    f"{CONFIGURATOR}moonshotai/Kimi-K3: head": (lambda: k3_on_8().weights[Role.LM_HEAD], 293_601_280, 0),
    # its attention has f_a and b whole on each GPU
    f"{CONFIGURATOR}moonshotai/Kimi-K3: attention": (lambda: k3_on_8().weights[Role.ATTENTION], 9.875e9, 0.01),
}  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize("source", PUBLISHED)
def test_figures_are_the_published_ones(source: str) -> None:
    computed, published, tolerance = PUBLISHED[source]
    assert computed() == pytest.approx(published, rel=tolerance, abs=0)


def test_256_experts_do_not_fit_on_four_96_gb_cards_and_224_barely_do() -> None:
    """A plain quarter of the weights is 101.2 GB; what every GPU keeps whole makes it 103.5 GB of 102.6 GB.

    With 224 experts, about 1 % of a card is left, so its tokens depend on every assumption.
    """
    fit = on_rtx(4, 256)
    assert fit.weight_bytes == pytest.approx(101.2e9, rel=0.06)
    assert fit.weight_bytes > RTX.memory_bytes
    assert not fit.holds
    assert on_rtx(4, 224).holds
    assert on_rtx(4, 224).tokens < 64_000


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
def test_what_every_gpu_reads_bounds_the_tokens_a_second(gpu: str, layout: Parallelism, bound: int) -> None:
    """q_a, kv_a and the router are read whole on each GPU, 2.17 GB: 8 GPUs read 6.03 GB each, not an eighth of 32.98.

    With DP attention only experts are divided. The stages of a pipeline wait for each other.
    """
    bandwidth = GPUS[gpu].bandwidth
    assert bandwidth is not None
    assert round(bandwidth / read_for_a_token(layout)) == bound


def test_the_guide_says_what_a_token_of_k2_reads_and_what_fp8_makes_of_it() -> None:
    """FP8 halves attention, but for kv_b, shared experts and the dense layer. Their scales are small."""
    weights = thinking().bytes_by_role
    roles = (Role.ATTENTION, Role.SHARED_EXPERTS, Role.DENSE_MLP)
    attention, shared, dense = (weights[role] for role in roles)
    experts = weights[Role.EXPERTS] * K2_SHAPE.experts_per_token / K2_SHAPE.num_experts
    kv_b = K2_SHAPE.num_layers * 64 * (128 + 128) * 512 * 2
    total = read_for_a_token(Parallelism())
    in_fp8 = total - (attention - kv_b + shared + dense) / 2
    giga = [f"{count / 1e9:.1f} GB" for count in (total, experts, attention, shared, in_fp8)]
    page = " ".join((GUIDE / "serve.md").read_text().split())
    assert "a token of K2 reads {}: {} of experts, {} of attention, {} of shared experts".format(*giga) in page
    assert f"read by a token at batch 1 | {giga[0]} | {giga[-1]} |" in page


def test_five_sparks_have_the_bytes_and_six_hold_the_model() -> None:
    """5 x 121.7 GiB is 653 GB for 595 GB, but 61 layers in five stages give one of them 13: 127.5 GB of 130.7 GB."""
    spark = GPUS["dgx-spark"]
    assert 5 * spark.memory_bytes > k25().num_bytes
    five, six = (fit_on(count, k25(), spark, Settings(kv="fp8")) for count in (5, 6))
    assert (str(five.layout), five.holds) == ("PP5", False)
    assert five.weight_bytes < spark.memory_bytes
    assert (str(six.layout), six.holds) == ("TP2 PP3", True)


def _holds(model: Model, gpu: Gpu, layout: Parallelism, settings: Settings) -> bool:
    try:
        check_layout(layout, model.shape)
    except FitError:
        return False
    return fit_layout(model, gpu, layout, settings).holds


@pytest.mark.parametrize("kv", ["fp8", "bf16"])
@pytest.mark.parametrize("model", [k25, pytest.param(k3, marks=pytest.mark.slow)])
def test_the_least_number_of_each_gpu_is_that_of_all_layouts(model: Callable[[], Model], kv: ServedKvCache) -> None:
    """Every product of sizes of tensor, expert and pipeline parallelism is tried for 1 to 16 GPUs of each kind."""
    settings = Settings(kv=kv)
    sizes = range(1, 17)
    least: dict[str, int] = {}
    for gpu, tensor, pipeline in product(GPUS.values(), sizes, sizes):
        count = tensor * pipeline
        if count > min(least.get(gpu.name, 16), 16):
            continue
        if any(_holds(model(), gpu, Parallelism(tensor, expert, pipeline), settings) for expert in sizes):
            least[gpu.name] = count
    fits = find_holders(model(), settings=settings)
    assert {name: min(fit.layout.num_gpus for fit in fits if fit.gpu.name == name) for name in least} == least
    assert {fit.gpu.name for fit in fits} == least.keys()


def test_24_layers_of_k3_have_a_kv_cache_and_69_have_states() -> None:
    """unslothai/unsloth, pull request 7616 (2026-07-29): 24 of 93 layers are MLA, the others KDA."""
    shape = k3_shape()
    assert (shape.num_layers, shape.kv_layers(), len(shape.linear_layers)) == (93, 24, KDA_LAYERS)
    assert shape.linear_layers.isdisjoint((3, 7, 91, 92))
    assert {0, 1, 2, 90} <= shape.linear_layers


@pytest.mark.slow
def test_gpus_that_vllm_names_hold_k3() -> None:
    """vLLM's announcement: at least 8 B300 or GB300; 16 B200 work too (vllm-project.github.io, pull request 286,

    2026-07-27). 8 GB200 are too few (vllm-project/recipes, issue 934, 2026-09-07). mgoin/Kimi-K3-pruned50 has 448
    experts, and fits on 8 B200.
    """
    for model in (k3_source(), k3()):
        gpus = holders(model, Settings(kv="bf16"))
        assert gpus >= {("b300", 8), ("gb300", 8), ("b200", 16), ("gb200", 16)}
        assert gpus.isdisjoint((("b200", 8), ("gb200", 8)))
    assert ("b200", 8) in holders(k3().with_experts(448), Settings())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "expert", "factor"), [(8, 1, 1), (16, 1, 4 / 3), (16, 2, 1), (32, 2, 4 / 3), (16, 16, 1)]
)
def test_narrow_pieces_of_experts_are_padded(tensor: int, expert: int, factor: float) -> None:
    """vLLM: 3072 columns become 4096 with TP16, and stay whole with expert parallelism."""
    fit = fit_on(tensor, k3(), B300, Settings(), tensor=tensor, expert=expert)
    split = k3().bytes_by_role[Role.EXPERTS] / tensor
    assert fit.weights[Role.EXPERTS] == pytest.approx(split * factor, rel=1e-9)


@pytest.mark.slow
def test_requests_share_the_pool_with_their_states() -> None:
    def fit(**changed: Any) -> Fit:
        return fit_on(8, k3(), B300, Settings(requests=changed.pop("requests", 1)), **changed)

    pool, states = fit().pool.num_bytes, fit().pool.state_bytes
    assert fit(data_attention=True).pool.state_bytes == 8 * states
    assert fit().tokens == fit().longest == (pool - states) // fit().pool.kv_bytes_per_token
    assert fit(requests=100).tokens == (pool - 100 * states) // fit().pool.kv_bytes_per_token
    slots = fit().slots_of(8192)
    assert slots == pool // (8192 * fit().pool.kv_bytes_per_token + states)
    assert fit(requests=slots).holds
    assert not fit(requests=slots + 1).holds


@pytest.mark.slow
def test_a_pipeline_stage_without_kv_cache_is_limited_by_its_states() -> None:
    """31 stages of 3 layers: some have KDA layers only, and hold the fewest short requests."""
    fit = fit_layout(k3(), GPUS["b200"], Parallelism(pipeline=31), Settings(kv="fp8"))
    without = [pool for pool in fit.pools if pool.kv_bytes_per_token == 0]
    assert len(without) == 8
    assert fit.slots_of(1) == min(pool.num_bytes // pool.state_bytes for pool in without)
    assert fit.longest < 1 << 31
    assert fit.pool.kv_bytes_per_token > 0, "the fullest one has a cache"


def converted(headers: Path, recipe: str) -> Model:
    """A model as a recipe converts it, by its headers."""
    source = open_checkpoint(headers)
    plan = plan_conversion(source=source, recipe=load_recipe(recipe))
    outputs = (output for job in plan.jobs for output in job.outputs)
    return read_result(outputs, family=find_family(plan.family), config=source.config, where="result")


@pytest.mark.slow
def test_fp8_raises_the_bound_of_k2_on_eight_sparks_from_45_to_66(k2_headers: Path) -> None:
    bandwidth = GPUS["dgx-spark"].bandwidth
    assert bandwidth is not None
    source = open_checkpoint(k2_headers)
    for recipe, bound in (("kimi-k2-thinking-nvfp4", 45), ("kimi-k2-thinking-nvfp4-fp8", 66)):
        read = bytes_per_token(converted(k2_headers, recipe), Parallelism(tensor=8))
        assert bandwidth / read == pytest.approx(bound, rel=0.02), recipe
        assert bytes_per_token(read_model(source, recipe=recipe), Parallelism(tensor=8)) == read, "by the source"


@pytest.mark.slow
def test_the_guide_says_what_a_token_of_k3_reads(k3_headers: Path) -> None:
    page = " ".join((GUIDE / "serve.md").read_text().split())
    read = [bytes_per_token(converted(k3_headers, f"kimi-k3-nvfp4{end}"), Parallelism()) for end in ("", "-fp8")]
    assert "read by a token at batch 1 | {:.1f} GB | {:.1f} GB |".format(*(count / 1e9 for count in read)) in page
