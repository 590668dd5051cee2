"""Rules 11 to 15 find their own faults in config.json and hf_quant_config.json, and no other rule does."""

from collections.abc import Callable
from typing import Any

import pytest
from converted import Converted, check, only

from k2convert.check.results import Verdict
from scripts.fixture_maker import damage

Change = Callable[[dict[str, Any]], object]
Fault = Callable[[Converted], object]


def in_file(name: str, apply: Change) -> Fault:
    return lambda converted: damage.edit_json(converted.folder / name, apply)


def config(apply: Change) -> Fault:
    return in_file("config.json", apply)


def text(apply: Change) -> Fault:
    return config(lambda c: apply(c.get("text_config", c)))


def quantization(apply: Change) -> Fault:
    return config(lambda c: apply(c["quantization_config"]))


def group(apply: Change) -> Fault:
    return quantization(lambda q: apply(q["config_groups"]["group_0"]))


def weights(**fields: object) -> Fault:
    return group(lambda g: g["weights"].update(fields))


def activations(**fields: object) -> Fault:
    return group(lambda g: g["input_activations"].update(fields))


def beside(apply: Change) -> Fault:
    return in_file("hf_quant_config.json", apply)


def excludes(apply: Callable[[list[str]], list[str]]) -> Fault:
    """Change the exclude list in both files that hold it."""

    def edit(converted: Converted) -> None:
        quantization(lambda q: q.update(ignore=apply(q["ignore"])))(converted)
        if (converted.folder / "hf_quant_config.json").exists():
            beside(lambda d: d["quantization"].update(exclude_modules=apply(d["quantization"]["exclude_modules"])))(
                converted
            )

    return edit


def without(part: str) -> Fault:
    return excludes(lambda entries: [e for e in entries if part not in e.replace("\\", "")])


def added(entry: str) -> Fault:
    return excludes(lambda entries: [*entries, entry])


MODELOPT = ("modelopt",)
OTHER = ("packed",)
BOTH = MODELOPT + OTHER
FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
FP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
LANGUAGE = ("self_attn", "shared_experts", "lm_head", "layers.0.mlp")
STALE = {"quant_method": "compressed-tensors", "format": "pack-quantized"}

FAULTS: list[tuple[int, tuple[str, ...], str, Fault]] = [
    (11, BOTH, "quantization_config", config(lambda c: c.pop("quantization_config"))),
    (11, BOTH, "config_groups", quantization(lambda q: q.pop("config_groups"))),
    (11, BOTH, "input_activations", group(lambda g: g.pop("input_activations"))),
    (11, BOTH, "input_activations", group(lambda g: g.update(input_activations=None))),
    (11, BOTH, "weights.type", weights(type="int")),
    (11, BOTH, "weights.group_size", weights(group_size=32)),
    (11, BOTH, "activations.num_bits", activations(num_bits=8)),
    (11, BOTH, "targets", group(lambda g: g.update(targets=[]))),
    (11, BOTH, "quant_method", quantization(lambda q: q.update(quant_method="fp8"))),
    (11, MODELOPT, "quant_algo", quantization(lambda q: q.update(quant_algo="W4A16_NVFP4"))),
    (11, MODELOPT, "group_size", quantization(lambda q: q.pop("group_size"))),
    (11, MODELOPT, "group_size", quantization(lambda q: q.update(group_size="16"))),
    (11, OTHER, "format", quantization(lambda q: q.update(format="pack-quantized"))),
    (11, OTHER, "weights.strategy", weights(strategy="group")),
    (11, OTHER, "weights.symmetric", weights(symmetric=False)),
    (11, OTHER, "activations.dynamic", activations(dynamic=False)),
    (11, OTHER, "activations.scale_dtype", activations(scale_dtype="torch.bfloat16")),
    (11, OTHER, "text_config.compression_config", text(lambda c: c.update(compression_config=STALE))),
    (11, OTHER, "vision_config.quant", config(lambda c: c["vision_config"].update(quantization_config=STALE))),
    (12, BOTH, "tie_word_embeddings", config(lambda c: c.update(tie_word_embeddings=True))),
    (12, BOTH, "architectures", config(lambda c: c.update(architectures=["Other"]))),
    (12, BOTH, "rope_theta", text(lambda c: c.update(rope_theta=10000.0))),
    (12, BOTH, "rope_theta", text(lambda c: c.update(rope_theta=50000))),  # another type
    (12, BOTH, "routed_scaling_factor", text(lambda c: c.pop("routed_scaling_factor"))),
    (12, BOTH, "torch_dtype", config(lambda c: c.update(torch_dtype="float16"))),
    (13, MODELOPT, "producer.name", beside(lambda d: d["producer"].update(name="k2convert"))),
    (13, MODELOPT, "producer.name", beside(lambda d: d.pop("producer"))),
    (13, MODELOPT, "quantization.quant_algo", beside(lambda d: d["quantization"].update(quant_algo="FP8"))),
    (13, MODELOPT, "quantization.group_size", beside(lambda d: d["quantization"].update(group_size=32))),
    (13, MODELOPT, "quantization.kv_cache_quant_algo", beside(lambda d: d["quantization"].pop("kv_cache_quant_algo"))),
    (13, MODELOPT, "kv_cache_quant_algo", beside(lambda d: d["quantization"].update(kv_cache_quant_algo="FP8"))),
    (13, MODELOPT, "quantization.exclude_modules", beside(lambda d: d["quantization"].pop("exclude_modules"))),
    (13, MODELOPT, "quantization.exclude_modules", beside(lambda d: d["quantization"]["exclude_modules"].pop(0))),
    (13, MODELOPT, "hf_quant_config.json", lambda c: (c.folder / "hf_quant_config.json").unlink()),
    (13, OTHER, "hf_quant_config.json", lambda c: (c.folder / "hf_quant_config.json").write_text("{}")),
    (11, ("weight_only",), "input_activations", group(lambda g: g.update(input_activations=FP4))),
    (14, BOTH, "BF16", quantization(lambda q: q.pop("ignore"))),
    *((14, BOTH, "BF16", without(part)) for part in LANGUAGE),
    *((14, OTHER, "BF16", without(part)) for part in ("vision_tower", "mm_projector")),
    *((14, MODELOPT, entry, added(entry)) for entry in ("*mlp*", "*layers.1*", "*experts*", "re:.*self_attn.*")),
    (14, MODELOPT, "experts.2.up_proj", added("model.layers.1.mlp.experts.2.up_proj")),
    *((14, OTHER, e, added(e)) for e in ("re:.*mlp.*", "re:.*experts\\.3\\.up_proj", "re:.*layers\\.1\\.")),
    (14, OTHER, "BF16", excludes(lambda entries: [e if "self_attn" not in e else "*self_attn*" for e in entries])),
    (14, MODELOPT, "BF16", quantization(lambda q: q["ignore"].remove("*lm_head*"))),
    (15, BOTH, "kv_cache_scheme", quantization(lambda q: q.update(kv_cache_scheme=FP8))),
]


@pytest.mark.parametrize(
    ("rule", "layout", "words", "fault"),
    [(rule, layout, words, fault) for rule, layouts, words, fault in FAULTS for layout in layouts],
)
def test_a_fault_is_found(rule: int, layout: str, words: str, fault: Fault, request: pytest.FixtureRequest) -> None:
    converted: Converted = request.getfixturevalue(layout)
    fault(converted)
    result = only(converted.check(), rule)
    assert words in result.offenders[0].name or words in result.offenders[0].problem
    assert rule != 12 or result.count == 1


def test_rule_11_block_scales_of_activations_that_transformers_would_not_round(packed: Converted) -> None:
    group(lambda g: g["input_activations"].pop("scale_dtype"))(packed)
    offender = only(packed.check(), 11, Verdict.WARN).offenders[0]
    assert offender.name.endswith("input_activations.scale_dtype")
    assert 'Add "scale_dtype": "torch.float8_e4m3fn"' in offender.problem


@pytest.mark.parametrize(("name", "needs_it"), [("modelopt", False), ("packed", False), ("weight_only", True)])
def test_rule_11_sglangs_option_for_weight_only(name: str, needs_it: bool, request: pytest.FixtureRequest) -> None:
    converted: Converted = request.getfixturevalue(name)
    assert ("--moe-runner-backend marlin" in converted.check().rules[10].note) == needs_it


@pytest.mark.parametrize("written", ["", "{", '{"a": 1, "a": 2}'])
def test_rule_11_no_config_to_read(modelopt: Converted, written: str) -> None:
    (modelopt.folder / "config.json").write_text(written)
    report = modelopt.check()
    assert report.failed == [11]
    assert report.rules[13].verdict is Verdict.SKIPPED
    assert "rule 11" in report.rules[13].note


def test_rule_12_does_not_mind_the_order_of_keys(breakable: Converted) -> None:
    def reverse(document: dict[str, Any]) -> None:
        items = list(document.items())[::-1]
        document.clear()
        document.update(items)

    config(reverse)(breakable)
    assert breakable.check().passed


def declare_fp8_cache_to_tensorrt_llm(converted: Converted) -> None:
    if converted.kind.layout == "modelopt":
        beside(lambda document: document["quantization"].update(kv_cache_quant_algo="FP8"))(converted)


def test_rule_15_asked_for_and_not_there_or_there_without_scales(breakable: Converted) -> None:
    damage.edit_json(breakable.folder / "k2convert.json", lambda ledger: ledger["recipe"].update(kv_cache="fp8"))
    declare_fp8_cache_to_tensorrt_llm(breakable)
    assert only(breakable.check(), 15).count == 1
    quantization(lambda q: q.update(kv_cache_scheme=FP8))(breakable)
    effect = "engines use 1.0" if breakable.kind.layout == "modelopt" else "serve with --kv-cache-dtype fp8"
    assert effect in only(breakable.check(), 15, Verdict.WARN).offenders[0].problem


def test_rule_15_without_a_ledger_nobody_knows(breakable: Converted) -> None:
    quantization(lambda q: q.update(kv_cache_scheme=FP8))(breakable)
    declare_fp8_cache_to_tensorrt_llm(breakable)
    (breakable.folder / "k2convert.json").unlink()
    report = check(breakable.folder)
    assert report.failed == [19]
    assert report.rules[14].verdict is Verdict.WARN
