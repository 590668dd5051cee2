"""What a validation found: the contract, the weights, reference layers and a comparison, as plain values."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from k2convert.checkpoint.names import SHARD_SUFFIX
from k2convert.choices import Rule
from k2convert.quantize.rules import RULES
from k2convert.records.ledger import TOTAL
from k2convert.validate.contract.findings import MAX_OFFENDERS, ContractReport, RuleResult, Verdict
from k2convert.validate.decode import DecodedError
from k2convert.validate.layers.result import LayersReport
from k2convert.validate.weights import CheckedWeight


@dataclass(frozen=True, slots=True)
class RuleReport:
    """Whether the converted tensors are what the recipe's rule makes of the source.

    `rule` is None if they could not be made again, and `skip_reason` says why. `measured` tensors have codes of a walk
    through the layers, which were measured but not made again. `blocks` were made again by the kernels,
    `sampled_blocks` of them by the reference arithmetic too; for a rule without a kernel, none are, because `blocks`
    were made by it. `mismatches` maps modules to what differs.
    """

    rule: str | None
    skip_reason: str
    tensors: int
    measured: int
    blocks: int
    sampled_blocks: int
    mismatches: dict[str, str]


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """The measured error of every converted tensor, by module, and where rule, journal or a library disagree."""

    errors: dict[str, DecodedError]
    roles: dict[str, str]
    rule: RuleReport
    journal_mismatches: tuple[str, ...]
    journal_compared: int
    decoder_mismatches: tuple[str, ...]
    decoder_compared: int

    @property
    def passed(self) -> bool:
        return not (self.rule.mismatches or self.journal_mismatches or self.decoder_mismatches)

    def totals(self) -> dict[str, DecodedError]:
        """Return the errors added up by role and under "total"; empty if nothing was measured."""
        return total_errors(self.errors, self.roles)

    def worst(self, count: int) -> list[tuple[str, DecodedError]]:
        """Return the `count` tensors with the lowest SQNR, lowest first."""
        return sorted(self.errors.items(), key=lambda item: -item[1].relative_mse)[:count]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A second checkpoint of the same source, and how many tensors have less error here, there, or the same.

    `note` says why that is not what to compare, if one of the results is calibrated; None otherwise.
    """

    folder: str
    contract: ContractReport
    weights: WeightsReport
    better_here: int
    better_there: int
    equal: int
    note: str | None = None


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Everything that `validate` found. `passed` decides the exit code.

    `layers_skipped` says why reference layers are missing that were asked for.
    """

    folder: str
    contract: ContractReport
    weights: WeightsReport | None
    layers: LayersReport | None
    comparison: Comparison | None
    layers_skipped: str = ""

    @property
    def passed(self) -> bool:
        parts = (self.weights, self.layers)
        return self.contract.passed and all(part.passed for part in parts if part is not None)


def total_errors(errors: Mapping[str, DecodedError], roles: Mapping[str, str]) -> dict[str, DecodedError]:
    """Add up errors by role and under "total"; empty if there are none."""
    by_role: dict[str, list[DecodedError]] = defaultdict(list)
    for module, error in errors.items():
        by_role[roles[module]].append(error)
    result = {role: _add(found) for role, found in sorted(by_role.items())}
    return result | {TOTAL: _add(list(errors.values()))} if result else result


def _add(errors: list[DecodedError]) -> DecodedError:
    steps = [e.max_error_steps for e in errors if e.max_error_steps is not None]
    return DecodedError(
        num_weights=sum(e.num_weights for e in errors),
        num_nonzero=sum(e.num_nonzero for e in errors),
        equal_nonzero=sum(e.equal_nonzero for e in errors),
        energy=math.fsum(e.energy for e in errors),
        squared_error=math.fsum(e.squared_error for e in errors),
        max_error_steps=max(steps) if steps else None,
        weighted_energy=_sum_of_known(e.weighted_energy for e in errors),
        weighted_error=_sum_of_known(e.weighted_error for e in errors),
    )


def _sum_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None


def rule_report(rule: Rule | None, skip_reason: str, checked: Mapping[str, CheckedWeight]) -> RuleReport:
    """Sum up the check by the rule."""
    has_walk = rule is not None and RULES[rule].needs_walk
    if rule is not None and not checked:
        skip_reason = "no tensor could be measured"
    return RuleReport(
        rule=rule,
        skip_reason=skip_reason,
        tensors=len(checked) if rule is not None else 0,
        measured=sum(not found.num_blocks for found in checked.values()) if has_walk else 0,
        blocks=sum(found.num_blocks for found in checked.values()),
        sampled_blocks=sum(found.sampled_blocks for found in checked.values()),
        mismatches={module: "; ".join(found.problems) for module, found in checked.items() if found.problems},
    )


def compare(folder: str, ours: WeightsReport, contract: ContractReport, theirs: WeightsReport) -> Comparison:
    """Compare two results of the same source tensor by tensor: count which one has less error."""
    common = [(ours.errors[m], theirs.errors[m]) for m in ours.errors if m in theirs.errors]
    return Comparison(
        folder=folder,
        contract=contract,
        weights=theirs,
        better_here=sum(a.squared_error < b.squared_error for a, b in common),
        better_there=sum(a.squared_error > b.squared_error for a, b in common),
        equal=sum(a.squared_error == b.squared_error for a, b in common),
    )


def merge_contracts(found: Sequence[ContractReport]) -> ContractReport:
    """Return one report of several parts of a result: each rule with the offenders and notes of all parts."""
    rules = tuple(_merge_rules(same) for same in zip(*(report.rules for report in found), strict=True))
    return replace(found[0], rules=rules)


def _merge_rules(found: Sequence[RuleResult]) -> RuleResult:
    if all(rule == found[0] for rule in found):
        return found[0]
    worst = min(found, key=lambda rule: (Verdict.FAIL, Verdict.WARN, Verdict.SKIPPED, Verdict.PASS).index(rule.verdict))
    same = [rule for rule in found if rule.verdict is worst.verdict]
    offenders = [offender for rule in same for offender in rule.offenders]
    return replace(
        worst,
        count=sum(rule.count for rule in same),
        offenders=tuple(offenders[:MAX_OFFENDERS]),
        note="; ".join(dict.fromkeys(rule.note for rule in found if rule.note)),
    )


def merge_weights(found: Sequence[WeightsReport]) -> WeightsReport:
    """Return one report on the tensors of several parts."""
    return WeightsReport(
        errors={module: error for report in found for module, error in report.errors.items()},
        roles={module: role for report in found for module, role in report.roles.items()},
        rule=RuleReport(
            rule=found[0].rule.rule,
            skip_reason=found[0].rule.skip_reason,
            tensors=sum(report.rule.tensors for report in found),
            measured=sum(report.rule.measured for report in found),
            blocks=sum(report.rule.blocks for report in found),
            sampled_blocks=sum(report.rule.sampled_blocks for report in found),
            mismatches={module: text for report in found for module, text in report.rule.mismatches.items()},
        ),
        journal_mismatches=tuple(module for report in found for module in report.journal_mismatches),
        journal_compared=sum(report.journal_compared for report in found),
        decoder_mismatches=tuple(module for report in found for module in report.decoder_mismatches),
        decoder_compared=sum(report.decoder_compared for report in found),
    )


def merge_layers(found: Sequence[LayersReport]) -> LayersReport | None:
    """Return one report on the layers of several; None if there is none."""
    return replace(found[0], layers=tuple(layer for report in found for layer in report.layers)) if found else None


def validation_document(report: ValidationReport) -> dict[str, Any]:
    """Return a validation as plain data, for --json and the report."""
    document: dict[str, Any] = {
        "folder": report.folder,
        "passed": report.passed,
        "contract": report.contract.to_dict(),
        "weights": None if report.weights is None else _weights_document(report.weights),
        "layers": None if report.layers is None else report.layers.to_dict(),
        "layers_skipped": report.layers_skipped or None,
        "against": None,
    }
    if report.comparison is not None:
        other = report.comparison
        document["against"] = {
            "folder": other.folder,
            "contract": other.contract.to_dict(),
            "weights": _weights_document(other.weights),
            "better_here": other.better_here,
            "better_there": other.better_there,
            "equal": other.equal,
            "note": other.note,
        }
    return document


def _weights_document(weights: WeightsReport) -> dict[str, Any]:
    return {
        "passed": weights.passed,
        "totals": {role: _error_document(error) for role, error in weights.totals().items()},
        "worst": {module: _error_document(error) for module, error in weights.worst(8)},
        "verdicts": {
            "rule": _verdict(weights.rule.tensors, weights.rule.mismatches),
            "journal": _verdict(weights.journal_compared, weights.journal_mismatches),
            "library_decoder": _verdict(weights.decoder_compared, weights.decoder_mismatches),
        },
        "rule": asdict(weights.rule),
        "journal": {"compared": weights.journal_compared, "mismatches": list(weights.journal_mismatches)},
        "library_decoder": {"compared": weights.decoder_compared, "mismatches": list(weights.decoder_mismatches)},
    }


def _verdict(compared: int, mismatches: Sized) -> Verdict:
    """Return the outcome of a comparison: skipped if nothing was compared."""
    if not compared:
        return Verdict.SKIPPED
    return Verdict.FAIL if mismatches else Verdict.PASS


def _error_document(error: DecodedError) -> dict[str, Any]:
    """Return the figures of a tensor or total; ratios that are not finite become None."""
    figures = {"sqnr_db": error.sqnr_db, "relative_mse": error.relative_mse, "squared_error": error.squared_error}
    if error.weighted_error is not None:
        figures["weighted_sqnr_db"] = error.weighted_sqnr_db
    return {
        "num_weights": error.num_weights,
        "num_nonzero": error.num_nonzero,
        "equal_nonzero": error.equal_nonzero,
        "energy": error.energy,
        "max_error_steps": error.max_error_steps,
        **{key: value if value is not None and math.isfinite(value) else None for key, value in figures.items()},
    }


def folder_bytes(folder: Path) -> int:
    """Return the tensor bytes of the shards in a folder; 0 if there is no such folder."""
    return sum(map(_data_bytes, folder.glob(f"*{SHARD_SUFFIX}"))) if folder.is_dir() else 0


def _data_bytes(shard: Path) -> int:
    """Return a file's size without the header that its first 8 bytes announce; a damaged file counts as a whole."""
    if not shard.is_file():
        return 0
    size = shard.stat().st_size
    try:
        with shard.open("rb") as file:
            data = size - 8 - int.from_bytes(file.read(8), "little")
    except OSError:
        return size
    return data if data >= 0 else size
