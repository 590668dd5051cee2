"""The model card: metadata that the Hub accepts, figures from the totals, commands that the engines have."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_cli import cli_environment
from loopback import LoopbackHub

from k2convert.checkpoint.files import read_json_file
from k2convert.hub.card import CardCommand, CardFacts, build_card
from k2convert.hub.card_calibration import CardCalibration, CardFeedback
from k2convert.hub.card_needs import CardNeeds
from k2convert.hub.source_card import Licence, SourceCard, read_source_card
from k2convert.quantize.metrics.weight_metrics import WeightMetrics

K2_CARD = """---
license: other
license_name: modified-mit
license_link: LICENSE
library_name: transformers
pipeline_tag: text-generation
---
# Kimi
"""


@pytest.fixture
def facts(local_result: Path) -> CardFacts:
    ledger = read_json_file(local_result / "k2convert.json")
    return CardFacts(
        repo="me/Kimi-K2-Thinking-NVFP4",
        base_model="moonshotai/Kimi-K2-Thinking",
        recipe=ledger["recipe"],
        totals={role: WeightMetrics.from_dict(metrics) for role, metrics in ledger["totals"].items()},
        revision="0123abcd",
        tool_version="0.1.0",
        versions={"numpy": "2.3.4"},
        tensor_bytes=594_205_904_896,
        source=read_source_card(K2_CARD),
        picture="report.png",
        model_kind="a Kimi K2 model",
        tags=("kimi-k2",),
        serving=(
            CardCommand("vLLM", "vllm serve me/Kimi-K2-Thinking-NVFP4 \\\n    --trust-remote-code", ()),
            CardCommand("SGLang", "python3 -m sglang.launch_server", ("It needs an option.", "It is new.")),
        ),
        kept=("attention", "router"),
        has_vision=False,
        rule_summary="the best scale of each block",
        has_power_of_two_scale=True,
        checked="19 of 19 rules of the servable contract were checked, with the source.",
    )


def changed(facts: CardFacts, **recipe: Any) -> CardFacts:
    return replace(facts, recipe=dict(facts.recipe) | recipe)


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---")[1])


def test_front_matter_carries_over_the_sources_licence_and_names_the_base(facts: CardFacts) -> None:
    assert front_matter(build_card(facts)) == {
        "base_model": "moonshotai/Kimi-K2-Thinking",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "license": "other",
        "license_link": "LICENSE",
        "license_name": "modified-mit",
        "pipeline_tag": "text-generation",
        "tags": ["nvfp4", "fp4", "kimi-k2", "modelopt", "vllm", "sglang", "tensorrt-llm", "k2convert"],
    }


VALIDATE = """
import sys
from huggingface_hub import ModelCard, get_session, set_client_factory

def to_loopback(request):  # client 1.x asks huggingface.co whatever HF_ENDPOINT says
    request.url = request.url.copy_with(scheme="http", host="127.0.0.1", port=int(sys.argv[2]))

client = type(get_session())
set_client_factory(lambda: client(event_hooks={"request": [to_loopback]}))
ModelCard.load(sys.argv[1]).validate()
"""


def test_card_passes_the_librarys_own_validation(facts: CardFacts, server: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(build_card(facts))
    arguments = [sys.executable, "-c", VALIDATE, str(tmp_path / "README.md"), server.url.rpartition(":")[2]]
    subprocess.run(arguments, env=cli_environment(), check=True)
    assert len(server.traffic.matching("POST", "validate-yaml")) == 1
    (tmp_path / "README.md").write_text(build_card(facts).replace("license: other", "license: mine"))
    assert subprocess.run(arguments, env=cli_environment(), capture_output=True, check=False).returncode != 0


def test_figures_are_those_of_the_totals(facts: CardFacts) -> None:
    card = build_card(facts)
    assert "22.62 dB" in card
    assert "19.65 dB" in card  # what `plain` would have
    assert "0.506 times that of `plain`" in card
    assert "1.130 times the bound" in card
    assert "not lossless" in card
    assert "not smaller than the INT4 source" in card
    assert "![Error of the converted weights](report.png)" in card


def test_every_engine_has_its_command_and_its_notes(facts: CardFacts) -> None:
    _, _, section = build_card(facts).partition("## Serving\n")
    section, _, _ = section.partition("\n## ")
    vllm, sglang = facts.serving
    assert f"vLLM:\n\n```bash\n{vllm.command}\n```\n\nSGLang:" in section
    assert f"SGLang:\n\n```bash\n{sglang.command}\n```\n\nIt needs an option.\n\nIt is new.\n" in section


def test_needs_are_a_table_before_the_hardware(facts: CardFacts) -> None:
    rows = (("4 x B200", "TP4", "674,048"), ("8 x H200", "TP8", "1,683,767"))
    needs = CardNeeds("Weights: 595 GB.", ("GPUs", "layout", "KV tokens"), rows, "Computed.")
    card = build_card(replace(facts, needs=needs))
    assert "## Needs" not in build_card(facts)
    section = card.split("## Needs\n\n")[1].split("\n\n## Hardware")[0]
    assert section == (
        "Weights: 595 GB.\n\n| GPUs | layout | KV tokens |\n| --- | --- | ---: |\n| 4 x B200 | TP4 | 674,048 |\n"
        "| 8 x H200 | TP8 | 1,683,767 |\n\nComputed."
    )


def test_the_rule_and_what_was_kept_are_named(facts: CardFacts) -> None:
    card = build_card(facts)
    assert "one power-of-two scale for each tensor" in card
    assert "- Kept byte for byte: attention, router\n" in card
    assert "- Rule: `optimal`: the best scale of each block\n" in card
    assert "one FP32 scale for each tensor" in build_card(replace(facts, has_power_of_two_scale=False))


def test_a_family_without_tags_has_none(facts: CardFacts) -> None:
    assert "kimi-k2" not in front_matter(build_card(replace(facts, tags=())))["tags"]


@pytest.mark.parametrize(("has_vision", "task"), [(True, "image-text-to-text"), (False, "text-generation")])
def test_the_task_follows_from_vision_if_the_source_states_none(facts: CardFacts, has_vision: bool, task: str) -> None:
    card = build_card(replace(facts, source=SourceCard(), has_vision=has_vision))
    assert front_matter(card)["pipeline_tag"] == task


@pytest.mark.parametrize("activations", ["w4a4", "w4a16"])
def test_rule_feedback_is_explained_in_one_paragraph(facts: CardFacts, activations: str) -> None:
    found = CardFeedback(
        layers=60,
        measured_layers=60,
        better_layers=59,
        measured_on="on 4 of 64 windows that were kept out of the fit",
        error=0.0012345,
        optimal_error=0.0034567,
        warning="In 1 of 60 layers, it is worse.",
        plain_experts=1_200,
        experts=23_040,
    )
    calibration = CardCalibration(("emma.txt",), 131_072, is_weighted=True, has_norm_scaling=True, feedback=found)
    card = build_card(replace(changed(facts, activations=activations, rule="feedback"), calibration=calibration))
    assert "- Calibrated on 131,072 tokens of `emma.txt`" in card
    assert "- Norm scaling: " in card
    assert "- Importance: " not in card
    (paragraph,) = (part for part in card.split("\n\n") if part.startswith("**Rule `feedback`**"))
    assert "\n" not in paragraph
    assert "the same weights serve W4A16 and W4A4" in paragraph
    assert "1,200 of 23,040 experts" in paragraph
    lost = card[card.index("## What it lost") : card.index("Error of the stored weights")]
    assert "squared error of **0.00123**, on 4 of 64 windows that were kept out of the fit." in lost
    assert "they would have 0.00346." in lost
    assert "after 59 of 60 MoE layers" in lost
    assert "**Warning:** In 1 of 60 layers, it is worse." in lost
    assert "further from the source than those of rule `optimal`" in lost
    whole = replace(calibration, feedback=replace(found, plain_experts=0))
    assert "without feedback" not in build_card(replace(facts, calibration=whole))
    single = replace(found, measured_on="no held-out figure: only one window", error=None, optimal_error=None)
    card = build_card(replace(facts, calibration=replace(calibration, feedback=single)))
    assert "Error of the layers' outputs: no held-out figure: only one window." in card
    assert "relative squared error" not in card


def test_other_rules_are_not_explained_as_feedback(facts: CardFacts) -> None:
    calibration = CardCalibration(("emma.txt",), 131_072, is_weighted=True, has_norm_scaling=False)
    card = build_card(replace(facts, calibration=calibration))
    assert "- Importance: " in card
    assert "feedback" not in card
    assert card.index("SQNR of its weights is expected to be a little lower") < card.index(
        "Error of the stored weights"
    )


def test_source_converter_and_size_are_stated(facts: CardFacts) -> None:
    card = build_card(facts)
    assert "commit `0123abcd`" in card
    assert "k2convert 0.1.0 (numpy 2.3.4), recipe" in card
    assert "594 GB" in card
    assert "a local copy" in build_card(replace(facts, revision=None))


def test_weight_only_cards_do_not_promise_4_bit_activations(facts: CardFacts) -> None:
    card = build_card(changed(facts, activations="w4a16"))
    assert "W4A16" in card
    assert "multiplies NVFP4 weights and activations" not in card
    assert "Rounding activations" not in card


def test_versions_for_the_compressed_tensors_layout_are_stated(facts: CardFacts) -> None:
    card = build_card(changed(facts, layout="compressed-tensors"))
    assert "compressed-tensors 0.13 or later" in card
    assert "transformers 5 (tested with 5.23.0) drops the global scale" in card
    assert "transformers 5" not in build_card(facts)


def test_unknown_licence_and_base_are_said_to_be_unknown(facts: CardFacts) -> None:
    card = build_card(replace(facts, base_model=None, source=SourceCard()))
    assert front_matter(card)["license"] == "unknown"
    assert "base_model" not in front_matter(card)
    assert "\n\nA Kimi K2 model with its routed experts" in card
    assert "- Source: a Kimi K2 model, " in card


@pytest.mark.parametrize("before", ["\ufeff", "\n", "\r\n\r\n", "\ufeff\n"])
def test_text_before_the_front_matter_does_not_hide_the_license(before: str) -> None:
    assert read_source_card(f"{before}---\nlicense: mit\n---\n# x\n").licence == Licence("mit")


@pytest.mark.parametrize("text", ["", "# no front matter", "---\nlicense: [mit]\n---\n", "---\n: bad\n---\n"])
def test_strange_source_cards_do_not_stop_a_job(text: str) -> None:
    assert read_source_card(text).licence in (Licence(), Licence("mit"))
