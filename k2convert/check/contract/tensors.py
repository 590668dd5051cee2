"""Rules 1, 2, 3, 8, 9 and 10: tensor names, shapes and counts, from headers and config.json.

Rule 8 names the tensors that no other rule reports. Where others report why the totals differ, it gives the totals.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from k2convert.check.contract.fp8 import check_fp8_names, cut_blocks, fp8_problems, loads_everywhere
from k2convert.check.contract.modules import FP8_PARAMETERS, Module
from k2convert.check.contract.result import Result
from k2convert.check.results import Findings
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.layouts.layout import fp8_tensors
from k2convert.checkpoint.names import CARD_NAME, CONFIG_NAME
from k2convert.choices import BLOCK_SIZE
from k2convert.errors import PlanError, quoted
from k2convert.models.config import (
    EXPERTS_KEY,
    DescribedModel,
    Fault,
    expert_columns_key,
    is_tied,
    key_of,
    text_config,
)
from k2convert.models.names import CONVERTIBLE_ROLES, WEIGHT, WEIGHT_PACKED, Role
from k2convert.models.projections import experts_remedy, find_experts, format_of

HIDDEN_ALIGNMENT = 256
WIDTH_ALIGNMENT = 16
WIDTH_ALIGNMENT_FAST = 64
_TP_SIZE = re.compile(r"(?:--tensor-parallel-size|--tp-size|--tp_size|--tp|(?<!\w)-tp)[\s=]+(\d+)")


def check_names(result: Result) -> Findings:
    """Rule 1. vLLM stops at an unknown name but not at a missing one. SGLang silently skips unknown expert tensors."""
    findings = Findings(1)
    expected = set(result.expected_parameters)
    allowed = {parts.module for parts in result.source_names.values()}
    others = Counter[str]()
    for module in result.modules.values():
        if module.other_form and module.parts.role is not Role.ROUTER:  # rule 14 reports routers
            form = "FP8" if module.is_fp8 else f"{module.other_form}, not checked here"
            others[f"{module.parts.role} in {form}"] += not loads_everywhere(result, module)
            if not any("scale" in parameter for parameter in module.parameters):
                findings.error(module.name, f"is {module.other_form}, but has no scale")
    for module in result.converted:
        role = module.parts.role
        needed = expected
        if role in _UNQUANTIZED or (role not in CONVERTIBLE_ROLES and not result.is_foreign):
            findings.error(module.name, f"is NVFP4, but engines read the role {role} in BF16")
            continue
        if role not in result.family.roles:
            others[f"{role} in NVFP4, not checked here"] += 1
            needed = expected - {result.names.input_scale}
        if not result.is_in_source(module) and module.parts.role is not Role.EXPERTS:  # rule 9 reports experts
            findings.error(module.name, "a new module, not in the source")
            continue
        for parameter in sorted(needed - set(module.parameters)):
            findings.error(f"{module.name}.{parameter}", "missing")
        for parameter in sorted(set(module.parameters) - expected):
            findings.error(f"{module.name}.{parameter}", "a converted projection of this layout has no such tensor")
    for module in result.fp8:
        if not module.other_form:
            check_fp8_names(result, module, findings)
    experts = {(m.parts.layer, m.parts.expert) for m in result.modules.values() if m.parts.role is Role.EXPERTS}
    stems = {m.name.rsplit(".", 1)[0] for m in result.modules.values() if m.parts.role is Role.EXPERTS}
    projections = result.family.projections.values()
    missing = {name for stem in stems for end in projections if (name := f"{stem}.{end}") not in result.modules}
    for parts in result.source_names.values():
        is_lost_expert = parts.role is Role.EXPERTS and (parts.layer, parts.expert) not in experts  # rule 9 reports it
        if parts.module in result.int4_modules and parts.module not in result.modules and not is_lost_expert:
            missing.add(parts.module)
    for name in sorted(missing):
        findings.error(name, "missing")
    for name in result.unknown:
        if result.source is None or name not in result.source.tensors:
            findings.error(name, f"not part of a {result.family.title} model")
    for module in result.modules.values():
        if result.source is None or module.is_converted:
            continue
        for parameter, tensor in module.parameters.items():
            name = f"{module.name}.{parameter}"
            if module.is_fp8 and parameter in FP8_PARAMETERS:
                continue
            if not (name in result.source.tensors or result.is_unjudged(name) or result.is_decoded(name)):
                new = "a new name" if module.name in allowed else "a new module"
                findings.error(name, f"{new} ({tensor.shard}), not in the source")
    for kind, count in others.items():
        if count:
            findings.warn(kind, f"{count:,} modules: not every engine loads this form", count=count)
    return findings


_UNQUANTIZED: Final = (Role.ROUTER, Role.NORM, Role.EMBEDDINGS, Role.VISION_TOWER)


def check_prefix(result: Result) -> Findings:
    """Rule 2. Engines refuse names with a wrong prefix, or leave the weights random; one prefix they rename."""
    findings = Findings(2)
    for name, expected in result.renamed.items():
        report = findings.error
        if any(name.replace(*rename) == expected for rename in result.family.naming.renamed_prefixes):
            report = result.habit(findings)
            expected += ", as which engines load it"
        report(name, f"should be {expected}")
    return findings


def check_shapes(result: Result) -> Findings:
    """Rule 3: codes U8 [N, K/2], block scales F8_E4M3 [N, K/16], scalars F32 [] or [1], K a multiple of 16."""
    findings = Findings(3)
    for module in (*result.converted, *result.fp8):
        for parameter, problem in shape_problems(result, module).items():
            findings.error(f"{module.name}.{parameter}", problem)
    return findings


def shape_problems(result: Result, module: Module) -> dict[str, str]:
    """Return what is wrong with a converted module's tensors, by parameter. Missing ones are reported by rule 1."""
    if module.is_fp8:
        return fp8_problems(result, module, _source_size(result, module))
    names = result.names
    problems = dict[str, str]()
    weight = module.parameters.get(names.weight)
    scale = module.parameters.get(names.block_scale)
    size = _source_size(result, module) or _own_size(weight, scale)
    for parameter, tensor, dtype, columns_a_byte in (
        (names.weight, weight, "U8", 2),
        (names.block_scale, scale, "F8_E4M3", BLOCK_SIZE),
    ):
        if tensor is None:
            continue
        expected = None
        if size is not None:
            expected = (size[0], size[1] // columns_a_byte)
        if tensor.dtype != dtype or len(tensor.shape) != 2 or (expected is not None and tensor.shape != expected):
            wanted = "with two dimensions"
            if expected is not None:
                wanted = list(expected)
            problems[parameter] = f"{tensor.dtype} {list(tensor.shape)}, expected {dtype} {wanted}"
    if size is not None and size[1] % BLOCK_SIZE and weight is not None and names.weight not in problems:
        problems[names.weight] = f"{size[1]} input columns are not a multiple of {BLOCK_SIZE}"
    for parameter in (names.global_scale, names.input_scale):
        tensor = module.parameters.get(parameter)
        if tensor is not None and (tensor.dtype != "F32" or tensor.shape not in ((), (1,))):
            problems[parameter] = f"{tensor.dtype} {list(tensor.shape)}, expected F32 [] or [1]"
    return problems


def _source_size(result: Result, module: Module) -> tuple[int, int] | None:
    if result.source is None:
        return None
    packed = result.source.tensors.get(f"{module.name}.{WEIGHT_PACKED}")
    if packed is not None and len(packed.shape) == 2:
        return packed.shape[0], packed.shape[1] * format_of(packed).columns_per_element
    weight = result.source.tensors.get(f"{module.name}.{WEIGHT}")
    if weight is not None and len(weight.shape) == 2:
        return (weight.shape[0], weight.shape[1])
    return None


def _own_size(weight: TensorInfo | None, scale: TensorInfo | None) -> tuple[int, int] | None:
    """Return N and K by the codes, or by the block scales if the codes have a wrong number of dimensions."""
    if weight is not None and len(weight.shape) == 2:
        return weight.shape[0], weight.shape[1] * 2
    if scale is not None and len(scale.shape) == 2:
        return (scale.shape[0], scale.shape[1] * BLOCK_SIZE)
    return None


def check_totals(result: Result) -> Findings:
    """Rule 8. Experts-only W4A4 keeps the bytes of an INT4 source: three tensors become four of the same total size."""
    findings = Findings(8)
    if result.source is None:
        return findings.skip(result.no_source)
    count = 0
    size = 0
    done: set[str] = set()
    converted = result.int4_modules | {module.name for module in result.converted}
    fp8 = {f"{module.name}.{WEIGHT}" for module in result.fp8 if not module.other_form}
    for name, tensor in result.source.tensors.items():
        parts = result.source_names.get(name)
        if name in fp8 and len(tensor.shape) == 2:
            tensors = fp8_tensors(*tensor.shape, has_blocks=result.family.has_fp8_blocks)
            count += len(tensors)
            size += sum(t[3] for t in tensors)
        elif parts is None or parts.module not in converted:
            count += 1
            size += tensor.num_bytes
        elif parts.module not in done and parts.parameter in (WEIGHT, WEIGHT_PACKED) and len(tensor.shape) == 2:
            done.add(parts.module)
            is_packed = parts.parameter == WEIGHT_PACKED
            tensors = result.names.tensors(
                num_rows=tensor.shape[0],
                num_columns=tensor.shape[1] * (format_of(tensor).columns_per_element if is_packed else 1),
                has_input_scale=result.has_input_scale,
            )
            count += len(tensors)
            size += sum(t[3] for t in tensors)
    actual = sum(tensor.num_bytes for tensor in result.tensors.values())
    findings.note = f"{len(result.tensors):,} of {count:,} tensors, {actual:,} of {size:,} bytes"
    for name, parts in result.source_names.items():
        # Rule 9 reports missing experts and router rows, rule 1 missing projections.
        is_kept = parts.module not in converted and not result.is_unjudged(name)
        if is_kept and parts.role is not Role.ROUTER and name not in result.tensors:
            findings.error(name, f"missing; it has {result.source.tensors[name].num_bytes:,} bytes in the source")
    if not findings.errors and not result.is_foreign and (len(result.tensors), actual) != (count, size):
        problem = f"{len(result.tensors):,} tensors with {actual:,} bytes, expected {count:,} with {size:,}"
        findings.error(str(result.folder), problem)
    return findings


def check_expert_counts(result: Result) -> Findings:
    """Rule 9: every MoE layer has the experts 0..k-1, and every tensor is as config.json says. Pruned models too."""
    findings = Findings(9)
    if result.config is None:
        return findings.skip("config.json cannot be read, see rule 11")
    try:
        architecture = result.family.read_architecture(result.config, str(result.folder))
    except PlanError as error:
        return findings.error(CONFIG_NAME, str(error))
    count = architecture.num_experts
    family = result.family
    experts = find_experts(module.parts for module in result.modules.values())
    findings.note = f"{count} experts in {len(architecture.moe_layers)} layers"
    remedy = experts_remedy(result.tensors, experts, family=family, key=key_of(result.config, EXPERTS_KEY))
    if remedy and any(len(numbers) != count for numbers in experts.values()):
        findings.error(CONFIG_NAME, remedy)
    for layer in sorted({*architecture.moe_layers, *experts}):
        experts_name = family.experts.format(layer=layer)
        wanted = set(range(count)) if layer in architecture.moe_layers else set[int]()
        for expert in sorted(wanted ^ set(experts.get(layer, ()))):
            problem = "missing"
            if expert not in wanted:
                problem = f"config.json says the experts are 0..{len(wanted) - 1}"
            findings.error(f"{experts_name}.{expert}", problem)
    model = DescribedModel(family, architecture, result.config, str(result.folder))
    for fault in model.find_faults(result.tensors, experts):
        if not _is_reported(result, fault):
            findings.error(fault.name, model.problem(fault))
    text = text_config(result.config)
    for field, problem in _unserved_fields(result, result.config):
        known = result.config if result.source is None else result.source.config
        if (known.get(field), text_config(known).get(field)) == (result.config.get(field), text.get(field)):
            findings.warn(field, problem)  # rule 12 reports a change
    if not findings.errors and result.source is not None:
        total = family.read_architecture(result.source.config, str(result.source.folder)).num_experts
        if total != count:
            problem = f"the result has {count} experts per layer, the source {total}. "
            findings.error(CONFIG_NAME, problem + "Pass the source that it was converted from")
    return findings


def _unserved_fields(result: Result, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield fields of config.json that engines have no code for, or that contradict the tensors."""
    family = result.family
    named: Any = config.get("architectures")
    if family.model_class and isinstance(named, list) and family.model_class not in cast(list[object], named):
        wanted = f"vLLM and SGLang have their code for these tensors under {family.model_class}"
        yield "architectures", f"{quoted(config['architectures'])}: {wanted}"
    activation = text_config(config).get("hidden_act", family.activation)
    if activation != family.activation:
        yield "hidden_act", f"{quoted(activation)}: vLLM and SGLang refuse all but {family.activation!r}"
    if is_tied(config) and any(module.parts.role is Role.LM_HEAD for module in result.modules.values()):
        yield "tie_word_embeddings", "true, but the model has a head: transformers puts the embedding in its place"


def _is_reported(result: Result, fault: Fault) -> bool:
    """Return whether rule 1, 3, 7 or 8 reports a fault. Routers are this rule's too."""
    name = fault.name.rpartition(".")[0]
    module = result.modules.get(name)
    before = None
    if result.source is not None:
        before = result.source.tensors.get(fault.name)
    if module is not None and module.other_form:  # of which only the weight's shape is known
        if not fault.name.endswith(f".{WEIGHT}") or fault.expected is None or fault.tensor is None:
            return True
        return fault.tensor.shape == fault.expected.shape
    if module is not None and module.is_fp8 and fault.name.rpartition(".")[2] in FP8_PARAMETERS:
        return True
    if module is not None and module.is_converted:
        is_complete = set(result.expected_parameters) <= set(module.parameters)
        is_named = module.parts.role not in CONVERTIBLE_ROLES or not is_complete or shape_problems(result, module)
        return fault.expected is None or bool(is_named)
    if fault.expected is None:
        return before is None and (module is None or result.source is not None)
    parts = result.family.classify(name)
    if parts is not None and parts.role is Role.ROUTER:
        return False
    if fault.tensor is None:
        return before is not None or not fault.expected.dtypes
    return before is not None and (before.dtype, before.shape) != (fault.tensor.dtype, fault.tensor.shape)


def check_alignment(result: Result) -> Findings:
    """Rule 10: what an expert reads is a multiple of 256, the expert width per GPU one of 16, better 64.

    The tensor-parallel sizes are those named on the card, or else the one that `validate` recommends at the end.
    """
    from k2convert.deploy.serving import usual_parallelism

    findings = Findings(10)
    if result.config is None:
        return findings.skip("config.json cannot be read, see rule 11")
    text = text_config(result.config)
    allowed = result.family.tensor_parallel_sizes
    columns = expert_columns_key(result.config)
    hidden = text.get(columns)
    width = text.get("moe_intermediate_size")
    if not isinstance(hidden, int) or hidden % HIDDEN_ALIGNMENT:
        result.habit(findings)(
            columns, f"{hidden} is not a multiple of {HIDDEN_ALIGNMENT}: FlashInfer's kernels need it"
        )
    recommended = usual_parallelism(result.config, result.family).tensor
    card = result.folder / CARD_NAME
    sizes = [recommended]
    if card.is_file():
        stated = _TP_SIZE.findall(card.read_text(encoding="utf-8", errors="replace"))
        sizes = sorted({int(size) for size in stated if int(size) > 0}) or [recommended]
    findings.note = f"tensor-parallel size{'s' if len(sizes) > 1 else ''} {', '.join(map(str, sizes))}"
    for size in sizes:
        if allowed and size not in allowed:
            findings.error(f"tensor-parallel size {size}", f"not one of {', '.join(map(str, allowed))}")
            continue
        name = f"moe_intermediate_size at tensor-parallel size {size}"
        if not isinstance(width, int) or width % (size * WIDTH_ALIGNMENT):
            findings.error(name, f"{width} / {size} is not a multiple of {WIDTH_ALIGNMENT}")
        elif width % (size * WIDTH_ALIGNMENT_FAST):
            findings.warn(name, f"{width} / {size} is not a multiple of {WIDTH_ALIGNMENT_FAST}: kernels pad it")
        for name, problem in cut_blocks(result, size) if result.fp8 else ():
            findings.warn(name, problem)
    return findings
