"""Rule 14: the modules that an exclude list keeps in BF16, as each engine decides it.

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

The modules are all two-dimensional weights of linear layers, under the names of each engine, fused ones included. Some
engines never quantize some of them (vLLM's vision tower, SGLang's projector). The list must exclude them anyway: those
exceptions change with versions. It need not name routers, which every engine keeps unquantized: vLLM's `GateLinear`
passes `quant_config=None`; SGLang's `MoEGate` and TensorRT-LLM's `DeepseekV3Gate` hold a plain parameter.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, Final, cast

from k2convert.check.contract.groups import QUARK, names_other_forms, nvfp4_targets
from k2convert.check.contract.modules import CONVERTED_WHILE_LOADING, Module
from k2convert.check.contract.result import Result
from k2convert.check.results import Findings
from k2convert.checkpoint.layouts.layout import QUANTIZATION_KEYS
from k2convert.models.names import CONVERTIBLE_ROLES, WEIGHT, EngineNaming, Role

_Modules = Mapping[tuple[str, bool], bool]
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


# ---- Rule 14 ---------------------------------------------------------------------------------------------------------


_LINEAR_ROLES = (
    Role.EXPERTS, Role.SHARED_EXPERTS, Role.DENSE_MLP, Role.ATTENTION,
    Role.LM_HEAD, Role.VISION_TOWER, Role.MM_PROJECTOR, Role.LATENT, Role.RESIDUAL,
)  # fmt: skip


def _fused_into(name: str) -> dict[str, str]:
    return {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "q_a_proj": name, "kv_a_proj_with_mqa": name}


@dataclass(frozen=True, slots=True)
class Engine:
    """Names that an engine gives modules, and its reading of the list; `may_exclude` is the widest of its versions.

    Both readings get a module's name, whether it is a layer's routed experts, and the list.
    `cut_prefix` is removed from names, `renamed` maps whole names, `fused` projections, `bank` a layer's experts.
    """

    name: str
    fused: Mapping[str, str]
    fuses_experts: bool
    entries: Sequence[str]
    excludes: Callable[[str, bool, Sequence[str]], bool]
    may_exclude: Callable[[str, bool, Sequence[str]], bool]
    cut_prefix: str = ""
    bank: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])


def check_exclude_list(result: Result) -> Findings:
    """Rule 14: vLLM, SGLang and TensorRT-LLM exclude every BF16 linear layer and no converted one."""
    findings = Findings(14)
    if not isinstance((result.config or {}).get(QUANTIZATION_KEYS[0]), dict):
        return findings.skip("no quantization_config, see rule 11")
    if result.is_quark:
        return findings.skip(QUARK)
    listed = result.declared.get("ignore", result.declared.get("exclude_modules"))
    entries = [e for e in cast(list[Any], listed) if isinstance(e, str)] if isinstance(listed, list) else []
    is_modelopt = result.names.library == "modelopt"
    if is_modelopt:
        for entry in entries:
            if entry.startswith(REGEX_MARK):
                result.habit(findings)(entry, "regular expressions match nothing in this layout")
    linears = [module for module in result.modules.values() if _is_linear(module)]
    others = [] if names_other_forms(result) else result.other_experts  # which else are as the config says
    names: list[str] = []
    problems: dict[str, list[tuple[str, str]]] = {}
    for engine in _engines(result.family.naming, entries, is_modelopt=is_modelopt):
        modules = engine_modules(linears, engine)
        names.append(f"{engine.name} {len(modules)}")
        if result.selects and (is_modelopt or engine.name != "SGLang"):  # which refuses what has no entry and no target
            modules = {module: is_converted for module, is_converted in modules.items() if is_converted}
        problems[engine.name] = list(_engine_problems(engine, modules))
        other_modules = dict.fromkeys(engine_modules(others, engine), False)
        problems[engine.name] += _engine_problems(engine, other_modules, "not NVFP4")
    is_loaded = result.is_foreign and not all(problems.values())  # another tool may have made it for one engine
    for name, problem in chain.from_iterable(problems.values()):
        (findings.warn if is_loaded else findings.error)(name, problem)
    if result.selects and not is_modelopt:
        named = nvfp4_targets(result)
        for module in linears:
            if module.is_converted and not vllm_ignores(module.name, named):
                findings.error(module.name, "is NVFP4, but no target of a group of 4 bits names it")
    for module in result.modules.values():
        weight = module.parameters.get(WEIGHT)
        form = module.other_form or (weight.dtype if weight is not None and not module.is_converted else "BF16")
        if module.parts.role is Role.ROUTER and form not in CONVERTED_WHILE_LOADING:
            findings.error(module.name, f"is {form}, but no engine reads a quantized router")
    findings.note = "modules: " + ", ".join(names)
    return findings


def _engine_problems(engine: Engine, modules: _Modules, form: str = "BF16") -> Iterator[tuple[str, str]]:
    entries = engine.entries
    for (module, is_moe), is_converted in modules.items():
        name = f"{engine.name}: {module}"
        try:
            if is_converted and engine.may_exclude(module, is_moe, entries):
                excluding = (entry for entry in entries if engine.may_exclude(module, is_moe, [entry]))
                yield name, f"is quantized, but {next(excluding, 'several entries together')} excludes it"
            elif not is_converted and not engine.excludes(module, is_moe, entries):
                yield name, f"is {form}, but no entry excludes it"
        except EngineRefusalError as error:
            yield name, str(error)


def _is_linear(module: Module) -> bool:
    if module.parts.role not in _LINEAR_ROLES or module.other_form:
        return False
    if module.is_converted:
        return module.parts.role in CONVERTIBLE_ROLES  # rule 1 reports any other
    weight = module.parameters.get(WEIGHT)
    return weight is not None and len(weight.shape) == 2


def engine_modules(linears: Sequence[Module], engine: Engine) -> dict[tuple[str, bool], bool]:
    """Return whether modules of an engine are converted, fused ones if any part is; keys as `Engine` takes them."""
    converted: dict[tuple[str, bool], bool] = defaultdict(bool)
    for module in linears:
        is_moe = module.parts.role is Role.EXPERTS and engine.fuses_experts
        converted[_engine_name(module, engine), is_moe] |= module.is_converted or module.is_fp8
    return converted


def _engine_name(module: Module, engine: Engine) -> str:
    name = module.name.removeprefix(engine.cut_prefix)
    if module.parts.role is Role.EXPERTS:
        if not engine.fuses_experts:
            return name
        return engine.bank.format(layer=module.parts.layer) or f"{name.split('.experts.')[0]}.experts"
    if name in engine.renamed:
        return engine.renamed[name]
    stem, _, last = name.rpartition(".")
    fused = engine.fused.get(last) if module.parts.role is not Role.VISION_TOWER else None
    return name if fused is None else f"{stem}.{fused}"


def _engines(naming: EngineNaming, entries: Sequence[str], *, is_modelopt: bool) -> tuple[Engine, ...]:
    """Return the three engines as their loaders of one library read the list: ModelOpt's or compressed-tensors'."""
    map_vllm = map_vllm_excludes if is_modelopt else map_vllm_ignores
    map_sglang = map_sglang_excludes if is_modelopt else map_sglang_ignores
    # Only versions that know `re:` load compressed-tensors' format in NVFP4.
    tensorrt_llm = tensorrt_llm_excludes if is_modelopt else tensorrt_llm_excludes_subtree

    def vllm(module: str, _: bool, entries: Sequence[str]) -> bool:
        if is_modelopt:
            return vllm_excludes(module, entries, naming)
        return vllm_ignores(module, entries)

    def sglang(module: str, is_moe: bool, entries: Sequence[str]) -> bool:
        if is_modelopt:
            return sglang_excludes(module, entries, naming, is_moe=is_moe)
        return sglang_ignores(module, entries)

    return (
        Engine(
            name="vLLM",
            fused=_fused_into("fused_qkv_a_proj") | dict(naming.vllm_fused),
            fuses_experts=is_modelopt,
            entries=map_vllm(entries, naming),
            excludes=vllm,
            may_exclude=vllm,
            bank=naming.banks.get("vLLM", ""),
            renamed=naming.renamed_modules,
        ),
        Engine(
            name="SGLang",
            fused=_fused_into("fused_qkv_a_proj_with_mqa") | dict(naming.sglang_fused),
            fuses_experts=is_modelopt,
            entries=map_sglang(entries, naming),
            excludes=sglang,
            may_exclude=sglang,
            cut_prefix=naming.wrapper,
            bank=naming.banks.get("SGLang", ""),
            renamed=naming.renamed_modules,
        ),
        Engine(
            name="TensorRT-LLM",
            fused=_fused_into("kv_a_proj_with_mqa"),
            fuses_experts=True,
            entries=map_tensorrt_llm_excludes(entries, naming),
            excludes=lambda module, _, entries: tensorrt_llm(module, entries),
            may_exclude=lambda module, _, entries: tensorrt_llm_excludes_subtree(module, entries),
            cut_prefix=naming.wrapper,
        ),
    )
