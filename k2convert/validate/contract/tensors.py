"""Rules 1, 2, 3, 8, 9 and 10: tensor names, shapes and counts, from headers and config.json.

Rule 8 names the tensors that no other rule reports. Where others report why the totals differ, it gives the totals.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.layouts import projection_tensors
from k2convert.checkpoint.names import CARD_NAME, CONFIG_NAME, LEDGER_NAME
from k2convert.choices import BLOCK_SIZE
from k2convert.errors import PlanError
from k2convert.models.config import text_config
from k2convert.models.names import CONVERTIBLE_ROLES, WEIGHT, WEIGHT_PACKED, Architecture, Family, Role
from k2convert.validate.contract.result import PRUNING_PLACE, Module, Subject
from k2convert.validate.results import Findings

HIDDEN_ALIGNMENT = 256
WIDTH_ALIGNMENT = 16
WIDTH_ALIGNMENT_FAST = 64
_PROJECTIONS = ("gate", "up", "down")
_TP_SIZE = re.compile(r"(?:--tensor-parallel-size|--tp-size|--tp_size|--tp|(?<!\w)-tp)[\s=]+(\d+)")


def check_names(subject: Subject) -> Findings:
    """Rule 1. vLLM stops at an unknown name but not at a missing one. SGLang silently skips unknown expert tensors."""
    found = Findings(1)
    expected = set(subject.expected_parameters)
    allowed = {parts.module for parts in subject.source_names.values()}
    for module in subject.converted:
        if module.parts.role not in CONVERTIBLE_ROLES:
            found.error(module.name, f"no engine loads the role {module.parts.role} in NVFP4")
            continue
        if not subject.is_in_source(module) and module.parts.role is not Role.EXPERTS:  # rule 9 reports experts
            found.error(module.name, "a new module, not in the source")
            continue
        for parameter in sorted(expected - set(module.parameters)):
            found.error(f"{module.name}.{parameter}", "missing")
        for parameter in sorted(set(module.parameters) - expected):
            found.error(f"{module.name}.{parameter}", "a converted projection of this layout has no such tensor")
    for name in _missing_projections(subject):
        found.error(name, "missing")
    for name in subject.unknown:
        if subject.source is None or name not in subject.source.tensors:
            found.error(name, f"not part of a {subject.family.title} model")
    for module in subject.modules.values():
        if subject.source is None or module.is_converted:
            continue
        for parameter, tensor in module.parameters.items():
            if f"{module.name}.{parameter}" not in subject.source.tensors:
                new = "a new name" if module.name in allowed else "a new module"
                found.error(f"{module.name}.{parameter}", f"{new} ({tensor.shard}), not in the source")
    return found


def _missing_projections(subject: Subject) -> list[str]:
    """Return projections with no tensors at all. Missing experts are reported by rule 9."""
    experts = {(m.parts.layer, m.parts.expert) for m in subject.modules.values() if m.parts.role is Role.EXPERTS}
    stems = {m.name.rsplit(".", 1)[0] for m in subject.modules.values() if m.parts.role is Role.EXPERTS}
    missing = {f"{stem}.{kind}_proj" for stem in stems for kind in _PROJECTIONS} - set(subject.modules)
    for parts in subject.source_names.values():
        is_expert = parts.role is Role.EXPERTS
        gone = parts.module in subject.int4_modules and parts.module not in subject.modules
        if gone and not (is_expert and (parts.layer, parts.expert) not in experts):
            missing.add(parts.module)
    return sorted(missing)


def check_prefix(subject: Subject) -> Findings:
    """Rule 2. Engines refuse names with a wrong prefix, or leave the weights random."""
    found = Findings(2)
    for name, expected in subject.renamed.items():
        refused = subject.family.refused_prefixes.items()
        reason = next((f" ({reason})" for prefix, reason in refused if name.startswith(prefix)), "")
        found.error(name, f"should be {expected}{reason}")
    return found


def check_shapes(subject: Subject) -> Findings:
    """Rule 3: codes U8 [N, K/2], block scales F8_E4M3 [N, K/16], scalars F32 [] or [1], K a multiple of 16."""
    found = Findings(3)
    for module in subject.converted:
        for parameter, problem in shape_problems(subject, module).items():
            found.error(f"{module.name}.{parameter}", problem)
    return found


def shape_problems(subject: Subject, module: Module) -> dict[str, str]:
    """Return what is wrong with a converted module's tensors, by parameter. Missing ones are reported by rule 1."""
    names, problems = subject.names, dict[str, str]()
    weight, scale = module.parameters.get(names.weight), module.parameters.get(names.block_scale)
    size = _source_size(subject, module) or _own_size(weight, scale)
    for parameter, tensor, dtype, columns_a_byte in (
        (names.weight, weight, "U8", 2),
        (names.block_scale, scale, "F8_E4M3", BLOCK_SIZE),
    ):
        if tensor is None:
            continue
        expected = (size[0], size[1] // columns_a_byte) if size is not None else None
        if tensor.dtype != dtype or len(tensor.shape) != 2 or (expected is not None and tensor.shape != expected):
            wanted = list(expected) if expected is not None else "with two dimensions"
            problems[parameter] = f"{tensor.dtype} {list(tensor.shape)}, expected {dtype} {wanted}"
    if size is not None and size[1] % BLOCK_SIZE and weight is not None and names.weight not in problems:
        problems[names.weight] = f"{size[1]} input columns are not a multiple of {BLOCK_SIZE}"
    for parameter in (names.global_scale, names.input_scale):
        tensor = module.parameters.get(parameter)
        if tensor is not None and (tensor.dtype != "F32" or tensor.shape not in ((), (1,))):
            problems[parameter] = f"{tensor.dtype} {list(tensor.shape)}, expected F32 [] or [1]"
    return problems


def _source_size(subject: Subject, module: Module) -> tuple[int, int] | None:
    if subject.source is None:
        return None
    packed = subject.source.tensors.get(f"{module.name}.{WEIGHT_PACKED}")
    if packed is not None and len(packed.shape) == 2:
        return packed.shape[0], packed.shape[1] * 8
    weight = subject.source.tensors.get(f"{module.name}.{WEIGHT}")
    return (weight.shape[0], weight.shape[1]) if weight is not None and len(weight.shape) == 2 else None


def _own_size(weight: TensorInfo | None, scale: TensorInfo | None) -> tuple[int, int] | None:
    """Return N and K by the codes, or by the block scales if the codes have a wrong number of dimensions."""
    if weight is not None and len(weight.shape) == 2:
        return weight.shape[0], weight.shape[1] * 2
    return (scale.shape[0], scale.shape[1] * BLOCK_SIZE) if scale is not None and len(scale.shape) == 2 else None


def check_totals(subject: Subject) -> Findings:
    """Rule 8. Experts-only W4A4 keeps the source's tensor bytes: three tensors become four of the same total size."""
    found = Findings(8)
    if subject.source is None:
        return found.skip(subject.no_source)
    count, size = _expected_totals(subject)
    actual = sum(tensor.num_bytes for tensor in subject.tensors.values())
    found.note = f"{len(subject.tensors):,} of {count:,} tensors, {actual:,} of {size:,} bytes"
    for name, parts in subject.source_names.items():
        converted = parts.module in subject.int4_modules or _is_converted(subject, parts.module)
        # Rule 9 reports missing experts and router rows, rule 1 missing projections.
        if not converted and parts.role is not Role.ROUTER and name not in subject.tensors:
            found.error(name, f"missing; it has {subject.source.tensors[name].num_bytes:,} bytes in the source")
    if not found.errors and (len(subject.tensors), actual) != (count, size):
        problem = f"{len(subject.tensors):,} tensors with {actual:,} bytes, expected {count:,} with {size:,}"
        found.error(str(subject.folder), problem)
    return found


def _is_converted(subject: Subject, name: str) -> bool:
    module = subject.modules.get(name)
    return module is not None and module.is_converted


def _expected_totals(subject: Subject) -> tuple[int, int]:
    assert subject.source is not None
    count = size = 0
    done: set[str] = set()
    for name, tensor in subject.source.tensors.items():
        parts = subject.source_names.get(name)
        module = parts.module if parts is not None else ""
        if parts is None or not (module in subject.int4_modules or _is_converted(subject, module)):
            count, size = count + 1, size + tensor.num_bytes
        elif module not in done and parts.parameter in (WEIGHT, WEIGHT_PACKED) and len(tensor.shape) == 2:
            done.add(module)
            columns = tensor.shape[1] * (8 if parts.parameter == WEIGHT_PACKED else 1)
            tensors = projection_tensors(
                layout=subject.layout,
                num_rows=tensor.shape[0],
                num_columns=columns,
                has_input_scale=subject.has_input_scale,
            )
            count, size = count + len(tensors), size + sum(t[3] for t in tensors)
    return count, size


def check_expert_counts(subject: Subject) -> Findings:
    """Rule 9, for pruned models too: every MoE layer has the experts 0..k-1, with the same k."""
    found = Findings(9)
    architecture = _architecture(subject, found)
    if architecture is None:
        return found
    count, family = architecture.num_experts, subject.family
    experts: dict[int, set[int]] = defaultdict(set)
    for module in subject.modules.values():
        if module.parts.role is Role.EXPERTS and module.parts.layer is not None and module.parts.expert is not None:
            experts[module.parts.layer].add(module.parts.expert)
    found.note = f"{count} experts in {len(architecture.moe_layers)} layers"
    _check_list(subject, architecture, found)
    for layer in sorted({*architecture.moe_layers, *experts}):
        experts_name, router_name = family.experts.format(layer=layer), family.router.format(layer=layer)
        wanted = set(range(count)) if layer in architecture.moe_layers else set[int]()
        for expert in sorted(wanted ^ experts[layer]):
            problem = "missing" if expert in wanted else f"config.json says the experts are 0..{len(wanted) - 1}"
            found.error(f"{experts_name}.{expert}", problem)
        if layer not in architecture.moe_layers:
            continue
        for parameter in family.router_parameters:
            router = subject.tensors.get(f"{router_name}.{parameter}")
            if router is None or not router.shape or router.shape[0] != count:
                has = "missing" if router is None else f"has shape {list(router.shape)}"
                found.error(f"{router_name}.{parameter}", f"{has}, but n_routed_experts is {count}")
    if not found.errors and not subject.is_pruned and subject.source is not None:
        _compare_count(subject.source, architecture, subject.family, found)
    return found


def _check_list(subject: Subject, architecture: Architecture, found: Findings) -> None:
    """Compare the ledger's list of kept experts with the result's own count and layers, and with the source."""
    pruning = None if subject.ledger is None else subject.ledger.pruning
    if pruning is None:
        return
    kept, layers = pruning.kept.num_experts, tuple(pruning.kept.layers)
    found.note += f", {kept} of {pruning.num_source_experts} kept"
    if kept != architecture.num_experts:
        found.error(PRUNING_PLACE, f"keeps {kept} experts, but n_routed_experts is {architecture.num_experts}")
    if layers != architecture.moe_layers:
        found.error(PRUNING_PLACE, f"has {_span(layers)}, but the MoE layers are {_span(architecture.moe_layers)}")
    if subject.list_problem and not found.errors:
        found.error(PRUNING_PLACE, subject.list_problem)


def _span(layers: Sequence[int]) -> str:
    return f"{layers[0]}..{layers[-1]} ({len(layers)})" if layers else "none"


def _compare_count(source: Checkpoint, architecture: Architecture, family: Family, found: Findings) -> None:
    """A pruned result says in its ledger which experts of the source it has. Without that, nothing can be compared."""
    total = family.read_architecture(source.config, str(source.folder)).num_experts
    if total != architecture.num_experts:
        found.error(
            LEDGER_NAME,
            f"the result has {architecture.num_experts} experts a layer, the source {total}, and the ledger has no "
            "list of kept experts. Pass the source that it was converted from, or restore the ledger",
        )


def _architecture(subject: Subject, found: Findings) -> Architecture | None:
    if subject.config is None:
        found.skip("config.json cannot be read, see rule 11")
        return None
    try:
        return subject.family.read_architecture(subject.config, str(subject.folder))
    except PlanError as error:
        found.error(CONFIG_NAME, str(error))
        return None


def check_alignment(subject: Subject) -> Findings:
    """Rule 10: hidden_size is a multiple of 256, the expert width per GPU one of 16, better 64.

    The tensor-parallel sizes are those named on the card, or 1.
    """
    found = Findings(10)
    if subject.config is None:
        return found.skip("config.json cannot be read, see rule 11")
    text = text_config(subject.config)
    hidden, width = text.get("hidden_size"), text.get("moe_intermediate_size")
    if not isinstance(hidden, int) or hidden % HIDDEN_ALIGNMENT:
        found.error("hidden_size", f"{hidden} is not a multiple of {HIDDEN_ALIGNMENT}")
    sizes = _card_tp_sizes(subject.folder / CARD_NAME) or [1]
    found.note = "tensor-parallel sizes " + ", ".join(map(str, sizes))
    for size in sizes:
        part = width // size if isinstance(width, int) and width % size == 0 else None
        name = f"moe_intermediate_size at tensor-parallel size {size}"
        if part is None or part % WIDTH_ALIGNMENT:
            found.error(name, f"{width} / {size} is not a multiple of {WIDTH_ALIGNMENT}")
        elif part % WIDTH_ALIGNMENT_FAST:
            found.warn(name, f"{width} / {size} is not a multiple of {WIDTH_ALIGNMENT_FAST}: kernels pad it")
    return found


def _card_tp_sizes(card: Path) -> list[int]:
    if not card.is_file() or card.is_symlink():
        return []
    text = card.read_text(encoding="utf-8", errors="replace")
    return sorted({int(size) for size in _TP_SIZE.findall(text) if int(size) > 0})
