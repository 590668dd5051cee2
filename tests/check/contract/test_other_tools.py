"""Checkpoints in the forms that other tools publish: what engines load is not called failed, and what they do not is.

Each form is made from a result of our own: its ledger is removed, tensors and configs are changed as the tool writes
them. What the rules do not judge is a warning, or a note, that says so.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from command import RunCli
from converted import Converted, Kind, next_number, validate
from other_tools import (
    F8,
    K3,
    MODELOPT,
    PACKED,
    Change,
    channels,
    config_beside,
    declared_in,
    flat_config,
    foreign,
    in_both,
    integers,
    is_attention,
    kv_scales,
    mixed_precision,
    nvfp4_of,
    nvidia_k3,
    one_kind,
    other_cache,
    other_habits,
    packed_integers,
    plain_k3,
    quantization,
    runs_of_names,
    shared,
    tensors,
)

from k2convert.check.results import Verdict
from k2convert.errors import CheckpointError
from scripts.fixture_maker import damage
from scripts.fixture_maker.folder import read_small


class Form(NamedTuple):
    """A form of a checkpoint, the rules that warn, and words of their warnings."""

    kind: Kind
    make: Change
    warned: set[int]
    words: tuple[str, ...] = ()


LEGACY = tensors(lambda name, t: {name.replace("language_model.model.layers.", "language_model.layers."): t})
MXFP8 = tensors(
    lambda name, t: {name: t.to(F8), f"{name}_scale": torch.zeros(len(t), 2).byte()} if is_attention(name) else None
)
AS_I8 = tensors(lambda name, t: {name: t.view(torch.int8)} if t.dtype is torch.uint8 else None)
FORMS = {
    "Kimi-K3 by NVIDIA": Form(K3, nvidia_k3, {6, 10}, ("vLLM 0.33.0 gives rows of g_proj",)),
    "Kimi-K3 by RedHatAI": Form(Kind("compressed-tensors", "k3", "w4a4"), lambda _: None, set()),
    "Kimi-K3 without a map": Form(K3, plain_k3, {11}, ("TensorRT-LLM needs MIXED_PRECISION",)),
    "mixed precision": Form(PACKED, mixed_precision, set()),
    "o_proj in NVFP4": Form(MODELOPT, nvfp4_of("o_proj"), {1}, ("attention in NVFP4",)),
    "the head in NVFP4": Form(MODELOPT, nvfp4_of("lm_head"), {1}, ("lm_head in NVFP4",)),
    "attention in MXFP8": Form(MODELOPT, MXFP8, {1}, ("attention in F8_E4M3",)),
    "attention in INT8": Form(MODELOPT, channels(torch.int8, 127), {1}, ("attention in I8",)),
    "shared experts in INT8": Form(MODELOPT, shared(torch.int8), {1}, ("shared_experts in I8",)),
    "shared experts in MXFP4": Form(PACKED, shared(torch.uint8), {1}, ("shared_experts in MXFP4",)),
    "a cache in NVFP4": Form(MODELOPT, other_cache("NVFP4", 4, "float"), {15}, ("only scales of a static FP8 cache",)),
    "a cache in INT8": Form(MODELOPT, other_cache("INT8", 8, "int"), {15}, ("only scales of a static FP8 cache",)),
    "a dynamic cache": Form(MODELOPT, other_cache("FP8", 8, "float", dynamic=True), {15}, ("dynamic FP8: only",)),
    "a cache in config.json alone": Form(MODELOPT, declared_in("config.json"), {13, 15}, ("TensorRT-LLM reads only",)),
    "a cache in hf_quant_config.json alone": Form(
        MODELOPT, declared_in("hf_quant_config.json"), {13}, ("TensorRT-LLM reads only",)
    ),
    "scales of keys alone": Form(MODELOPT, one_kind("v_scale"), {15}, ("vLLM and SGLang use the k scale for both",)),
    "the vision tower in INT8": Form(MODELOPT, integers("vision_tower."), {1}, ("vision_tower in I8", "not checked")),
    "the vision tower in INT4": Form(PACKED, packed_integers("vision_tower."), {1}, ("vision_tower in I32",)),
    "embeddings in INT8": Form(MODELOPT, integers("embed_tokens"), {1}, ("embeddings in I8", "not checked")),
    "calibrated cache, ModelOpt": Form(MODELOPT, kv_scales("{0}_proj.{0}_scale"), set()),
    "calibrated cache, compressed-tensors": Form(MODELOPT, kv_scales("{0}_scale"), set()),
    "a cache that is not declared": Form(
        MODELOPT, kv_scales("{0}_scale", declared=False), {15}, ("serve with --kv-cache-dtype fp8",)
    ),
    "codes as I8": Form(MODELOPT, AS_I8, set()),
    "packed codes as I8": Form(PACKED, AS_I8, set()),
    "hf_quant_config.json alone": Form(MODELOPT, config_beside, set()),
    "a flat config": Form(MODELOPT, flat_config, {13}, ("TensorRT-LLM reads it first",)),
    "other habits": Form(MODELOPT, other_habits, {13, 16}, ("metadata.total_size",)),
    "early names": Form(MODELOPT, LEGACY, {2}, ("as which engines load it",)),
    "a list of runs of names": Form(MODELOPT, runs_of_names, {14}, ("TensorRT-LLM: model.layers.0",)),
}


@pytest.fixture(scope="session")
def convert_any(convert: Callable[[Kind], Converted], convert_source: Callable[..., Path], k3_tiny: Path) -> Any:
    def run(kind: Kind) -> Converted:
        if kind.source != "k3":
            return convert(kind)
        return Converted(kind, convert_source(k3_tiny, rule="mse", layout=kind.layout), k3_tiny)

    return run


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", FORMS)
def test_a_form_that_engines_load_is_not_called_failed(
    name: str, convert_any: Callable[[Kind], Converted], tmp_path: Path, run_cli: RunCli
) -> None:
    form = FORMS[name]
    converted = foreign(convert_any(form.kind), tmp_path / "other")
    form.make(converted.folder)
    for with_source in (False, True):
        report = validate(converted, with_source=with_source)
        assert report.passed, [
            (rule.number, rule.offenders) for rule in report.contract.rules if rule.verdict is Verdict.FAIL
        ] + [report.weights]
        warned = {rule.number for rule in report.contract.rules if rule.verdict is Verdict.WARN}
        assert warned - {5, 12, 17} == form.warned, [r.offenders for r in report.contract.rules if r.number in warned]
        problems = " ".join(f"{o.name} {o.problem}" for rule in report.contract.rules for o in rule.offenders)
        assert all(words in problems for words in form.words), problems
    shown = run_cli("inspect", converted.folder, code=0)
    assert "NVFP4" in shown.stdout
    shown = run_cli("validate", converted.folder, code=0)
    parser = "kimi_k3" if form.kind.source == "k3" else "kimi_k2"
    if name != "hf_quant_config.json alone":
        assert f"--tool-call-parser {parser}" in shown.stderr
        assert "--mm-encoder-tp-mode data" in shown.stderr


RECAST = {
    "routers in F32": (".mlp.gate.weight", torch.float32),
    "routers in F16": (".mlp.gate.weight", torch.float16),
    "biases of routers in BF16": (".e_score_correction_bias", torch.bfloat16),
    "norms in F16": ("norm.weight", torch.float16),
    "embeddings in F32": ("embed_tokens.weight", torch.float32),
    "the head in F16": ("lm_head.weight", torch.float16),
    "attention in F16": ("_proj.weight", torch.float16),
    "the vision tower in F32": (".wo.weight", torch.float32),
}


def another(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with another last number."""
    tensor.view(-1)[-1] = 3 * tensor.view(-1)[-1] + 1
    return tensor


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", RECAST)
def test_numbers_that_engines_convert_while_loading_are_compared_after_rounding(
    name: str, convert: Callable[[Kind], Converted], tmp_path: Path
) -> None:
    """Neither the rules nor the certificate fails them. Another number fails rule 7, another shape fails both."""
    end, dtype = RECAST[name]
    converted = foreign(convert(MODELOPT), tmp_path / "other")
    before = validate(converted)
    recast = {name for shard in read_small(converted.folder).shards.values() for name in shard if name.endswith(end)}
    recast = {name for name in recast if ".experts." not in name}
    assert recast
    tensors(lambda name, t: {name: t.to(dtype)} if name in recast else None)(converted.folder)
    report = validate(converted)
    assert report.passed, [report.contract.failed, report.weights]
    rule = report.contract.rules[6]
    assert (rule.verdict, rule.count) == (Verdict.WARN, len(recast))
    assert "engines convert it while loading" in rule.offenders[0].problem
    assert rule.note == before.contract.rules[6].note
    assert before.weights is not None
    assert report.weights is not None
    assert report.weights.certificate.copies == before.weights.certificate.copies - len(recast)
    last = max(recast)
    tensors(lambda name, t: {name: another(t)} if name == last else None)(converted.folder)
    report = validate(converted)
    assert report.contract.failed == [7]
    assert "1 numbers are not the source's" in report.contract.rules[6].offenders[0].problem
    tensors(lambda name, t: {name: t[1:].clone()} if name in recast else None)(converted.folder)
    report = validate(converted)
    assert 7 in report.contract.failed
    assert report.weights is not None
    assert recast <= report.weights.certificate.mismatches.keys()


def test_a_config_that_no_engine_has_code_for_is_a_warning(
    convert: Callable[[Kind], Converted], tmp_path: Path
) -> None:
    converted = foreign(convert(MODELOPT), tmp_path / "other")
    damage.edit_config(converted.folder, architectures=["LlamaForCausalLM"], tie_word_embeddings=True)
    damage.edit_json(converted.folder / "config.json", lambda c: c["text_config"].update(hidden_act="gelu"))
    rule = validate(converted, with_source=False).contract.rules[8]
    assert rule.verdict is Verdict.WARN
    assert [offender.name for offender in rule.offenders] == ["architectures", "hidden_act", "tie_word_embeddings"]
    assert "under KimiK25ForConditionalGeneration" in rule.offenders[0].problem


SCALES = {
    "zero": (0.0, 0.0, Verdict.FAIL, "no k scale above zero: vLLM and SGLang refuse it"),
    "keys zero": (0.0, 0.5, Verdict.FAIL, "no k scale above zero: vLLM and SGLang refuse it"),
    "keys below zero": (-0.5, 0.5, Verdict.FAIL, "k scale -0.5 and v scale 0.5, but no k scale"),
    "below zero": (-0.5, -0.5, Verdict.WARN, "vLLM and SGLang use 1.0"),
    "values zero": (0.5, 0.0, Verdict.WARN, "vLLM and SGLang use the k scale for both"),
    "huge": (1e30, 0.5, Verdict.FAIL, "to zero"),
    "tiny": (0.5, 1e-30, Verdict.FAIL, "holds nothing above"),
    "usual": (0.01, 0.5, Verdict.PASS, ""),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_a_cache_are_judged_as_engines_use_them(
    dtype: torch.dtype, convert: Callable[[Kind], Converted], tmp_path: Path
) -> None:
    converted = foreign(convert(MODELOPT), tmp_path / "other")
    kv_scales("{0}_scale")(converted.folder)
    for k, v, verdict, words in SCALES.values():
        new = {"k_scale": torch.tensor(k, dtype=dtype), "v_scale": torch.tensor(v, dtype=dtype)}
        tensors(lambda name, _: {name: new[end]} if (end := name.rpartition(".")[2]) in new else None)(converted.folder)  # noqa: B023 - called here
        rule = validate(converted, with_source=False).contract.rules[14]
        assert rule.verdict is verdict, (k, v)
        assert words in " ".join(o.problem for o in rule.offenders), (k, v)


def expert(change: Callable[[torch.Tensor], torch.Tensor | None], *ends: str) -> Change:
    """Change tensors of one expert's up projection by the ends of their names; None removes them."""

    def edit(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if "layers.1." not in name or not name.endswith(tuple(f"experts.0.{up}.{end}" for up in UP for end in ends)):
            return None
        new = change(tensor)
        return {} if new is None else {name: new}

    return tensors(edit)


UP = ("up_proj", "w3")


def no_scale(folder: Path) -> None:
    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if name.endswith("q_b_proj.weight_scale"):
            return {}
        return {name: tensor.to(F8)} if name.endswith("q_b_proj.weight") else None

    tensors(change)(folder)


def nothing_listed(config: dict[str, Any], _: str) -> None:
    if "quantized_layers" in config:
        config["quantized_layers"] = {n: e for n, e in config["quantized_layers"].items() if "layers.1." not in n}
    else:
        config["quant_algo"] = "INT4_AWQ"


def other_groups(config: dict[str, Any]) -> None:
    for group in config["config_groups"].values():
        if group.get("weights", {}).get("num_bits") == 4:
            group["weights"]["group_size"] = 32


CONTROLS: dict[str, tuple[Change, set[int]]] = {
    "a wrong weight": (expert(lambda t: t.flip(0), "weight"), {18}),
    "a wrong shared scale": (expert(next_number, "weight_scale_2"), {6}),
    "a missing tensor": (expert(lambda _: None, "weight_scale_2"), {1}),
    "FP8 without scales": (no_scale, {1}),
    "a router in INT8": (integers(".gate."), {14}),
    "scales of values alone": (one_kind("k_scale"), {15}),
    "a config that no engine loads": (in_both(nothing_listed), {11}),
    "a scheme of other groups": (quantization(other_groups), {11}),
    "experts that every engine excludes": (in_both(lambda q, key: q[key].append("*experts*")), {14}),
    "a changed number": (lambda folder: damage.edit_json(
        folder / "config.json", lambda c: c["text_config"].update(rms_norm_eps=0.1)), {12}),
    "another tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), {17}),
}  # fmt: skip
CONTROLLED = [
    (form, name)
    for form in ("Kimi-K3 by NVIDIA", "o_proj in NVFP4")
    for name in CONTROLS
    if (form, name) != ("Kimi-K3 by NVIDIA", "another tokenizer")  # the small Kimi-K3 has none
]


@pytest.mark.quick(4)
@pytest.mark.parametrize(("form", "name"), CONTROLLED)
def test_a_fault_in_such_a_form_still_fails(
    form: str, name: str, convert_any: Callable[[Kind], Converted], tmp_path: Path
) -> None:
    converted = foreign(convert_any(FORMS[form].kind), tmp_path / "other")
    FORMS[form].make(converted.folder)
    change, rules = CONTROLS[name]
    change(converted.folder)
    report = validate(converted)
    assert not report.passed
    assert rules <= set(report.contract.failed), report.contract.failed


def of_fp8(end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change a tensor of o_proj in layer 1 whose name has this end."""
    wanted = f"layers.1.self_attn.o_proj.{end}"
    return tensors(lambda name, tensor: {name: change(tensor)} if name.endswith(wanted) else None)


def not_a_number(codes: torch.Tensor) -> torch.Tensor:
    codes.view(torch.uint8)[3, 5] = 0x7F
    return codes


FP8_FAULTS: dict[str, tuple[Change, set[int]]] = {
    "a code of NaN": (of_fp8("weight", not_a_number), {4}),
    "an infinite scale": (of_fp8("weight_scale", lambda t: t * float("inf")), {4}),
    "reciprocal scales": (of_fp8("weight_scale", lambda t: 1 / t), {18}),
    "scales twice as large": (of_fp8("weight_scale", lambda t: 2 * t), {18}),
    "rows in another order": (of_fp8("weight", lambda t: t.view(torch.uint8).flip(0).view(F8)), {18}),
    "a transposed weight": (of_fp8("weight", lambda t: t.view(torch.uint8).T.contiguous().view(F8)), {9}),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("fault", FP8_FAULTS)
@pytest.mark.parametrize("form", ["Kimi-K3 by NVIDIA", "mixed precision"])
def test_wrong_fp8_weights_of_other_tools_fail(
    form: str, fault: str, convert_any: Callable[[Kind], Converted], tmp_path: Path
) -> None:
    converted = foreign(convert_any(FORMS[form].kind), tmp_path / "other")
    FORMS[form].make(converted.folder)
    change, rules = FP8_FAULTS[fault]
    change(converted.folder)
    report = validate(converted)
    assert rules <= set(report.contract.failed), report.contract.failed


def per_tensor(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """ModelOpt's FP8: one scale for the weight, and one for its inputs."""
    if not is_attention(name):
        return None
    scale = tensor.float().abs().max() / 448
    codes = (tensor.float() / scale).to(F8)
    return {name: codes, f"{name}_scale": scale, f"{name.removesuffix('weight')}input_scale": torch.tensor(0.5)}


def scales_in_bf16(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """As compressed-tensors writes the scales of a BF16 model."""
    if not is_attention(name):
        return None
    scale = (tensor.float().abs().amax(dim=1, keepdim=True) / 448).bfloat16()
    return {name: (tensor.float() / scale.float()).clamp(-448, 448).to(F8), f"{name}_scale": scale}


@pytest.mark.parametrize("make", [per_tensor, scales_in_bf16])
def test_other_fp8_weights_are_compared_with_the_source(
    make: Any, convert: Callable[[Kind], Converted], tmp_path: Path
) -> None:
    converted = foreign(convert(MODELOPT), tmp_path / "other")
    tensors(make)(converted.folder)
    in_both(lambda q, key: q.update({key: [entry for entry in q[key] if "self_attn" not in entry]}))(converted.folder)
    report = validate(converted)
    assert report.passed, [(r.number, r.offenders) for r in report.contract.rules if r.verdict is Verdict.FAIL]
    assert report.weights is not None
    assert {"attention", "experts"} == {*report.weights.roles.values()}
    assert all(error.sqnr_db > 30 for name, error in report.weights.errors.items() if "self_attn" in name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: damage.edit_config(f, model_type="glm5_moe"), "model_type is 'glm5_moe', and the rules are about"),
        (lambda f: damage.edit_config(f, model_type="deepseek_v3"), "model_type is 'deepseek_v3', and the rules"),
        (quantization(lambda q: q.update(quant_algo="NVFP4_AWQ")), "its scheme is NVFP4_AWQ"),
        (
            tensors(lambda n, t: {n: t.to(F8)} if ".experts." in n and n.endswith(".weight") else
                    ({} if ".experts." in n and n.endswith("_scale_2") else None)),
            "its weights are F8_E4M3, and the rules are about NVFP4",
        ),
    ],
)  # fmt: skip
def test_what_the_rules_are_not_about_is_not_checked(
    change: Change, words: str, convert: Callable[[Kind], Converted], tmp_path: Path
) -> None:
    converted = foreign(convert(MODELOPT), tmp_path / "other")
    change(converted.folder)
    with pytest.raises(CheckpointError, match="was not checked: ") as raised:
        validate(converted, with_source=False)
    assert words in str(raised.value)
