"""Memory of Kimi K3, whose layers of linear attention (KDA) keep a state per request instead of a KV cache.

The weights are those of the released headers, tensor by tensor (scripts/fixture_maker). Each published figure has its
source.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from command import assert_refused, run, run_here
from test_fit_command import answer

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import FitError
from k2convert.fit.gpus import GIB, GPUS, MIB
from k2convert.fit.layouts import Parallelism, check_layout, complete_layout
from k2convert.fit.memory import Fit, Settings, fit_layout
from k2convert.fit.model import Model, ModelShape, Weights, read_shape, weigh
from k2convert.fit.search import find_holders
from k2convert.fit.serving import Deployment, serve_command
from k2convert.hub.source_card import read_source_card
from k2convert.models.kimi_k3 import K3
from k2convert.models.names import Role
from k2convert.plan.plan import plan_conversion
from k2convert.plan.recipe import load_recipe
from k2convert.report.card import render_card
from k2convert.report.figures import collect_report
from scripts.fixture_maker.damage import edit_json
from scripts.fixture_maker.k3 import k3_parts

CONFIG = Path(__file__).parents[1] / "data" / "published-configs" / "moonshotai--Kimi-K3_config.json"
KDA_LAYERS = 69
HEADS = 96
WIDTH = 128
KERNEL = 4
MATRIX = HEADS * WIDTH * WIDTH
CONVOLUTIONS = 3 * HEADS * WIDTH * (KERNEL - 1)


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return read_shape(read_json_file(CONFIG), family=K3, where="Kimi-K3")


@pytest.fixture(scope="module")
def source() -> Weights:
    return weigh((spec for part in k3_parts() for spec in part), family=K3)


@pytest.fixture(scope="module")
def converted() -> Weights:
    return weigh((spec for part in k3_parts() for spec in part), family=K3, recipe=load_recipe(K3.recipe))


def fit_on(name: str, count: int, weights: Weights, shape: ModelShape, settings: Settings, **layout: Any) -> Fit:
    chosen = complete_layout(count, shape, **layout)
    return fit_layout(weights, shape, chosen, memory_bytes=GPUS[name].memory_bytes, settings=settings)


@pytest.mark.slow
def test_weights_are_those_of_the_released_headers(source: Weights, converted: Weights) -> None:
    """1,560,860,324,864 bytes: a census of the 96 headers. RedHatAI/Kimi-K3-NVFP4 has 1645.9 GB of safetensors

    (vllm-project/recipes, pull request 744, 2026-08-04).
    """
    assert source.num_bytes == 1_560_860_324_864
    assert converted.num_bytes == 1_645_947_954_176
    assert converted.num_bytes == pytest.approx(1645.9e9, rel=1e-4)


def test_24_layers_have_a_kv_cache_and_69_have_states(shape: ModelShape) -> None:
    """unslothai/unsloth, pull request 7616 (2026-07-29): 24 of 93 layers are MLA, the others KDA. 27.0 GiB of cache at

    1,048,576 tokens in 16 bits, and 443.11 MiB of states per sequence in llama.cpp, which keeps the inputs of the
    convolutions in FP32 too.
    """
    assert (shape.num_layers, shape.kv_layers(), len(shape.linear_layers)) == (93, 24, KDA_LAYERS)
    assert shape.linear_layers.isdisjoint((3, 7, 91, 92))
    assert {0, 1, 2, 90} <= shape.linear_layers
    assert shape.kv_values * shape.kv_layers() * 2 * 1_048_576 / GIB == pytest.approx(27.0, rel=0.001)
    all_fp32 = KDA_LAYERS * (shape.state_bytes + CONVOLUTIONS * 2)
    assert all_fp32 / MIB == pytest.approx(443.11, abs=0.01)


@pytest.mark.slow
def test_a_state_is_divided_by_heads(shape: ModelShape, converted: Weights) -> None:
    """vllm-project/vllm, pull request 50855 (2026-08-03): with TP8, a request's recurrent state is 0.75 MiB per layer.

    The inputs of the convolutions are in the model's dtype.
    """
    fit = fit_on("b300", 8, converted, shape, Settings())
    assert fit.state_bytes == KDA_LAYERS * (int(0.75 * MIB) + CONVOLUTIONS * 2 // 8)
    whole = fit_on("b300", 8, converted, shape, Settings(), data_attention=True)
    assert whole.state_bytes == 8 * fit.state_bytes


@pytest.mark.slow
def test_a_gpu_of_8_agrees_with_nvidias_configurator(shape: ModelShape, source: Weights) -> None:
    """NVIDIA Dynamo's configurator 0.12.0, moonshotai/Kimi-K3, TP8, its own operations.

    It counts one slot of states as below (and charges 5 for a request), and attention with f_a and b whole on each GPU.
    """
    fit = fit_on("b300", 8, source, shape, Settings(kv="fp8"))
    assert fit.state_bytes == 56_171_520
    assert fit.kv_bytes_per_token == 13_824
    assert fit.weights[Role.LATENT] == 2 * 4_726_980_608
    assert fit.weights[Role.SHARED_EXPERTS] == 2_025_848_832 + 1_012_924_416
    assert fit.weights[Role.ROUTER] == pytest.approx(1_181_745_152, rel=0.001)
    assert fit.weights[Role.LM_HEAD] == fit.weights[Role.EMBEDDINGS] == 293_601_280
    assert fit.weights[Role.ATTENTION] == pytest.approx(9.875e9, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "count", "holds"),
    [("b300", 8, True), ("gb300", 8, True), ("b200", 16, True), ("gb200", 16, True), ("b200", 8, False),
     ("gb200", 8, False)],
)  # fmt: skip
def test_gpus_that_vllm_names_hold_it(
    gpu: str, count: int, holds: bool, shape: ModelShape, source: Weights, converted: Weights
) -> None:
    """vLLM's announcement: at least 8 B300 or GB300; 16 B200 work too (vllm-project.github.io, pull request 286,

    2026-07-27). 8 GB200 are too few (vllm-project/recipes, issue 934, 2026-09-07).
    """
    for weights in (source, converted):
        assert fit_on(gpu, count, weights, shape, Settings(kv="bf16")).holds == holds


def test_a_gpu_of_8_has_about_195_gb_of_the_source(shape: ModelShape, source: Weights) -> None:
    """SemiAnalysisAI/InferenceX, pull request 2351 (2026-07-27): 195 GB, an eighth. What is whole on each is added."""
    fit = fit_on("b300", 8, source, shape, Settings())
    assert fit.weight_bytes == pytest.approx(195e9, rel=0.06)
    assert fit.weight_bytes > source.num_bytes / 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "expert", "factor"), [(8, 1, 1), (16, 1, 4 / 3), (16, 2, 1), (32, 2, 4 / 3), (16, 16, 1)]
)
def test_narrow_pieces_of_experts_are_padded(
    tensor: int, expert: int, factor: float, shape: ModelShape, converted: Weights
) -> None:
    """vLLM: 3072 columns become 4096 with TP16, and stay whole with expert parallelism."""
    fit = fit_on("b300", tensor, converted, shape, Settings(), tensor=tensor, expert=expert)
    split = converted.by_role[Role.EXPERTS] / tensor
    assert fit.weights[Role.EXPERTS] == pytest.approx(split * factor, rel=1e-9)


@pytest.mark.slow
def test_requests_share_the_pool_with_their_states(shape: ModelShape, converted: Weights) -> None:
    one, many = (fit_on("b300", 8, converted, shape, Settings(requests=n)) for n in (1, 100))
    assert one.tokens == one.longest == (one.pool_bytes - one.state_bytes) // one.kv_bytes_per_token
    assert many.longest == one.longest
    assert many.tokens == (one.pool_bytes - 100 * one.state_bytes) // one.kv_bytes_per_token
    slots = one.request_slots
    assert slots * (8192 * one.kv_bytes_per_token + one.state_bytes) <= one.pool_bytes
    assert (slots + 1) * (8192 * one.kv_bytes_per_token + one.state_bytes) > one.pool_bytes
    assert fit_on("b300", 8, converted, shape, Settings(requests=slots)).holds
    assert not fit_on("b300", 8, converted, shape, Settings(requests=slots + 1)).holds


def test_a_pipeline_stage_without_kv_cache_is_limited_by_its_states(shape: ModelShape, converted: Weights) -> None:
    """31 stages of 3 layers: some have KDA layers only, and hold the fewest short requests."""
    layout = Parallelism(pipeline=31)
    fit = fit_layout(converted, shape, layout, memory_bytes=180 * GIB, settings=Settings(kv="fp8"))
    without = [pool for pool in fit.pools if pool.kv_bytes_per_token == 0]
    assert len(without) == 8
    assert fit.slots_of(1) == min(pool.num_bytes // pool.state_bytes for pool in without)
    assert fit.longest < 1 << 31
    assert fit.kv_bytes_per_token > 0, "the fullest one has a cache"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Parallelism(tensor=3), "--tp 3: it must divide the 96 attention heads and be one of 1, 2, 4, 8, 16, 32. "
         "Nearest: --tp 2 or --tp 4."),
        (Parallelism(tensor=48), "Nearest: --tp 32."),
        (Parallelism(tensor=32), "Nearest: --ep 2."),
    ],
)  # fmt: skip
def test_layouts_that_no_engine_has_are_refused(layout: Parallelism, message: str, shape: ModelShape) -> None:
    with pytest.raises(FitError) as refused:
        check_layout(layout, shape)
    assert message in str(refused.value)


@pytest.mark.slow
def test_known_gpus_that_hold_it_are_found(shape: ModelShape, k3_headers: Path) -> None:
    found = answer(k3_headers)
    assert found["weights"]["bytes"] == 1_645_947_954_176
    assert found["kv_bytes_per_token"] == {"fp8": 13_824, "bf16": 27_648}
    assert found["state_bytes_per_request"] == KDA_LAYERS * (MATRIX * 4 + CONVOLUTIONS * 2) == 449_372_160
    assert {(fit["gpu"], fit["count"]) for fit in found["fits"]} >= {("b300", 8), ("gb300", 8), ("b200", 16)}
    assert ("b200", 8) not in {(fit["gpu"], fit["count"]) for fit in found["fits"]}


def test_why_an_engine_has_no_command_stands_under_its_name(k3_tiny: Path) -> None:
    shown = run_here("fit", k3_tiny, "--gpu", "b200", "--count", 2, "--tp", 1, code=0)
    assert "TensorRT-LLM:\nTensorRT-LLM has no pipeline parallelism for this model.\n" in shown.stdout
    assert "no pipeline parallelism" not in shown.stderr


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_result_weighs_what_its_source_was_planned_to(layout: str, k3_tiny: Path, tmp_path: Path) -> None:
    assert run("run", k3_tiny, tmp_path / "out", "--set", f"layout={layout}", "--quiet") == 0
    before = answer(k3_tiny)
    after = answer(tmp_path / "out")
    plan = plan_conversion(source=open_checkpoint(k3_tiny), recipe=load_recipe(K3.recipe))
    assert (before["recipe"], after["recipe"]) == ("kimi-k3-nvfp4", None)
    assert before["weights"]["bytes"] == after["weights"]["bytes"] == plan.data_bytes
    assert after["weights"]["bytes"] == open_checkpoint(tmp_path / "out").tensor_bytes
    found = open_checkpoint(tmp_path / "out")
    config = read_json_file(tmp_path / "out" / "config.json")
    report = collect_report(folder=tmp_path / "out", tensors=found.tensors.values())
    card = render_card(report, base_model=None, source=read_source_card(""), config=config)
    assert "of states per request." in card
    assert "```bash\n\n```" not in card
    is_refused = layout == "compressed-tensors"
    assert ("SGLang 0.5.23 does not load the layout compressed-tensors" in card) == is_refused
    assert ("sglang.launch_server" in card) != is_refused
    for reason in ("no pipeline parallelism", "about 2 TB of GPU memory"):
        assert card.count(reason) == 1
    assert card.count("skips the experts' tensors") == is_refused, "each note is said once, where it applies"
    assert "it loads W4A4 only" not in card
    assert "36 of 36 tensors are in the window, where a cast is exact" in card.partition("## Serving")[0]


def test_engines_are_given_the_parsers_of_k3_and_refuse_what_they_cannot_load() -> None:
    def words(engine: Any, **changed: Any) -> tuple[str, tuple[str, ...]]:
        usual: dict[str, Any] = {"layout": "modelopt", "activations": "w4a4", "parallelism": Parallelism(tensor=8)}
        made = serve_command(engine, Deployment(model="me/K3", family=K3.card, **(usual | changed)))
        return made.line, made.notes

    assert words("vllm")[0].endswith("--enable-auto-tool-choice --tool-call-parser kimi_k3 --reasoning-parser kimi_k3")
    assert words("sglang")[0].endswith("--tool-call-parser kimi_k3 --reasoning-parser kimi_k3")
    for gpu, kernels in ((None, True), ("b200", True), ("h200", False), ("rtx-pro-6000", False)):
        line, notes = words("sglang", gpu=gpu and GPUS[gpu])
        assert ("--moe-runner-backend flashinfer_trtllm" in line) == kernels
        assert any("on Blackwell: its other kernels" in note for note in notes) == kernels
    assert "--moe-runner-backend marlin" in words("sglang", activations="w4a16")[0]
    assert words("tensorrt-llm")[0].endswith("--tool_parser kimi_k3 --reasoning_parser kimi_k3")
    assert words("vllm", layout="compressed-tensors")[0]
    for engine, changed, reason in (
        ("sglang", {"layout": "compressed-tensors"}, "skips the experts' tensors without a message"),
        ("tensorrt-llm", {"activations": "w4a16"}, "it loads W4A4 only"),
        ("tensorrt-llm", {"parallelism": Parallelism(tensor=8, pipeline=2)}, "no pipeline parallelism"),
    ):
        line, (note,) = words(engine, **changed)
        assert (line, reason in note) == ("", True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kda_layers": [1, 2]}, "must have each of the layers 1 to 4 once"),
        ({"kda_layers": [1, 2, 3, 4], "full_attn_layers": []}, "and some of them in full_attn_layers"),
        ({"full_attn_layers": "4"}, "must have each of the layers 1 to 4 once"),
        ({"kda_layers": ["1", "2", "3"]}, "must have each of the layers 1 to 4 once"),
        ({"head_dim": None}, "linear_attn_config: config.json: head_dim is None, expected a count"),
        ({"num_heads": 0}, "num_heads is 0, expected a count"),
        ({"short_conv_kernel_size": True}, "short_conv_kernel_size is True, expected a count"),
    ],
)
def test_damaged_lists_of_layers_are_refused(
    changed: dict[str, Any], message: str, k3_tiny: Path, tmp_path: Path
) -> None:
    shutil.copytree(k3_tiny, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", lambda found: found["text_config"]["linear_attn_config"].update(changed))
    assert_refused(run_here("fit", tmp_path), message)


@pytest.mark.slow
def test_fewer_experts_fit_on_fewer_gpus(shape: ModelShape, converted: Weights) -> None:
    """mgoin/Kimi-K3-pruned50 has 448 experts."""
    half = shape.with_experts(448)
    weights = converted.with_experts(448, of=896)
    model = Model(K3, half, weights, None, "bf16")
    found = {(holder.gpu.name, holder.fit.layout.num_gpus) for holder in find_holders(model, settings=Settings())}
    assert ("b200", 8) in found
