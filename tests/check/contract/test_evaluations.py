"""Rule 19 knows evaluation.json: it must be whole, and of the weights that the ledger states."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from converted import Converted, only
from evaluation_makers import evaluation_of, of_servers, write_evaluation

from k2convert.check.results import Verdict
from k2convert.records.document import plain
from k2convert.records.ledger import read_ledger
from scripts.fixture_maker.damage import edit_json

OTHER = "0" * 64


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write an evaluation that is whole but for one change; NaN and infinity as Python writes them."""
    document = json.loads(json.dumps(plain(evaluation_of(folder))))
    change(document)
    (folder / "evaluation.json").write_text(json.dumps(document))


def test_a_fresh_evaluation_passes_and_one_of_servers(breakable: Converted) -> None:
    assert breakable.check().passed  # a result without one is fine
    for evaluation in (evaluation_of(breakable.folder), of_servers()):
        write_evaluation(breakable.folder, evaluation)
        report = breakable.check()
        assert not [rule for rule in report.rules if rule.verdict is Verdict.FAIL]
        assert len(report.rules) == 19


def test_weights_are_named_by_every_byte_and_by_nothing_else(breakable: Converted) -> None:
    path = breakable.folder / "k2convert.json"
    before = read_ledger(breakable.folder).weights
    edit_json(path, lambda ledger: ledger.update(k2convert="9.9", versions={"python": "4"}))
    assert read_ledger(breakable.folder).weights == before
    edit_json(path, lambda ledger: next(iter(ledger["shards"].values())).update(blake3=OTHER))
    assert read_ledger(breakable.folder).weights != before


STALE: dict[str, Callable[[dict[str, Any]], object]] = {
    "every mode": lambda e: [row["model"].update(weights=OTHER) for row in e["rows"]],
    "one mode": lambda e: e["rows"][1]["model"].update(weights=OTHER),
    "no digest": lambda e: e["rows"][0]["model"].pop("weights"),
}


@pytest.mark.parametrize("name", STALE)
def test_an_evaluation_of_other_weights_is_refused(breakable: Converted, name: str) -> None:
    edited(breakable.folder, STALE[name])
    (offender,) = only(breakable.check(), 19).offenders
    assert offender.name == "evaluation.json"
    assert offender.problem == (
        "measures other weights than this result has. Delete the file, or run `k2convert evaluate` again"
    )


def of_divergence(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda e: e["rows"][0]["figures"]["divergence"].update({key: value})


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "not a number": (of_divergence("mean", math.nan), "rows.0.figures.divergence.mean is nan"),
    "infinite": (of_divergence("p99", math.inf), "rows.0.figures.divergence.p99 is inf"),
    "negative": (of_divergence("median", -1.0), "rows.0.figures.divergence.median is -1.0"),
    "text": (of_divergence("maximum", "1"), "rows.0.figures.divergence.maximum is '1'"),
    "counts left out": (of_divergence("histogram", [1] * 3), "histogram has 3 counts, not 38"),
    "a count too large": (of_divergence("histogram", [1 << 63] * 38), "rows.0.figures.divergence.histogram.0"),
    "many counts": (of_divergence("histogram", [1] * 100_000), "histogram has 100000 counts, not 38"),
    "many positions": (
        of_divergence("by_position", [{"first": 0, "stop": 1, "mean": 0.0}] * 65),
        "rows.0.figures.divergence.by_position",
    ),
    "more than all": (lambda e: e["rows"][0]["figures"].update(top1_agreement=1.5), "top1_agreement is 1.5"),
    "many layers": (
        lambda e: e["rows"][0].update(layers=[{"relative_error": 0.0, "routing_agreement": None}] * 10_000),
        "rows.0.layers",
    ),
    "many models": (lambda e: e.update(rows=e["rows"] * 33), "rows is"),
    "no model": (lambda e: e.update(rows=[]), "measures no model"),
    "a long token": (lambda e: e["rows"][0]["worst"][0].update(token="x" * 10_001), "rows.0.worst.0.token"),
    "half a character": (lambda e: e["rows"][0]["worst"][0].update(token="\ud800"), "half of a surrogate pair"),
    "an unknown field": (lambda e: e.update({"\x1b[31m": 1}), "is unknown"),
    "a missing field": (lambda e: e.pop("text"), "text is missing"),
    "a later format": (lambda e: e.update(format=2), "format is 2"),
    "a kind that is no word": (lambda e: e.update(kind="*"), "kind is '*'"),
    "not a digest": (lambda e: e["rows"][0]["model"].update(weights="abc"), "rows.0.model.weights is 'abc'"),
}


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_evaluation_is_refused(modelopt: Converted, name: str) -> None:
    change, words = DAMAGED[name]
    edited(modelopt.folder, change)
    (offender,) = only(modelopt.check(), 19).offenders
    assert offender.name == "evaluation.json"
    assert words in offender.problem
    assert offender.problem.endswith("Delete the file, or run `k2convert evaluate` again")
    assert len(offender.problem) < 600
    assert "\x1b" not in offender.problem


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"format": 1, "format": 1}', b"[" * 100_000])
def test_a_file_that_is_no_document_is_refused(modelopt: Converted, data: bytes) -> None:
    (modelopt.folder / "evaluation.json").write_bytes(data)
    assert only(modelopt.check(), 19).offenders[0].name == "evaluation.json"


@pytest.mark.parametrize("kind", ["a link to nothing", "a folder", "a pipe", "a large file"])
def test_what_is_no_small_file_is_refused(modelopt: Converted, kind: str, tmp_path: Path) -> None:
    path = modelopt.folder / "evaluation.json"
    if kind == "a link to nothing":
        path.symlink_to(tmp_path / "nothing")
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        write_evaluation(modelopt.folder, evaluation_of(modelopt.folder))
        os.truncate(path, 1 << 33)
    assert only(modelopt.check(), 19).offenders[0].name == "evaluation.json"
