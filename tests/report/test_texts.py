"""Page, report.md and card are one text: the same figures, and those of ledger, evaluation and calibration."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_makers import evaluation_of, token_scores, write_evaluation
from PIL import Image
from report_makers import HELD_OUT, as_read, gptq_record

from k2convert.check.results import ValidationReport, Verdict
from k2convert.checkpoint.index import open_checkpoint
from k2convert.hub.source_card import SourceCard
from k2convert.records.document import encode
from k2convert.records.journal import Published, record_published
from k2convert.records.ledger import read_ledger
from k2convert.report import ReportFiles, write_report
from k2convert.report.card import render_card
from k2convert.report.content import contract_figure, headline, needs_section, sections
from k2convert.report.figures import Report, collect_report, figures_document
from k2convert.report.wording import joined, percent, with_error
from scripts.fixture_maker.damage import edit_json


def card_of(report: Report) -> str:
    named = replace(report, name="me/K2")
    config = {"moe_intermediate_size": 512}
    return render_card(named, base_model="moon/K2", source=SourceCard(), config=config)


def texts(files: ReportFiles) -> list[str]:
    return [as_read(text) for text in (files.page.read_text(), files.markdown.read_text(), card_of(files.report))]


@pytest.mark.parametrize("name", ["reported", "evaluated"])
def test_every_sentence_and_every_cell_is_in_all_three(name: str, request: pytest.FixtureRequest) -> None:
    files: ReportFiles = request.getfixturevalue(name)
    words = [word for section in sections(files.report) for word in (section.title, *section.sentences)]
    words += [cell for section in sections(files.report) for t in section.tables for row in t.rows for cell in row]
    words += [word for figure in headline(files.report) for word in (figure.value, figure.label, figure.detail)]
    assert len(words) > 150
    for text in texts(files):
        assert not [word for word in words if as_read(word) not in text]


def test_the_figures_are_those_of_the_ledger(reported: ReportFiles, local_result: Path) -> None:
    total = json.loads((local_result / "k2convert.json").read_text())["totals"]["total"]
    assert headline(reported.report)[0].value == "19 of 19"
    text = as_read(reported.markdown.read_text())
    for figure in (
        f"{10 * np.log10(total['energy'] / total['squared_error']):.2f} dB",
        f"{total['squared_error'] / total['energy']:.5f}",
        f"{total['sampled_error_achieved'] / total['sampled_error_max']:.3f}",
        f"{100 * total['recoverable_codes'] / total['num_codes']:.1f} %",
        f"{100 * (1 - total['equal_nonzero'] / total['num_nonzero']):.1f} %",
        f"{total['max_error_steps']:.2f} steps of its INT4 grid",
        f"{total['num_weights']:,}",
    ):
        assert figure in text, figure


def test_the_figures_of_an_evaluation_are_those_of_the_tokens(evaluated: ReportFiles) -> None:
    """Computed again from the scores, in other words than the package's."""
    scores = token_scores(0.35)
    windows = scores.divergence.mean(axis=1)
    error = np.sqrt(((windows - windows.mean()) ** 2).sum() / (len(windows) - 1) / len(windows))
    figure = headline(evaluated.report)[1]
    assert (figure.value, figure.label) == (f"{scores.divergence.mean():.3g}", "KL divergence")
    assert figure.detail == f"± {error:.2g} nats per token, W4A4, against hf://moon/K2"
    text = as_read(evaluated.markdown.read_text())
    for words in (
        "Measured on 1,542 tokens of emma.txt (6 windows of 257) against hf://moon/K2: KL ",
        f"{np.exp(scores.loss.mean()):.6g}",
        f"{100 * scores.agrees.mean():.2f} %",
        f"{(scores.reference_loss - scores.loss).mean():.4f} ± ",
    ):
        assert words in text
    assert "/home/someone" not in text


def test_the_held_out_error_is_stated_with_the_rule_that_it_is_compared_with(evaluated: ReportFiles) -> None:
    last = HELD_OUT[3]
    figure = headline(evaluated.report)[2]
    assert (figure.value, figure.label) == (f"{last.gptq_error:.3g}", "output error")
    assert f"on the 1 of 5 windows that were kept out of the fit; {last.mse_error:.3g} with rule mse" in figure.detail
    assert "| 2 | 0 | 70 | 2,000,000 | 0.00247 | 0.00691 | 0.001 |" in evaluated.markdown.read_text()


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ((64, 64, 64, 64), None),
        ((63, 64, 64, 64), "3 of 12 experts saw fewer than 64 tokens: rule mse converted their down projections. The"),
        ((0, 1, 63, 64), "Warning: 9 of 12 experts saw fewer than 64 tokens: rule mse converted their down "),
    ],
)
def test_experts_that_saw_few_tokens_are_counted(
    tokens: tuple[int, ...], sentence: str | None, records_only: Path
) -> None:
    record = gptq_record()
    layers = {number: replace(layer, tokens=tokens) for number, layer in record.layers.items()}
    ledger = replace(read_ledger(records_only), calibration=replace(record, layers=layers))
    (records_only / "k2convert.json").write_bytes(encode(ledger))
    text = as_read(write_report(folder=records_only).markdown.read_text())
    assert "experts saw fewer" not in text if sentence is None else sentence in text


def test_without_held_out_windows_no_error_is_stated(records_only: Path) -> None:
    ledger = replace(read_ledger(records_only), calibration=gptq_record(held_out=False))
    (records_only / "k2convert.json").write_bytes(encode(ledger))
    text = as_read(write_report(folder=records_only).markdown.read_text())
    assert "no held-out figure: only one window" in text
    assert "output error is at most" not in text


def test_the_json_has_the_documents_as_they_are(evaluated: ReportFiles) -> None:
    document = json.loads(json.dumps(figures_document(evaluated.report)))
    folder = evaluated.page.parent / "out"
    assert document["evaluation"] == json.loads((folder / "evaluation.json").read_text())
    assert document["calibration"] == json.loads((folder / "k2convert.json").read_text())["calibration"]


@pytest.mark.parametrize("declared", ["w4a4", "w4a16"])
def test_the_mode_that_the_result_declares_comes_first(records_only: Path, declared: str) -> None:
    evaluation = evaluation_of(records_only)
    edit_json(records_only / "k2convert.json", lambda ledger: ledger["recipe"].update(activations=declared))
    fp8 = replace(evaluation.rows[0], model=replace(evaluation.rows[0].model, kv_cache="fp8"))
    write_evaluation(records_only, replace(evaluation, rows=(fp8, *evaluation.rows)))
    files = write_report(folder=records_only)
    (row,) = (row for row in evaluation.rows if row.model.activations == declared)
    assert headline(files.report)[0].value == f"{row.figures.divergence.mean:.3g}"
    assert f"|  | {declared.upper()} | W4A" in files.markdown.read_text()
    assert "W4A16, FP8 KV" in files.markdown.read_text()


def test_a_stale_or_damaged_evaluation_is_not_shown(records_only: Path) -> None:
    def other(document: dict[str, Any]) -> None:
        document["rows"][1]["model"]["weights"] = "0" * 64

    changes: list[tuple[Callable[[dict[str, Any]], object], str]] = [
        (other, "measures other weights than this result has. Delete the file, or run"),
        (lambda document: document.pop("rows"), "rows is missing. Delete the file, or run"),
    ]
    for change, words in changes:
        write_evaluation(records_only, evaluation_of(records_only))
        edit_json(records_only / "evaluation.json", change)
        files = write_report(folder=records_only)
        assert files.report.evaluation is None
        for text in texts(files):
            assert "valuation of the whole" not in text
            assert f"evaluation.json is not shown: {words}" in text
            assert str(records_only.parent) not in text


def shards_left(folder: Path) -> None:
    record_published(folder, Published("me/out", "1" * 40))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shards_left, "`k2convert report hf://me/out` shows the verdict"),
        (lambda folder: None, "Write the report of the folder or the repository that has them"),
        (lambda folder: (folder / "x.safetensors").touch(), "`k2convert validate` checks it"),
    ],
    ids=["published", "records", "shards"],
)
def test_what_gives_a_missing_verdict_is_said(change: Callable[[Path], object], words: str, records_only: Path) -> None:
    change(records_only)
    sentence = write_report(folder=records_only).report.missing[-1]
    assert words in sentence
    assert sentence.count("`k2convert") == ("`k2convert" in words)


def test_rule_max_is_not_compared_with_itself(records_only: Path) -> None:
    edit_json(records_only / "k2convert.json", lambda ledger: ledger["recipe"].update(rule="max"))
    files = write_report(folder=records_only)
    assert not [figure.label for figure in headline(files.report) if "error of max" in figure.label]
    assert re.findall(r">([^<>]*median [^<]*)<", files.page.read_text()) == ["this result (max): median 22.62 dB"]


def test_rules_that_were_not_checked_do_not_count_as_success(validation: ValidationReport) -> None:
    contract = validation.contract
    for number, verdict, value in (
        (6, Verdict.PASS, "19 of 19"),
        (6, Verdict.SKIPPED, "18 of 19"),
        (3, Verdict.FAIL, "1 broken"),
    ):
        rules = list(contract.rules)
        rules[number] = replace(rules[number], verdict=verdict)
        report = replace(validation, contract=replace(contract, rules=tuple(rules)))
        assert contract_figure(report).value == value


def test_weights_that_the_rule_does_not_give_are_shown(local_result: Path, validation: ValidationReport) -> None:
    assert validation.weights is not None
    wrong = {"model.layers.1.mlp.experts.0.down_proj": "1 of 8 codes differ"}
    weights = replace(validation.weights, certificate=replace(validation.weights.certificate, mismatches=wrong))
    report = replace(validation, weights=weights)
    assert not report.passed
    assert contract_figure(report).detail == "do not serve it: see what was compared"
    (section,) = (s for s in sections(collect_report(folder=local_result, validation=report)) if "contract" in s.title)
    assert "by code that shares nothing with the conversion: faults in 1 of them." in " ".join(section.sentences)


def test_memory_and_gpus_are_those_of_the_result(reported: ReportFiles) -> None:
    needs = needs_section(reported.report)
    assert needs is not None
    assert needs.sentences[0].startswith("Weights: 7.5 MB. KV cache: ")
    assert ("1 x A100 80 GB", "TP1") in {tuple(row[:2]) for row in needs.tables[0].rows}


def test_same_bytes(local_result: Path, reported: ReportFiles, validation: ValidationReport, tmp_path: Path) -> None:
    tensors = open_checkpoint(local_result).tensors.values()
    write_report(folder=local_result, out=tmp_path, validation=validation, tensors=tensors)
    for before in (reported.page, reported.markdown, reported.picture):
        assert (tmp_path / before.name).read_bytes() == before.read_bytes()
    with Image.open(reported.picture) as picture:
        assert picture.width > 1200


def test_the_report_is_titled_by_the_model_and_has_its_day(reported: ReportFiles, records_only: Path) -> None:
    text = reported.markdown.read_text()
    assert text.startswith(f"# {reported.report.title}\n")
    assert f"<title>{reported.report.title}</title>" in reported.page.read_text()
    (day,) = re.findall(r"k2convert's report of (\S+) \(UTC\)", text)
    assert datetime.now(UTC).date() - date.fromisoformat(day) <= timedelta(days=1)
    edit_json(records_only / "k2convert.json", lambda ledger: ledger["source"].update(repo="moonshotai/Kimi-K2"))
    assert write_report(folder=records_only).report.title == "moonshotai/Kimi-K2: INT4 to NVFP4"


def test_a_folder_without_journal_falls_back_on_the_ledger(records_only: Path, local_result: Path) -> None:
    shutil.rmtree(records_only / ".k2convert")
    files = write_report(folder=records_only)
    assert files.report.tensors == ()
    assert files.report.total == read_ledger(local_result).totals["total"]
    assert "no figures of single tensors" in as_read(files.markdown.read_text())
    assert "<svg" not in files.page.read_text()


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (joined([]), ""),
        (joined(["a"]), "a"),
        (joined(["a", "b", "c"]), "a, b and c"),
        (with_error(0.0123, 0.00041), "0.01230 ± 0.00041"),
        (with_error(0.0123, None), "0.0123"),
        (with_error(0.0, 0.0), "0"),
        (with_error(-1.5, 12.0), "-2 ± 12"),
        (with_error(1e300, 1e-3), "1e+300 ± 0.001"),
        (with_error(1.0, 1e-300), "1 ± 1e-300"),
        (percent(0, 10), "0 %"),
        (percent(10, 10), "100 %"),
        (percent(1, 10**9), "< 0.001 %"),
        (percent(10**9 - 1, 10**9), "> 99.999 %"),
        (percent(1, 3), "33.3 %"),
    ],
)
def test_lists_errors_and_shares_in_words(shown: str, expected: str) -> None:
    assert shown == expected
