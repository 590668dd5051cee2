"""The tiny checkpoint, converted and validated once. Every report here is about it or a copy of its records."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from evaluation_makers import evaluation_of, write_evaluation
from report_makers import gptq_record

from k2convert.check.results import ValidationReport
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from k2convert.records.document import encode
from k2convert.records.ledger import read_ledger
from k2convert.report import ReportFiles, write_report


@pytest.fixture(scope="session")
def validation(local_result: Path, tiny: Path) -> ValidationReport:
    """Its validation, with the source."""
    return validate_checkpoint(folder=local_result, source=open_checkpoint(tiny))


@pytest.fixture(scope="session")
def reported(local_result: Path, validation: ValidationReport, tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """A full report."""
    tensors = open_checkpoint(local_result).tensors.values()
    out = tmp_path_factory.mktemp("reported")
    return write_report(folder=local_result, out=out, validation=validation, tensors=tensors)


@pytest.fixture(scope="session")
def evaluated(
    local_result: Path, validation: ValidationReport, tmp_path_factory: pytest.TempPathFactory
) -> ReportFiles:
    """A report with all four charts: on a conversion by rule `gptq`, as its ledger says, with an evaluation."""
    folder = Path(shutil.copytree(local_result, tmp_path_factory.mktemp("evaluated") / "out"))
    write_evaluation(folder, evaluation_of(folder))
    (folder / "k2convert.json").write_bytes(encode(replace(read_ledger(folder), calibration=gptq_record())))
    tensors = open_checkpoint(folder).tensors.values()
    return write_report(folder=folder, out=folder.parent, validation=validation, tensors=tensors)


@pytest.fixture
def records_only(local_result: Path, tmp_path: Path) -> Path:
    """A copy of the conversion without its shards, to be damaged."""
    return Path(shutil.copytree(local_result, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors")))
