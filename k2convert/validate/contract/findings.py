"""The nineteen rules by number, and what the checks found."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from k2convert.validate.contract.source_view import NO_SOURCE

MAX_OFFENDERS = 8


class Severity(StrEnum):
    """What a broken rule means: a checkpoint with an error must not be published, a warning is counted."""

    ERROR = "error"
    WARNING = "warning"


class Verdict(StrEnum):
    """The outcome of a rule. `skipped` always has a reason."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


RULES: dict[int, tuple[Severity, str]] = {
    1: (Severity.ERROR, "every converted projection has exactly its tensors, and there are no other new names"),
    2: (Severity.ERROR, "tensor names keep the source's prefix"),
    3: (Severity.ERROR, "converted tensors have the right dtypes and shapes"),
    4: (Severity.ERROR, "block scales are non-negative numbers, and blocks of scale zero have zero codes"),
    5: (Severity.WARNING, "no block scale is below 2^-6 (Marlin kernels on Hopper flush such scales to zero)"),
    6: (Severity.ERROR, "global and input scales are finite, positive, shared by gate and up, and the recipe's"),
    7: (Severity.ERROR, "every other tensor is byte-identical to the source"),
    8: (Severity.ERROR, "tensor count and tensor bytes match the source and the layout"),
    9: (Severity.ERROR, "experts, router and config.json agree on the number of experts"),
    10: (Severity.ERROR, "hidden and expert sizes fit the kernels' alignment"),
    11: (Severity.ERROR, "config.json has one quantization config, at the top level, and it describes the tensors"),
    12: (Severity.ERROR, "the rest of config.json equals the source's"),
    13: (Severity.ERROR, "hf_quant_config.json agrees with config.json"),
    14: (Severity.ERROR, "every engine's matcher excludes the BF16 layers and no converted layer"),
    15: (Severity.ERROR, "a KV cache scheme is declared only if the recipe asks for it"),
    16: (Severity.ERROR, "index, headers and shards are complete and consistent, without leftover files"),
    17: (Severity.ERROR, "tokenizer, template, processor and code files are byte-identical copies"),
    18: (Severity.ERROR, "the weight error of every converted tensor is within the budget"),
    19: (Severity.ERROR, "the ledger is present, and shards and measured weights have the hashes and totals it states"),
}


@dataclass(frozen=True, slots=True)
class Offender:
    """A tensor, module, file or config field that breaks a rule, and what is wrong with it."""

    name: str
    problem: str


@dataclass(frozen=True, slots=True)
class RuleResult:
    """One rule's outcome. `count` is of all offenders, `offenders` has the first few, `note` is a reason or figure."""

    number: int
    title: str
    severity: Severity
    verdict: Verdict
    count: int
    offenders: tuple[Offender, ...]
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for --json."""
        return {
            "number": self.number,
            "title": self.title,
            "severity": str(self.severity),
            "verdict": str(self.verdict),
            "count": self.count,
            "offenders": [{"name": o.name, "problem": o.problem} for o in self.offenders],
            "note": self.note,
        }


@dataclass(slots=True)
class Findings:
    """Collects what one rule finds. All offenders are counted, the first few are kept.

    `title` replaces the rule's own where the ledger allows more than the rule says.
    """

    number: int
    errors: int = 0
    warnings: int = 0
    note: str = ""
    skip_reason: str = ""
    title: str = ""
    _first_errors: list[Offender] = field(default_factory=list[Offender])
    _first_warnings: list[Offender] = field(default_factory=list[Offender])

    def error(self, name: str, problem: str, *, count: int = 1) -> "Findings":
        """Count an offender that fails the rule; return these findings."""
        self.errors += count
        if len(self._first_errors) < MAX_OFFENDERS:
            self._first_errors.append(Offender(name, problem))
        return self

    def warn(self, name: str, problem: str, *, count: int = 1) -> None:
        """Count an offender that does not fail the rule."""
        self.warnings += count
        if len(self._first_warnings) < MAX_OFFENDERS:
            self._first_warnings.append(Offender(name, problem))

    def skip(self, reason: str) -> "Findings":
        """Keep why the rule could not be checked; return these findings. Errors found before still count."""
        self.skip_reason = reason
        return self

    def result(self) -> RuleResult:
        """Return the outcome: fail, else warn, else skipped, else pass."""
        severity, usual = RULES[self.number]
        title = self.title or usual
        if self.errors:
            verdict, count, offenders = Verdict.FAIL, self.errors, self._first_errors
        elif self.warnings:
            verdict, count, offenders = Verdict.WARN, self.warnings, self._first_warnings
        else:
            verdict, count, offenders = (Verdict.SKIPPED if self.skip_reason else Verdict.PASS), 0, []
        note = "; ".join(text for text in (self.note, self.skip_reason) if text)
        return RuleResult(self.number, title, severity, verdict, count, tuple(offenders), note)


@dataclass(frozen=True, slots=True)
class ContractReport:
    """All nineteen outcomes for one folder, in order. `layout` and `activations` are as found in the tensors."""

    folder: str
    layout: str
    activations: str
    rules: tuple[RuleResult, ...]

    @property
    def passed(self) -> bool:
        """Whether no rule failed. Warnings and skipped rules do not fail a checkpoint."""
        return all(rule.verdict is not Verdict.FAIL for rule in self.rules)

    @property
    def failed(self) -> list[int]:
        """The numbers of the rules that failed."""
        return [rule.number for rule in self.rules if rule.verdict is Verdict.FAIL]

    @property
    def unchecked(self) -> list[int]:
        """The numbers of the rules that were skipped."""
        return [rule.number for rule in self.rules if rule.verdict is Verdict.SKIPPED]

    @property
    def counts(self) -> dict[str, Any]:
        """How many rules there are and which ones were not checked or failed, for --json."""
        return {"rules": len(self.rules), "unchecked": self.unchecked, "failed": self.failed}

    @property
    def summary(self) -> str:
        """How many rules were checked, with what, and which ones were not."""
        total, skipped = len(self.rules), [rule for rule in self.rules if rule.verdict is Verdict.SKIPPED]
        if not skipped:
            return f"{total} of {total} rules of the servable contract were checked, with the source."
        why = "; ".join(sorted({rule.note for rule in skipped}))
        if why == NO_SOURCE:
            why = "they compare with the source, and none was given"
        return (
            f"{total - len(skipped)} of {total} rules of the servable contract were checked. Not checked: rules "
            f"{', '.join(map(str, self.unchecked))} ({why})."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for --json."""
        return {
            "folder": self.folder,
            "layout": self.layout,
            "activations": self.activations,
            "passed": self.passed,
            "failed": self.failed,
            "summary": self.summary,
            "rules": [rule.to_dict() for rule in self.rules],
        }
