"""A report's figures are those of the journal; without a journal they are the ledger's, and the report says so."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from k2convert.check.results import ValidationReport
from k2convert.errors import CheckpointError, DestinationError
from k2convert.models import locate_module
from k2convert.records.document import plain
from k2convert.records.journal import Journal
from k2convert.report import write_report
from k2convert.report.figures import collect_report, heat_maps, tensor_figures
from scripts.fixture_maker.damage import edit_json


def test_figures_are_those_of_ledger_and_records(local_result: Path) -> None:
    report = collect_report(folder=local_result)
    ledger = json.loads((local_result / "k2convert.json").read_text())
    assert {role: plain(metrics) for role, metrics in report.ledger.totals.items()} == ledger["totals"]
    listed = [tensor.sqnr_db for tensor in report.worst]
    assert listed == sorted(tensor.sqnr_db for tensor in report.tensors)[: len(listed)]
    maps = {heat_map.projection: heat_map for heat_map in report.maps}
    assert list(maps) == ["gate", "up", "down"]
    num_cells = 0
    for record in Journal(local_result).find_records(report.ledger.digest)[0].values():
        for projection in record.projections:
            assert projection.metrics is not None
            name = locate_module(projection.module)
            assert name is not None
            heat_map = maps[str(name.projection)]
            sqnr = heat_map.values[heat_map.layers.index(int(name.layer or 0)), int(name.expert or 0)]
            assert sqnr == projection.metrics.sqnr_db
            num_cells += 1
    assert num_cells == sum(heat_map.values.size for heat_map in maps.values()) == 144


def test_measured_errors_replace_a_missing_journal(
    records_only: Path, validation: ValidationReport, local_result: Path
) -> None:
    shutil.rmtree(records_only / ".k2convert")
    report = collect_report(folder=records_only, validation=validation)
    recorded = {t.module: t.sqnr_db for t in collect_report(folder=local_result).tensors}
    assert {t.module for t in report.tensors} == set(recorded)
    for tensor in report.tensors:
        assert tensor.sqnr_db == pytest.approx(recorded[tensor.module], abs=1e-9)
    assert len(report.maps) == 3


def test_what_cannot_be_reported_is_refused(records_only: Path, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither k2convert\.json nor"):
        collect_report(folder=tiny)
    with pytest.raises(CheckpointError, match="no such folder"):
        collect_report(folder=tmp_path / "nowhere")
    with pytest.raises(DestinationError, match=r"config\.json: is a file"):
        write_report(folder=records_only, out=records_only / "config.json")
    edit_json(records_only / "k2convert.json", lambda ledger: ledger["recipe"].update(target="bf16"))
    with pytest.raises(CheckpointError, match="BF16 copy"):
        collect_report(folder=records_only)
    (records_only / "k2convert.json").unlink()
    with pytest.raises(CheckpointError, match=r"is not finished.*`k2convert status"):
        collect_report(folder=records_only)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_weights", value) for value in ("<script>", None, -1, True, math.nan, [1])]
    + [("scale_histogram", value) for value in ({"999": 1}, {"100": "x"}, {"x": 1}, [], {"100": -1})],
)
def test_figures_that_are_not_numbers_are_refused(records_only: Path, key: str, value: object) -> None:
    shutil.rmtree(records_only / ".k2convert")
    edit_json(records_only / "k2convert.json", lambda ledger: ledger["totals"]["total"].update({key: value}))
    with pytest.raises(CheckpointError, match=key):
        collect_report(folder=records_only)


def test_absurd_expert_number_makes_no_map(local_result: Path) -> None:
    metrics = collect_report(folder=local_result).total
    far = tensor_figures(f"model.layers.1.mlp.experts.{10**12}.gate_proj", metrics)
    longer_than_int_reads = tensor_figures(f"model.layers.1.mlp.experts.{'9' * 5000}.up_proj", metrics)
    assert heat_maps([far]) == ()
    assert heat_maps([longer_than_int_reads]) == ()


def test_exact_and_absent_cells_differ(local_result: Path) -> None:
    total = collect_report(folder=local_result).total
    exact = tensor_figures("model.layers.1.mlp.experts.0.gate_proj", replace(total, squared_error=0.0))
    other = tensor_figures("model.layers.1.mlp.experts.2.gate_proj", total)
    (heat_map,) = heat_maps([exact, other])
    assert np.isposinf(heat_map.values[0, 0])
    assert np.isnan(heat_map.values[0, 1])
    assert exact.sqnr_max_db is None
