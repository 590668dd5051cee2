"""The tiny checkpoint, converted and validated once. Every report here is about it or a copy of its records."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from evaluation_makers import evaluation_of, write_evaluation

from k2convert.checkpoint.index import open_checkpoint
from k2convert.report import ReportFiles, write_report


@pytest.fixture(scope="session")
def converted(tiny: Path, run_cli: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, converted by the command. Read it only."""
    folder = tmp_path_factory.mktemp("report") / "converted"
    done = run_cli("run", tiny, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def validation(converted: Path, tiny: Path, run_cli: Any) -> dict[str, Any]:
    """What `validate --json` prints for it, with the source and one reference layer."""
    done = run_cli("validate", converted, "--source", tiny, "--layers", "2", "--tokens", "32", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def reported(converted: Path, validation: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """A full report."""
    tensors = open_checkpoint(converted).tensors.values()
    out = tmp_path_factory.mktemp("reported")
    return write_report(folder=converted, out=out, validation=validation, tensors=tensors)


@pytest.fixture(scope="session")
def evaluated(converted: Path, validation: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """A full report on the conversion with an evaluation."""
    folder = Path(shutil.copytree(converted, tmp_path_factory.mktemp("evaluated") / "out"))
    write_evaluation(folder, evaluation_of(folder))
    tensors = open_checkpoint(folder).tensors.values()
    return write_report(folder=folder, out=folder.parent, validation=validation, tensors=tensors)


@pytest.fixture
def records_only(converted: Path, tmp_path: Path) -> Path:
    """A copy of the conversion without its shards, to be damaged."""
    folder = tmp_path / "copy"
    shutil.copytree(converted, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder
