"""Which modules an exclude list keeps in BF16, as each engine decides it.

Three engines read the same list in three different ways. None of them reports an entry that matched nothing or too
much. The functions here return whether an engine leaves a module unquantized. Module names are those that the engine
builds, fused projections included. `naming` says how engines rename the modules of the family. Read in:

- vLLM 0.33.0: `ModelOptQuantConfigBase.is_layer_excluded` and `.apply_vllm_mapper` (layers/quantization/modelopt.py),
  `is_layer_skipped` (layers/quantization/utils/quant_utils.py), `hf_to_vllm_mapper` (models/kimi_k25.py),
  `should_ignore_layer` (layers/quantization/compressed_tensors/utils.py) and `find_matching_patterns`
  (layers/quantization/utils/config_utils.py);
- SGLang 0.5.23: `ModelOptQuantConfig._get_quant_method`, `.is_layer_excluded`, `.apply_weight_name_mapper`
  (srt/layers/quantization/modelopt_quant.py), `is_layer_skipped` (srt/layers/quantization/utils.py),
  `hf_to_sglang_mapper` (srt/models/kimi_k25.py), `should_ignore_layer` (compressed_tensors/utils.py);
- TensorRT-LLM, two states of its main branch (2025: only globs; 2026: subtrees and `re:` too):
  `QuantConfig.is_module_excluded_from_quantization` (models/modeling_utils.py), `KimiK25ForConditionalGeneration`
  (_torch/models/modeling_kimi_k25.py), `apply_quant_config_exclude_modules` (_torch/models/modeling_utils.py).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate
from typing import Final

from k2convert.models.names import EngineNaming

Fusion = Mapping[str, tuple[str, ...]]

REGEX_MARK: Final = "re:"
_VLLM_FUSION: Fusion = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_SGLANG_FUSION: Fusion = {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
# SGLang uses these if the model registers no mapping for the projection.
_SGLANG_DEFAULT_FUSION: Fusion = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_SGLANG_MLA_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


class EngineRefusalError(ValueError):
    """The engine refuses this list: parts of a fused layer disagree, or an entry is not a valid pattern."""


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


def map_vllm_excludes(excludes: Sequence[str], naming: EngineNaming) -> list[str]:
    """Return the list as vLLM keeps it. Model classes without a mapper keep it unchanged.

    A mapper first splits `x*` into `x` and `x.*`, then renames prefixes.
    """
    if not naming.vllm_renamed_prefixes:
        return list(excludes)
    halves: list[str] = []
    for entry in excludes:
        open_end = len(entry) >= 2 and entry.endswith("*") and not entry.endswith(".*")
        halves += [entry[:-1], f"{entry[:-1]}.*"] if open_end else [entry]
    return [_rename_prefixes(entry, naming.vllm_renamed_prefixes) for entry in halves]


def vllm_excludes(module: str, excludes: Sequence[str], naming: EngineNaming) -> bool:
    """Return whether vLLM leaves `module` unquantized: by whole name, else as a substring, else as a glob.

    A fused layer needs the whole names of all its parts. A module with `experts` in its name is excluded by any entry
    that contains it: `...mlp.experts.7.up_proj` excludes all experts of the layer. Substrings are searched with and
    without the wrapper's prefix. Raises EngineRefusalError if parts of a layer disagree.
    """
    if not excludes:
        return False
    bare = module.removeprefix(naming.wrapper)
    return (
        _vllm_excludes_by_name(module, excludes)
        or any(entry != module and (entry in module or entry in bare) for entry in excludes)
        or any(fnmatchcase(module, entry) for entry in excludes)
    )


def _vllm_excludes_by_name(module: str, excludes: Sequence[str]) -> bool:
    parts = _fused_parts(module, _VLLM_FUSION)
    if parts is not None:
        return module in excludes or _all_or_none(module, [part in excludes for part in parts])
    if "experts" in module:
        return any("experts" in entry and module in entry for entry in excludes)
    return module in excludes


# ---- SGLang, modelopt layout ----------------------------------------------------------------------------------------


def map_sglang_excludes(excludes: Sequence[str], naming: EngineNaming) -> list[str]:
    """Return the list as SGLang keeps it: prefixes renamed, and every entry also without the wrapper's prefix."""
    if not naming.wrapper:
        return list(excludes)
    result: dict[str, None] = {}
    for entry in excludes:
        renamed = _rename_prefixes(entry, naming.renamed_prefixes)
        result[renamed] = None
        result[renamed.removeprefix(naming.wrapper)] = None
    return list(result)


def sglang_excludes(module: str, excludes: Sequence[str], naming: EngineNaming, *, is_moe: bool = False) -> bool:
    """Return whether SGLang leaves `module` unquantized. Routed experts (`is_moe`) are matched only by globs.

    Linear layers are matched by an entry that is a run of whole dotted parts of the name, or by a glob. A glob is a
    full match, as a regular expression in which `.` is literal and `*` is any run: on the name, on each of its dotted
    parts, and on the name without the wrapper's prefix. An entry ending in an MLA projection also matches the fused
    layer that has the projection in its name.
    """
    if not is_moe and _sglang_skips(module, excludes):
        return True
    names = {module, module.removeprefix(naming.wrapper)}
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
    # SGLang translates only these two characters; all other metacharacters keep their meaning.
    try:
        return re.compile(".*".join(piece.replace(".", r"\.") for piece in entry.split("*")))
    except re.error as error:
        raise EngineRefusalError(f"{entry}: not a valid pattern for SGLang ({error})") from None


def _holds_path(module: str, entry: str) -> bool:
    return f".{entry.rstrip('.')}." in f".{module.rstrip('.')}."


def _sglang_skips(module: str, excludes: Sequence[str]) -> bool:
    registered = _last_part(module) in _SGLANG_FUSION
    parts = _fused_parts(module, _SGLANG_FUSION if registered else _SGLANG_DEFAULT_FUSION)
    if parts is not None:
        return _all_or_none(module, [any(_holds_path(part, entry) for entry in excludes) for part in parts])
    if any(_holds_path(module, entry) for entry in excludes):
        return True
    return "experts" in module and any("experts" in entry and module in entry for entry in excludes)


# ---- TensorRT-LLM ---------------------------------------------------------------------------------------------------


def map_tensorrt_llm_excludes(excludes: Sequence[str], naming: EngineNaming) -> list[str]:
    """Return the list that the language model gets: the wrapper's prefix removed, `layers.` put under `model.`."""
    if not naming.wrapper:
        return list(excludes)
    result: list[str] = []
    for entry in excludes:
        if entry.startswith(naming.wrapper):
            entry = entry.removeprefix(naming.wrapper)
            entry = f"model.{entry}" if entry.startswith("layers.") else entry
        result.append(entry)
    return result


def tensorrt_llm_excludes(module: str, excludes: Sequence[str]) -> bool:
    """Return whether TensorRT-LLM of 2025 leaves `module` unquantized: by a case-sensitive glob over the whole name.

    The engine also tries the names of a fused layer's parts. Lists that need this fail here.
    """
    return any(fnmatchcase(module, entry) for entry in excludes)


def tensorrt_llm_excludes_subtree(module: str, excludes: Sequence[str]) -> bool:
    """The same in 2026: an entry also matches everything below it, and `re:` is a full regex match.

    An entry for gate or up also matches the layer fused from both.
    """
    names = (module, *(_fused_parts(module, {"gate_up_proj": ("gate_proj", "up_proj")}) or ()))
    ancestors = [stem for name in names for stem in accumulate(name.split("."), "{}.{}".format)]
    return any(_subtree_entry_matches(ancestor, entry) for ancestor in ancestors for entry in excludes)


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
        raise EngineRefusalError(f"{entry}: not a valid regular expression ({error})") from None


def map_vllm_ignores(ignores: Sequence[str], naming: EngineNaming) -> list[str]:
    """Return the `ignore` list as vLLM keeps it: dotted names are renamed, `re:` entries are not."""
    prefixes = naming.vllm_renamed_prefixes
    return [
        entry if entry.startswith(REGEX_MARK) or "." not in entry else _rename_prefixes(entry, prefixes)
        for entry in ignores
    ]


def vllm_ignores(module: str, ignores: Sequence[str]) -> bool:
    """Return whether vLLM leaves `module` unquantized in this layout: by exact name, or `re:` from the name's start."""

    def matches(name: str) -> bool:
        return any(_regex(e).match(name) is not None if e.startswith(REGEX_MARK) else e == name for e in ignores)

    return matches(module) or _parts_match(module, _VLLM_FUSION, matches)


def map_sglang_ignores(ignores: Sequence[str], naming: EngineNaming) -> list[str]:
    """Return the `ignore` list as SGLang keeps it: prefixes renamed. Unlike in its modelopt list, nothing is added."""
    return [_rename_prefixes(entry, naming.renamed_prefixes) for entry in ignores]


def sglang_ignores(module: str, ignores: Sequence[str]) -> bool:
    """Return whether SGLang leaves `module` unquantized in this layout: by name, by a dotted ending, or by `re:`."""

    def matches(name: str) -> bool:
        return any(
            _regex(e).match(name) is not None if e.startswith(REGEX_MARK) else e == name or name.endswith(f".{e}")
            for e in ignores
        )

    if module not in ignores and _last_part(module) in _SGLANG_FUSION:
        return _parts_match(module, _SGLANG_FUSION, matches)
    return matches(module)


def _parts_match(module: str, fusion: Fusion, matches: Callable[[str], bool]) -> bool:
    parts = _fused_parts(module, fusion)
    return parts is not None and _all_or_none(module, [matches(part) for part in parts])


@dataclass(frozen=True, slots=True)
class ListReader:
    """An exclude list as the engines' loaders of one library read it. Lists are mapped once, then modules are matched.

    `fuses_experts`: one module has all experts of a layer, which the last argument of `sglang` states.
    """

    fuses_experts: bool
    reads_regexes: bool
    map_vllm: Callable[[Sequence[str], EngineNaming], list[str]]
    vllm: Callable[[str, Sequence[str], EngineNaming], bool]
    map_sglang: Callable[[Sequence[str], EngineNaming], list[str]]
    sglang: Callable[[str, Sequence[str], EngineNaming, bool], bool]
    tensorrt_llm: Callable[[str, Sequence[str]], bool]


LIST_READERS: Final = {
    "modelopt": ListReader(
        fuses_experts=True,
        reads_regexes=False,
        map_vllm=map_vllm_excludes,
        vllm=vllm_excludes,
        map_sglang=map_sglang_excludes,
        sglang=lambda module, entries, naming, is_moe: sglang_excludes(module, entries, naming, is_moe=is_moe),
        tensorrt_llm=tensorrt_llm_excludes,
    ),
    "compressed-tensors": ListReader(
        fuses_experts=False,
        reads_regexes=True,
        map_vllm=map_vllm_ignores,
        vllm=lambda module, entries, _: vllm_ignores(module, entries),
        map_sglang=map_sglang_ignores,
        sglang=lambda module, entries, _, __: sglang_ignores(module, entries),
        # Only versions that know `re:` load this library's format in NVFP4.
        tensorrt_llm=tensorrt_llm_excludes_subtree,
    ),
}
"""A row for each library that a layout may be of."""
