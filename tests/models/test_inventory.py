"""config.json describes every tensor: a model that lacks one, or has another, is neither converted nor accepted."""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from command import messages_of, run_here

from k2convert.check.contract.result import read_result
from k2convert.check.contract.tensors import check_expert_counts, check_names, check_shapes
from k2convert.checkpoint.header import ShardHeader, TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import PlanError
from k2convert.models import detect_family, parse_tensor_names, read_architecture
from k2convert.models.config import DescribedModel
from k2convert.models.projections import find_experts
from k2convert.plan.plan import plan_conversion
from k2convert.plan.recipe import load_recipe
from scripts.fixture_maker.config import k2_config, k25_config
from scripts.fixture_maker.damage import edit_tensor
from scripts.fixture_maker.headers import k2_thinking_parts, k25_parts
from scripts.fixture_maker.inventory import (
    K2_SHAPE,
    SMALL_SHAPE,
    TensorSpec,
    layer_tensors,
    outer_tensors,
    projector_tensors,
    vision_tensors,
)
from scripts.fixture_maker.k3 import K3_SHAPE, TINY_SHAPE, k3_config, k3_parts

Tensors = dict[str, TensorInfo]
VISION = {"mm_hidden_size": 32, "vt_hidden_size": 32, "vt_intermediate_size": 80, "vt_num_hidden_layers": 1}
WHOLE_VISION = {
    "mm_hidden_size": 1152,
    "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304,
    "vt_num_hidden_layers": 27,
}


def small_k25() -> list[TensorSpec]:
    prefix = "language_model.model"
    layers = [spec for i in range(SMALL_SHAPE.layers) for spec in layer_tensors(SMALL_SHAPE, i, prefix=prefix)]
    outer = outer_tensors(SMALL_SHAPE, prefix=prefix, head="language_model.lm_head")
    return [*layers, *outer, *projector_tensors(32, SMALL_SHAPE.hidden), *vision_tensors(32, 80, 1, positions=64)]


def joined(parts: list[list[TensorSpec]]) -> list[TensorSpec]:
    return [spec for part in parts for spec in part]


SMALL: dict[str, tuple[list[TensorSpec], dict[str, Any]]] = {
    "kimi-k2-thinking": (joined(k2_thinking_parts(SMALL_SHAPE)), k2_config(SMALL_SHAPE)),
    "kimi-k2.5": (small_k25(), k25_config(k2_config(SMALL_SHAPE), vision=VISION)),
    "kimi-k3": (joined(k3_parts(TINY_SHAPE)), k3_config(TINY_SHAPE)),
}


def infos(specs: Iterable[TensorSpec]) -> Tensors:
    return {spec.name: TensorInfo(spec.name, spec.dtype, spec.shape, 0, 0, "s.safetensors") for spec in specs}


def checkpoint(tensors: Tensors, config: dict[str, Any]) -> Checkpoint:
    header = ShardHeader("s.safetensors", 0, 0, {}, tensors, "")
    return Checkpoint(Path("folder"), json.dumps(config), {"s.safetensors": header}, tensors, {}, ())


def described(source: Checkpoint) -> list[tuple[str, str, tuple[int, ...] | None]]:
    family = detect_family(source)
    architecture = read_architecture(source)
    experts = find_experts(parse_tensor_names(source, family=family).values())
    model = DescribedModel(family, architecture, source.config, "folder")
    assert not list(model.find_faults(source.tensors, experts))
    return sorted((tensor.name, tensor.dtypes[0], tensor.shape) for tensor in model.tensors(source.tensors, experts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "config"),
    [
        (k2_thinking_parts, lambda: k2_config(K2_SHAPE)),
        (k25_parts, lambda: k25_config(k2_config(K2_SHAPE), vision=WHOLE_VISION)),
        (k3_parts, lambda: k3_config(K3_SHAPE)),
    ],
    ids=list(SMALL),
)
def test_published_tensors(parts: Callable[[], list[list[TensorSpec]]], config: Callable[[], dict[str, Any]]) -> None:
    specs = joined(parts())
    wanted = sorted((spec.name, spec.dtype, spec.shape) for spec in specs)
    assert described(checkpoint(infos(specs), config())) == wanted


def kinds(names: Iterable[str]) -> list[str]:
    """One tensor of each kind, the last: not of the layer that comes first."""
    return list({re.sub(r"\.\d+\.", ".N.", name): name for name in names}.values())


def plan(source: Checkpoint, family: str) -> Any:
    return plan_conversion(source=source, recipe=load_recipe(f"{family}-nvfp4"))


def dropped(tensors: Tensors, name: str) -> Tensors:
    return {other: tensor for other, tensor in tensors.items() if other != name}


def wrapped(tensors: Tensors, name: str) -> Tensors:
    module, _, parameter = name.rpartition(".")
    return dropped(tensors, name) | {f"{module}.base_layer.{parameter}": tensors[name]}


def reshaped(tensors: Tensors, name: str) -> Tensors:
    shape = tensors[name].shape
    return tensors | {name: tensors[name]._replace(shape=(*shape[:-1], shape[-1] + 1) if shape else (2,))}


def as_integers(tensors: Tensors, name: str) -> Tensors:
    is_shape = name.endswith("weight_shape")
    return tensors | {name: tensors[name]._replace(dtype="F64" if is_shape else "I16")}


DAMAGES = (dropped, wrapped, reshaped, as_integers)
CASES = [(family, name) for family, (specs, _) in SMALL.items() for name in kinds(spec.name for spec in specs)]


@pytest.mark.quick(200)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_source_with_one_wrong_tensor_is_refused(family: str, name: str, damage: Callable[..., Tensors]) -> None:
    specs, config = SMALL[family]
    with pytest.raises(PlanError, match=re.escape(name.rpartition(".")[0])) as refused:
        plan(checkpoint(damage(infos(specs), name), config), family)
    assert "adapter" in str(refused.value) or damage is not wrapped or "no shard has" in str(refused.value)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensors]]:
    by_family: dict[str, tuple[Path, Tensors]] = {}
    for family, (specs, config) in SMALL.items():
        jobs = plan(checkpoint(infos(specs), config), family).jobs
        outputs = [output for job in jobs for output in job.outputs]
        folder = tmp_path_factory.mktemp(family)
        (folder / "config.json").write_text(json.dumps(config))
        by_family[family] = folder, infos(TensorSpec(output.name, output.dtype, output.shape) for output in outputs)
    return by_family


def faults(folder: Path, tensors: Tensors) -> list[str]:
    """Names that the rules on headers report, without the source."""
    header = ShardHeader("s.safetensors", 0, 0, {}, tensors, "")
    result = read_result(folder, source=None, known_headers={"s.safetensors": header})
    rules = (check_names, check_shapes, check_expert_counts)
    return [offender.name for check in rules for offender in check(result).result().offenders]


@pytest.mark.quick(5)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("family", "part"), [(family, k) for family, (specs, _) in SMALL.items() for k in ("experts", "rest")]
)
def test_a_result_with_one_wrong_tensor_fails_without_the_source(
    family: str, part: str, damage: Callable[..., Tensors], results: dict[str, tuple[Path, Tensors]]
) -> None:
    folder, tensors = results[family]
    assert faults(folder, tensors) == []
    names = [name for name in kinds(tensors) if (".experts." in name) == (part == "experts")]
    assert len(names) > 5
    for name in names:
        messages = faults(folder, damage(tensors, name))
        module = name.rpartition(".")[0]
        assert any(message.startswith(module) for message in messages), (name, messages)
        assert len(messages) == len(set(messages)), (name, messages)


def k2_variant(change: Callable[[Tensors], Tensors] = lambda tensors: tensors, **fields: Any) -> Checkpoint:
    specs, config = SMALL["kimi-k2-thinking"]
    return checkpoint(change(infos(specs)), config | fields)


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if not any(part in n for part in parts)}


def in_dtype(dtype: str, *parts: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        return {n: t._replace(dtype=dtype) if any(part in n for part in parts) else t for n, t in tensors.items()}

    return change


def with_biases(tensors: Tensors) -> Tensors:
    variant = dict(tensors)
    for name, tensor in tensors.items():
        if any(part in name for part in ("q_a_proj", "kv_a_proj", "o_proj")):
            bias = name.replace(".weight", ".bias")
            variant[bias] = tensor._replace(name=bias, shape=tensor.shape[:1])
    return variant


def with_one_query_matrix(tensors: Tensors) -> Tensors:
    variant = without("q_a_", "q_b_")(tensors)
    for layer in range(SMALL_SHAPE.layers):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        variant[name] = TensorInfo(name, "BF16", (2 * (128 + 64), 512), 0, 0, "s.safetensors")
    return variant


VARIANTS: dict[str, Callable[[], Checkpoint]] = {
    "tied embeddings": lambda: k2_variant(without("lm_head"), tie_word_embeddings=True),
    "tied embeddings with the head": lambda: k2_variant(tie_word_embeddings=True),
    "attention biases": lambda: k2_variant(with_biases, attention_bias=True),
    "one query matrix": lambda: k2_variant(with_one_query_matrix, q_lora_rank=None),
    "no bias of the router": lambda: k2_variant(without("e_score"), topk_method="greedy"),
    "no shared experts": lambda: k2_variant(without("shared_experts"), n_shared_experts=None),
    "FP32 norms": lambda: k2_variant(in_dtype("F32", "norm")),
    "FP16 copies": lambda: k2_variant(in_dtype("F16", "self_attn", "e_score", "embed")),
    "MTP layers that the config alone has": lambda: k2_variant(num_nextn_predict_layers=1),
    "text-only K2.5": lambda: checkpoint(
        without("vision_tower", "mm_projector")(infos(SMALL["kimi-k2.5"][0])), SMALL["kimi-k2.5"][1]
    ),
    "vision that the config does not describe": lambda: checkpoint(
        infos(SMALL["kimi-k2.5"][0]), {key: v for key, v in SMALL["kimi-k2.5"][1].items() if key != "vision_config"}
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_forms_of_the_models_are_accepted(variant: str) -> None:
    source = VARIANTS[variant]()
    assert plan(source, detect_family(source).name).jobs


def added(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: TensorInfo(name, "BF16", (512, 64), 0, 0, "s.safetensors")}


K3_TENSORS, K3_CONFIG = SMALL["kimi-k3"]
WRONG: dict[str, tuple[Callable[[], Checkpoint], str]] = {
    "an adapter": (
        lambda: k2_variant(added("model.layers.1.self_attn.o_proj.lora_A.weight")),
        r"o_proj\.lora_A\.weight belongs to an adapter that was not merged\. Merge it with PEFT's `merge_and_unload",
    ),
    "an adapter of an expert": (
        lambda: k2_variant(added("model.layers.1.mlp.experts.0.up_proj.lora_B.default.weight")),
        "lora_B.* belongs to an adapter that was not merged",
    ),
    "an adapter alone": (
        lambda: checkpoint(added("base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight")({}), K3_CONFIG),
        "base_model.* belongs to an adapter",
    ),
    "an MTP layer": (
        lambda: k2_variant(added("model.layers.2.eh_proj.weight"), num_nextn_predict_layers=1),
        r"model\.layers\.2\.eh_proj\.weight.* multi-token prediction \(MTP\)",
    ),
    "attention of a layer too many": (
        lambda: k2_variant(added("model.layers.2.self_attn.o_proj.weight")),
        "is not in the model that config.json describes. Use the model's own config.json",
    ),
    "experts of a layer too many": (
        lambda: k2_variant(added("model.layers.2.mlp.experts.0.up_proj.weight")), r"layer 2 .*\(MTP\)",
    ),
    "two wrong tensors": (
        lambda: k2_variant(without("lm_head", "kv_b_proj")),
        "3 tensors are not .*: lm_head.weight is missing; model.layers.0.self_attn.kv_b_proj.weight is missing",
    ),
    "more experts for a token than there are": (
        lambda: k2_variant(num_experts_per_tok=3), "num_experts_per_tok is 3, but a layer has 2 experts",
    ),
    "K3 without latent projections": (
        lambda: checkpoint(without("routed_expert_")(infos(K3_TENSORS)), K3_CONFIG),
        "routed_expert_down_proj.weight is",
    ),
    "half of a vision tower": (
        lambda: checkpoint(without("mm_projector")(infos(K3_TENSORS)), K3_CONFIG),
        "mm_projector.proj.0.weight is missing",
    ),
    "K3's language model alone": (
        lambda: checkpoint(
            {n.removeprefix("language_model."): t for n, t in infos(K3_TENSORS).items()},
            K3_CONFIG["text_config"],
        ),
        "this is the language model of Kimi K3 alone",
    ),
    "names of newer transformers": (
        lambda: checkpoint(added("language_model.model.blocks.1.self_attn.o_proj.weight")({}), K3_CONFIG),
        r"Found: language_model\.model\.blocks\.1\.self_attn\.o_proj\.weight\.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_said_with_its_remedy(fault: str) -> None:
    make, words = WRONG[fault]
    source = make()
    with pytest.raises(PlanError, match=words) as refused:
        plan(source, detect_family(source).name)
    assert str(refused.value).endswith((".", ")"))


def test_evaluate_needs_every_tensor(tiny: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    edit_tensor(source, "model.layers.2.self_attn.kv_b_proj.weight", lambda _: None)
    (tmp_path / "text.jsonl").write_text(json.dumps(list(range(64))) + "\n")
    words = ("evaluate", source, source, "--text", tmp_path / "text.jsonl", "--out", tmp_path / "out")
    assert "kv_b_proj.weight is missing" in messages_of(run_here(*words, code=1).stderr)
