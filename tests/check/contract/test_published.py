"""NVIDIA's own configs: our matchers read their exclude lists as engines do, and rule 14 accepts them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import RunCli
from converted import Converted, Kind, change_tensor, check, copy_of, validate
from matcher_cases import PUBLISHED, PUBLISHED_CONFIGS, modules_of, published_list
from test_matchers import ENGINES, Matcher, tensorrt_llm_subtree

from k2convert.check.results import Verdict
from k2convert.models import family_of
from k2convert.models.kimi import K2_5, K2_THINKING
from k2convert.models.kimi_k3 import K3
from scripts.fixture_maker import damage
from scripts.fixture_maker.config import published_config

MOE = range(1, 61)
READERS: dict[str, Matcher] = ENGINES | {"TensorRT-LLM, 2026": tensorrt_llm_subtree}
WITH_MLP = "Kimi-K2.5-NVFP4"  # shared experts and the dense layer are NVFP4 too


def exclusions(name: str, reader: str) -> dict[str, bool]:
    """Every module of the whole model as the engine names it, and whether the engine keeps it in BF16."""
    engine = reader.partition(",")[0]
    entries = published_list(name)
    return {module: READERS[reader](module, entries, True) for module in modules_of(engine, wrapped=True, moe=MOE)}


@pytest.mark.quick(4)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_list_leaves_every_engine_with_the_same_modules(name: str, reader: str) -> None:
    modules = exclusions(name, reader)
    for module, is_kept in modules.items():
        is_mlp = ".mlp.shared_experts." in module or ".layers.0.mlp." in module
        is_converted = ".mlp.experts" in module or (is_mlp and name == WITH_MLP)
        is_router = module.endswith(".mlp.gate")  # no published list names the routers
        assert is_kept != (is_converted or is_router), module
    assert sum(module.endswith(".mlp.gate") for module in modules) == 60


@pytest.mark.parametrize("path", sorted(PUBLISHED_CONFIGS.glob("*_config.json")), ids=lambda path: path.stem)
def test_published_model_types_are_known(path: Path) -> None:
    config = json.loads(path.read_text())
    if "quantization" in config:
        return  # hf_quant_config.json
    family = K3 if config["model_type"] == "kimi_k3" else K2_5 if "text_config" in config else K2_THINKING
    assert config["model_type"] in family.model_types
    assert family_of(config, ()) is family


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
        names = [offender.name for rule in report.rules if rule.verdict is Verdict.FAIL for offender in rule.offenders]
        assert any(name.startswith(module) for name in names), names


def publish_as(converted: Converted, name: str) -> None:
    """Give a folder the configs of a release, with the model's own sizes, and take away what k2convert wrote."""
    published = published_config(f"nvidia/{name}")
    own = json.loads((converted.folder / "config.json").read_text())
    for key, value in own["text_config"].items():
        if key in published["text_config"]:
            published["text_config"][key] = value
    published["vision_config"] |= own.get("vision_config", {})
    published |= {key: own[key] for key in ("eos_token_id", "bos_token_id", "pad_token_id") if key in own}
    quantization = published["quantization_config"]
    producer = quantization["producer"]
    entries = quantization["ignore"]
    stated = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": entries}
    beside = {"producer": producer, "quantization": stated}
    (converted.folder / "config.json").write_text(json.dumps(published))
    (converted.folder / "hf_quant_config.json").write_text(json.dumps(beside))
    (converted.folder / "k2convert.json").unlink()
    shutil.rmtree(converted.folder / ".k2convert")


@pytest.fixture(params=PUBLISHED)
def release(
    request: pytest.FixtureRequest, convert_source: Callable[..., Path], sources: dict[str, Path], tmp_path: Path
) -> Converted:
    """A checkpoint as NVIDIA publishes it: ModelOpt's layout and rule, its configs, no ledger."""
    kind = Kind("modelopt", "k2.5", "w4a4")
    more = {"roles": ["experts", "shared_experts", "dense_mlp"]} if request.param == WITH_MLP else {}
    folder = convert_source(sources["k2.5"], **kind.recipe, **more)
    copied = copy_of(Converted(kind, folder, sources["k2.5"]), tmp_path / "release")
    publish_as(copied, request.param)
    return copied


@pytest.mark.parametrize("with_source", [False, True])
def test_a_release_passes_though_it_has_no_ledger(release: Converted, *, with_source: bool) -> None:
    report = validate(release, with_source=with_source)
    assert report.contract.failed == [], [r.offenders for r in report.contract.rules if r.verdict is Verdict.FAIL]
    assert report.passed
    skipped = {rule.number: rule.note for rule in report.contract.rules if rule.verdict is Verdict.SKIPPED}
    assert skipped[19] == "no k2convert.json: another tool made this checkpoint"
    assert "another tool made this checkpoint" in report.contract.summary
    assert skipped.keys() == ({19} if with_source else {7, 8, 12, 17, 18, 19})
    kv_cache = report.contract.rules[14]
    assert kv_cache.verdict is Verdict.WARN  # declared without scales


def test_the_command_validates_a_release_and_says_how_to_serve_it(release: Converted, run_cli: RunCli) -> None:
    shown = run_cli("validate", release.folder, code=0)
    assert f"next: vllm serve {release.folder} " in shown.stderr
    assert "--tool-call-parser kimi_k2" in shown.stderr


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda q: q.update(group_size=32), 11),
        (lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=32), 11),
        (lambda q: q["config_groups"]["group_0"]["weights"].pop("group_size"), 11),
        (lambda q: q.update(ignore=[]), 14),
    ],
)
def test_a_release_is_judged_like_our_own(release: Converted, change: Callable[[Any], object], rule: int) -> None:
    damage.edit_json(release.folder / "config.json", lambda config: change(config["quantization_config"]))
    assert rule in check(release.folder).failed


def test_a_changed_number_of_a_release_fails(release: Converted) -> None:
    damage.edit_json(release.folder / "config.json", lambda c: c["text_config"].update(rms_norm_eps=0.1))
    report = release.check()
    assert [o.name for o in report.rules[11].offenders] == ["text_config.rms_norm_eps"]
    assert report.failed == [12]


def test_a_result_of_ours_still_needs_its_ledger(multimodal: Converted) -> None:
    (multimodal.folder / "k2convert.json").unlink()
    shutil.rmtree(multimodal.folder / ".k2convert", ignore_errors=True)
    assert multimodal.check().failed == [19]
    damage.edit_json(multimodal.folder / "config.json", lambda c: c["quantization_config"].pop("group_size"))
    assert multimodal.check().failed == [11, 19]


def test_the_config_of_quark_is_named_as_not_checked(release: Converted) -> None:
    damage.edit_json(release.folder / "config.json", lambda c: c["quantization_config"].update(quant_method="quark"))
    (release.folder / "hf_quant_config.json").unlink()
    report = check(release.folder)
    assert report.failed == []
    assert {11, 13, 14} <= set(report.unchecked)
    assert "AMD Quark's loader" in report.summary
