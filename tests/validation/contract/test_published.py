"""NVIDIA's own configs: our matchers read their exclude lists as engines do, and rule 14 accepts them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from converted import Converted, Kind, change_tensor, check, copy_of
from matcher_cases import PUBLISHED, PUBLISHED_CONFIGS, modules_of, published_list
from test_matchers import ENGINES, Matcher, tensorrt_llm_subtree

from k2convert.models import FAMILIES
from k2convert.models.kimi import K2_5, K2_THINKING
from k2convert.models.kimi_k3 import K3
from k2convert.validation.results import Verdict
from scripts.fixture_maker import damage

MOE = range(1, 61)
READERS: dict[str, Matcher] = ENGINES | {"TensorRT-LLM, 2026": tensorrt_llm_subtree}
WITH_MLP = "Kimi-K2.5-NVFP4"  # shared experts and the dense layer are NVFP4 too


def kept(name: str, reader: str) -> dict[str, bool]:
    """Every module of the whole model as the engine names it, and whether the engine keeps it in BF16."""
    engine, entries = reader.partition(",")[0], published_list(name)
    return {module: READERS[reader](module, entries, True) for module in modules_of(engine, wrapped=True, moe=MOE)}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_list_leaves_every_engine_with_the_same_modules(name: str, reader: str) -> None:
    found = kept(name, reader)
    for module, is_kept in found.items():
        is_mlp = ".mlp.shared_experts." in module or ".layers.0.mlp." in module
        is_converted = ".mlp.experts" in module or (is_mlp and name == WITH_MLP)
        is_router = module.endswith(".mlp.gate")  # no published list names the routers
        assert is_kept != (is_converted or is_router), module
    assert sum(module.endswith(".mlp.gate") for module in found) == 60


@pytest.mark.parametrize("path", sorted(PUBLISHED_CONFIGS.glob("*_config.json")), ids=lambda path: path.stem)
def test_published_model_types_are_known(path: Path) -> None:
    config = json.loads(path.read_text())
    if "quantization" in config:
        return  # hf_quant_config.json
    family = K3 if config["model_type"] == "kimi_k3" else K2_5 if "text_config" in config else K2_THINKING
    assert config["model_type"] in family.model_types
    assert next(f.name for f in FAMILIES if f.matches_config(config)) == family.name


@pytest.fixture
def multimodal(convert: Callable[[Kind], Converted], tmp_path: Path) -> Converted:
    """A copy of a good checkpoint in the modelopt layout and K2.5's names: only the routed experts are NVFP4."""
    return copy_of(convert(Kind("modelopt", "k2.5", "w4a4")), tmp_path / "copy")


def use_list(converted: Converted, name: str) -> None:
    """Replace the exclude list by that of a release, in both files."""
    entries = published_list(name)
    damage.edit_json(converted.folder / "config.json", lambda c: c["quantization_config"].update(ignore=entries))
    damage.edit_json(
        converted.folder / "hf_quant_config.json", lambda d: d["quantization"].update(exclude_modules=entries)
    )


@pytest.mark.parametrize("name", PUBLISHED[1:])
def test_rule_14_accepts_a_published_list(multimodal: Converted, name: str) -> None:
    use_list(multimodal, name)
    report = multimodal.check()
    assert report.rules[13].verdict is Verdict.PASS, report.rules[13].offenders
    assert report.failed == []


def test_rule_14_refuses_a_published_list_for_other_weights(multimodal: Converted) -> None:
    use_list(multimodal, WITH_MLP)
    rule = multimodal.check().rules[13]
    assert rule.verdict is Verdict.FAIL
    assert {"shared_experts" in o.name or "layers.0.mlp" in o.name for o in rule.offenders} == {True}


def test_a_quantized_router_still_fails(multimodal: Converted) -> None:
    use_list(multimodal, PUBLISHED[1])
    module = f"{multimodal.layers}.1.mlp.gate"
    change_tensor(multimodal, f"{module}.weight", lambda t: t.to(torch.float8_e4m3fn))
    for report in (multimodal.check(), check(multimodal.folder)):
        found = [offender.name for rule in report.rules if rule.verdict is Verdict.FAIL for offender in rule.offenders]
        assert any(name.startswith(module) for name in found), found
