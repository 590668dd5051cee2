"""The servable contract: nineteen rules that a finished NVFP4 checkpoint must keep. They are checked without a GPU.

An error means that an engine refuses the folder, or loads it and gives wrong answers without a message. A warning is
counted. Headers and configs are read first. Rules that need data share one pass over the shards (see `scan`). One
fault is reported by one rule if faults can be told apart. NVFP4 checkpoints made by other tools are checked by the
same rules, except for the ledger. The rules on data (4 to 7, 18 and 19) are here.

Left out: running an engine. Engine behavior is as read in vLLM 0.33.0, SGLang 0.5.23 and TensorRT-LLM's sources.
"""

import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

from k2convert.check.contract.folder import (
    check_config_unchanged,
    check_hf_quant_config,
    check_kv_cache,
    check_package,
    check_quantization_config,
    check_sidecars,
)
from k2convert.check.contract.matchers import check_exclude_list
from k2convert.check.contract.modules import FP8_PARAMETERS
from k2convert.check.contract.result import NO_SOURCE, Result
from k2convert.check.contract.scan import ScanResult
from k2convert.check.contract.tensors import (
    check_alignment,
    check_expert_counts,
    check_names,
    check_prefix,
    check_shapes,
    check_totals,
)
from k2convert.check.results import ContractReport, Findings
from k2convert.checkpoint.files import is_there
from k2convert.checkpoint.names import EVALUATION_NAME, LEDGER_NAME
from k2convert.errors import CheckpointError, shortened
from k2convert.models.names import CONVERTIBLE_ROLES, WEIGHT, Role
from k2convert.plan.recipe import FP8_SQNR_DB, OTHERS_FP8_SQNR_DB
from k2convert.quantize.metrics.weight_metrics import MetricsSum, WeightMetrics
from k2convert.records.document import plain
from k2convert.records.ledger import ALL_ZERO

Figures = Mapping[str, Any]
"""Figures of weights, by name."""
TOLERANCE: Final = 1e-9  # both sides add float64 terms, in different orders
_OF_SOURCE: Final = ("num_weights", "num_blocks", "energy", "num_nonzero")
_NOT_STATED: Final = ("sampled_blocks", "sampled_error_achieved", "sampled_error_max", "changed_codes")

# These rules need every header. They are skipped if a shard cannot be read.
_NEED_ALL_SHARDS: tuple[tuple[int, Callable[[Result], Findings]], ...] = (
    (1, check_names),
    (2, check_prefix),
    (3, check_shapes),
    (8, check_totals),
    (9, check_expert_counts),
    (14, check_exclude_list),
)
_FROM_CONFIGS: tuple[Callable[[Result], Findings], ...] = (
    check_alignment,
    check_quantization_config,
    check_config_unchanged,
    check_package,
    check_sidecars,
)


def check_result(
    result: Result,
    scan: ScanResult,
    *,
    errors: Mapping[str, WeightMetrics] | None = None,
    totals: Mapping[str, Figures] | None = None,
    warnings: Mapping[str, str] | None = None,
) -> ContractReport:
    """Check all nineteen rules on a folder that was opened and scanned.

    `errors` maps modules to their measured errors, for rule 18. The rule is skipped if they are None. `totals` are the
    measured figures by role, for rule 19; None if not every converted weight was measured. `warnings` say by module
    what is suspicious about the codes of a source weight.
    """
    rules = [
        Findings(number).skip(result.incomplete) if result.incomplete else check(result)
        for number, check in _NEED_ALL_SHARDS
    ]
    rules += [check(result) for check in _FROM_CONFIGS]
    list_is_good = not any(f.number == 14 and (f.errors or f.skip_reason) for f in rules)
    rules.append(check_hf_quant_config(result, compare_lists=list_is_good))
    rules.append(check_kv_cache(result, scan.kv_scales))
    on_data = [*check_block_scales(result, scan), check_scalars(result, scan), check_copies(result, scan, errors or {})]
    if result.incomplete:
        for findings in on_data:
            findings.skip(result.incomplete)
    on_data += [check_errors(result, scan, errors, warnings or {}), check_ledger(result, scan, totals)]
    rules += on_data
    return ContractReport(
        folder=str(result.folder),
        layout=result.names.name,
        activations="w4a4" if result.has_input_scale else "w4a16",
        family=result.family.name,
        rules=tuple(f.result() for f in sorted(rules, key=lambda f: f.number)),
    )


def check_block_scales(result: Result, scan: ScanResult) -> list[Findings]:
    """Rules 4 and 5. 0x7F and 0xFF are NaN, engines do not read the sign, and Marlin flushes 0x01 to 0x07 to zero."""
    wrong = Findings(4)
    subnormal = Findings(5)
    for name, count in scan.invalid_scales.items():
        module, _, parameter = name.rpartition(".")
        problem = "block scales are NaN or negative"
        if module in result.modules and result.modules[module].is_fp8:
            problem = "scales are not positive numbers, far too large, or not the powers of two of blocks"
            if parameter == WEIGHT:
                problem = "codes are NaN, or rows or blocks use less than half of their range"
        wrong.error(name, f"{count:,} {problem}", count=count)
    for name, count in scan.zero_blocks_with_codes.items():
        wrong.error(name, f"{count:,} blocks have scale zero but non-zero codes", count=count)
    for name, count in scan.subnormal_scales.items():
        subnormal.warn(name, f"{count:,} block scales below 2^-6", count=count)
    return [wrong, subnormal]


def check_scalars(result: Result, scan: ScanResult) -> Findings:
    """Rule 6. Engines use gate's global scale for both or the larger of the two: unequal scales give wrong weights.

    Input scales must be those of the ledger's recipe. Without a recipe, input scales that vary within a layer are a
    warning: most kernels use the layer's maximum for all.
    """
    findings = Findings(6)
    partners: dict[tuple[str, str], tuple[str, bytes]] = {}  # what waits for the other of gate and up
    by_layer: dict[str, dict[bytes, str]] = defaultdict(dict)
    for name, data in scan.scalars.items():
        raw = bytes.fromhex(data)
        module_name, _, parameter = name.rpartition(".")
        value = struct.unpack("<f", raw)[0]
        module = result.modules[module_name]
        wanted = None
        if parameter == result.names.input_scale and result.recipe is not None:
            scales = result.recipe.input_scale
            wanted = result.names.encode_scalar(scales.down if module.parts.projection == "down" else scales.gate_up)
        if not math.isfinite(value) or value <= 0:
            findings.error(name, f"{value!r}, expected finite and positive")
        elif wanted is not None and raw != wanted:
            findings.error(name, f"{value!r}, but the recipe's input scale is {struct.unpack('<f', wanted)[0]!r}")
        if wanted is not None:
            continue  # a scale that is the recipe's is shared
        key = (module.parts.sharing_key, parameter)
        if (partner := partners.pop(key, None)) is None:
            if module.parts.projection in ("gate", "up"):
                partners[key] = name, raw
        elif partner[1] != raw:
            findings.error(partner[0], f"gate and up differ: {struct.unpack('<f', partner[1])[0]!r} and {value!r}")
        if parameter == result.names.input_scale and module.parts.role is Role.EXPERTS:
            kind = "gate and up"
            if module.parts.projection == "down":
                kind = "down"
            by_layer[f"layer {module.parts.layer} {kind}"].setdefault(raw, name)
    for name, row in scan.shared_rows.items():
        partner = str(result.family.fp8_partner(name))
        if name < partner and (not row or scan.shared_rows.get(partner) != row):
            problem = "has other scales in a column of blocks: vLLM 0.33.0 gives rows of g_proj those of a neighbor"
            result.habit(findings)(partner, problem)
    for where, values in by_layer.items():
        if len(values) > 1 and not findings.errors:
            findings.warn(where, f"{len(values)} different input scales, but kernels use one per layer")
    return findings


def check_copies(result: Result, scan: ScanResult, errors: Mapping[str, WeightMetrics]) -> Findings:
    """Rule 7: dtype, shape and bytes of everything that was not converted. Missing tensors are reported by rule 8.

    So are the codes of MXFP4 weights that were cast, except for groups below the window.

    Smoothing, if the ledger states it, multiplies columns by powers of two. Every other change is an error.
    """
    findings = Findings(7)
    if result.is_smoothed:
        findings.title = (
            "every other tensor is the source's, byte for byte or scaled exactly by the norm's powers of two"
        )
    for name in sorted(scan.not_finite):
        findings.error(name, "has NaN or infinite values")
    for name in sorted(scan.all_zero - result.modules.keys()):
        findings.warn(name, ALL_ZERO)
    if result.source is None:
        return findings.skip(result.no_source)
    compared = 0
    habit = result.habit(findings)
    if 2 * len(scan.different) > len(scan.compared):
        problem = f"{len(scan.different):,} of {len(scan.compared):,} copied tensors differ: the result was converted "
        findings.error(str(result.source.folder), f"{problem}from another source, or the source has changed", count=0)
    for offender in result.scaling.problems.values():
        findings.error(offender.name, offender.problem)
    reported = {offender.name for offender in result.scaling.problems.values()}
    for name, tensor in result.tensors.items():
        before = result.source.tensors.get(name)
        module = result.modules.get(name.rpartition(".")[0])
        if before is None or (module is not None and module.has_converted(name.rpartition(".")[2])):
            continue
        problem = f"{tensor.dtype} {list(tensor.shape)}, was {before.dtype} {list(before.shape)}"
        compared += 1
        if name in reported:
            continue
        if result.is_recast(name):
            if name not in scan.different:
                habit(name, f"{problem}: engines convert it while loading")
            elif name not in scan.not_finite:
                findings.error(name, f"{problem}: {scan.different[name]:,} numbers are not the source's, rounded")
        elif (before.dtype, before.shape) != (tensor.dtype, tensor.shape):
            findings.error(name, problem)
        elif name in scan.different:
            findings.error(name, f"{scan.different[name]:,} of {tensor.num_bytes:,} bytes differ")
        elif name in scan.misscaled:
            findings.error(name, scan.misscaled[name])
        elif name not in scan.compared:
            findings.error(name, "was not compared")
    cast = {module: error.changed_codes for module, error in errors.items() if error.changed_codes is not None}
    for module, changed in cast.items():
        if changed:
            weight = result.modules[module].parameters[result.names.weight]
            problem = f"{changed:,} of {weight.num_bytes:,} bytes of codes are not the source's"
            findings.error(f"{module}.{result.names.weight}", problem)
    findings.note = f"{compared:,} tensors compared"
    if scan.scaled:
        findings.note += f", {len(scan.scaled):,} of them scaled"
    if cast:
        findings.note += f", and the codes of {len(cast):,} that were cast"
    return findings


def check_errors(
    result: Result, scan: ScanResult, errors: Mapping[str, WeightMetrics] | None, warnings: Mapping[str, str]
) -> Findings:
    """Rule 18: every converted tensor was measured, and its SQNR is at least the recipe's budget.

    Damage to a source lowers no SQNR, so weights that are zero and codes that no training writes are warnings.
    """
    findings = Findings(18)
    for name in sorted(scan.all_zero & result.modules.keys()):
        module = result.modules[name]
        if module.is_fp8 or module.parts.role in CONVERTIBLE_ROLES:  # rule 1 reports any other
            findings.warn(name, ALL_ZERO)
    for name, warning in warnings.items():
        findings.warn(name, warning)
    if errors is None:
        return findings.skip(result.no_source or NO_SOURCE)
    converted = [*result.converted, *result.fp8]
    if not errors and not converted:
        return findings.skip("no weight is converted")
    budget = result.budget.tensor_sqnr_db
    worst = dict[str, tuple[float, float]]()  # by form: the least SQNR, and its budget
    for module in converted:
        measured = errors.get(module.name)
        if measured is None:
            # Rule 1 or 3 reports a projection that cannot be decoded, rule 1 or 9 one that the source does not have.
            expected = FP8_PARAMETERS if module.is_fp8 else result.expected_parameters
            if set(expected) <= set(module.parameters) and result.is_in_source(module):
                findings.error(module.name, "not measured")
            continue
        if measured.is_zero:
            continue
        sqnr = measured.sqnr_db
        form, least = "NVFP4", budget
        if module.is_fp8:
            form, least = "FP8", OTHERS_FP8_SQNR_DB if module.other_form else FP8_SQNR_DB
        if not sqnr >= least:
            findings.error(module.name, f"SQNR {sqnr:.2f} dB is below the budget of {least:.2f} dB")
        worst[form] = min(worst.get(form, (sqnr, least)), (sqnr, least))
    findings.note = ", ".join(
        f"worst {form} {sqnr:.2f} dB, budget {least:.2f} dB"
        for form, (sqnr, least) in sorted(worst.items(), reverse=True)
        if math.isfinite(sqnr)
    )
    if result.incomplete and not findings.errors:
        return findings.skip(result.incomplete)
    return findings


def check_ledger(result: Result, scan: ScanResult, totals: Mapping[str, Figures] | None) -> Findings:
    """Rule 19: the ledger states source and recipe, the size and hash of every shard, and what was measured. An
    evaluation, if there is one, is of the weights that it states.

    `totals` are the measured figures by role; None if they are not known.
    """
    findings = Findings(19)
    digests = scan.digests
    ledger = result.ledger
    if result.is_foreign:
        return findings.skip(f"no {LEDGER_NAME}: another tool made this checkpoint")
    if ledger is None:
        return findings.error(LEDGER_NAME, result.ledger_problem)
    evaluation = result.folder / EVALUATION_NAME
    if is_there(evaluation):
        from k2convert.records.evaluation import fresh_evaluation  # most results have none

        try:
            fresh_evaluation(result.folder, weights=ledger.weights)
        except CheckpointError as error:
            findings.error(EVALUATION_NAME, str(error).removeprefix(f"{evaluation}: ").removesuffix("."))
    for shard, digest in digests.items():
        stated = ledger.shards.get(shard)
        header = result.headers.get(shard)
        size = scan.unreadable_bytes[shard] if header is None else header.file_bytes
        if stated is None:
            findings.error(shortened(shard), "not in the ledger")
        elif stated.num_bytes != size:
            findings.error(shard, f"{size:,} bytes, but the ledger says {stated.num_bytes:,}")
        elif stated.blake3 != digest:
            findings.error(shard, "its blake3 is not the ledger's: the file was changed after it was written")
    missing = sorted(set(ledger.shards) - set(digests) - set(result.unreadable))
    for shard in missing:
        findings.error(shortened(shard), "in the ledger, but missing")
    if result.source is not None and ledger.source.headers and ledger.pruning is None:
        headers = {shard: header.digest for shard, header in result.source.headers.items()}
        if headers != ledger.source.headers:
            findings.warn(LEDGER_NAME, "states different source headers than --source has")
    if totals is None or missing or result.unreadable:
        findings.note = "totals were not compared: not every converted weight was measured"
    else:
        for field, problem in differing_totals(ledger.totals, totals):
            findings.error(f"{LEDGER_NAME}: {field}", problem)
    return findings


def measured_figures(totals: Mapping[str, MetricsSum], *, has_exact_scales: bool) -> Mapping[str, Figures]:
    """Return the figures to compare with a ledger's, by role and under "total"."""
    documents = {role: plain(sums.total()) for role, sums in totals.items()}
    for role, document in documents.items():
        names = document.keys() - set(_NOT_STATED) if has_exact_scales else _OF_SOURCE
        documents[role] = {name: document[name] for name in names if document[name] not in (None, {})}
    return documents


def differing_totals(stated: Mapping[str, WeightMetrics], measured: Mapping[str, Figures]) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) for every figure of a ledger that is not the measured one, with both numbers."""
    for role in stated.keys() - measured.keys():
        yield f"totals.{role}", "stated, but no such weight was measured"
    for role, figures in measured.items():
        if role not in stated:
            yield f"totals.{role}", f"missing, but {figures['num_weights']:,} weights were measured"
            continue
        document = plain(stated[role])
        for key, value in sorted(figures.items()):
            if key in document or key != "lossless_tensors":  # a local run does not read back what it wrote
                yield from _differences(f"totals.{role}.{key}", document.get(key), value)


def _differences(field: str, stated: Any, measured: Any) -> Iterator[tuple[str, str]]:
    if isinstance(stated, dict) and isinstance(measured, dict):
        left = cast(dict[str, int], stated)
        right = cast(dict[str, int], measured)
        for key in sorted(left.keys() | right.keys()):
            yield from _differences(f"{field}.{key}", left.get(key, 0), right.get(key, 0))
    elif not _is_same_figure(cast("float | None", stated), cast("float | None", measured)):
        yield field, f"{stated!r}, but {measured!r} was measured"


def is_same_error(measured: WeightMetrics, recorded: WeightMetrics) -> bool:
    """Return whether the figures that a conversion recorded are those of the written bytes."""
    keys = ("squared_error", "energy", "equal_nonzero", "num_nonzero")
    return all(_is_same_figure(getattr(recorded, key), getattr(measured, key)) for key in keys)


def _is_same_figure(stated: float | None, measured: float | None) -> bool:
    if stated is None or measured is None:
        return stated is measured
    if isinstance(stated, int) and isinstance(measured, int):
        return stated == measured
    return math.isclose(stated, measured, rel_tol=TOLERANCE)
