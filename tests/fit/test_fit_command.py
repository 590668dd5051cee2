"""`k2convert fit` on sources, planned results and results."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command import messages_of, run, run_here

from k2convert.checkpoint.index import open_checkpoint
from k2convert.deploy.gpus import GPUS, find_gpu
from k2convert.errors import FitError
from k2convert.models import find_family
from k2convert.plan.plan import plan_conversion
from k2convert.plan.recipe import load_recipe, shipped_recipes
from scripts.fixture_maker.damage import edit_config, edit_json


def run_fit(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    return run_here("fit", *words, code=code)


def answer(*words: object, code: int = 0) -> dict[str, Any]:
    """The document of `fit ... --json`."""
    return json.loads(run_fit(*words, "--json", code=code).stdout)


@pytest.fixture(scope="module")
def result(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, converted, with an FP8 KV cache declared."""
    folder = tmp_path_factory.mktemp("fit") / "out"
    assert run("run", tiny, folder, "--set", "kv_cache=fp8", "--quiet") == 0
    return folder


def test_a_source_is_weighed_as_its_recipe_converts_it(tiny: Path, k25: Path, k3_tiny: Path) -> None:
    sources = {"kimi-k2-thinking": tiny, "kimi-k2.5": k25, "kimi-k3": k3_tiny}
    for name in shipped_recipes():
        recipe = load_recipe(name)
        for folder in [sources[recipe.family]] if recipe.family else [tiny, k25]:
            plan = plan_conversion(source=open_checkpoint(folder), recipe=recipe)
            document = answer(folder, "--recipe", name)
            assert document["recipe"] == name
            assert document["weights"]["bytes"] == plan.data_bytes, name
            if name == find_family(plan.family).recipe:
                assert document == answer(folder), "without the option"


def test_a_recipe_is_named_to_the_next_command_and_fits_the_source(tiny: Path, result: Path) -> None:
    chosen = ("--recipe", "kimi-k2-thinking-nvfp4-fp8")
    layout = ("--gpu", "b200", "--count", "2")
    shown = run_fit(tiny, *layout, *chosen)
    assert shown.stderr.endswith(f"next: k2convert run {tiny} DEST {' '.join(chosen)} --dry-run\n")
    assert run("run", tiny, "DEST", *chosen, "--dry-run", "--quiet") == 0
    before, after = (answer(tiny, *layout, *more)["fits"][0] for more in ((), chosen))
    assert after["bound_tokens_per_second"] > before["bound_tokens_per_second"]
    assert before["serve"]["tensorrt-llm"]["command"] is not None
    assert "FP8" in after["serve"]["tensorrt-llm"]["notes"][0], "it does not load the result"
    assert "recipe kimi-k2.5-nvfp4: is for kimi-k2.5" in run_fit(tiny, "--recipe", "kimi-k2.5-nvfp4", code=1).stderr
    assert "Leave out --recipe." in run_fit(result, *chosen, code=1).stderr


def test_a_result_weighs_what_its_source_was_planned_to(tiny: Path, result: Path) -> None:
    before = answer(tiny)
    after = answer(result)
    assert after["recipe"] is None
    assert after["weights"] == before["weights"]
    assert after["weights"]["bytes"] == open_checkpoint(result).tensor_bytes
    assert before["settings"]["kv"] == "bf16"
    assert after["settings"]["kv"] == "fp8", "as config.json declares"


def test_weights_in_bf16_have_no_notes_about_nvfp4(tiny: Path, result: Path, tmp_path: Path) -> None:
    unquantized = tmp_path / "bf16"
    assert run("run", tiny, unquantized, "--set", "target=bf16", "--quiet") == 0
    for folder, is_nvfp4 in ((unquantized, False), (result, True)):
        assert ("H200: NVFP4" in run_fit(folder, "--gpu", "h200").stderr) == is_nvfp4
        shown = run_fit(folder, "--gpu", "h200", "--count", "1")
        assert ("H200: NVFP4" in shown.stderr) == is_nvfp4
        assert "vllm serve" in shown.stdout


def test_fewer_experts_weigh_what_a_pruned_checkpoint_weighs(tiny: Path, reap: Path) -> None:
    planned = answer(tiny, "--experts", "10")
    pruned = answer(reap)
    assert planned["experts_per_layer"] == pruned["experts_per_layer"] == 10
    assert planned["weights"] == pruned["weights"]


def test_the_answer_about_one_layout(tiny: Path) -> None:
    document = answer(tiny, "--gpu", "RTX PRO 6000", "--count", "2", "--kv", "fp8", "--context", "1000")
    [fit] = document["fits"]
    assert (fit["gpu"], fit["count"], fit["nvfp4"]) == ("rtx-pro-6000", 2, "slow")
    assert fit["layout"] == {"tensor": 2, "expert": 1, "pipeline": 1, "data_attention": False}
    each = fit["each"]
    assert each["usable"] == int(0.92 * each["memory"])
    assert each["weights"] == sum(each["weights_by_role"].values())
    assert each["kv_pool"] == each["usable"] - each["weights"] - each["overhead"]
    assert fit["kv_tokens"] == fit["kv_tokens_fp8"] == each["kv_pool"] // each["kv_bytes_per_token"]
    assert fit["requests"] == fit["kv_tokens"] // 1000
    assert fit["holds"] is True
    assert any("without scales" in note for note in fit["notes"])
    assert fit["bound_tokens_per_second"] == GPUS["rtx-pro-6000"].bandwidth / each["bytes_per_token"]
    read = document["weights"]["bytes_per_token"]
    assert read / 2 < each["bytes_per_token"] < read, "some weights are read whole on both"


def test_each_kind_of_gpu_has_its_overhead_unless_one_is_given(tiny: Path) -> None:
    def overheads(*options: str) -> dict[str, int]:
        return {fit["gpu"]: fit["each"]["overhead"] for fit in answer(tiny, *options)["fits"]}

    assert {overheads().pop(name) for name in ("b200", "h100")} == {GPUS["b200"].overhead_bytes}
    assert overheads()["h200"] == GPUS["h200"].overhead_bytes > GPUS["b200"].overhead_bytes
    assert set(overheads("--overhead", "4GB").values()) == {4_000_000_000}
    fit = answer(tiny, "--gpu", "h200", "--count", "1")["fits"][0]
    assert any("assumed: 8.70 GB on each GPU" in note for note in fit["notes"])


def test_the_commands_that_serve_it_follow_from_what_was_asked(tiny: Path, result: Path) -> None:
    words = ("--gpu", "b200", "--count", "2", "--ep", "2", "--kv", "fp8", "--utilization", "0.8")
    [fit] = answer(tiny, *words)["fits"]
    assert fit["serve"]["vllm"]["command"].startswith(
        "vllm serve DEST --tensor-parallel-size 2 --enable-expert-parallel --kv-cache-dtype fp8 "
        "--gpu-memory-utilization 0.8 --trust-remote-code"
    )
    assert fit["serve"]["sglang"]["command"].startswith("python3 -m sglang.launch_server --model-path DEST --tp-size 2")
    assert fit["serve"]["tensorrt-llm"]["command"].startswith("trtllm-serve DEST --tp_size 2 --ep_size 2")
    [fit] = answer(result, "--gpu", "b200", "--count", "4", "--tp", "4", "--ep", "2")["fits"]
    assert fit["serve"]["sglang"]["command"].startswith(
        f"python3 -m sglang.launch_server --model-path {result} --tp-size 4 --ep-size 2"
    )
    assert fit["serve"]["vllm"]["command"] is None
    assert "whole experts to all 4 GPUs that hold a layer or to none" in fit["serve"]["vllm"]["notes"][0]
    [fit] = answer(tiny, "--gpu", "2GB", "--count", "1", code=3)["fits"]
    assert fit["serve"] == {}
    shown = run_fit(tiny, *words)
    assert "\n\nvLLM:\nvllm serve DEST --tensor-parallel-size 2 --enable-expert-parallel \\\n    --kv" in shown.stdout
    assert shown.stderr.count("In BABILong at 256k tokens") == 1, "each note is said once"


def test_a_cache_shorter_than_the_model_limits_the_request(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, max_position_embeddings=262_144)
    [fit] = answer(tmp_path, "--gpu", "4GB", "--count", "1", "--overhead", "3.66GB")["fits"]
    assert 8192 < fit["longest_request"] < 262_144
    assert f"--max-model-len {fit['longest_request']} " in fit["serve"]["vllm"]["command"]


def test_requests_are_limited_only_where_the_longest_do_not_fit(tiny: Path) -> None:
    roomy = answer(tiny, "--gpu", "b200", "--count", "1")["fits"][0]
    assert "--max-model-len" not in roomy["serve"]["vllm"]["command"]
    longest = json.loads((tiny / "config.json").read_text())["max_position_embeddings"]
    size = roomy["each"]["weights"] + roomy["each"]["kv_bytes_per_token"] * longest // 2
    words = ("--gpu", f"{size}B", "--count", "1", "--overhead", "1B", "--utilization", "1", "--context", "16")
    [tight] = answer(tiny, *words)["fits"]
    assert tight["holds"]
    assert "--max-model-len 16 " in tight["serve"]["vllm"]["command"]


def test_dp_attention_keeps_all_but_experts_and_adds_up_the_caches(tiny: Path) -> None:
    words = (tiny, "--gpu", "b200", "--count", "2", "--kv", "fp8")
    [split], [whole] = answer(*words)["fits"], answer(*words, "--dp-attention")["fits"]
    by_role = answer(tiny)["weights"]["by_role"]
    assert whole["each"]["weights_by_role"]["attention"] == by_role["attention"]
    assert split["each"]["weights_by_role"]["attention"] < by_role["attention"]
    for fit in (split, whole):
        assert fit["each"]["weights_by_role"]["experts"] == by_role["experts"] // 2
    assert whole["kv_tokens"] == 2 * whole["longest_request"]


def test_known_gpus_are_listed_smallest_first(tiny: Path) -> None:
    fits = answer(tiny)["fits"]
    sizes = [fit["count"] * fit["each"]["memory"] for fit in fits]
    assert sizes == sorted(sizes)
    assert {fit["gpu"] for fit in answer(tiny, "--gpu", "h200")["fits"]} == {"h200"}
    assert all(fit["holds"] for fit in fits)


def test_what_does_not_fit_says_how_much_is_missing(tiny: Path) -> None:
    shown = run_fit(tiny, "--gpu", "2GB", "--count", "1", code=3)
    for words in ("does not fit: 1.1", "MISSING", "not even half of the experts fit on 1 x GPU of 2GB as TP1"):
        assert words in shown.stdout
    assert "next:" not in shown.stderr
    size = ("--gpu", "10GB", "--count", "1", "--overhead", "1GB")
    assert "does not fit: " in run_fit(tiny, *size, "--requests", "1000000", code=3).stdout
    shown = run_fit(tiny, "--requests", "1000000000", code=3)
    assert "no known GPUs hold it with 1,000,000,000 requests of 8,192 tokens" in shown.stdout
    assert "next:" not in shown.stderr


RTX = ("--gpu", "rtx-pro-6000", "--count", "4")


@pytest.mark.slow
def test_what_does_not_fit_names_the_experts_and_the_gpus_that_do(k2_headers: Path) -> None:
    shown = run_fit(k2_headers, *RTX, code=3)
    assert (
        "fits with 224 of 384 experts per layer: 11,905 tokens of KV cache, 1 request of 8,192 tokens\n"
        "fits with all experts on 7 x RTX PRO 6000\n"
    ) in shown.stdout
    assert "Moonlight 17 % of its score" in shown.stderr
    assert shown.stderr.endswith(f"next: k2convert prune {k2_headers} PRUNED --keep FILE\n")
    [fit] = answer(k2_headers, *RTX, code=3)["fits"]
    assert [way["experts_per_layer"] for way in fit["ways_out"]["experts"]] == [224], "176 are less than half"
    assert fit["ways_out"]["count"] == 7
    [fit] = answer(k2_headers, *RTX[:2], "--count", "8")["fits"]
    assert fit["holds"]
    assert (fit["max_context"], fit["requests"], fit["requests_of_max_context"]) == (262144, 26, 0)


@pytest.mark.slow
def test_experts_auto_keeps_the_most_that_fit(k2_headers: Path) -> None:
    most = answer(k2_headers, *RTX, "--experts", "auto")
    assert (most["experts_per_layer"], most["fits"][0]["kv_tokens"]) == (224, 11905)


def test_experts_of_small_models(tiny: Path, result: Path) -> None:
    whole = answer(tiny, "--gpu", "h200", "--count", "1", "--experts", "auto")
    assert whole == answer(tiny, "--gpu", "h200", "--count", "1"), "all of them fit"
    nothing = answer(tiny, "--gpu", "2GB", "--count", "1", "--experts", "auto", code=3)
    assert nothing["experts_per_layer"] == 16
    few = run_fit(tiny, "--gpu", "h200", "--count", "1", "--experts", "7").stderr
    assert "pruning costs quality" in few
    assert "next:" not in few
    for folder, source in ((tiny, tiny), (result, "SOURCE")):
        shown = run_fit(folder, "--gpu", "h200", "--count", "1", "--experts", "10").stderr
        assert shown.endswith(f"next: k2convert prune {source} PRUNED --keep FILE\n")


@pytest.mark.slow
def test_the_list_counts_requests_of_the_model_s_maximum(k2_headers: Path) -> None:
    shown = run_fit(k2_headers, "--gpu", "b200").stdout
    table = [line.split("│") for line in shown.splitlines() if "│" in line]
    assert [[cell.strip() for cell in row] for row in table[:2]] == [
        ["4 x B200", "TP4", "773.1 GB", "150.2 GB", "350,433", "42", "1"],
        ["8 x B200", "TP8", "1,546.2 GB", "76.2 GB", "1,403,531", "171", "5"],
    ]


def test_the_list_says_where_nvfp4_does_not_pay(tiny: Path) -> None:
    shown = run_fit(tiny).stderr
    assert "RTX PRO 6000, DGX Spark: NVFP4 runs in hardware, but INT4 is faster on RTX PRO 6000 today: " in shown
    assert "FP8 KV cache, one request of K2.5 ran at 53 to 55 tokens/s in NVFP4 (SGLang) and at 79 in INT4" in shown
    assert "No such comparison is known on DGX Spark" in shown
    assert "A100 80 GB, H100, H100 NVL, H20, H200: NVFP4 runs as weight-only" in shown
    assert shown.index("53 to 55 tokens/s") < shown.index("next:")


def test_no_request_is_longer_than_the_model_allows(tiny: Path, tmp_path: Path) -> None:
    tiny = Path(shutil.copytree(tiny, tmp_path / "short"))
    edit_json(tiny / "config.json", lambda config: config.update(max_position_embeddings=1024))
    shown = run_fit(tiny).stdout
    assert "with 1 request of 1,024 tokens" in shown
    assert "8,192" not in shown
    assert "with 1 request of 9,000 tokens" in run_fit(tiny, "--context", "9000").stdout


PRINTED = {
    "a100": ("A100", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "p4de.24xlarge", "Standard_ND96amsr_A100_v4",
             "nvidia-a100-80gb", "gpu_8x_a100_80gb_sxm4", "A100-80G", "ml.p4de.24xlarge", "a2-ultragpu-8g",
             "nvidia a100", "Standard_NC24ads_A100_v4"),
    "h100": ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "p5.48xlarge", "a3-edgegpu-8g", "Standard_ND96isr_H100_v5",
             "ml.p5.48xlarge", "ml.p5.4xlarge", "p5", "gpu_8x_h100_sxm5", "nvidia-h100-80gb", "h100-80g"),
    "h200": ("NVIDIA H200", "NVIDIA H200 NVL", "p5en.48xlarge", "a3-ultragpu-8g", "nvidia-h200-141gb",
             "ml.p5en.48xlarge", "ml.p5e.48xlarge", "p5en"),
    "h100-nvl": ("NVIDIA H100 NVL", "h100-94g", "Standard_NC40ads_H100_v5", "Standard_NC80adis_H100_v5"),
    "h20": ("NVIDIA H20", "H20 96GB"),
    "b200": ("NVIDIA B200", "p6-b200.48xlarge", "a4-highgpu-8g", "gpu_8x_b200_sxm6", "HGX B200",
             "ml.p6-b200.48xlarge", "B200 192GB"),
    "b300": ("NVIDIA B300 SXM6 AC", "p6-b300.48xlarge", "DGX B300"),
    "gb200": ("NVIDIA GB200", "a4x-highgpu-4g", "p6e-gb200.36xlarge", "ml.p6e-gb200.36xlarge"),
    "gb300": ("NVIDIA GB300", "Standard_ND128isr_GB300_v6"),
    "rtx-pro-6000": ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "g7e.48xlarge", "RTX 6000 Pro", "g7e",
                     "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX 6000 Blackwell",
                     "g4-standard-384", "ml.g7e.48xlarge", "RTX PRO 6000 96GB"),
    "dgx-spark": ("NVIDIA GB10", "spark", "DGX Spark", "ASUS Ascent GX10"),
    "": (
        "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "NVIDIA H20-3e", "H20 141GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA RTX 6000 Ada Generation", "NVIDIA L40S", "p4d.24xlarge",
        "NVIDIA H100L-94C", "NVIDIA A100-SXM-64GB", "RTX 5090",
        "a100-40g", "A100 40GB", "H100 64GB", "ml.p4d.24xlarge", "ml.g6e.48xlarge", "p5000",
        "a2-highgpu-8g", "b2000", "h1000", "gb2001", "NVIDIA B2000", "h20000", "rtx-pro-60001",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["nvidia-tesla-a100", "gpu_8x_a100", "gpu_1x_a100_sxm4", "BM.GPU.A100-v2.8", "A100 PCIe"]
)
def test_a_name_of_two_gpus_is_no_answer(name: str) -> None:
    with pytest.raises(FitError, match="an A100 of 40 GB or of 80 GB"):
        find_gpu(name)


@pytest.mark.parametrize("gpu", [*GPUS, ""])
def test_gpus_are_known_by_the_names_that_tools_and_clouds_print(gpu: str) -> None:
    for name in PRINTED[gpu]:
        if gpu:
            assert find_gpu(name).name == gpu, name
        else:
            with pytest.raises(FitError, match="an unknown GPU"):
                find_gpu(name)


_AMD = f"--gpu 'mi300': a GPU of AMD, which cannot run NVFP4. Known: {', '.join(GPUS)}."


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--gpu b100 --count 8", 1, "--gpu 'b100': an unknown GPU. Known: b200, b300,"),
        ("--gpu MI355X --count 8", 1, "--gpu 'MI355X': a GPU of AMD, which cannot run NVFP4. Known: b200, b300,"),
        ("--gpu mi300 --count 8", 1, f"{_AMD} For another one that runs NVFP4, pass its memory, such as --gpu 96GB."),
        ("--gpu b200 --count 3 --tp 3", 1, "--tp 3: it must divide the 4 attention heads. Nearest:"),
        ("--experts 3", 1, "--experts 3: a layer has 16 experts and each token uses 4. Pass 4 to 16."),
        ("--experts 17", 1, "--experts 17: a layer has 16 experts"),
        ("--count 4", 2, "--count needs --gpu"),
        ("--tp 4", 2, "--tp: needs --gpu and --count"),
        ("--gpu 96XB --count 1", 2, "not a size"),
        ("--gpu 3", 2, "'3': no memory of a GPU. Write for example 96GB."),
        ("--gpu 0GB", 2, "'0GB': no memory of a GPU"),
        ("--gpu 8xH200", 1, "--gpu '8xH200': a number of GPUs. Pass --gpu h200 --count 8."),
        ("--experts auto --gpu b200", 2, "--experts auto: needs --gpu and --count"),
        ("--experts 0", 2, "'0' is not a number of experts. Pass one such as 192, or auto."),
        ("--experts most", 2, "'most' is not a number of experts"),
    ],
)
def test_what_cannot_be_is_one_line_and_what_needs_more_options_a_usage_error(
    words: str, code: int, message: str, tiny: Path
) -> None:
    shown = run_fit(tiny, *words.split(), code=code)
    assert shown.stdout == ""
    assert message in shown.stderr
    if code == 1:
        assert messages_of(shown.stderr).startswith(f"error: {message}")
        assert messages_of(shown.stderr).count("\n") == 1


def test_other_attention_is_refused(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", lambda config: config.pop("kv_lora_rank"))
    assert "kv_lora_rank is None, expected a count" in run_fit(tmp_path, code=1).stderr
