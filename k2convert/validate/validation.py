"""Is a finished checkpoint right? Contract, weights and reference layers, checked on the written bytes.

Weights are decoded by code that shares nothing with the code that wrote them, and compared with the source's exact
values, in the same pass over the shards that the contract's rules need. Then they are made again by the recipe's rule
and compared byte for byte (see weights.py). Journal and ledger are not trusted: their figures are checked too. Only one
number is taken from the journal: if no rule is known, which global scale a rounded divisor means.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from k2convert.calibrate.channels import Calibration
from k2convert.calibrate.statistics import Statistics
from k2convert.calibrate.text import Windows
from k2convert.checkpoint.header import ShardHeader, TensorInfo
from k2convert.checkpoint.index import Checkpoint, open_checkpoint
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.names import LEDGER_NAME
from k2convert.choices import Rule
from k2convert.errors import CheckpointError, remedy
from k2convert.models.names import WEIGHT_PACKED
from k2convert.plan.recipe import Recipe
from k2convert.quantize.rules import RULES
from k2convert.records.events import SILENT, Events
from k2convert.records.fingerprint import ARITHMETIC_VERSION
from k2convert.records.journal import Journal
from k2convert.records.ledger import Ledger
from k2convert.records.shard_record import ProjectionRecord, ShardRecord
from k2convert.validate.contract import check_subject
from k2convert.validate.contract.findings import ContractReport
from k2convert.validate.contract.result import Subject, open_subject
from k2convert.validate.contract.scan import ShardVisitor
from k2convert.validate.layers.result import LayerBudget, LayersReport
from k2convert.validate.remote import LOCAL, Shards
from k2convert.validate.results import (
    ValidationReport,
    WeightsReport,
    compare,
    merge_contracts,
    merge_layers,
    merge_weights,
    rule_report,
)
from k2convert.validate.shards import ShardsFound, join_findings, validate_shards
from k2convert.validate.smoothing import calibration_of, read_scaling
from k2convert.validate.totals import compare_journal

RESULT_REMEDY: Final = "Run the conversion again: it replaces what is damaged."

CALIBRATED_NOTE: Final = (
    "The error of weights is the wrong measure for a calibrated result: validate each result with --layers and --text, "
    "which compares the outputs of the layers."
)


@dataclass(frozen=True, slots=True)
class LayersRequest:
    """Which reference layers to compute (empty: all), on captured hidden states, those of a text, or synthetic ones."""

    layers: tuple[int, ...]
    hidden_states: Path | Windows | None
    tokens: int


def validate_checkpoint(
    *,
    folder: Path,
    source: Checkpoint | None,
    reference: bool = False,
    against: Path | None = None,
    layers: LayersRequest | None = None,
    events: Events = SILENT,
    visitor: ShardVisitor | None = None,
    shards: Shards = LOCAL,
    statistics: Statistics | None = None,
) -> ValidationReport:
    """Validate `folder`; raises CheckpointError if a checkpoint cannot be read.

    Weights, `layers` and the comparison with the folder `against` need `source`, the whole one also of a pruned result;
    without it they are left out.
    `reference` also decodes every tensor with the layout's own library. `visitor` gets all bytes of the folder's
    shards. Reference layers are computed only if the contract holds; else the report says why not. `shards` brings
    those that are on the Hub; of a result or source there, only the given `layers` are read. `statistics` are those of
    the conversion, from which its weights are made again; CalibrationError if they are others.
    """
    whole, subject = source, open_subject(folder, source=source, read=shards.header_reader)
    _check_operands(subject)
    if subject.is_int4 and (layers is not None or against is not None):
        raise CheckpointError(
            f"{folder}: has the source's own weights (--to int4), so there is no error to compute. Leave out --layers "
            "and --against."
        )
    calibration = None if statistics is None else calibration_of(subject, statistics)
    subject = replace(subject, scaling=read_scaling(subject, shards=shards, calibration=calibration))
    source = subject.source
    if layers is not None and source is not None and whole is not None and shards.is_remote:
        return _validate_layers(
            subject, source, whole, layers, reference=reference, events=events, shards=shards, calibration=calibration
        )
    contract, weights = _measure(
        subject, reference=reference, events=events, visitor=visitor, shards=shards, calibration=calibration
    )
    layers_report, skipped = None, ""
    if layers is not None and (source is None or whole is None):
        skipped = subject.no_source
    elif layers is not None and not contract.passed:
        skipped = _broken_rules(contract)
    elif layers is not None and source is not None and whole is not None:
        layers_report = _compute_layers(layers, subject, source, whole, events=events, shards=shards)
    comparison = None
    if against is not None and source is not None and weights is not None:
        other, theirs = _open_other(against, subject, whole), replace(shards, result=None)
        other = replace(other, scaling=read_scaling(other, shards=theirs))
        their_contract, their_weights = _measure(other, reference=False, events=events, visitor=None, shards=theirs)
        assert their_weights is not None
        comparison = compare(str(against), weights, their_contract, their_weights)
        if any(found.ledger is not None and found.ledger.calibration is not None for found in (subject, other)):
            comparison = replace(comparison, note=CALIBRATED_NOTE)
    return ValidationReport(str(folder), contract, weights, layers_report, comparison, skipped)


def _check_operands(subject: Subject) -> None:
    """Refuse an INT4 source as the result, and an NVFP4 checkpoint as the source (CheckpointError)."""
    folder, source = subject.folder, subject.source
    is_source = _is_int4(subject.tensors) and not _is_nvfp4(subject.tensors) and not subject.is_int4
    is_result = source is not None and _is_nvfp4(source.tensors)
    if is_source and source is not None and is_result:
        raise CheckpointError(
            f"{folder} is an INT4 checkpoint and {source.folder} an NVFP4 one. Swap them: the result comes first, the "
            "INT4 source after --source."
        )
    if is_source:
        raise CheckpointError(
            f"{folder}: its weights are INT4, so it is a source, not a result. Pass the folder of a finished "
            "conversion, and the INT4 source with --source."
        )
    if source is not None and is_result:
        raise CheckpointError(
            f"{source.folder}: its weights are NVFP4, so it is not the source. Pass the INT4 checkpoint that the "
            "result was converted from with --source."
        )


def _is_int4(tensors: Mapping[str, TensorInfo]) -> bool:
    return any(name.endswith(f".{WEIGHT_PACKED}") and tensor.dtype == "I32" for name, tensor in tensors.items())


def _is_nvfp4(tensors: Mapping[str, TensorInfo]) -> bool:
    global_scales = tuple(names.global_scale for names in LAYOUTS.values())
    return any(name.rpartition(".")[2] in global_scales for name in tensors)


def _broken_rules(contract: ContractReport) -> str:
    """Return which rules do not hold, as the reason why reference layers were not computed."""
    rules = ", ".join(map(str, contract.failed))
    return f"rule {rules} does not hold" if len(contract.failed) == 1 else f"rules {rules} do not hold"


def _open_other(folder: Path, subject: Subject, source: Checkpoint | None) -> Subject:
    """Open the result to compare with; raises CheckpointError if it does not have the same experts of the source."""
    other = open_subject(folder, source=source)
    ours, theirs = (None if s.ledger is None else s.ledger.pruning for s in (subject, other))
    if (ours and ours.kept) != (theirs and theirs.kept) or other.source is None:
        raise CheckpointError(
            f"{folder}: does not keep the same experts as {subject.folder}, by their ledgers, so their weights cannot "
            "be compared. Leave out --against."
        )
    return other


def _validate_layers(
    subject: Subject,
    source: Checkpoint,
    whole: Checkpoint,
    request: LayersRequest,
    *,
    reference: bool,
    events: Events,
    shards: Shards,
    calibration: Calibration | None,
) -> ValidationReport:
    """Check headers and configs, and read only the MoE blocks of the layers, one layer on disk at a time."""
    from k2convert.validate.layers.check import moe_layers

    contracts: list[ContractReport] = []
    weights: list[WeightsReport] = []
    computed: list[LayersReport] = []
    skipped: list[str] = []
    for layer in request.layers or moe_layers(source):
        part, wanted = subject.of_layer(layer), replace(request, layers=(layer,))
        with shards.around_layer(part, layer, source=whole):
            contract, measured = _measure(
                part, reference=reference, events=events, visitor=None, shards=LOCAL, calibration=calibration
            )
            contracts.append(contract)
            weights += [] if measured is None else [measured]
            if contract.passed:
                computed.append(_compute_layers(wanted, subject, source, whole, events=events, shards=shards))
            else:
                skipped.append(f"layer {layer}: {_broken_rules(contract)}")
    return ValidationReport(
        folder=str(subject.folder),
        contract=merge_contracts(contracts),
        weights=merge_weights(weights),
        layers=merge_layers(computed),
        comparison=None,
        layers_skipped="; ".join(skipped),
    )


def validate_sent(
    folder: Path, *, headers: Mapping[str, ShardHeader], source: Checkpoint, records: Iterable[ShardRecord]
) -> ValidationReport:
    """Validate a result whose shards left the disk: `folder` holds everything else, `records` what was found on each.

    `headers` are the planned ones of all shards. The hash of a whole file, compared with the ledger, covers its header.
    `source` is the whole one, also of a pruned result. What no record says was compared with it fails.
    """
    subject, records = open_subject(folder, source=source, known_headers=dict(headers)), list(records)
    rule, skip_reason = checkable_rule(subject.ledger, subject.recipe, has_statistics=True)
    recorded = {projection.module: projection for record in records for projection in record.projections}
    contract, weights = _report(subject, join_findings(records), recorded, rule, skip_reason)
    return ValidationReport(str(folder), contract, weights, layers=None, comparison=None)


def _measure(
    subject: Subject,
    *,
    reference: bool,
    events: Events,
    visitor: ShardVisitor | None,
    shards: Shards,
    calibration: Calibration | None = None,
) -> tuple[ContractReport, WeightsReport | None]:
    """Check the contract and, if there is a source, measure every converted tensor in the same pass.

    A result with the source's own weights is compared byte for byte: nothing is measured.
    """
    if subject.ledger is not None and subject.ledger.recipe.get("target") == "bf16":
        raise CheckpointError(
            f"{subject.folder}: holds a BF16 copy (--to bf16), but only NVFP4 checkpoints can be validated. "
            f"{LEDGER_NAME} has the hash of every shard."
        )
    recorded = _recorded(subject)
    rule, skip_reason = checkable_rule(subject.ledger, subject.recipe, has_statistics=calibration is not None)
    found = validate_shards(
        subject,
        rule=rule,
        recorded=recorded,
        calibration=calibration,
        with_library=reference,
        events=events,
        visitor=visitor,
        shards=shards,
    )
    return _report(subject, found, recorded, rule, skip_reason, with_library=reference)


def _report(
    subject: Subject,
    found: ShardsFound,
    recorded: Mapping[str, ProjectionRecord],
    rule: Rule | None,
    skip_reason: str,
    *,
    with_library: bool = False,
) -> tuple[ContractReport, WeightsReport | None]:
    """Check the rules on what the pass found, and compare the journal's figures."""
    if subject.source is None or subject.is_int4:
        return check_subject(subject, found.scan), None
    errors = found.errors
    mismatches, compared = compare_journal(recorded, errors)
    weights = WeightsReport(
        errors=errors,
        roles={name: subject.modules[name].parts.role for name in errors},
        rule=rule_report(rule, skip_reason, found.checked),
        journal_mismatches=tuple(mismatches),
        journal_compared=compared,
        decoder_mismatches=found.decoder_mismatches,
        decoder_compared=len(errors) if with_library else 0,
    )
    is_whole = subject.whole is None and errors.keys() >= {module.name for module in subject.converted}
    totals = found.figures(subject) if is_whole and errors else None
    return check_subject(subject, found.scan, errors=errors, totals=totals), weights


def checkable_rule(ledger: Ledger | None, recipe: Recipe | None, *, has_statistics: bool) -> tuple[Rule | None, str]:
    """Return the rule by which the weights can be regenerated; None, and why, if they cannot.

    `has_statistics` says whether the importance of the columns is known, which some rules need. Weights of a rule that
    needs a walk can always be measured.
    """
    if ledger is None:
        return None, "no ledger says by which rule the weights were converted"
    if recipe is None:
        return None, f"this version does not know the ledger's recipe (rule {ledger.recipe.get('rule')!r})"
    if recipe.quantizer != "native":
        return None, f"the recipe's quantizer is {recipe.quantizer!r}, whose arithmetic is not k2convert's own"
    version = ledger.fingerprint.get("arithmetic")
    if version != ARITHMETIC_VERSION:
        return None, f"the ledger states arithmetic {version!r}, this version has {ARITHMETIC_VERSION}"
    if RULES[recipe.rule].uses_importance and not has_statistics and not RULES[recipe.rule].needs_walk:
        return None, f"the rule {recipe.rule} needs the statistics of the conversion: pass them with --statistics"
    return recipe.rule, ""


def _recorded(subject: Subject) -> dict[str, ProjectionRecord]:
    """Return the journal's records of the job that the ledger states, by module; empty without a ledger."""
    if subject.ledger is None:
        return {}
    records = Journal(subject.folder).finished(subject.ledger.digest).values()
    return {projection.module: projection for record in records for projection in record.projections}


def _compute_layers(
    request: LayersRequest,
    subject: Subject,
    source: Checkpoint,
    whole: Checkpoint,
    *,
    events: Events,
    shards: Shards,
) -> LayersReport:
    from k2convert.validate.layers.check import check_layers, moe_layers

    with remedy(RESULT_REMEDY):
        converted = open_checkpoint(subject.folder, read=shards.header_reader)
    budget = subject.budget
    return check_layers(
        source=source,
        converted=converted,
        layers=request.layers or moe_layers(source),
        hidden_states=request.hidden_states,
        tokens=request.tokens,
        budget=LayerBudget(layer_sqnr_db=budget.layer_sqnr_db, expert_sqnr_db=budget.expert_sqnr_db),
        scaling=subject.scaling,
        whole=whole if subject.is_pruned else None,
        events=events,
    )
