"""`k2convert fit` on Kimi K3, and how its results are served."""

import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, assert_refused, run, run_here
from test_fit_command import answer

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.index import open_checkpoint
from k2convert.deploy.gpus import GPUS
from k2convert.deploy.layouts import Parallelism
from k2convert.deploy.serving import Deployment, serve_command
from k2convert.hub.source_card import read_source_card
from k2convert.models.kimi_k3 import K3
from k2convert.plan.plan import plan_conversion
from k2convert.plan.recipe import load_recipe
from k2convert.report.card import render_card
from k2convert.report.figures import collect_report
from scripts.fixture_maker.damage import edit_json


@pytest.mark.slow
def test_known_gpus_that_hold_it_are_found(k3_headers: Path) -> None:
    document = answer(k3_headers)
    assert document["weights"]["bytes"] == 1_645_947_954_176
    assert document["kv_bytes_per_token"] == {"fp8": 13_824, "bf16": 27_648}
    assert document["state_bytes_per_request"] == 449_372_160
    holders = {(fit["gpu"], fit["count"]) for fit in document["fits"]}
    assert holders >= {("b300", 8), ("gb300", 8), ("b200", 16)}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "headers"), [("Kimi-K2.5", "k25_headers"), ("Kimi-K3", "k3_headers")])
def test_the_guide_shows_what_it_prints(model: str, headers: str, request: pytest.FixtureRequest) -> None:
    guide = (ROOT / "k2convert" / "guide" / "fit.md").read_text()
    shown = guide.partition(f"$ k2convert fit {model}\n")[2].partition("    ...\n")[0]
    folder = request.getfixturevalue(headers)
    printed = run_here("fit", folder, code=0, COLUMNS="200").stdout
    assert shown.count("\n") > 8
    assert printed.removeprefix(str(folder)).startswith(textwrap.dedent(shown).removeprefix(model))


def test_why_an_engine_has_no_command_stands_under_its_name(k3_tiny: Path) -> None:
    shown = run_here("fit", k3_tiny, "--gpu", "b200", "--count", 2, "--tp", 1, code=0)
    assert "TensorRT-LLM:\nTensorRT-LLM has no pipeline parallelism for this model.\n" in shown.stdout
    assert "no pipeline parallelism" not in shown.stderr


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_result_weighs_what_its_source_was_planned_to(layout: str, k3_tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("run", k3_tiny, out, "--set", f"layout={layout}", "--quiet") == 0
    before, after = answer(k3_tiny), answer(out)
    plan = plan_conversion(source=open_checkpoint(k3_tiny), recipe=load_recipe(K3.recipe))
    checkpoint = open_checkpoint(out)
    assert (before["recipe"], after["recipe"]) == ("kimi-k3-nvfp4", None)
    assert before["weights"]["bytes"] == after["weights"]["bytes"] == plan.data_bytes == checkpoint.tensor_bytes
    config = read_json_file(out / "config.json")
    report = collect_report(folder=out, tensors=checkpoint.tensors.values())
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
    assert "36 of 36 tensors were converted without loss" in card.partition("## Serving")[0]


def test_engines_are_given_the_parsers_of_k3_and_refuse_what_they_cannot_load() -> None:
    def words(engine: Any, **changed: Any) -> tuple[str, tuple[str, ...]]:
        usual: dict[str, Any] = {"layout": "modelopt", "activations": "w4a4", "parallelism": Parallelism(tensor=8)}
        command = serve_command(engine, Deployment(model="me/K3", family=K3.card, **(usual | changed)))
        return command.line, command.notes

    for engine, options in (
        ("vllm", "--enable-auto-tool-choice --tool-call-parser kimi_k3 --reasoning-parser kimi_k3"),
        ("sglang", "--tool-call-parser kimi_k3 --reasoning-parser kimi_k3"),
        ("tensorrt-llm", "--tool_parser kimi_k3 --reasoning_parser kimi_k3"),
    ):
        assert words(engine)[0].endswith(options)
    for gpu, kernels in ((None, True), ("b200", True), ("h200", False), ("rtx-pro-6000", False)):
        line, notes = words("sglang", gpu=gpu and GPUS[gpu])
        assert ("--moe-runner-backend flashinfer_trtllm" in line) == kernels
        assert any("on Blackwell: its other kernels" in note for note in notes) == kernels
    assert "--moe-runner-backend marlin" in words("sglang", activations="w4a16")[0]
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
    edit_json(tmp_path / "config.json", lambda config: config["text_config"]["linear_attn_config"].update(changed))
    assert_refused(run_here("fit", tmp_path), message)
