"""The model card: metadata that the Hub reads, the report's figures, and advice only where it applies."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from k2convert.hub.source_card import SourceCard, read_source_card
from k2convert.plan.recipe import InputScale
from k2convert.report import ReportFiles
from k2convert.report.card import render_card
from k2convert.report.figures import Report

K2_CARD = """---
license: other
license_name: modified-mit
license_link: LICENSE
library_name: transformers
pipeline_tag: text-generation
---
# Kimi
"""
BASE = "moonshotai/Kimi-K2-Thinking"
HOSTILE = "x](http://evil)<script>alert(1)</script>`|\n# taken"


@pytest.fixture
def report(reported: ReportFiles) -> Report:
    return replace(reported.report, name="me/Kimi-K2-Thinking-NVFP4")


@pytest.fixture
def config(local_result: Path) -> dict[str, Any]:
    return json.loads((local_result / "config.json").read_text())


def changed(report: Report, **recipe: Any) -> Report:
    return replace(report, ledger=replace(report.ledger, recipe=report.ledger.recipe.model_copy(update=recipe)))


def card(
    report: Report, config: dict[str, Any], *, base: str | None = BASE, source: str = K2_CARD
) -> tuple[dict[str, Any], dict[str, str]]:
    """The front matter, and the sections by title; the part before the first one is under ""."""
    card = read_source_card(source)
    text = render_card(report, base_model=base, source=card, config=config)
    _, matter, body = text.split("---\n", 2)
    first, *rest = body.split("\n## ")
    return yaml.safe_load(matter), {"": first} | {part.partition("\n")[0]: part for part in rest}


def test_front_matter_carries_over_the_sources_licence_and_names_the_base(report: Report, config: Any) -> None:
    matter, _ = card(report, config)
    assert matter == {
        "base_model": BASE,
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "license": "other",
        "license_link": "LICENSE",
        "license_name": "modified-mit",
        "pipeline_tag": "text-generation",
        "tags": ["nvfp4", "fp4", "kimi-k2", "modelopt", "vllm", "sglang", "tensorrt-llm", "k2convert"],
    }


def test_the_card_says_what_was_converted_and_how_it_is_served(report: Report, config: Any) -> None:
    """The sections between are those of the report: test_texts.py."""
    _, sections = card(report, config)
    assert list(sections) == [
        "", "Error of the weights", "Worst tensors", "Servable contract", "Needs", "Serving",
        "Hardware", "Provenance",
    ]  # fmt: skip
    for words in (
        f"[{BASE}](https://huggingface.co/{BASE}) with its routed experts",
        "](report.png)",
        "one power-of-two scale per tensor",
        "is copied byte for byte: attention, router, embeddings",
        "not lossless",
        "The result is no smaller than the source",
    ):
        assert words in sections[""]
    assert "All shards together need 7.5 MB" in sections["Hardware"]


def test_activations_of_4_bits_have_advice_of_their_own(report: Report, config: Any) -> None:
    advice = ("**Keep `input_scale` at 1.0.**", "_PER_TOKEN_ACTIVATION=1`", "4OVER6=1`")
    _, sections = card(report, config)
    assert all(words in sections["Serving"] for words in advice)
    assert "the INT4 source is faster" in sections["Hardware"]
    published = "got 53 to 55 tokens per second with NVFP4 in SGLang, and 79 with INT4 in vLLM"
    assert f"with an FP8 KV cache, one request of Kimi K2.5 {published}" in sections["Hardware"]
    assert "activations stay in 16 bits there, and the INT4 source serves as well." in sections["Hardware"]
    _, sections = card(changed(report, activations="w4a16"), config)
    text = "".join(sections.values())
    assert "W4A16" in text
    for words in (*advice, "multiplies NVFP4 weights and activations", "FP4 activations add error"):
        assert words not in text
    measured = changed(report, input_scale=InputScale(gate_up=0.5, down=1.0))
    assert advice[0] not in card(measured, config)[1]["Serving"]


def test_what_became_fp8_is_not_called_copied(report: Report, config: Any) -> None:
    mixed = changed(report, layout="compressed-tensors", fp8=("attention", "dense_mlp"))
    quantization = config["quantization_config"] | {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    quantization["config_groups"] = {"group_0": {"format": "nvfp4-pack-quantized", "input_activations": {}}}
    _, sections = card(mixed, config | {"quantization_config": quantization})
    opening = sections[""]
    assert "Attention and dense MLP of the first layers became FP8 (W8A8: 8-bit weights and activations)" in opening
    assert "is copied byte for byte: `kv_b_proj` of attention, router, embeddings and output head, shared e" in opening
    assert "no smaller than the source:" not in opening
    assert "What became FP8 has half of its bytes." in opening
    assert "TensorRT-LLM does not load FP8 weights beside NVFP4" in sections["Serving"]
    assert "trtllm-serve" not in sections["Serving"]
    assert "No speed was measured." in sections["Hardware"]
    assert "attention, dense_mlp" in sections["Provenance"]


def test_what_the_source_does_not_state_is_said_to_be_unknown(report: Report, config: Any) -> None:
    for family, task in (("kimi-k2.5", "image-text-to-text"), ("kimi-k2-thinking", "text-generation")):
        matter, sections = card(with_source(report, family=family), config, base=None, source="")
        assert matter["pipeline_tag"] == task
        assert matter["license"] == "unknown"
        assert "base_model" not in matter
        assert "A Kimi K2" in sections[""]


@pytest.mark.parametrize(
    ("base", "heads"),
    [
        ("moonshotai/Kimi-K2.5", {"lightseekorg/kimi-k2.5-eagle3-mla"}),
        ("me/Kimi-K2.6", {"lightseekorg/kimi-k2.6-eagle3-mla", "nvidia/Kimi-K2.6-Eagle3"}),
        ("moonshotai/Kimi-K2.7-Code", {"nvidia/Kimi-K2.7-Code-DFlash"}),
        (BASE, set()),
        ("me/a-fine-tune", set()),
        (None, set()),
    ],
)
def test_draft_heads_of_this_model_are_listed(base: str | None, heads: set[str], report: Report, config: Any) -> None:
    serving = card(with_source(report, family="kimi-k2.5"), config, base=base)[1]["Serving"]
    assert set(re.findall(r"`(\w+/[\w.-]+)`", serving)) - {"me/Kimi-K2-Thinking-NVFP4"} == heads
    assert ("draft head" in serving) == bool(heads)


def with_source(report: Report, **facts: Any) -> Report:
    return replace(report, ledger=replace(report.ledger, source=replace(report.ledger.source, **facts)))


def test_hostile_names_are_shown_and_do_nothing(report: Report, config: Any) -> None:
    hostile = replace(with_source(report, revision=HOSTILE), name=f"me/{HOSTILE}")
    hostile = replace(hostile, ledger=replace(hostile.ledger, versions={HOSTILE: HOSTILE}))
    source = SourceCard(pipeline_tag="a: b\n---\n# taken", library_name="<script>")
    text = render_card(hostile, base_model=HOSTILE, source=source, config=config)
    _, matter, body = text.split("\n---\n")[0], *text.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(matter)["base_model"] == HOSTILE
    assert yaml.safe_load(matter)["pipeline_tag"] == "a: b\n---\n# taken"
    outside = "".join(body.split("```")[::2])  # the commands are in blocks of code
    assert "<script>" not in outside
    assert not re.search(r"(?<!\\)\]\(http://evil", outside)
    assert "\n# taken" not in outside
