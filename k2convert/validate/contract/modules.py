"""Rule 14: what every engine would make of the exclude list, held against what is BF16 and what is converted.

The module list is derived from the headers: every two-dimensional weight of a linear layer, under the names each engine
gives its modules, fused ones included. An engine that never quantises some module whatever the list says (vLLM's vision
tower, SGLang's projector, every router) is held to the list all the same: those exceptions come and go with versions.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from k2convert.checkpoint.layouts import MODELOPT
from k2convert.models.kimi import TEXT_PREFIX, WRAPPED_PREFIX
from k2convert.models.names import CONVERTIBLE_ROLES, WEIGHT, Role
from k2convert.validate.contract import matchers
from k2convert.validate.contract.config import QUANTIZATION_KEYS, exclude_entries
from k2convert.validate.contract.findings import Findings
from k2convert.validate.contract.matchers import EngineRefusalError
from k2convert.validate.contract.subject import Module, Subject

_LINEAR_ROLES = (
    Role.EXPERTS, Role.SHARED_EXPERTS, Role.DENSE_MLP, Role.ATTENTION,
    Role.ROUTER, Role.LM_HEAD, Role.VISION_TOWER, Role.MM_PROJECTOR,
)  # fmt: skip
_FUSED_MLP = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_PROJECTOR = {"mm_projector.proj.0": "mm_projector.linear_1", "mm_projector.proj.2": "mm_projector.linear_2"}


@dataclass(frozen=True, slots=True)
class EngineModule:
    """One module as an engine builds it, out of one or several of the checkpoint's."""

    name: str
    is_converted: bool
    is_moe: bool


@dataclass(frozen=True, slots=True)
class Engine:
    """How an engine names modules and reads the list; `may_exclude` is the widest reading among its versions."""

    name: str
    fused: dict[str, str]
    keeps_wrapper: bool
    renames_projector: bool
    fuses_experts: bool
    map_entries: Callable[[Sequence[str]], list[str]]
    excludes: Callable[[EngineModule, Sequence[str]], bool]
    may_exclude: Callable[[EngineModule, Sequence[str]], bool]


def check_exclude_list(subject: Subject) -> Findings:
    """Rule 14: every BF16 linear layer excluded, no converted one, under vLLM, SGLang and TensorRT-LLM alike."""
    found = Findings(14)
    if not isinstance((subject.config or {}).get(QUANTIZATION_KEYS[0]), dict):
        found.skip("there is no quantization_config, see rule 11")
        return found
    entries = exclude_entries(subject)
    if subject.layout == MODELOPT:
        for entry in entries:
            if entry.startswith(matchers.REGEX_MARK):
                found.error(entry, "regular expressions match nothing in this layout")
    linears = [module for module in subject.modules.values() if _is_linear(module)]
    names: list[str] = []
    for engine in _engines(subject):
        modules = engine_modules(linears, engine)
        names.append(f"{engine.name} {len(modules)}")
        _check_engine(engine, modules, engine.map_entries(entries), found)
    found.note = "modules: " + ", ".join(names)
    return found


def _check_engine(engine: Engine, modules: Sequence[EngineModule], entries: Sequence[str], found: Findings) -> None:
    for module in modules:
        name = f"{engine.name}: {module.name}"
        try:
            if module.is_converted and engine.may_exclude(module, entries):
                entry = next((e for e in entries if engine.may_exclude(module, [e])), "several entries together")
                found.error(name, f"is NVFP4, but {entry} excludes it")
            elif not module.is_converted and not engine.excludes(module, entries):
                found.error(name, "is BF16, but no entry excludes it")
        except EngineRefusalError as error:
            found.error(name, str(error))


def _is_linear(module: Module) -> bool:
    if module.parts.role not in _LINEAR_ROLES:
        return False
    if module.is_converted:
        return module.parts.role in CONVERTIBLE_ROLES  # any other is rule 1's finding
    weight = module.parameters.get(WEIGHT)
    return weight is not None and len(weight.shape) == 2


def engine_modules(linears: Sequence[Module], engine: Engine) -> list[EngineModule]:
    """The engine's modules for the checkpoint's linear layers; a fused one counts as converted if any part is."""
    converted: dict[str, bool] = defaultdict(bool)
    moe: set[str] = set()
    for module in linears:
        name = _engine_name(module, engine)
        converted[name] |= module.is_converted
        if module.parts.role is Role.EXPERTS and engine.fuses_experts:
            moe.add(name)
    return [EngineModule(name, is_converted, name in moe) for name, is_converted in converted.items()]


def _engine_name(module: Module, engine: Engine) -> str:
    name = module.name
    if not engine.keeps_wrapper:
        name = name.removeprefix(WRAPPED_PREFIX.removesuffix(TEXT_PREFIX))
    if module.parts.role is Role.EXPERTS:
        return f"{name.split('.experts.')[0]}.experts" if engine.fuses_experts else name
    if module.parts.role is Role.MM_PROJECTOR and engine.renames_projector:
        return _PROJECTOR.get(name, name)
    stem, _, last = name.rpartition(".")
    fused = engine.fused.get(last) if module.parts.role is not Role.VISION_TOWER else None
    return name if fused is None else f"{stem}.{fused}"


def _engines(subject: Subject) -> tuple[Engine, ...]:
    """The three engines as they read this layout; compressed-tensors entries name experts one by one."""
    wrapped, modelopt = subject.is_wrapped, subject.layout == MODELOPT
    mla = ("q_a_proj", "kv_a_proj_with_mqa")

    def fused_into(name: str) -> dict[str, str]:
        return _FUSED_MLP | dict.fromkeys(mla, name)

    def vllm(module: EngineModule, entries: Sequence[str]) -> bool:
        return (matchers.vllm_excludes if modelopt else matchers.vllm_ignores)(module.name, entries)

    def sglang(module: EngineModule, entries: Sequence[str]) -> bool:
        if modelopt:
            return matchers.sglang_excludes(module.name, entries, is_moe=module.is_moe)
        return matchers.sglang_ignores(module.name, entries)

    def tensorrt_llm(module: EngineModule, entries: Sequence[str]) -> bool:
        return matchers.tensorrt_llm_excludes(module.name, entries)

    def tensorrt_llm_widest(module: EngineModule, entries: Sequence[str]) -> bool:
        return matchers.tensorrt_llm_excludes_subtree(module.name, entries)

    vllm_map = matchers.map_vllm_excludes if modelopt else matchers.map_vllm_ignores
    sglang_map = matchers.map_sglang_excludes if modelopt else matchers.map_sglang_ignores
    return (
        Engine(
            name="vLLM",
            fused=fused_into("fused_qkv_a_proj"),
            keeps_wrapper=True,
            renames_projector=True,
            fuses_experts=modelopt,
            map_entries=partial(vllm_map, is_wrapped=wrapped),
            excludes=vllm,
            may_exclude=vllm,
        ),
        Engine(
            name="SGLang",
            fused=fused_into("fused_qkv_a_proj_with_mqa"),
            keeps_wrapper=False,
            renames_projector=True,
            fuses_experts=modelopt,
            map_entries=partial(sglang_map, is_wrapped=wrapped),
            excludes=sglang,
            may_exclude=sglang,
        ),
        Engine(
            name="TensorRT-LLM",
            fused=fused_into("kv_a_proj_with_mqa"),
            keeps_wrapper=False,
            renames_projector=False,
            fuses_experts=True,
            map_entries=partial(matchers.map_tensorrt_llm_excludes, is_wrapped=wrapped),
            # Only versions that know `re:` serve the compressed-tensors layout in NVFP4.
            excludes=tensorrt_llm if modelopt else tensorrt_llm_widest,
            may_exclude=tensorrt_llm_widest,
        ),
    )
