"""Findings of a validation, as plain values: the nineteen rules, the weights and reference layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import nlargest
from typing import TYPE_CHECKING, Final

from k2convert.plan.recipe import Budget
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.records.document import shown
from k2convert.records.ledger import sum_by_role

if TYPE_CHECKING:
    from k2convert.text.windows import Windows

MAX_OFFENDERS = 8
NO_SOURCE = "needs --source"
LAYERS_OF_FOLDERS: Final = (
    "layers are computed from folders, not from hf://: download them with `hf download OWNER/NAME --local-dir FOLDER`"
)


class Verdict(StrEnum):
    """The outcome of a rule. `skipped` always has a reason."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


CONTRACT: dict[int, str] = {
    1: "every converted projection has exactly its tensors, and there are no other new names",
    2: "tensor names keep the source's prefix",
    3: "converted tensors have the right dtypes and shapes",
    4: "block scales are non-negative numbers, and blocks of scale zero have zero codes",
    5: "no block scale is below 2^-6 (Marlin kernels on Hopper flush such scales to zero)",
    6: "global and input scales are finite, positive, shared by gate and up, and the recipe's",
    7: "every other tensor is byte-identical to the source",
    8: "tensor count and tensor bytes match the source and the layout",
    9: "every expert and every other tensor is as config.json describes the model",
    10: "hidden and expert sizes fit the kernels' alignment",
    11: "config.json has one quantization config, at the top level, and it describes the tensors",
    12: "the rest of config.json equals the source's",
    13: "hf_quant_config.json agrees with config.json",
    14: "every engine's matcher excludes the BF16 layers and no converted layer",
    15: "a KV cache scheme is declared only if the recipe asks for it",
    16: "index, headers and shards are complete and consistent, without leftover files",
    17: "tokenizer, template, processor and code files are byte-identical copies",
    18: "the weight error of every converted tensor is within the budget",
    19: "the ledger is present, and shards, measured weights and evaluation have the hashes and totals it states",
}


COMPARED: Final = frozenset({7, 8, 12, 17, 18})
"""The rules that compare with the source, and fail if it has changed since the conversion."""


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
    verdict: Verdict
    count: int
    offenders: tuple[Offender, ...]
    note: str

    @property
    def cells(self) -> tuple[str, ...]:
        """Number, verdict, count and title, as the row of a table."""
        title = f"{self.title} ({self.note})" if self.note else self.title
        return str(self.number), str(self.verdict), f"{self.count:,}" if self.count else "", title


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

    def error(self, name: str, problem: str, *, count: int = 1) -> Findings:
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

    def skip(self, reason: str) -> Findings:
        """Keep why the rule could not be checked; return these findings. Errors found before still count."""
        self.skip_reason = reason
        return self

    def result(self) -> RuleResult:
        """Return the outcome: fail, else warn, else skipped, else pass."""
        title = self.title or CONTRACT[self.number]
        if self.errors:
            verdict = Verdict.FAIL
            count = self.errors
            offenders = self._first_errors
        elif self.warnings:
            verdict = Verdict.WARN
            count = self.warnings
            offenders = self._first_warnings
        else:
            verdict = Verdict.SKIPPED if self.skip_reason else Verdict.PASS
            count = 0
            offenders = []
        note = "; ".join(text for text in (self.note, self.skip_reason) if text)
        return RuleResult(self.number, title, verdict, count, tuple(offenders), note)


@dataclass(frozen=True, slots=True)
class ContractReport:
    """All nineteen outcomes for one folder, in order; family, layout and activations are as found in the tensors."""

    folder: str
    layout: str
    activations: str
    family: str
    rules: tuple[RuleResult, ...]

    @property
    def passed(self) -> bool:
        """Return whether no rule failed. Warnings and skipped rules do not fail a checkpoint."""
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
    def summary(self) -> str:
        """Return how many rules were checked, with what, and which ones were not."""
        total = len(self.rules)
        skipped = [rule for rule in self.rules if rule.verdict is Verdict.SKIPPED]
        if not skipped:
            return f"{total} of {total} rules of the servable contract were checked, with the source."
        why = "; ".join(sorted({rule.note for rule in skipped}))
        if why == NO_SOURCE:
            why = "they compare with the source, and none was given"
        return (
            f"{total - len(skipped)} of {total} rules of the servable contract were checked. Not checked: rules "
            f"{', '.join(map(str, self.unchecked))} ({why})."
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain data for --json."""
        return {"passed": self.passed, "failed": self.failed, "summary": self.summary, **shown(self)}


@dataclass(frozen=True, slots=True)
class CertificateReport:
    """Extent and faults of the certificate (certificate.py): converted `tensors`, `rows` of them, and `copies`.

    `rule` is the one whose conditions were checked; None if only codes, copies and the error were, for the
    `skip_reason`. `is_whole` if every row of every tensor was checked. `mismatches` maps tensors and modules to what is
    wrong.
    """

    rule: str | None
    skip_reason: str
    tensors: int
    copies: int
    rows: int
    is_whole: bool
    mismatches: dict[str, str]


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """The measured error of every converted tensor, by module, and what certificate and journal found."""

    errors: Mapping[str, WeightMetrics]
    roles: dict[str, str]
    certificate: CertificateReport
    journal_mismatches: tuple[str, ...]
    journal_compared: int

    @property
    def passed(self) -> bool:
        return not (self.certificate.mismatches or self.journal_mismatches)

    def totals(self) -> dict[str, WeightMetrics]:
        """Return the errors added up by role and under "total"; empty if nothing was measured."""
        return sum_by_role((self.roles[module], error) for module, error in self.errors.items())

    def worst(self, count: int) -> list[tuple[str, WeightMetrics]]:
        """Return the `count` tensors with the lowest SQNR, lowest first."""
        return nlargest(count, self.errors.items(), key=lambda item: item[1].relative_mse)


@dataclass(frozen=True, slots=True)
class LayersRequest:
    """Which reference layers to compute, on the hidden states of a text or on synthetic ones.

    `num_experts` are those of the layers, and of the layers below that give the hidden states of the text.
    """

    layers: tuple[int, ...]
    text: Windows | None
    tokens: int
    num_experts: int = 0


class Variant(StrEnum):
    """Which weights, and whether the inputs of the quantized layers are FP4 too."""

    CONVERTED = "converted"
    CONVERTED_W4A4 = "converted-w4a4"
    ACTIVATIONS_ONLY = "activations-only"
    """The source's weights with FP4 activations: the error that no weight conversion can remove."""


W4A4_VARIANTS = (Variant.CONVERTED_W4A4, Variant.ACTIVATIONS_ONLY)

_LABELS: Final[dict[str, str]] = {
    Variant.CONVERTED_W4A4: "this result as served (W4A4)",
    Variant.CONVERTED: "its weights alone (W4A16)",
    Variant.ACTIVATIONS_ONLY: "the source's weights with FP4 activations",
}


def labels(variants: Collection[str]) -> dict[str, str]:
    """Return what people read for each of the `variants`, in the order in which they are shown."""
    served = {} if Variant.CONVERTED_W4A4 in variants else {Variant.CONVERTED: "this result as served (W4A16)"}
    return {variant: label for variant, label in (_LABELS | served).items() if variant in variants}


@dataclass(frozen=True, slots=True)
class VariantError:
    """Error of one layer's output against the source in FP32.

    `sqnr_db` over all tokens, `cosine` the mean over tokens and `worst_cosine` the least; experts are judged by their
    own outputs. Infinite if nothing differs, -infinite if a value is not finite.
    """

    variant: Variant
    sqnr_db: float
    cosine: float
    worst_cosine: float
    worst_expert: int
    worst_expert_sqnr_db: float
    shared_experts_sqnr_db: float | None = None


@dataclass(frozen=True, slots=True)
class LayerResult:
    """One MoE layer: `num_reached` of `num_experts` experts were chosen by some token (the others were still run)."""

    layer: int
    tokens: int
    num_experts: int
    num_reached: int
    errors: tuple[VariantError, ...]
    failures: tuple[str, ...]

    def error(self, variant: Variant) -> VariantError | None:
        """The error of one variant; None for W4A4 if the checkpoint has no input scales."""
        return next((error for error in self.errors if error.variant is variant), None)


@dataclass(frozen=True, slots=True)
class LayersReport:
    """All layers that were computed; `hidden_states` describes their inputs.

    Measured on synthetic states, routed experts converted: layers 19.2 to 20.6 dB `mse`, 16.2 to 17.7 `max`; worst
    expert 16.9 to 17.9 and 13.9 to 14.8. Shared experts converted too: layers 18.5 and 16.0.
    """

    hidden_states: str
    budget: Budget
    layers: tuple[LayerResult, ...]

    @property
    def passed(self) -> bool:
        """Return whether every layer stayed within the budget."""
        return not any(layer.failures for layer in self.layers)

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON; figures that are not finite become None."""
        return {"passed": self.passed, **shown(self)}


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Everything that `validate` found. `passed` decides the exit code.

    `layers_skipped` is why reference layers that were asked for are missing.
    """

    folder: str
    contract: ContractReport
    weights: WeightsReport | None
    layers: LayersReport | None
    layers_skipped: str = ""

    @property
    def passed(self) -> bool:
        parts = (self.weights, self.layers)
        return self.contract.passed and all(part.passed for part in parts if part is not None)

    @property
    def is_of_source(self) -> bool:
        """Return whether all that fails compares with the source, so that a source that has changed explains it."""
        return COMPARED.issuperset(self.contract.failed) and not (self.weights and self.weights.journal_mismatches)


def validation_document(report: ValidationReport) -> dict[str, object]:
    """Return a validation as plain data, for --json."""
    return {
        "folder": report.folder,
        "passed": report.passed,
        "contract": report.contract.to_dict(),
        "weights": None if report.weights is None else _weights_document(report.weights),
        "layers": None if report.layers is None else report.layers.to_dict(),
        "layers_skipped": report.layers_skipped or None,
    }


def _weights_document(weights: WeightsReport) -> dict[str, object]:
    return {
        "passed": weights.passed,
        "totals": {role: _error_document(error) for role, error in weights.totals().items()},
        "worst": {module: _error_document(error) for module, error in weights.worst(8)},
        "verdicts": {
            "certificate": _verdict(weights.certificate.tensors, weights.certificate.mismatches),
            "journal": _verdict(weights.journal_compared, weights.journal_mismatches),
        },
        "certificate": shown(weights.certificate),
        "journal": {"compared": weights.journal_compared, "mismatches": list(weights.journal_mismatches)},
    }


def _verdict(compared: int, mismatches: Sized) -> Verdict:
    if not compared:
        return Verdict.SKIPPED
    return Verdict.FAIL if mismatches else Verdict.PASS


def _error_document(error: WeightMetrics) -> dict[str, object]:
    """Return the figures of a tensor or total; ratios that are not finite become None."""
    names = ("num_weights", "num_nonzero", "equal_nonzero", "energy", "max_error_steps", "sqnr_db", "relative_mse")
    return shown({name: getattr(error, name) for name in (*names, "squared_error")})
