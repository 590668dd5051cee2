"""Checkpoints in the forms that other tools publish: what engines load is not called failed, and what they do not is.

Each form is made from a result of our own: its ledger is removed, tensors and configs are changed as the tool writes
them. What the rules do not judge is a warning, or a note, that says so.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from command import RunCli
from converted import Converted, Kind, copy_of, next_number, validate

from k2convert.check.results import Verdict
from k2convert.errors import CheckpointError
from scripts.fixture_maker import damage
from scripts.fixture_maker.folder import SmallCheckpoint

MODELOPT = Kind("modelopt", "k2.5", "w4a4")
PACKED = Kind("compressed-tensors", "k2.5", "w4a4")
K3 = Kind("modelopt", "k3", "w4a4")
Change = Callable[[Path], object]
F8 = torch.float8_e4m3fn


def foreign(converted: Converted, folder: Path) -> Converted:
    """A copy without all that k2convert writes beside a checkpoint."""
    copied = copy_of(converted, folder)
    (copied.folder / "k2convert.json").unlink()
    shutil.rmtree(copied.folder / ".k2convert")
    if converted.kind.layout == "modelopt":
        quantization(lambda q: q.update(producer={"name": "modelopt", "version": "0.47"}))(copied.folder)
    return copied


def quantization(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda folder: damage.edit_json(folder / "config.json", lambda c: change(c["quantization_config"]))


def in_both(change: Callable[[dict[str, Any], str], object]) -> Change:
    """Change the same lists in both configs; the second argument is the name of the exclude list."""

    def edit(folder: Path) -> None:
        quantization(lambda q: change(q, "ignore"))(folder)
        path = folder / "hf_quant_config.json"
        if path.exists():
            damage.edit_json(path, lambda document: change(document["quantization"], "exclude_modules"))

    return edit


def tensors(change: Callable[[str, torch.Tensor], dict[str, torch.Tensor] | None]) -> Change:
    """Replace tensors of a checkpoint by those that `change` returns for a name and a tensor; None keeps it."""

    def edit(checkpoint: SmallCheckpoint) -> None:
        for shard, members in checkpoint.shards.items():
            made: dict[str, torch.Tensor] = {}
            for name, tensor in members.items():
                new = change(name, tensor)
                made |= {name: tensor} if new is None else new
            checkpoint.shards[shard] = made

    return lambda folder: damage.edit_checkpoint(folder, edit)


def is_attention(name: str) -> bool:
    return ".self_attn." in name and name.endswith(("_proj.weight", "_with_mqa.weight"))


def fp8_blocks(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """ModelOpt's FP8_PB_WO: F32 scales of blocks of 128 x 128, with four dimensions."""
    if not is_attention(name) or len(tensor.shape) != 2:
        return None
    rows, columns = tensor.shape
    scale = torch.ones(-(-rows // 128), 1, -(-columns // 128), 1) / 64
    return {name: (tensor.float() * 64).to(F8), f"{name}_scale": scale}


def channels(dtype: torch.dtype, largest: int) -> Change:
    """Attention but for kv_b_proj in FP8 or INT8, with a scale for each output channel."""

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not is_attention(name) or "kv_b_proj" in name:
            return None
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / largest
        return {name: (tensor.float() / scale).to(dtype), f"{name}_scale": scale}

    return tensors(change)


def nvidia_k3(folder: Path) -> None:
    """nvidia/Kimi-K3-NVFP4: attention in FP8_PB_WO, listed in the map beside the banks, not excluded."""
    tensors(fp8_blocks)(folder)
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    linears = {name.rpartition(".")[0] for name in names if is_attention(name)}
    entries = {name: {"quant_algo": "FP8_PB_WO"} for name in sorted(linears)}

    def change(config: dict[str, Any], excludes: str) -> None:
        config["quantized_layers"] = entries | config["quantized_layers"]
        config[excludes].remove("*self_attn*")

    in_both(change)(folder)
    weights = {"num_bits": 8, "type": "float", "block_structure": [128, 128]}
    quantization(lambda q: q["config_groups"].update(group_1={"weights": weights, "targets": sorted(linears)}))(folder)


def mixed_precision(folder: Path) -> None:
    """unsloth's form: experts in NVFP4 and attention in FP8 per channel, both by regular expressions."""
    channels(F8, 448)(folder)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}

    def change(config: dict[str, Any]) -> None:
        experts = config["config_groups"]["group_0"]
        experts |= {"format": config["format"], "targets": [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"]}
        attention = {"format": "float-quantized", "weights": weights, "input_activations": inputs}
        attention["targets"] = [
            r"re:.*self_attn\.(fused_qkv_a_proj(_with_mqa)?|q_a_proj|kv_a_proj_with_mqa|q_b|o_proj)"
        ]
        config["config_groups"]["group_1"] = attention
        config["format"] = "mixed-precision"
        config["ignore"] = ["re:.*kv_b_proj$", *(entry for entry in config["ignore"] if "self_attn" not in entry)]

    quantization(change)(folder)


def nvfp4_of(*endings: str) -> Change:
    """NVFP4 in modules that k2convert leaves in BF16, and their names out of the exclude lists."""

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not name.endswith(tuple(f"{ending}.weight" for ending in endings)):
            return None
        rows, columns = tensor.shape
        blocks = tensor.float().reshape(rows, columns // 16, 16)
        scales = (blocks.abs().amax(dim=2) / 6 * 1024).to(F8)
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        sizes = (blocks.abs() / (scales.float() / 1024).clamp(min=1e-9)[..., None])[..., None]
        codes = (sizes - grid).abs().argmin(dim=-1) + 8 * (blocks < 0)
        codes = codes.reshape(rows, columns // 2, 2).to(torch.uint8)
        return {
            name: codes[..., 0] | codes[..., 1] << 4,
            f"{name}_scale": scales,
            f"{name}_scale_2": torch.tensor(1 / 1024),
        }

    def lists(config: dict[str, Any], excludes: str) -> None:
        parts = ("_a_proj", "q_b_proj", "kv_b_proj", "o_proj", "lm_head")
        kept = [f"*{part}*" for part in parts if part not in endings]
        config[excludes] = [e for e in config[excludes] if "self_attn" not in e and "lm_head" not in e] + kept

    def edit(folder: Path) -> None:
        tensors(change)(folder)
        in_both(lists)(folder)

    return edit


def kv_scales(suffix: str, *, declared: bool = True) -> Change:
    """Scales of an FP8 KV cache in each layer, under one tool's names."""

    def add(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not name.endswith(".self_attn.o_proj.weight"):
            return None
        stem = name.removesuffix("o_proj.weight")
        names = [suffix.format(kind) for kind in "kv"]
        return {name: tensor} | {f"{stem}{part}": torch.tensor(0.5) for part in names}

    def edit(folder: Path) -> None:
        tensors(add)(folder)
        if declared:
            scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
            quantization(lambda q: q.update(kv_cache_scheme=scheme))(folder)
            damage.edit_json(
                folder / "hf_quant_config.json", lambda d: d["quantization"].update(kv_cache_quant_algo="FP8")
            )

    return edit


def other_cache(algorithm: str, bits: int, kind: str) -> Change:
    """Scales of a KV cache that is not FP8."""

    def edit(folder: Path) -> None:
        kv_scales("{0}_proj.{0}_scale")(folder)
        quantization(lambda q: q["kv_cache_scheme"].update(num_bits=bits, type=kind))(folder)
        damage.edit_json(
            folder / "hf_quant_config.json", lambda d: d["quantization"].update(kv_cache_quant_algo=algorithm)
        )

    return edit


def shared(dtype: torch.dtype) -> Change:
    """Shared experts in INT8 with a scale for each row, or in MXFP4."""

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if ".shared_experts." not in name or not name.endswith(".weight"):
            return None
        rows, columns = tensor.shape
        if dtype is torch.int8:
            return {name: torch.ones(rows, columns, dtype=dtype), f"{name}_scale": torch.ones(rows, 1)}
        scales = torch.full((rows, columns // 32), 120, dtype=dtype)
        return {f"{name}_packed": torch.full((rows, columns // 2), 17, dtype=dtype), f"{name}_scale": scales}

    return tensors(change)


def config_beside(folder: Path) -> None:
    """ModelOpt's form of 2025: nothing in config.json."""
    damage.edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))


def flat_config(folder: Path) -> None:
    quantization(lambda q: (q.pop("config_groups"), q.update(quant_method="modelopt_fp4")))(folder)
    (folder / "hf_quant_config.json").unlink()


def other_habits(folder: Path) -> None:
    """What engines do not read: the size in the index, a left-over file, versions, and how files were saved."""
    damage.edit_json(folder / "model.safetensors.index.json", lambda index: index["metadata"].update(total_size=1.0))
    (folder / "model.safetensors.part").write_bytes(b"")
    damage.edit_config(folder, transformers_version="5.0.0", use_cache=False)
    (folder / "modeling_extra.py").write_text("")
    damage.edit_json(folder / "hf_quant_config.json", lambda d: d["quantization"].pop("kv_cache_quant_algo"))


def plain_k3(folder: Path) -> None:
    def change(config: dict[str, Any], _: str) -> None:
        del config["quantized_layers"]
        config["quant_algo"] = "NVFP4"

    in_both(change)(folder)
    quantization(
        lambda q: (q["config_groups"]["group_0"].update(targets=["Linear"]), q.update(quant_method="modelopt"))
    )(folder)


def runs_of_names(folder: Path) -> None:
    """Entries without wildcards: vLLM and SGLang find them inside a name, TensorRT-LLM compares whole names."""
    in_both(lambda q, excludes: q.update({excludes: [entry.strip("*") for entry in q[excludes]]}))(folder)


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
    "Kimi-K3 by NVIDIA": Form(K3, nvidia_k3, {1}, ("attention in F8_E4M3", "not checked here")),
    "Kimi-K3 by RedHatAI": Form(Kind("compressed-tensors", "k3", "w4a4"), lambda _: None, set()),
    "Kimi-K3 without a map": Form(K3, plain_k3, {11}, ("TensorRT-LLM needs MIXED_PRECISION",)),
    "mixed precision": Form(PACKED, mixed_precision, {1}, ("attention in F8_E4M3",)),
    "o_proj in NVFP4": Form(MODELOPT, nvfp4_of("o_proj"), {1}, ("attention in NVFP4",)),
    "the head in NVFP4": Form(MODELOPT, nvfp4_of("lm_head"), {1}, ("lm_head in NVFP4",)),
    "attention in MXFP8": Form(MODELOPT, MXFP8, {1}, ("attention in F8_E4M3",)),
    "attention in INT8": Form(MODELOPT, channels(torch.int8, 127), {1}, ("attention in I8",)),
    "shared experts in INT8": Form(MODELOPT, shared(torch.int8), {1}, ("shared_experts in I8",)),
    "shared experts in MXFP4": Form(PACKED, shared(torch.uint8), {1}, ("shared_experts in MXFP4",)),
    "a cache in NVFP4": Form(MODELOPT, other_cache("NVFP4", 4, "float"), {15}, ("not FP8, so its scales are not",)),
    "a cache in INT8": Form(MODELOPT, other_cache("INT8", 8, "int"), {15}, ("not FP8, so its scales are not",)),
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


@pytest.mark.quick(7)
@pytest.mark.parametrize("name", FORMS)
def test_a_form_that_engines_load_is_not_called_failed(
    name: str, convert_any: Callable[[Kind], Converted], tmp_path: Path, run_cli: RunCli
) -> None:
    form = FORMS[name]
    found = foreign(convert_any(form.kind), tmp_path / "other")
    form.make(found.folder)
    for with_source in (False, True):
        report = validate(found, with_source=with_source)
        assert report.passed, [
            (rule.number, rule.offenders) for rule in report.contract.rules if rule.verdict is Verdict.FAIL
        ] + [report.weights]
        warned = {rule.number for rule in report.contract.rules if rule.verdict is Verdict.WARN}
        assert warned - {5, 12, 17} == form.warned, [r.offenders for r in report.contract.rules if r.number in warned]
        said = " ".join(f"{o.name} {o.problem}" for rule in report.contract.rules for o in rule.offenders)
        assert all(words in said for words in form.words), said
    shown = run_cli("inspect", found.folder, code=0)
    assert "NVFP4" in shown.stdout
    shown = run_cli("validate", found.folder, code=0)
    parser = "kimi_k3" if form.kind.source == "k3" else "kimi_k2"
    if name != "hf_quant_config.json alone":
        assert f"--tool-call-parser {parser}" in shown.stderr
        assert "--mm-encoder-tp-mode data" in shown.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numbers_that_engines_convert_while_loading_are_not_called_failed(
    dtype: torch.dtype, convert: Callable[[Kind], Converted], tmp_path: Path
) -> None:
    found = foreign(convert(MODELOPT), tmp_path / "other")
    tensors(lambda name, t: {name: t.to(dtype)} if name.endswith(".mlp.gate.weight") else None)(found.folder)
    rule = validate(found).contract.rules[6]
    assert rule.verdict is Verdict.WARN
    assert "engines convert it while loading, and its values were not compared" in rule.offenders[0].problem
    tensors(lambda name, t: {name: t[1:].clone()} if name.endswith(".mlp.gate.weight") else None)(found.folder)
    assert validate(found).contract.rules[6].verdict is Verdict.FAIL


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
        if group["weights"]["num_bits"] == 4:
            group["weights"]["group_size"] = 32


CONTROLS: dict[str, tuple[Change, set[int]]] = {
    "a wrong weight": (expert(lambda t: t.flip(0), "weight"), {18}),
    "a wrong shared scale": (expert(next_number, "weight_scale_2"), {6}),
    "a missing tensor": (expert(lambda _: None, "weight_scale_2"), {1}),
    "FP8 without scales": (no_scale, {1}),
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


@pytest.mark.quick(6)
@pytest.mark.parametrize(("form", "name"), CONTROLLED)
def test_a_fault_in_such_a_form_still_fails(
    form: str, name: str, convert_any: Callable[[Kind], Converted], tmp_path: Path
) -> None:
    found = foreign(convert_any(FORMS[form].kind), tmp_path / "other")
    FORMS[form].make(found.folder)
    change, rules = CONTROLS[name]
    change(found.folder)
    report = validate(found)
    assert not report.passed
    assert rules <= set(report.contract.failed), report.contract.failed


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
    found = foreign(convert(MODELOPT), tmp_path / "other")
    change(found.folder)
    with pytest.raises(CheckpointError, match="was not checked: ") as raised:
        validate(found, with_source=False)
    assert words in str(raised.value)
