"""Rules 11 to 15 find their own faults in config.json and hf_quant_config.json, and no other rule does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from converted import Converted, check, only

from k2convert.validation.results import Verdict
from scripts.fixture_maker import damage

Change = Callable[[dict[str, Any]], object]


def edit_config(converted: Converted, apply: Change) -> None:
    damage.edit_json(converted.folder / "config.json", apply)


def edit_quantization(converted: Converted, apply: Change) -> None:
    edit_config(converted, lambda config: apply(config["quantization_config"]))


def edit_list(converted: Converted, apply: Callable[[list[str]], object]) -> None:
    """Change the exclude list in both files that hold it."""
    edit_quantization(converted, lambda q: apply(q["ignore"]))
    other = converted.folder / "hf_quant_config.json"
    if other.exists():
        damage.edit_json(other, lambda document: apply(document["quantization"]["exclude_modules"]))


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = config.get("text_config", config)
    return inner


# ---- 11 --------------------------------------------------------------------------------------------------------------

BOTH: list[tuple[str, Change, str]] = [
    ("no group", lambda q: q.pop("config_groups"), "config_groups"),
    ("no activations", lambda q: q["config_groups"]["group_0"].pop("input_activations"), "input_activations"),
    ("null activations", lambda q: q["config_groups"]["group_0"].update(input_activations=None), "input_activations"),
    ("INT4 weights", lambda q: q["config_groups"]["group_0"]["weights"].update(type="int"), "weights.type"),
    ("group of 32", lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=32), "weights.group_size"),
    ("8 bits", lambda q: q["config_groups"]["group_0"]["input_activations"].update(num_bits=8), "activations.num_bits"),
    ("no targets", lambda q: q["config_groups"]["group_0"].update(targets=[]), "targets"),
    ("another method", lambda q: q.update(quant_method="fp8"), "quant_method"),
]
MODELOPT: list[tuple[str, Change, str]] = [
    ("weight-only by name", lambda q: q.update(quant_algo="W4A16_NVFP4"), "quant_algo"),
    ("group size missing", lambda q: q.pop("group_size"), "group_size"),
    ("group size as text", lambda q: q.update(group_size="16"), "group_size"),
]
COMPRESSED_TENSORS: list[tuple[str, Change, str]] = [
    ("source's format", lambda q: q.update(format="pack-quantized"), "format"),
    ("plain groups", lambda q: q["config_groups"]["group_0"]["weights"].update(strategy="group"), "weights.strategy"),
    ("asymmetric", lambda q: q["config_groups"]["group_0"]["weights"].update(symmetric=False), "weights.symmetric"),
    (
        "static activations",
        lambda q: q["config_groups"]["group_0"]["input_activations"].update(dynamic=False),
        "activations.dynamic",
    ),
    (
        "BF16 block scales",
        lambda q: q["config_groups"]["group_0"]["input_activations"].update(scale_dtype="torch.bfloat16"),
        "activations.scale_dtype",
    ),
]


@pytest.mark.parametrize(
    ("layout", "apply", "field"),
    [
        pytest.param(layout, apply, field, id=f"{name}, {layout}")
        for layout, cases in (("modelopt", BOTH + MODELOPT), ("packed", BOTH + COMPRESSED_TENSORS))
        for name, apply, field in cases
    ],
)
def test_rule_11_declares_what_is_there(layout: str, apply: Change, field: str, request: pytest.FixtureRequest) -> None:
    converted: Converted = request.getfixturevalue(layout)
    edit_quantization(converted, apply)
    assert field in only(converted.check(), 11).offenders[0].name


def test_rule_11_activations_declared_for_a_weight_only_checkpoint(weight_only: Converted) -> None:
    scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    edit_quantization(weight_only, lambda q: q["config_groups"]["group_0"].update(input_activations=scheme))
    assert only(weight_only.check(), 11).offenders[0].name.endswith("input_activations")


def test_rule_11_block_scales_of_activations_that_transformers_would_not_round(packed: Converted) -> None:
    edit_quantization(packed, lambda q: q["config_groups"]["group_0"]["input_activations"].pop("scale_dtype"))
    offender = only(packed.check(), 11, Verdict.WARN).offenders[0]
    assert offender.name.endswith("input_activations.scale_dtype")
    assert 'Add "scale_dtype": "torch.float8_e4m3fn"' in offender.problem


def test_rule_11_sglangs_option_for_weight_only_checkpoints(good: Converted) -> None:
    report = good.check()
    needs_it = report.activations == "w4a16" and report.layout == "modelopt"
    assert ("--moe-runner-backend marlin" in report.rules[10].note) == needs_it


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("place", ["text_config", "vision_config"])
def test_rule_11_a_stale_config_in_a_part_of_its_own(packed: Converted, place: str, key: str) -> None:
    stale = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    edit_config(packed, lambda c: c[place].update({key: stale}))
    assert only(packed.check(), 11).offenders[0].name == f"{place}.{key}"


def test_rule_11_none_at_all(breakable: Converted) -> None:
    edit_config(breakable, lambda c: c.pop("quantization_config"))
    assert only(breakable.check(), 11).offenders[0].problem == "missing at the top level"


def test_rule_14_no_list_in_it(breakable: Converted) -> None:
    edit_quantization(breakable, lambda q: q.pop("ignore"))
    assert only(breakable.check(), 14).count > 3


@pytest.mark.parametrize("text", ["", "{", '{"a": 1, "a": 2}'])
def test_rule_11_no_config_to_read(breakable: Converted, text: str) -> None:
    (breakable.folder / "config.json").write_text(text)
    report = breakable.check()
    assert report.failed == [11]
    assert report.rules[13].verdict is Verdict.SKIPPED
    assert "rule 11" in report.rules[13].note


# ---- 12 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("apply", "field"),
    [
        (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings"),
        (lambda c: c.update(architectures=["Other"]), "architectures"),
        (lambda c: text_part(c).update(rope_theta=10000.0), "rope_theta"),
        (lambda c: text_part(c).update(rope_theta=50000), "rope_theta"),
        (lambda c: text_part(c).pop("routed_scaling_factor"), "routed_scaling_factor"),
        (lambda c: c.update(torch_dtype="float16"), "torch_dtype"),
    ],
    ids=["tied", "architecture", "rope", "a number's type", "dropped", "added"],
)
def test_rule_12_anything_else_changed(breakable: Converted, apply: Change, field: str) -> None:
    edit_config(breakable, apply)
    rule = only(breakable.check(), 12)
    assert rule.count == 1
    assert rule.offenders[0].name.endswith(field)


def test_rule_12_does_not_mind_the_order_of_keys(breakable: Converted) -> None:
    def reverse(config: dict[str, Any]) -> None:
        items = list(config.items())[::-1]
        config.clear()
        config.update(items)

    edit_config(breakable, reverse)
    assert breakable.check().passed


# ---- 13 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("apply", "field"),
    [
        (lambda d: d["producer"].update(name="k2convert"), "producer.name"),
        (lambda d: d.pop("producer"), "producer.name"),
        (lambda d: d["quantization"].update(quant_algo="FP8"), "quantization.quant_algo"),
        (lambda d: d["quantization"].update(group_size=32), "quantization.group_size"),
        (lambda d: d["quantization"].pop("kv_cache_quant_algo"), "quantization.kv_cache_quant_algo"),
        (lambda d: d["quantization"].update(kv_cache_quant_algo="FP8"), "quantization.kv_cache_quant_algo"),
        (lambda d: d["quantization"].pop("exclude_modules"), "quantization.exclude_modules"),
        (lambda d: d["quantization"]["exclude_modules"].pop(0), "quantization.exclude_modules"),
    ],
    ids=["producer", "no producer", "algo", "group", "no cache field", "cache", "no list", "shorter list"],
)
def test_rule_13_disagreement(modelopt: Converted, apply: Change, field: str) -> None:
    damage.edit_json(modelopt.folder / "hf_quant_config.json", apply)
    assert only(modelopt.check(), 13).offenders[0].name == field


def test_rule_13_missing(modelopt: Converted) -> None:
    (modelopt.folder / "hf_quant_config.json").unlink()
    assert only(modelopt.check(), 13).offenders[0].name == "hf_quant_config.json"


def test_rule_13_has_no_place_beside_compressed_tensors(packed: Converted) -> None:
    (packed.folder / "hf_quant_config.json").write_text("{}")
    assert only(packed.check(), 13).offenders[0].name == "hf_quant_config.json"


# ---- 14 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ["self_attn", "shared_experts", "lm_head", "layers.0.mlp"])
def test_rule_14_a_bf16_layer_that_no_entry_excludes(breakable: Converted, entry: str) -> None:
    def drop(entries: list[str]) -> None:
        entries[:] = [e for e in entries if entry not in e.replace("\\", "")]

    edit_list(breakable, drop)
    rule = only(breakable.check(), 14)
    engines = {offender.name.split(":")[0] for offender in rule.offenders}
    assert engines <= {"vLLM", "SGLang", "TensorRT-LLM"}
    assert all("BF16" in offender.problem for offender in rule.offenders)


@pytest.mark.parametrize("entry", ["vision_tower", "mm_projector"])
def test_rule_14_vision_and_projector(packed: Converted, entry: str) -> None:
    edit_list(packed, lambda entries: entries.remove(f"re:.*{entry}.*"))
    assert entry in only(packed.check(), 14).offenders[0].name


@pytest.mark.parametrize(
    ("layout", "entry"),
    [("modelopt", e) for e in ("*mlp*", "*layers.1*", "model.layers.1.mlp.experts.2.up_proj", "*experts*")]
    + [("packed", e) for e in ("re:.*mlp.*", "re:.*experts\\.3\\.up_proj", "re:.*layers\\.1\\.")],
)
def test_rule_14_an_entry_that_takes_experts_along(layout: str, entry: str, request: pytest.FixtureRequest) -> None:
    converted: Converted = request.getfixturevalue(layout)
    edit_list(converted, lambda entries: entries.append(entry))
    offender = only(converted.check(), 14).offenders[0]
    assert layout == "packed" or offender.name.endswith(".mlp.experts")
    assert entry in offender.problem


def test_rule_14_no_regular_expression_in_the_modelopt_layout(modelopt: Converted) -> None:
    edit_list(modelopt, lambda entries: entries.append("re:.*self_attn.*"))
    rule = only(modelopt.check(), 14)
    assert (rule.count, rule.offenders[0].name) == (1, "re:.*self_attn.*")


def test_rule_14_globs_mean_nothing_in_the_compressed_tensors_layout(packed: Converted) -> None:
    def globs(entries: list[str]) -> None:
        entries[:] = ["*self_attn*" if "self_attn" in e else e for e in entries]

    edit_list(packed, globs)
    assert only(packed.check(), 14).count > 0


def test_rule_14_is_found_where_config_json_alone_was_changed(modelopt: Converted) -> None:
    edit_quantization(modelopt, lambda q: q["ignore"].remove("*lm_head*"))
    assert only(modelopt.check(), 14).count == 3


# ---- 15 --------------------------------------------------------------------------------------------------------------

FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}


def declare_fp8_cache_to_tensorrt_llm(converted: Converted) -> None:
    path = converted.folder / "hf_quant_config.json"
    if path.exists():
        damage.edit_json(path, lambda document: document["quantization"].update(kv_cache_quant_algo="FP8"))


def test_rule_15_a_cache_scheme_nobody_asked_for(breakable: Converted) -> None:
    edit_quantization(breakable, lambda q: q.update(kv_cache_scheme=FP8))
    assert only(breakable.check(), 15).offenders[0].name.endswith("kv_cache_scheme")


def test_rule_15_asked_for_and_not_there(breakable: Converted) -> None:
    damage.edit_json(breakable.folder / "k2convert.json", lambda ledger: ledger["recipe"].update(kv_cache="fp8"))
    declare_fp8_cache_to_tensorrt_llm(breakable)
    assert only(breakable.check(), 15).count == 1


def test_rule_15_asked_for_and_there_is_a_warning(breakable: Converted) -> None:
    edit_quantization(breakable, lambda q: q.update(kv_cache_scheme=FP8))
    damage.edit_json(breakable.folder / "k2convert.json", lambda ledger: ledger["recipe"].update(kv_cache="fp8"))
    declare_fp8_cache_to_tensorrt_llm(breakable)
    effect = "engines use 1.0" if breakable.kind.layout == "modelopt" else "serve with --kv-cache-dtype fp8"
    assert effect in only(breakable.check(), 15, Verdict.WARN).offenders[0].problem


def test_rule_15_without_a_ledger_nobody_knows(breakable: Converted) -> None:
    edit_quantization(breakable, lambda q: q.update(kv_cache_scheme=FP8))
    declare_fp8_cache_to_tensorrt_llm(breakable)
    (breakable.folder / "k2convert.json").unlink()
    report = check(breakable.folder)
    assert report.failed == [19]
    assert report.rules[14].verdict is Verdict.WARN
