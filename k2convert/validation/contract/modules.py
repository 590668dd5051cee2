"""Rule 14: what every engine does with the exclude list, compared with what is BF16 and what is converted.

The module list comes from the headers: every two-dimensional weight of a linear layer, under the names that each
engine gives its modules, fused ones included. Some engines never quantize some modules whatever the list says (vLLM's
vision tower, SGLang's projector). The list must exclude them anyway: those exceptions change with versions.

The list need not name routers, and published lists do not. Every engine keeps them unquantized by construction: vLLM's
`GateLinear` passes `quant_config=None`; SGLang's `MoEGate` and TensorRT-LLM's `DeepseekV3Gate` hold a plain parameter.
So a router must be a plain float matrix. Rule 1 reports one that has scales.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from k2convert.checkpoint.layouts.layout import QUANTIZATION_KEYS
from k2convert.models.names import CONVERTIBLE_ROLES, WEIGHT, EngineNaming, Role
from k2convert.validation.contract import matchers
from k2convert.validation.contract.folder import QUARK, exclude_entries
from k2convert.validation.contract.matchers import EngineRefusalError, ListReader
from k2convert.validation.contract.result import Module, Result
from k2convert.validation.results import Findings

_LINEAR_ROLES = (
    Role.EXPERTS, Role.SHARED_EXPERTS, Role.DENSE_MLP, Role.ATTENTION,
    Role.LM_HEAD, Role.VISION_TOWER, Role.MM_PROJECTOR, Role.LATENT, Role.RESIDUAL,
)  # fmt: skip


def _fused_into(name: str) -> dict[str, str]:
    return {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "q_a_proj": name, "kv_a_proj_with_mqa": name}


@dataclass(frozen=True, slots=True)
class EngineModule:
    """One module as an engine builds it, from one or several modules of the checkpoint."""

    name: str
    is_converted: bool
    is_moe: bool


@dataclass(frozen=True, slots=True)
class Engine:
    """Names that an engine gives modules, and its reading of the list. `may_exclude` is the widest one of its versions.

    `cut_prefix` is removed from module names, `renamed` maps whole names, `fused` maps projections to fused layers.
    `bank` is the engine's name of a layer's experts, if it is not the checkpoint's.
    """

    name: str
    fused: Mapping[str, str]
    fuses_experts: bool
    entries: Sequence[str]
    excludes: Callable[[EngineModule, Sequence[str]], bool]
    may_exclude: Callable[[EngineModule, Sequence[str]], bool]
    cut_prefix: str = ""
    bank: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])


def check_exclude_list(result: Result) -> Findings:
    """Rule 14: vLLM, SGLang and TensorRT-LLM exclude every BF16 linear layer and no converted one."""
    found = Findings(14)
    if not isinstance((result.config or {}).get(QUANTIZATION_KEYS[0]), dict):
        return found.skip("no quantization_config, see rule 11")
    if result.is_quark:
        return found.skip(QUARK)
    entries = exclude_entries(result)
    reader = matchers.LIST_READERS[result.names.library]
    if not reader.reads_regexes:
        for entry in entries:
            if entry.startswith(matchers.REGEX_MARK):
                found.error(entry, "regular expressions match nothing in this layout")
    linears = [module for module in result.modules.values() if _is_linear(module)]
    names: list[str] = []
    for engine in _engines(result.family.naming, reader, entries):
        modules = engine_modules(linears, engine)
        names.append(f"{engine.name} {len(modules)}")
        _check_engine(engine, modules, found)
    for module in result.modules.values():
        is_router = module.parts.role is Role.ROUTER and not module.is_converted
        weight = module.parameters.get(WEIGHT)
        if is_router and weight is not None and weight.dtype not in ("BF16", "F16", "F32"):
            found.error(module.name, f"is {weight.dtype}, but no engine reads a quantized router")
    found.note = "modules: " + ", ".join(names)
    return found


def _check_engine(engine: Engine, modules: Sequence[EngineModule], found: Findings) -> None:
    entries = engine.entries
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
        return module.parts.role in CONVERTIBLE_ROLES  # rule 1 reports any other
    weight = module.parameters.get(WEIGHT)
    return weight is not None and len(weight.shape) == 2


def engine_modules(linears: Sequence[Module], engine: Engine) -> list[EngineModule]:
    """Return the engine's modules for the linear layers. A fused one is converted if any part is."""
    converted: dict[str, bool] = defaultdict(bool)
    moe: set[str] = set()
    for module in linears:
        name = _engine_name(module, engine)
        converted[name] |= module.is_converted
        if module.parts.role is Role.EXPERTS and engine.fuses_experts:
            moe.add(name)
    return [EngineModule(name, is_converted, name in moe) for name, is_converted in converted.items()]


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


def _engines(naming: EngineNaming, reader: ListReader, entries: Sequence[str]) -> tuple[Engine, ...]:
    """Return the three engines as they read the list."""

    def vllm(module: EngineModule, entries: Sequence[str]) -> bool:
        return reader.vllm(module.name, entries, naming)

    def sglang(module: EngineModule, entries: Sequence[str]) -> bool:
        return reader.sglang(module.name, entries, naming, module.is_moe)

    subtree = matchers.tensorrt_llm_excludes_subtree
    return (
        Engine(
            name="vLLM",
            fused=_fused_into("fused_qkv_a_proj") | dict(naming.vllm_fused),
            fuses_experts=reader.fuses_experts,
            entries=reader.map_vllm(entries, naming),
            excludes=vllm,
            may_exclude=vllm,
            bank=naming.banks.get("vLLM", ""),
            renamed=naming.renamed_modules,
        ),
        Engine(
            name="SGLang",
            fused=_fused_into("fused_qkv_a_proj_with_mqa") | dict(naming.sglang_fused),
            fuses_experts=reader.fuses_experts,
            entries=reader.map_sglang(entries, naming),
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
            entries=matchers.map_tensorrt_llm_excludes(entries, naming),
            excludes=lambda module, entries: reader.tensorrt_llm(module.name, entries),
            may_exclude=lambda module, entries: subtree(module.name, entries),
            cut_prefix=naming.wrapper,
        ),
    )
