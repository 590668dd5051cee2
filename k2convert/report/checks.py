"""The document of a validation, parsed: rules, decoded weights, layers, and the comparison with a second checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from k2convert.errors import MalformedFileError, quoted
from k2convert.report.formatting import decibels, with_exponents
from k2convert.validate.layers.result import labels, reference_name

VERDICTS = ("pass", "warn", "fail", "skipped")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the servable contract and its outcome. Offenders are (name, problem)."""

    number: int
    title: str
    verdict: str
    count: int
    note: str
    offenders: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The number of rules by outcome."""

    total: int
    held: int
    warned: int
    skipped: int
    failed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checks:
    """A validation ready to be shown. `layers` are table rows, `sentences` say what else was compared.

    `against` is what the layers' rows are compared with. `router_weights` is the share of the router's weight in each
    layer that the dropped experts have.
    `has_passed` is false if a rule is broken, or if a weight, a layer or the journal does not fit.
    """

    has_passed: bool
    rules: tuple[Rule, ...]
    verdicts: Verdicts
    layers: tuple[tuple[str, ...], ...]
    hidden_states: str
    sentences: tuple[str, ...]
    against: str = "INT4"
    router_weights: Mapping[int, float] = field(default_factory=dict[int, float])


LAYER_COLUMNS = ("layer", "computed with", "output SQNR", "cosine", "worst expert")


def read_checks(document: Mapping[str, Any]) -> Checks:
    """Parse the document of a validation; raises MalformedFileError if it is not one."""
    try:
        rules = tuple(_read_rule(rule) for rule in document["contract"]["rules"])
        layers = cast("Mapping[str, Any]", document.get("layers") or {})
        computed = cast("list[Mapping[str, Any]]", layers.get("layers", ()))
        verdicts, found = _tally(rules), {str(error["variant"]) for layer in computed for error in layer["errors"]}
        return Checks(
            has_passed=not verdicts.failed and bool(document.get("passed", True)),
            rules=rules,
            verdicts=verdicts,
            layers=tuple(row for layer in computed for row in _layer_rows(layer)),
            hidden_states=_last_part(layers.get("hidden_states", "")),
            sentences=(
                *_summary(document["contract"]),
                *_weight_sentences(document),
                *_layer_sentences(document, layers),
                *_against_sentences(document),
            ),
            against=reference_name(found),
            router_weights={
                int(layer["layer"]): float(layer["pruning"]["router_weight_left_out"])
                for layer in computed
                if layer.get("pruning")
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedFileError(
            f"the validation is not a document that `k2convert validate --json` prints ({quoted(error)})."
        ) from None


def _read_rule(rule: Mapping[str, Any]) -> Rule:
    verdict = str(rule["verdict"])
    if verdict not in VERDICTS:
        raise ValueError(f"verdict {verdict}")
    return Rule(
        number=int(rule["number"]),
        title=with_exponents(str(rule["title"])),
        verdict=verdict,
        count=int(rule["count"]),
        note=str(rule["note"]),
        offenders=tuple((str(o["name"]), str(o["problem"])) for o in rule["offenders"]),
    )


def _last_part(path: Any) -> str:
    """Return the last part of a path. A report is given to others, so it must not show local paths."""
    return str(path).rstrip("/").rsplit("/", 1)[-1]


def _tally(rules: tuple[Rule, ...]) -> Verdicts:
    by_verdict = {verdict: [r.number for r in rules if r.verdict == verdict] for verdict in VERDICTS}
    return Verdicts(
        total=len(rules),
        held=len(by_verdict["pass"]) + len(by_verdict["warn"]),
        warned=len(by_verdict["warn"]),
        skipped=len(by_verdict["skipped"]),
        failed=tuple(by_verdict["fail"]),
    )


def _layer_rows(layer: Mapping[str, Any]) -> list[tuple[str, ...]]:
    errors: dict[str, Mapping[str, Any]] = {str(error["variant"]): error for error in layer["errors"]}
    return [
        (
            str(int(layer["layer"])),
            label,
            decibels(error["sqnr_db"]),
            "" if error["cosine"] is None else f"{float(error['cosine']):.6f}",
            _worst_expert(error),
        )
        for variant, label in labels(errors).items()
        for error in (errors[variant],)
    ]


def _worst_expert(error: Mapping[str, Any]) -> str:
    if error["worst_expert"] is None:
        return ""
    return f"{int(error['worst_expert'])}: {decibels(error['worst_expert_sqnr_db'])}"


def _layer_sentences(document: Mapping[str, Any], layers: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    if skipped := document.get("layers_skipped"):
        found.append(f"Reference layers were skipped: {skipped}.")
    for layer in layers.get("layers", ()):
        number = int(layer["layer"])
        if not layer["router_unchanged"]:
            found.append(f"Layer {number}: the router differs from the source's.")
        found += [f"Layer {number}: {failure}" for failure in layer["failures"]]
    return found


def _summary(contract: Mapping[str, Any]) -> list[str]:
    """What was checked, if the document says so: those of version 0.1 do not."""
    return [str(contract["summary"])] if "summary" in contract else []


def _rule_sentences(rule: Mapping[str, Any]) -> list[str]:
    """What was made again by the rule or measured only, if the document says so: those of version 0.1 do not."""
    if not rule.get("tensors"):
        return []
    measured, wrong = int(rule.get("measured", 0)), len(rule["mismatches"])
    sentences: list[str] = []
    if int(rule["tensors"]) > measured:
        outcome = f"{wrong:,} differ" if wrong else "all are byte for byte the same"
        sentences.append(
            f"{int(rule['tensors']) - measured:,} tensors made again from the source by the rule {rule['rule']}: "
            f"{outcome}. {int(rule['sampled_blocks']):,} of {int(rule['blocks']):,} blocks were made by the reference "
            "arithmetic too."
        )
    if measured:
        sentences.append(
            f"{measured:,} tensors measured against the source: the rule {rule['rule']} chooses their codes in a walk "
            "through the layers, so they were not made again."
        )
    return sentences


def _weight_sentences(document: Mapping[str, Any]) -> list[str]:
    weights = cast("Mapping[str, Any] | None", document.get("weights"))
    if not weights:
        return []
    found = _rule_sentences(weights.get("rule") or {})
    for key, what in (("journal", "the journal's figures"), ("library_decoder", "the library's own decoder")):
        compared, wrong = int(weights[key]["compared"]), len(weights[key]["mismatches"])
        if compared:
            outcome = f"{wrong:,} differ" if wrong else "all agree"
            found.append(f"{compared:,} tensors decoded from the written bytes and compared with {what}: {outcome}.")
    return found


def _against_sentences(document: Mapping[str, Any]) -> list[str]:
    other = cast("Mapping[str, Any] | None", document.get("against"))
    if not other:
        return []
    name = _last_part(other["folder"])
    failed = ", ".join(str(int(n)) for n in other["contract"]["failed"]) or "none"
    sqnr = decibels(other["weights"]["totals"]["total"]["sqnr_db"])
    note = other.get("note")
    return [
        *([str(note)] if note else []),
        f"Compared with {name} ({sqnr}): less error here in {int(other['better_here']):,} tensors, less there in "
        f"{int(other['better_there']):,}, equal in {int(other['equal']):,}. Contract rules broken there: {failed}.",
    ]
