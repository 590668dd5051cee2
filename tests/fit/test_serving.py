"""Serve commands: every option and value is one that the engine's own definitions have."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.layouts.layout import Quantization
from k2convert.choices import Activations, Engine, Layout
from k2convert.deploy.gpus import GPUS
from k2convert.deploy.layouts import Parallelism, check_layout
from k2convert.deploy.model import read_shape
from k2convert.deploy.serving import (
    ENGINE_NAMES,
    Deployment,
    ServeCommand,
    nvfp4_scheme,
    serve_command,
    usual_parallelism,
)
from k2convert.errors import FitError
from k2convert.models.kimi import K2_5, K2_THINKING
from k2convert.models.kimi_k3 import K3
from k2convert.models.names import ModelCardFacts
from scripts.engine_checks.deployments import LISTS, commands, deployments

ROOT = Path(__file__).resolve().parents[2]
ENGINES: tuple[Engine, ...] = get_args(Engine)
PROGRAMS = {
    "vllm": ("vllm", "serve", "me/Kimi-NVFP4"),
    "sglang": ("python3", "-m", "sglang.launch_server"),
    "tensorrt-llm": ("trtllm-serve", "me/Kimi-NVFP4"),
}
Kind = str | list[str]
"""What an option takes: "flag" for nothing, "int", "float", "str", or one of a list."""


def recorded(engine: Engine) -> dict[str, Kind]:
    return read_json_file(LISTS / f"{engine}.json")["options"]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.param


def deployment(**changed: Any) -> Deployment:
    usual: dict[str, Any] = {
        "model": "me/Kimi-NVFP4",
        "layout": "modelopt",
        "activations": "w4a4",
        "family": K2_THINKING.card,
        "parallelism": Parallelism(tensor=8),
    }
    return Deployment(**(usual | changed))


def command(engine: Engine, **changed: Any) -> ServeCommand:
    return serve_command(engine, deployment(**changed))


def problems(engine: Engine, words: tuple[str, ...]) -> Iterator[str]:
    """What is wrong with the options in a command."""
    options = recorded(engine)
    rest = words[len(PROGRAMS[engine]) :]
    starts = [i for i, word in enumerate(rest) if word.startswith("--")]
    for begin, end in zip(starts, [*starts[1:], len(rest)], strict=True):
        name, *values = rest[begin:end]
        kind = options.get(name)
        if kind is None:
            yield f"{name}: unknown"
        elif len(values) != (kind != "flag"):
            yield f"{name}: takes {kind}, not {values}"
        elif values and not is_value(values[0], kind):
            yield f"{name}: {values[0]} is not of {kind}"


def is_value(word: str, kind: Kind) -> bool:
    if isinstance(kind, list):
        return word in kind
    patterns = {"int": r"\d+", "float": r"\d+(\.\d+)?", "str": ".+"}
    return re.fullmatch(patterns[kind], word) is not None


def test_every_command_and_note_has_options_and_values_of_the_engine(engine: Engine) -> None:
    launches = {launch.words: launch for launch in commands(engine) if launch.words}
    assert len(launches) > 100
    for words, launch in launches.items():
        program = PROGRAMS[engine]
        assert words[: len(program)] == program
        assert list(problems(engine, words)) == []
        assert tuple(shlex.split(launch.line)) == words
        assert tuple(shlex.split(launch.block.replace("\\\n", ""))) == words
        assert all(len(line) <= 80 for line in launch.block.splitlines())
    notes = {note for launch in commands(engine) for note in launch.notes}
    assert len(notes) > 5
    assert {word for note in notes for word in re.findall(r"--[a-z][\w-]+", note)} <= set(recorded(engine))
    assert "it's my folder" in shlex.split(command(engine, model="it's my folder").block.replace("\\\n", ""))


def test_a_wrong_option_is_found(engine: Engine) -> None:
    for wrong in (("--tensor-parallel", "8"), ("--trust-remote-code", "yes"), ("--port",), ("--port", "x")):
        assert len(list(problems(engine, (*command(engine).words, *wrong)))) == 1


@pytest.mark.parametrize(
    ("parallelism", "vllm", "sglang", "tensorrt_llm"),
    [
        (Parallelism(), "", "", ""),
        (Parallelism(tensor=8), "--tensor-parallel-size 8", "--tp-size 8", "--tp_size 8"),
        (
            Parallelism(tensor=8, expert=8, pipeline=2),
            "--tensor-parallel-size 8 --pipeline-parallel-size 2 --enable-expert-parallel",
            "--tp-size 8 --ep-size 8 --pp-size 2",
            "--tp_size 8 --ep_size 8 --pp_size 2",
        ),
        (
            Parallelism(tensor=8, expert=8, data_attention=True),
            "--data-parallel-size 8 --enable-expert-parallel",
            "--tp-size 8 --attn-dp-size 8 --ep-size 8",
            "--tp_size 8 --ep_size 8 --enable_attention_dp",
        ),
        (Parallelism(tensor=8, expert=4), None, "--tp-size 8 --ep-size 4", "--tp_size 8 --ep_size 4"),
    ],
)
def test_layouts_in_each_engines_words(
    parallelism: Parallelism, vllm: str | None, sglang: str, tensorrt_llm: str
) -> None:
    starts = ("vllm serve here", "python3 -m sglang.launch_server --model-path here", "trtllm-serve here")
    flags = ("--trust-remote-code", "--trust-remote-code", "--trust_remote_code")
    for engine, start, flag, expected in zip(ENGINES, starts, flags, (vllm, sglang, tensorrt_llm), strict=True):
        launch = command(engine, model="here", parallelism=parallelism, family=ModelCardFacts("a model", ()))
        if expected is None:
            assert (launch.words, len(launch.notes)) == ((), 1)
        else:
            assert launch.line == " ".join(filter(None, (start, expected, flag)))


def test_context_cache_memory_and_revision_in_each_engines_words() -> None:
    changed = {"context": 131_072, "kv_cache": "fp8", "utilization": 0.93, "revision": "0123abcd"}
    vllm, sglang, tensorrt_llm = (command(engine, **changed) for engine in ENGINES)
    assert "--revision 0123abcd" in vllm.line
    assert "--max-model-len 131072 --kv-cache-dtype fp8 --gpu-memory-utilization 0.93" in vllm.line
    assert "--context-length 131072 --kv-cache-dtype fp8_e4m3" in sglang.line
    assert "--max_seq_len 131072 --kv_cache_dtype fp8" in tensorrt_llm.line
    for launch in (vllm, sglang, tensorrt_llm):
        assert any("36 %" in note and "47 %" in note for note in launch.notes)
    for launch, option in ((sglang, "--mem-fraction-static"), (tensorrt_llm, "--free_gpu_memory_fraction")):
        assert any(option in note for note in launch.notes), "their memory options count otherwise"
        assert option not in launch.words
    assert "--kv-cache-dtype bfloat16" in command("vllm", kv_cache="bf16").line
    assert any("16-bit KV cache" in note for note in command("tensorrt-llm", kv_cache="bf16").notes)


def test_sglang_keeps_activations_of_weight_only_checkpoints_in_16_bits() -> None:
    for setup in {(setup.layout, setup.activations): setup for setup in deployments()}.values():
        needs = (setup.layout, setup.activations) == ("modelopt", "w4a16")
        launch = serve_command("sglang", setup)
        assert ("marlin" in launch.words) == needs
        assert any("rounds activations to 4 bits" in note for note in launch.notes) == needs


@pytest.mark.parametrize(
    ("gpu", "count", "machines", "begin"),
    [
        ("b200", 8, 1, None),
        ("b200", 16, 2, None),
        ("gb200", 8, 2, None),
        ("h200", 32, 4, "H200: NVFP4 runs as weight-only"),
        ("rtx-pro-6000", 8, 1, "RTX PRO 6000: "),
        ("dgx-spark", 1, 1, "DGX Spark: "),
        ("dgx-spark", 8, 8, "DGX Spark: "),
    ],
)
def test_notes_name_slow_gpus_and_how_a_cluster_starts(
    engine: Engine, gpu: str, count: int, machines: int, begin: str | None
) -> None:
    parallelism = Parallelism(tensor=min(count, 8), pipeline=max(count // 8, 1))
    notes = command(engine, gpu=GPUS[gpu], parallelism=parallelism).notes
    assert any(f"all {machines} machines" in note for note in notes) == (machines > 1)
    assert any("NCCL_NVLS_ENABLE=0" in note for note in notes) == (gpu == "dgx-spark" and machines > 1)
    assert len(notes) == (machines > 1) + (begin is not None) + (gpu == "dgx-spark" and machines > 1)
    assert begin is None or notes[-1].startswith(begin)
    unquantized = command(engine, gpu=GPUS[gpu], layout=None, activations=None, parallelism=Parallelism())
    assert unquantized.notes == (), "what is not NVFP4 has no notes about it"


def test_families_have_the_parsers_of_their_chat_templates() -> None:
    assert command("tensorrt-llm").line.endswith("--tool_parser kimi_k2 --reasoning_parser kimi_k2")
    assert command("tensorrt-llm", family=K2_5.card).line.endswith("--tool_parser kimi_k2 --reasoning_parser kimi_k25")
    parsers = "--tool-call-parser kimi_k2 --reasoning-parser kimi_k2"
    for family in (K2_THINKING.card, K2_5.card):
        tower = " --mm-encoder-tp-mode data" if family.has_vision else ""
        options = f"--trust-remote-code --enable-auto-tool-choice {parsers}"
        assert command("vllm", family=family).line.endswith(f"--tensor-parallel-size 8{tower} {options}")
        assert command("sglang", family=family).line.endswith(parsers)


@pytest.mark.parametrize(("width", "size"), [(2048, 8), (256, 4), (128, 2), (100, 1), (None, 1), (0, 1)])
def test_usual_tensor_parallelism_suits_the_experts_width(width: int | None, size: int) -> None:
    for config in ({"moe_intermediate_size": width}, {"text_config": {"moe_intermediate_size": width}}):
        assert usual_parallelism(config, K2_THINKING) == Parallelism(tensor=size)


def test_usual_tensor_parallelism_is_one_that_fit_allows(k3_tiny: Path) -> None:
    config = read_json_file(k3_tiny / "config.json")
    shape = read_shape(config, family=K3, where="")
    for heads, size in ((2, 2), (3, 1), (4, 4), (96, 4)):
        config["text_config"]["num_attention_heads"] = heads
        parallelism = usual_parallelism(config, K3)
        assert parallelism.tensor == size
        check_layout(parallelism, replace(shape, num_heads=heads))


@pytest.mark.parametrize(("algorithm", "size"), [("FP8_PB_WO", 2), ("NVFP4", 4)])
def test_usual_tensor_parallelism_cuts_no_block_of_fp8(algorithm: str, size: int) -> None:
    """q_b_proj has 4 * (128 + 64) = 2 * 3 * 128 rows."""
    heads = {"num_attention_heads": 4, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    layers = {"model.layers.0.self_attn.q_b_proj": {"quant_algo": algorithm}}
    config = {"moe_intermediate_size": 2048, **heads, "quantization_config": {"quantized_layers": layers}}
    assert usual_parallelism(config, K3) == Parallelism(tensor=size)


@pytest.mark.parametrize(("size", "is_whole"), [(8, True), (16, True), (32, False)])
def test_fit_cuts_no_block_of_fp8(size: int, is_whole: bool) -> None:
    """K3's q_b_proj has 96 * 192 rows: 32 GPUs would have 4.5 blocks each."""
    config = published("moonshotai--Kimi-K3")
    layout = Parallelism(tensor=size, expert=2)
    check_layout(layout, read_shape(config, family=K3, where=""))
    shape = read_shape(config, family=K3, where="", becomes_fp8=True)
    if is_whole:
        check_layout(layout, shape)
        return
    with pytest.raises(
        FitError, match=r"--tp 32: it would cut FP8 blocks of 128 x 128 weights of attention. Nearest: --tp 16\."
    ):
        check_layout(layout, shape)


def published(name: str) -> dict[str, Any]:
    return read_json_file(ROOT / "tests" / "data" / "published-configs" / f"{name}_config.json")


def test_the_scheme_of_nvfp4_weights_is_read_from_the_config() -> None:
    for name in ("nvidia--Kimi-K2.5-NVFP4", "nvidia--Kimi-K2.6-NVFP4", "nvidia--Kimi-K2.7-Code-NVFP4"):
        assert nvfp4_scheme(published(name)) == ("modelopt", "w4a4")
    assert nvfp4_scheme(published("moonshotai--Kimi-K2.5")) == (None, None)
    assert nvfp4_scheme({}) == (None, None)
    for layout in get_args(Layout):
        for activations in get_args(Activations):
            for banks in ((), ("model.layers.1.mlp.experts",)):
                config = LAYOUTS[layout].quantized_config({}, Quantization(activations, None, [], banks), version="1")
                assert nvfp4_scheme(config) == (layout, activations)


def test_documented_commands_are_the_functions() -> None:
    parallelism = usual_parallelism(published("moonshotai--Kimi-K2.5"), K2_5)
    setup = deployment(model="Kimi-K2-Thinking-NVFP4", parallelism=parallelism)
    blocks = [serve_command(engine, setup).block for engine in ENGINE_NAMES]
    assert serve_blocks(ROOT / "README.md") == blocks[:1]
    documented = serve_blocks(ROOT / "k2convert" / "guide" / "serve.md")
    assert documented[:3] == blocks
    assert "--mm-encoder-tp-mode data" in documented[3], "Kimi-K2.6 has a vision tower"
    for engine, block in zip(("vllm", "sglang", "vllm"), documented[3:], strict=True):
        assert list(problems(engine, tuple(shlex.split(block.replace("\\\n", ""))))) == []


def serve_blocks(page: Path) -> list[str]:
    starts = "vllm serve|python3 -m sglang|trtllm-serve"
    text = page.read_text(encoding="utf-8")
    return [textwrap.dedent(b) for b in re.findall(rf"^    (?:{starts}).*(?:\n     .*)*", text, flags=re.MULTILINE)]
