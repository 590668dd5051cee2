"""The engines read one exclude list in different ways. These lists were published, or caused trouble.

`scripts/engines` compares our matchers with the engines' own functions.
"""

from collections.abc import Callable

import pytest
from matcher_cases import LISTS, MOE, OURS, modules_of

from k2convert.check.contract import matchers
from k2convert.check.contract.matchers import EngineRefusalError
from k2convert.models.kimi import K2_5, K2_THINKING
from k2convert.models.names import EngineNaming

Matcher = Callable[[str, list[str], bool], bool]


def naming(wrapped: bool) -> EngineNaming:
    return (K2_5 if wrapped else K2_THINKING).naming


def vllm(module: str, entries: list[str], wrapped: bool) -> bool:
    return matchers.vllm_excludes(module, matchers.map_vllm_excludes(entries, naming(wrapped)), naming(wrapped))


def sglang(module: str, entries: list[str], wrapped: bool) -> bool:
    mapped = matchers.map_sglang_excludes(entries, naming(wrapped))
    return matchers.sglang_excludes(module, mapped, naming(wrapped), is_moe=module.endswith(".experts"))


def tensorrt_llm(module: str, entries: list[str], wrapped: bool) -> bool:
    return matchers.tensorrt_llm_excludes(module, matchers.map_tensorrt_llm_excludes(entries, naming(wrapped)))


def tensorrt_llm_subtree(module: str, entries: list[str], wrapped: bool) -> bool:
    mapped = matchers.map_tensorrt_llm_excludes(entries, naming(wrapped))
    return matchers.tensorrt_llm_excludes_subtree(module, mapped)


def vllm_packed(module: str, entries: list[str], wrapped: bool) -> bool:
    return matchers.vllm_ignores(module, matchers.map_vllm_ignores(entries, naming(wrapped)))


def sglang_packed(module: str, entries: list[str], wrapped: bool) -> bool:
    return matchers.sglang_ignores(module, matchers.map_sglang_ignores(entries, naming(wrapped)))


ENGINES: dict[str, Matcher] = {"vLLM": vllm, "SGLang": sglang, "TensorRT-LLM": tensorrt_llm}
PACKED: dict[str, Matcher] = {"vLLM": vllm_packed, "SGLang": sglang_packed, "TensorRT-LLM": tensorrt_llm_subtree}


def missed(engine: str, entries: list[str], *, wrapped: bool, engines: dict[str, Matcher] = ENGINES) -> set[str]:
    """BF16 modules that the engine would load as NVFP4, by their last part."""
    names = [name for name in modules_of(engine, wrapped=wrapped) if ".mlp.experts" not in name]
    return {name.rsplit(".", 1)[-1] for name in names if not engines[engine](name, entries, wrapped)}


def disabled(engine: str, entries: list[str], *, wrapped: bool, engines: dict[str, Matcher] = ENGINES) -> list[int]:
    """Layers whose experts the engine would load as BF16."""
    prefix = "language_model.model" if wrapped and engine == "vLLM" else "model"
    return [layer for layer in MOE if engines[engine](f"{prefix}.layers.{layer}.mlp.experts", entries, wrapped)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wrapped", [False, True], ids=["K2-Thinking", "K2.5"])
@pytest.mark.parametrize("engines", [ENGINES, PACKED], ids=["modelopt", "compressed-tensors"])
def test_our_lists_mean_the_same_to_all_engines(engine: str, wrapped: bool, engines: dict[str, Matcher]) -> None:
    entries = LISTS["ours" if engines is ENGINES else "ours, compressed-tensors"]
    assert missed(engine, entries, wrapped=wrapped, engines=engines) == set()
    assert disabled(engine, entries, wrapped=wrapped, engines=engines) == []


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "wrapped"), [("ModelOpt's style", False), ("ModelOpt's style, K2.5", True), ("legacy K2.5 names", True)]
)
def test_modelopt_s_own_style_of_list_works_everywhere(engine: str, name: str, wrapped: bool) -> None:
    assert missed(engine, LISTS[name], wrapped=wrapped) == set()
    assert disabled(engine, LISTS[name], wrapped=wrapped) == []


@pytest.mark.parametrize(
    ("engine", "attention"), [("vLLM", "fused_qkv_a_proj"), ("SGLang", "fused_qkv_a_proj_with_mqa")]
)
def test_regular_expressions_match_next_to_nothing_in_the_modelopt_layout(engine: str, attention: str) -> None:
    # The INT4 source's own list, unchanged.
    assert {attention, "q_b_proj", "o_proj", "gate_up_proj", "gate"} <= missed(
        engine, LISTS["the source's list"], wrapped=False
    )
    assert "lm_head" not in missed(engine, LISTS["the source's list"], wrapped=False)


def test_literal_names_miss_what_engines_fuse_or_rename() -> None:
    assert missed("vLLM", LISTS["literal"], wrapped=False) == set()
    assert missed("vLLM", LISTS["literal, K2.5"], wrapped=True) == set()
    assert missed("SGLang", LISTS["literal, K2.5"], wrapped=True) == {"linear_1", "linear_2"}
    assert missed("TensorRT-LLM", LISTS["literal"], wrapped=False) == {"gate_up_proj"}


def test_one_expert_s_name_disables_its_whole_layer_in_vllm() -> None:
    assert disabled("vLLM", LISTS["one expert"], wrapped=False) == [5]
    assert disabled("vLLM", LISTS["one expert, K2.5"], wrapped=True) == [5]
    assert disabled("SGLang", LISTS["one expert"], wrapped=False) == []
    assert disabled("TensorRT-LLM", LISTS["one expert"], wrapped=False) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_glob_takes_longer_numbers_and_experts_along(engine: str) -> None:
    assert disabled(engine, LISTS["mlp"], wrapped=False) == list(MOE)
    assert disabled(engine, LISTS["layers.1*"], wrapped=False) == [1, 10, 12]
    assert disabled(engine, [*OURS, "model.layers.1.*"], wrapped=False) == [1]


@pytest.mark.parametrize("matcher", [vllm, sglang])
@pytest.mark.parametrize("module", ["model.layers.0.mlp.gate_up_proj", "model.layers.5.self_attn.{}"])
def test_half_of_a_fused_layer_is_refused_by_engines_that_look_at_its_parts(matcher: Matcher, module: str) -> None:
    name = module.format("fused_qkv_a_proj" if matcher is vllm else "fused_qkv_a_proj_with_mqa")
    with pytest.raises(EngineRefusalError, match="only some"):
        matcher(name, LISTS["half of a fused layer"], False)


def test_vllm_finds_an_entry_anywhere_in_the_name() -> None:
    assert vllm("model.layers.5.self_attn.o_proj", ["layers.5.self"], False)
    assert not tensorrt_llm("model.layers.5.self_attn.o_proj", ["layers.5.self"], False)
    assert vllm("language_model.model.layers.5.mlp.gate", ["model.layers.5.mlp.gate"], True)


def test_sglang_matches_single_parts_and_runs_of_whole_parts() -> None:
    assert sglang("model.layers.5.self_attn.o_proj", ["self_attn"], False)
    assert sglang("model.layers.5.mlp.shared_experts.down_proj", ["shared_*"], False)
    assert not sglang("model.layers.5.mlp.gate_up_proj", ["mlp.gate"], False)
    assert sglang("model.layers.5.self_attn.fused_qkv_a_proj_with_mqa", ["*kv_a_proj_with_mqa", "x.q_a_proj"], False)
    with pytest.raises(EngineRefusalError, match="not a valid pattern"):
        sglang("model.layers.5.mlp.gate", ["model.(layers"], False)


def test_newer_tensorrt_llm_takes_everything_below_an_entry() -> None:
    assert tensorrt_llm_subtree("model.layers.5.mlp.experts", ["model.layers.5"], False)
    assert tensorrt_llm_subtree("model.layers.5", ["model.layers.5.*"], False)
    assert tensorrt_llm_subtree("model.layers.0.mlp.gate_up_proj", ["model.layers.0.mlp.up_proj"], False)
    assert not tensorrt_llm("model.layers.5.mlp.experts", ["model.layers.5"], False)


def test_compressed_tensors_entries_are_whole_names_or_match_from_the_start() -> None:
    name = "model.layers.5.self_attn.o_proj"
    assert vllm_packed(name, [name], False)
    assert not vllm_packed(name, ["o_proj"], False)
    assert sglang_packed(name, ["o_proj"], False)
    assert sglang_packed(name, ["self_attn.o_proj"], False)
    for matcher in (vllm_packed, sglang_packed):
        assert matcher(name, ["re:model.*o_proj"], False)
        assert not matcher(name, ["re:self_attn"], False)
        assert not matcher(name, ["*self_attn*"], False)
