"""Is a finished checkpoint right? Contract, weights and reference layers, checked on the written bytes.

One pass over the shards serves the contract's rules, and measures every weight by the compiled code (see shards.py).
The certificate then checks each shard by code that shares nothing with the conversion: it imports the standard library
and NumPy alone (see certificate.py). Journal and ledger are not trusted: their figures are checked too. Only one number
is taken from the journal: if no rule is known, which global scale a rounded divisor means.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from k2convert.check.certificate import KNOWN_RULES
from k2convert.check.contract import check_result
from k2convert.check.contract.result import Result, read_result
from k2convert.check.contract.scan import ShardBytes
from k2convert.check.remote import LOCAL, Shards
from k2convert.check.results import (
    CertificateReport,
    ContractReport,
    LayersReport,
    LayersRequest,
    ValidationReport,
    WeightsReport,
)
from k2convert.check.shards import ShardsFound, claim_of, join_findings, validate_shards
from k2convert.checkpoint.header import ShardHeader, TensorInfo
from k2convert.checkpoint.index import Checkpoint, open_checkpoint
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.names import LEDGER_NAME
from k2convert.errors import CheckpointError, quoted, remedy
from k2convert.models import FAMILIES, read_architecture
from k2convert.models.config import EXPERTS_KEY, key_of, text_config
from k2convert.models.names import WEIGHT, WEIGHT_PACKED
from k2convert.models.projections import other_method
from k2convert.records.command import shell_line
from k2convert.records.events import SILENT, Events
from k2convert.records.journal import Journal, check_finished
from k2convert.records.ledger import ProjectionRecord, ShardRecord

RESULT_REMEDY: Final = "Run the conversion again: it replaces what is damaged."


def validate_checkpoint(
    *,
    folder: Path,
    source: Checkpoint | None,
    layers: LayersRequest | None = None,
    events: Events = SILENT,
    visitor: ShardBytes | None = None,
    shards: Shards = LOCAL,
) -> ValidationReport:
    """Validate `folder`; raises CheckpointError if a checkpoint cannot be read.

    Weights and `layers` need `source`; without it they are left out. `visitor` gets all bytes of the folder's shards.
    Reference layers are computed only if the contract holds; else the report has the reason. `shards` brings those that
    are on the Hub.
    """
    if shards.result is None:
        check_finished(folder)
    result = read_result(folder, source=source, read=shards.header_reader)
    _check_operands(result)
    _check_pruned_source(result)
    result = _with_smoothing(result, shards)
    source = result.source
    findings = validate_shards(result, recorded=_recorded(result), events=events, visitor=visitor, shards=shards)
    contract, weights = _report(result, findings)
    layers_report = None
    skipped = ""
    if layers is not None and source is None:
        skipped = result.no_source
    elif layers is not None and not contract.passed:
        skipped = _broken_rules(contract)
    elif layers is not None and source is not None:
        layers_report = _compute_layers(layers, result, source, events=events)
    return ValidationReport(str(folder), contract, weights, layers_report, skipped)


def _with_smoothing(result: Result, shards: Shards) -> Result:
    if not result.is_smoothed:
        return result
    from k2convert.check.smoothing import read_scaling

    return replace(result, scaling=read_scaling(result, shards=shards))


def _check_operands(result: Result) -> None:
    folder = result.folder
    if result.ledger is not None and result.ledger.recipe.target == "bf16":
        raise CheckpointError(
            f"{folder}: holds a BF16 copy (target bf16), but only NVFP4 checkpoints can be validated. "
            f"{LEDGER_NAME} has the hash of every shard."
        )
    source = result.source
    known = result.family.source_format
    packed = (t for name, t in result.tensors.items() if name.endswith(f".{WEIGHT_PACKED}"))
    has_packed = any(t.dtype == known.packed_dtype for t in packed)
    is_source = has_packed and not is_nvfp4(result.tensors)
    is_result = source is not None and is_nvfp4(source.tensors)
    if is_source and source is not None and is_result:
        raise CheckpointError(
            f"{folder} is an {known.title} checkpoint and {source.folder} an NVFP4 one. Swap them: the result comes "
            f"first, the {known.title} source after --source."
        )
    if result.is_foreign and not is_source:
        _check_foreign(result)
    if is_source:
        raise CheckpointError(
            f"{folder}: its weights are {known.title}, so it is a source, not a result. Pass the folder of a finished "
            f"conversion, and the {known.title} source with --source."
        )
    if source is not None and is_result:
        raise CheckpointError(
            f"{source.folder}: its weights are NVFP4, so it is not the source. Pass the {known.title} checkpoint that "
            "the result was converted from with --source."
        )


def _check_foreign(result: Result) -> None:
    """Say what a checkpoint of another tool is, if the rules are not about it (CheckpointError)."""
    config = result.config or {}
    stated = config.get("model_type")
    types = result.family.model_types
    if stated is not None and types and stated not in types:
        titles = " and ".join(dict.fromkeys(family.title for family in FAMILIES))
        problem = f"model_type is {quoted(stated)}, and the rules are about {titles} alone"
    elif not is_nvfp4(result.tensors) and not result.is_quark and result.tensors:
        dtypes = {t.dtype for n, t in result.tensors.items() if ".experts." in n and n.endswith(f".{WEIGHT}")}
        method = other_method(config) or " and ".join(sorted(dtypes)) or "not NVFP4"
        problem = f"its weights are {method}, and the rules are about NVFP4"
    elif result.declared.get("quant_algo") == "NVFP4_AWQ":
        problem = "its scheme is NVFP4_AWQ, and the rules do not know its scales of inputs"
    else:
        return
    raise CheckpointError(f"{result.folder}: was not checked: {problem}.")


def _check_pruned_source(result: Result) -> None:
    """Refuse a source with all experts for a result that k2convert 0.3 pruned (CheckpointError).

    Its ledger states the headers of the source with all experts.
    """
    source = result.source
    if source is None or result.ledger is None or result.ledger.pruning is None:
        return
    total = read_architecture(source).num_experts
    count = None
    if result.config is not None:
        count = text_config(result.config).get(key_of(result.config, EXPERTS_KEY))
    if total == count:
        return
    keep = shell_line(("k2convert", "prune", str(source.folder), "PRUNED", "--keep", str(result.folder / LEDGER_NAME)))
    raise CheckpointError(
        f"{result.folder}: has {count} experts per layer, but {source.folder} has {total}. Prune the source first, and "
        f"pass the pruned one with --source: `{keep}`."
    )


def is_nvfp4(tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether a checkpoint has NVFP4 weights, by its tensors."""
    global_scales = tuple(names.global_scale for names in LAYOUTS.values())
    return any(name.rpartition(".")[2] in global_scales for name in tensors)


def _broken_rules(contract: ContractReport) -> str:
    rules = ", ".join(map(str, contract.failed))
    if len(contract.failed) == 1:
        return f"rule {rules} does not hold"
    return f"rules {rules} do not hold"


def validate_sent(
    folder: Path, *, headers: Mapping[str, ShardHeader], source: Checkpoint, records: Iterable[ShardRecord]
) -> ValidationReport:
    """Validate a result whose shards left the disk: `folder` holds everything else, `records` what was found on each.

    `headers` are the planned ones of all shards. The hash of a whole file, compared with the ledger, covers its header.
    What no record says was compared with it fails.
    """
    result = read_result(folder, source=source, known_headers=dict(headers))
    contract, weights = _report(result, join_findings(records, result))
    return ValidationReport(str(folder), contract, weights, layers=None)


def _report(result: Result, findings: ShardsFound) -> tuple[ContractReport, WeightsReport | None]:
    """Check the rules, and compare the journal's figures."""
    if result.source is None:
        return check_result(result, findings.scan), None
    errors = findings.measured
    weights = WeightsReport(
        errors=errors,
        roles={name: result.modules[name].parts.role for name in errors},
        certificate=_certificate_report(result, findings),
        journal_mismatches=tuple(findings.misstated),
        journal_compared=findings.num_stated,
    )
    is_whole = errors.keys() >= {module.name for module in (*result.converted, *result.fp8)}
    totals = findings.figures if is_whole and errors else None
    return check_result(result, findings.scan, errors=errors, totals=totals, warnings=findings.warnings), weights


def _certificate_report(result: Result, findings: ShardsFound) -> CertificateReport:
    certified = findings.certified
    rule = claim_of(result).rule
    reason = ""
    if result.ledger is None:
        reason = "no ledger says by which rule the weights were converted"
    elif rule not in KNOWN_RULES:
        rule = None
        reason = f"the conditions of the rule {result.ledger.recipe.rule} are not known to this version"
    return CertificateReport(
        rule=None if reason else rule,
        skip_reason=reason,
        tensors=len(certified.rows),
        copies=certified.copies,
        rows=sum(certified.rows.values()),
        is_whole=certified.all_rows,
        mismatches={n: p for n, p in certified.problems.items() if not result.is_unjudged(n)},
    )


def _recorded(result: Result) -> dict[str, ProjectionRecord]:
    """Return the journal's records of the job that the ledger states, by module, without the histograms of their
    scales, which are large; empty without a ledger.
    """
    if result.ledger is None:
        return {}
    records = Journal(result.folder).finished((result.job or result.ledger).digest).values()
    return {
        projection.module: replace(
            projection, metrics=projection.metrics and replace(projection.metrics, scale_histogram={})
        )
        for record in records
        for projection in record.projections
    }


def _compute_layers(request: LayersRequest, result: Result, source: Checkpoint, *, events: Events) -> LayersReport:
    from k2convert.check.reference_layers import check_layers

    with remedy(RESULT_REMEDY):
        converted = open_checkpoint(result.folder)
    return check_layers(
        request, source=source, converted=converted, budget=result.budget, scaling=result.scaling, events=events
    )
