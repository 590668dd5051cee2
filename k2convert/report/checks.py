"""The document of a validation, parsed: the verdicts of the rules, and the sections about what was compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from k2convert.check.layers.result import labels
from k2convert.check.results import Verdict
from k2convert.errors import MalformedFileError, quoted
from k2convert.report.wording import Section, Table, decibels, last_part


@dataclass(frozen=True, slots=True)
class Checks:
    """A validation ready to be shown.

    has_passed   false if a rule is broken, or if a weight, a layer or the journal does not fit
    verdicts     those of the rules of the contract, by number
    """

    has_passed: bool
    verdicts: Mapping[int, Verdict]
    sections: tuple[Section, ...]

    def numbers(self, verdict: str) -> list[int]:
        """Return the numbers of the rules with an outcome: "pass", "warn", "fail" or "skipped"."""
        return [number for number, outcome in self.verdicts.items() if outcome == verdict]


def read_checks(document: Mapping[str, Any]) -> Checks:
    """Parse the document of a validation; raises MalformedFileError if it is not one."""
    try:
        verdicts = {int(rule["number"]): Verdict(rule["verdict"]) for rule in document["contract"]["rules"]}
        return Checks(bool(document["passed"]), verdicts, tuple(_sections(document)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedFileError(
            f"the validation is not a document that `k2convert validate --json` prints ({quoted(error)})."
        ) from None


def _sections(document: Mapping[str, Any]) -> Iterator[Section]:
    rows: list[tuple[str, ...]] = []
    offenders: list[tuple[str, ...]] = []
    for rule in document["contract"]["rules"]:
        number = str(int(rule["number"]))
        count = f"{int(rule['count']):,}" if rule["count"] else ""
        title = f"{rule['title']} ({rule['note']})" if rule["note"] else str(rule["title"])
        rows.append((number, str(rule["verdict"]), count, title))
        offenders += [(number, str(each["name"]), str(each["problem"])) for each in rule["offenders"]]
    tables = [Table(("rule", "where", "problem"), offenders, words=(1, 2))] if offenders else []
    columns = ("rule", "verdict", "count", "requirement")
    tables.append(Table(columns, rows, words=(1, 3), summary=f"Rules ({len(rows)})"))
    layers: Mapping[str, Any] = document["layers"] or {}
    computed: list[Mapping[str, Any]] = layers.get("layers", [])
    sentences = (str(document["contract"]["summary"]), *_sentences(document, computed))
    yield Section("Servable contract", sentences, tables)
    if lines := [line for layer in computed for line in _layer_rows(layer)]:
        states = last_part(layers["hidden_states"])
        sentence = f"Error of the output of MoE blocks against INT4 in FP32. Hidden states: {states}."
        columns = ("layer", "computed with", "output SQNR", "cosine", "worst expert")
        yield Section("Reference layers", (sentence,), (Table(columns, lines, words=(1,)),))


def _layer_rows(layer: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    errors: dict[str, Mapping[str, Any]] = {str(error["variant"]): error for error in layer["errors"]}
    for variant, label in labels(errors).items():
        error = errors[variant]
        cosine = "" if error["cosine"] is None else f"{float(error['cosine']):.6f}"
        expert = error["worst_expert"]
        worst = "" if expert is None else f"{int(expert)}: {decibels(error['worst_expert_sqnr_db'])}"
        yield str(int(layer["layer"])), label, decibels(error["sqnr_db"]), cosine, worst


def _sentences(document: Mapping[str, Any], layers: list[Mapping[str, Any]]) -> Iterator[str]:
    if weights := document["weights"]:
        yield from _weight_sentences(weights)
    if skipped := document.get("layers_skipped"):
        yield f"Reference layers were skipped: {skipped}."
    for layer in layers:
        if not layer["router_unchanged"]:
            yield f"Layer {int(layer['layer'])}: the router differs from the source's."
        yield from (f"Layer {int(layer['layer'])}: {failure}" for failure in layer["failures"])
    if other := document["against"]:
        if other["note"]:
            yield str(other["note"])
        failed = ", ".join(str(int(n)) for n in other["contract"]["failed"]) or "none"
        name = last_part(other["folder"])
        yield (
            f"Compared with {name} ({decibels(other['weights']['totals']['total']['sqnr_db'])}): this result is better "
            f"in {int(other['better_here']):,} tensors, {name} in {int(other['better_there']):,}, and "
            f"{int(other['equal']):,} are equal. Contract rules that {name} breaks: {failed}."
        )


def _weight_sentences(weights: Mapping[str, Any]) -> Iterator[str]:
    certificate = weights.get("certificate")  # documents of earlier releases have none
    if certificate and int(certificate["tensors"]):
        wrong = len(certificate["mismatches"])
        outcome = f"faults in {wrong:,} of them" if wrong else "no fault was found"
        rows = "Every row" if certificate["is_whole"] else f"{int(certificate['rows']):,} rows"
        yield (
            f"{rows} of {int(certificate['tensors']):,} converted tensors, and {int(certificate['copies']):,} copies, "
            f"were checked against the source by code that shares nothing with the conversion: {outcome}."
        )
    for key, reference in (("journal", "the journal's figures"), ("library_decoder", "the library's own decoder")):
        if compared := int(weights[key]["compared"]):
            wrong = len(weights[key]["mismatches"])
            outcome = f"{wrong:,} differ" if wrong else "all agree"
            yield f"{compared:,} tensors decoded from the written bytes and compared with {reference}: {outcome}."
