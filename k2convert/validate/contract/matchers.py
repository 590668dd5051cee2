"""Which modules an exclude list keeps in BF16, as each engine decides it.

Three engines read the same list with three different meanings, and none of them says when an entry matched nothing or
too much. The functions here answer, for one module name as the engine itself builds it (fused projections included),
whether the engine leaves it unquantised. Read in:

- vLLM 0.33.0: `ModelOptQuantConfigBase.is_layer_excluded` and `.apply_vllm_mapper` (layers/quantization/modelopt.py),
  `is_layer_skipped` (layers/quantization/utils/quant_utils.py), `hf_to_vllm_mapper` (models/kimi_k25.py),
  `should_ignore_layer` (layers/quantization/compressed_tensors/utils.py) and `find_matching_patterns`
  (layers/quantization/utils/config_utils.py);
- SGLang 0.5.23: `ModelOptQuantConfig._get_quant_method`, `.is_layer_excluded`, `.apply_weight_name_mapper`
  (srt/layers/quantization/modelopt_quant.py), `is_layer_skipped` (srt/layers/quantization/utils.py),
  `hf_to_sglang_mapper` (srt/models/kimi_k25.py), `should_ignore_layer` (compressed_tensors/utils.py);
- TensorRT-LLM, two states of its main branch (2025: globs alone; 2026: subtrees and `re:` too):
  `QuantConfig.is_module_excluded_from_quantization` (models/modeling_utils.py), `KimiK25ForConditionalGeneration`
  (_torch/models/modeling_kimi_k25.py), `apply_quant_config_exclude_modules` (_torch/models/modeling_utils.py).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

Fusion = Mapping[str, tuple[str, ...]]

REGEX_MARK = "re:"
VLLM_FUSION: Fusion = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
SGLANG_FUSION: Fusion = {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
# SGLang falls back to these where the model registers no mapping of its own for the projection.
_SGLANG_DEFAULT_FUSION: Fusion = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_SGLANG_MLA_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_WRAPPER = "language_model."
_KIMI_PREFIXES = (("language_model.layers.", "language_model.model.layers."),)
_KIMI_VLLM_PREFIXES = (
    *_KIMI_PREFIXES,
    ("mm_projector.proj.0", "mm_projector.linear_1"),
    ("mm_projector.proj.2", "mm_projector.linear_2"),
)


class EngineRefusalError(ValueError):
    """The engine itself raises on this list: parts of one fused layer disagree, or an entry is no valid pattern."""


def _last_part(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _rename_prefixes(entry: str, prefixes: Iterable[tuple[str, str]]) -> str:
    for old, new in prefixes:
        if entry.startswith(old):
            entry = new + entry[len(old) :]
    return entry


def _all_or_none(module: str, verdicts: Sequence[bool]) -> bool:
    if any(verdicts) and not all(verdicts):
        raise EngineRefusalError(f"{module}: only some of its fused parts are excluded")
    return all(verdicts)


def _fused_parts(module: str, fusion: Fusion) -> list[str] | None:
    projection = _last_part(module)
    parts = fusion.get(projection)
    return None if parts is None else [module.replace(projection, part) for part in parts]


# ---- vLLM, modelopt layout ------------------------------------------------------------------------------------------


def map_vllm_excludes(excludes: Sequence[str], *, is_wrapped: bool) -> list[str]:
    """The list as vLLM holds it for K2.5's wrapper class; K2-Thinking's class has no mapper and keeps it as it is.

    The mapper renames prefixes and, before that, takes `x*` apart into `x` and `x.*`.
    """
    if not is_wrapped:
        return list(excludes)
    halves: list[str] = []
    for entry in excludes:
        open_end = len(entry) >= 2 and entry.endswith("*") and not entry.endswith(".*")
        halves += [entry[:-1], f"{entry[:-1]}.*"] if open_end else [entry]
    return [_rename_prefixes(entry, _KIMI_VLLM_PREFIXES) for entry in halves]


def vllm_excludes(module: str, excludes: Sequence[str], *, fusion: Fusion = VLLM_FUSION) -> bool:
    """Whether vLLM leaves `module` unquantised: by whole name, else as a substring, else as a glob.

    Whole names of fused layers are those of all their parts. A module with `experts` in its name is excluded by any
    entry that contains it: `...mlp.experts.7.up_proj` switches off the whole layer's experts. Substrings are looked
    for with and without the leading `language_model.`. Raises EngineRefusalError where parts of a layer disagree.
    """
    if not excludes:
        return False
    bare = module.removeprefix(_WRAPPER)
    return (
        _vllm_excludes_by_name(module, excludes, fusion)
        or any(entry != module and (entry in module or entry in bare) for entry in excludes)
        or any(fnmatchcase(module, entry) for entry in excludes)
    )


def _vllm_excludes_by_name(module: str, excludes: Sequence[str], fusion: Fusion) -> bool:
    parts = _fused_parts(module, fusion)
    if parts is not None:
        return module in excludes or _all_or_none(module, [part in excludes for part in parts])
    if "experts" in module:
        return any("experts" in entry and module in entry for entry in excludes)
    return module in excludes


# ---- SGLang, modelopt layout ----------------------------------------------------------------------------------------


def map_sglang_excludes(excludes: Sequence[str], *, is_wrapped: bool) -> list[str]:
    """The list as SGLang holds it for K2.5: legacy prefix renamed, entries added without `language_model.`."""
    if not is_wrapped:
        return list(excludes)
    result: dict[str, None] = {}
    for entry in excludes:
        renamed = _rename_prefixes(entry, _KIMI_PREFIXES)
        result[renamed] = None
        result[renamed.removeprefix(_WRAPPER)] = None
    return list(result)


def sglang_excludes(
    module: str, excludes: Sequence[str], *, is_moe: bool = False, fusion: Fusion = SGLANG_FUSION
) -> bool:
    """Whether SGLang leaves `module` unquantised; routed experts (`is_moe`) are matched by globs alone.

    Linear layers: an entry that is a run of whole dotted parts of the name, or a glob. Globs: full match, as a regular
    expression in which `.` is literal and `*` any run, on the name, on each of its dotted parts, and on the name
    without `language_model.`; an entry ending in an MLA projection also takes the fused layer with that name in it.
    """
    if not is_moe and _sglang_skips(module, excludes, fusion):
        return True
    names = {module, module.removeprefix(_WRAPPER)}
    candidates = names | {part for name in names for part in name.split(".")}
    for entry in excludes:
        pattern = _sglang_glob(entry)
        if any(pattern.fullmatch(candidate) for candidate in candidates):
            return True
        tail = _last_part(entry)
        if tail in _SGLANG_MLA_PARTS and tail in _last_part(module):
            return True
    return False


@lru_cache(maxsize=4096)
def _sglang_glob(entry: str) -> re.Pattern[str]:
    # Every other metacharacter stays live: SGLang translates these two and compiles the rest as it stands.
    try:
        return re.compile(".*".join(piece.replace(".", r"\.") for piece in entry.split("*")))
    except re.error as error:
        raise EngineRefusalError(f"{entry}: is no valid pattern for SGLang ({error})") from None


def _holds_path(module: str, entry: str) -> bool:
    return f".{entry.rstrip('.')}." in f".{module.rstrip('.')}."


def _sglang_skips(module: str, excludes: Sequence[str], fusion: Fusion) -> bool:
    parts = _fused_parts(module, fusion if _last_part(module) in fusion else _SGLANG_DEFAULT_FUSION)
    if parts is not None:
        return _all_or_none(module, [any(_holds_path(part, entry) for entry in excludes) for part in parts])
    if any(_holds_path(module, entry) for entry in excludes):
        return True
    return "experts" in module and any("experts" in entry and module in entry for entry in excludes)


# ---- TensorRT-LLM ---------------------------------------------------------------------------------------------------


def map_tensorrt_llm_excludes(excludes: Sequence[str], *, is_wrapped: bool) -> list[str]:
    """The list as the language model of K2.5 gets it: `language_model.` cut off, `layers.` put under `model.`."""
    if not is_wrapped:
        return list(excludes)
    result: list[str] = []
    for entry in excludes:
        if entry.startswith(_WRAPPER):
            entry = entry.removeprefix(_WRAPPER)
            entry = f"model.{entry}" if entry.startswith("layers.") else entry
        result.append(entry)
    return result


def tensorrt_llm_excludes(module: str, excludes: Sequence[str]) -> bool:
    """Whether TensorRT-LLM of 2025 leaves `module` unquantised: a case-sensitive glob over the whole name, no more.

    For fused layers it tries the parts' names too; a list that needs this is not relied on here.
    """
    return any(fnmatchcase(module, entry) for entry in excludes)


def tensorrt_llm_excludes_subtree(module: str, excludes: Sequence[str]) -> bool:
    """The same in 2026: an entry also takes everything below it, and `re:` is a full regex match.

    Layers fused of gate and up are taken by entries for either part as well.
    """
    parts = _fused_parts(module, {"gate_up_proj": ("gate_proj", "up_proj")}) or []
    return any(
        _subtree_entry_matches(ancestor, entry)
        for name in (module, *parts)
        for ancestor in _with_ancestors(name)
        for entry in excludes
    )


def _with_ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _subtree_entry_matches(name: str, entry: str) -> bool:
    if entry.startswith(REGEX_MARK):
        return _regex(entry).fullmatch(name) is not None
    return fnmatchcase(name, entry) or (entry.endswith(".*") and fnmatchcase(name, entry[:-2]))


# ---- compressed-tensors layout --------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _regex(entry: str) -> re.Pattern[str]:
    try:
        return re.compile(entry.removeprefix(REGEX_MARK))
    except re.error as error:
        raise EngineRefusalError(f"{entry}: is no valid regular expression ({error})") from None


def map_vllm_ignores(ignores: Sequence[str], *, is_wrapped: bool) -> list[str]:
    """The `ignore` list as vLLM holds it for K2.5: dotted names are renamed, `re:` entries are not."""
    if not is_wrapped:
        return list(ignores)
    return [
        entry if entry.startswith(REGEX_MARK) or "." not in entry else _rename_prefixes(entry, _KIMI_VLLM_PREFIXES)
        for entry in ignores
    ]


def vllm_ignores(module: str, ignores: Sequence[str], *, fusion: Fusion = VLLM_FUSION) -> bool:
    """Whether vLLM leaves `module` unquantised in this layout: exact names, or `re:` matched from the name's start."""

    def matches(name: str) -> bool:
        return any(_regex(e).match(name) is not None if e.startswith(REGEX_MARK) else e == name for e in ignores)

    return matches(module) or _any_part_pattern(module, fusion, matches)


def map_sglang_ignores(ignores: Sequence[str], *, is_wrapped: bool) -> list[str]:
    """The `ignore` list as SGLang holds it for K2.5; unlike its modelopt list, nothing is added."""
    return [_rename_prefixes(entry, _KIMI_PREFIXES) for entry in ignores] if is_wrapped else list(ignores)


def sglang_ignores(module: str, ignores: Sequence[str], *, fusion: Fusion = SGLANG_FUSION) -> bool:
    """Whether SGLang leaves `module` unquantised in this layout: whole names or their dotted endings, or `re:`."""

    def matches(name: str) -> bool:
        return any(
            _regex(e).match(name) is not None if e.startswith(REGEX_MARK) else e == name or name.endswith(f".{e}")
            for e in ignores
        )

    if module not in ignores and _last_part(module) in fusion:
        return _any_part_pattern(module, fusion, matches)
    return matches(module)


def _any_part_pattern(module: str, fusion: Fusion, matches: Callable[[str], bool]) -> bool:
    parts = _fused_parts(module, fusion)
    return parts is not None and _all_or_none(module, [matches(part) for part in parts])
