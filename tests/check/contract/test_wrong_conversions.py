"""A result that the recipe's rule does not give fails, although its hashes and totals fit and its journal is gone."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import Converted, Kind, change_tensor, copy_of, next_number, set_byte, validate

from k2convert.check.contract.result import read_result
from k2convert.check.results import Verdict, validation_document
from k2convert.check.shards import validate_shards
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CheckpointError
from scripts.fixture_maker import damage

MSE = Kind("modelopt", "thinking", "w4a4", "mse")
KINDS = [
    MSE,
    Kind("modelopt", "thinking", "w4a4"),
    Kind("compressed-tensors", "k2.5", "w4a4"),
    Kind("compressed-tensors", "thinking", "w4a16"),
]
Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=KINDS, ids=str)
def converted(request: pytest.FixtureRequest, convert: Callable[[Kind], Converted], tmp_path: Path) -> Converted:
    """A copy of a good result without its journal, to break."""
    return without_journal(convert(request.param), tmp_path)


@pytest.fixture
def mse(convert: Callable[[Kind], Converted], tmp_path: Path) -> Converted:
    """The same, by the rule `mse`."""
    return without_journal(convert(MSE), tmp_path)


def without_journal(converted: Converted, folder: Path) -> Converted:
    copy = copy_of(converted, folder / "copy")
    shutil.rmtree(copy.folder / ".k2convert")
    return copy


def fit_totals(converted: Converted) -> None:
    """Write the figures of the changed bytes into the ledger's totals."""
    result = read_result(converted.folder, source=open_checkpoint(converted.source))
    figures = validate_shards(result, recorded={}).figures

    def fit(ledger: dict[str, Any]) -> None:
        for role, metrics in ledger["totals"].items():
            metrics.update(figures[role])

    damage.edit_json(converted.folder / "k2convert.json", fit)


def found_by_certificate_alone(converted: Converted) -> dict[str, str]:
    """Validate with fitting totals; return what the certificate found, the only one that may find something."""
    fit_totals(converted)
    report = validate(converted)
    assert report.contract.passed, report.contract.failed
    assert not report.passed
    assert (report.weights.journal_compared, report.weights.certificate.tensors) == (0, 36)
    assert validation_document(report)["weights"]["verdicts"]["certificate"] == Verdict.FAIL
    return report.weights.certificate.mismatches


def one_block(scales: torch.Tensor) -> torch.Tensor:
    byte = int(scales.view(torch.uint8).view(-1)[100])
    return set_byte(scales, 100, byte + 1 if byte < 0x7E else byte - 1)


def one_code(packed: torch.Tensor) -> torch.Tensor:
    return set_byte(packed, 100, int(packed.view(-1)[100]) ^ 0x10)


def one_sign(packed: torch.Tensor) -> torch.Tensor:
    index = int((packed.view(-1) & 7).nonzero()[0])
    return set_byte(packed, index, int(packed.view(-1)[index]) ^ 0x08)


def row_of_zeros(packed: torch.Tensor) -> torch.Tensor:
    packed[17] = 0
    return packed


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("parameter", "apply", "words"),
    [
        ("block_scale", one_block, "of 32,768 codes are not the nearest ones|1 of 2,048 block scales"),
        ("weight", one_code, "1 of 32,768 codes are not the nearest ones"),
        ("weight", one_sign, "1 of 32,768 signs are not the source's"),
        ("weight", row_of_zeros, "of 32,768 codes are not the nearest ones"),
    ],
)
def test_scales_and_codes_that_are_not_best(converted: Converted, parameter: str, apply: Change, words: str) -> None:
    module = converted.expert(3, 2, "gate")
    change_tensor(converted, f"{module}.{getattr(converted.names, parameter)}", apply)
    mismatches = found_by_certificate_alone(converted)
    assert list(mismatches) == [module]
    assert re.search(words, mismatches[module])


def test_a_global_scale_one_step_of_fp32_away(converted: Converted) -> None:
    modules = [converted.expert(1, 1, projection) for projection in ("gate", "up")]
    for module in modules:
        change_tensor(converted, f"{module}.{converted.names.global_scale}", next_number)
    mismatches = found_by_certificate_alone(converted)
    assert sorted(mismatches) == modules
    assert all(
        converted.names.global_scale in problem and "the rule gives" in problem for problem in mismatches.values()
    )


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("squared_error", lambda value: value * 0.9),
        ("energy", lambda value: value * 1.0001),
        ("num_weights", lambda value: value + 1),
        ("equal_nonzero", lambda value: value - 1),
        ("recoverable_codes", lambda value: value + 1),
        ("num_minus_eight", lambda value: value + 1),
        ("scale_histogram", lambda value: value | {min(value): value[min(value)] + 1}),
    ],
)
def test_totals_of_the_ledger_that_are_not_measured(mse: Converted, key: str, changed: Callable[[Any], Any]) -> None:
    figures: dict[str, tuple[Any, Any]] = {}

    def edit(ledger: dict[str, Any]) -> None:
        for role in ("experts", "total"):
            measured = ledger["totals"][role][key]
            ledger["totals"][role][key] = changed(measured)
            figures[f"totals.{role}.{key}"] = changed(measured), measured

    damage.edit_json(mse.folder / "k2convert.json", edit)
    report = validate(mse)
    assert report.contract.failed == [19]
    problems = {offender.name.rpartition(" ")[2]: offender.problem for offender in report.contract.rules[18].offenders}
    for name, (stated, measured) in figures.items():
        problem = next(problem for field, problem in problems.items() if field.startswith(name))
        assert not key.startswith("num") or problem == f"{stated}, but {measured} was measured"


def test_totals_that_are_missing(mse: Converted) -> None:
    weights = validation_document(validate(mse))["weights"]
    assert weights["verdicts"] == {"certificate": "pass", "journal": "skipped"}
    assert weights["certificate"]["tensors"] == 36
    damage.edit_json(mse.folder / "k2convert.json", lambda ledger: ledger["totals"].pop("experts"))
    rule = validate(mse).contract.rules[18]
    assert [offender.name for offender in rule.offenders] == ["k2convert.json: totals.experts"]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda ledger: ledger["fingerprint"].update(arithmetic=99), "are not known to this version"),
        (None, "no ledger"),
    ],
    ids=["other arithmetic", "no ledger"],
)
def test_an_unknown_rule(mse: Converted, edit: Callable[[dict[str, Any]], Any] | None, reason: str) -> None:
    if edit is None:
        (mse.folder / "k2convert.json").unlink()
    else:
        damage.edit_json(mse.folder / "k2convert.json", edit)
    weights = validation_document(validate(mse))["weights"]
    assert weights["verdicts"]["certificate"] == "pass"
    assert (weights["certificate"]["rule"], weights["certificate"]["tensors"]) == (None, 36)
    assert reason in weights["certificate"]["skip_reason"]
    damage.edit_tensor(mse.folder, f"{mse.expert(3, 2, 'gate')}.{mse.names.weight}", row_of_zeros)
    assert list(validate(mse).weights.certificate.mismatches) == [mse.expert(3, 2, "gate")]


def test_a_source_as_the_result_and_a_result_as_the_source_are_refused(mse: Converted) -> None:
    with pytest.raises(CheckpointError, match="Swap them"):
        validate_checkpoint(folder=mse.source, source=open_checkpoint(mse.folder))
    for other in (None, open_checkpoint(mse.source)):
        with pytest.raises(CheckpointError, match="it is a source, not a result"):
            validate_checkpoint(folder=mse.source, source=other)
    with pytest.raises(CheckpointError, match="it is not the source"):
        validate_checkpoint(folder=mse.folder, source=open_checkpoint(mse.folder))


def test_the_totals_of_tensors_and_bytes_are_compared(mse: Converted) -> None:
    module = mse.expert(1, 0, "down")
    change_tensor(mse, f"{module}.{mse.names.input_scale}", lambda scale: scale.view(1, 1).expand(1, 2).clone())
    rule = validate(mse).contract.rules[7]
    assert rule.verdict is Verdict.FAIL
    stated = json.loads((mse.folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert f"{stated:,} bytes" in rule.offenders[0].problem
    assert f"with {stated - 4:,}" in rule.offenders[0].problem
