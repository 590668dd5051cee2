"""The ledger's part `calibration`: read back as it was written, and refused by field when it is damaged."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k2convert.checkpoint.index import open_checkpoint
from k2convert.job.prepare import choose_recipe
from k2convert.plan.plan import plan_conversion
from k2convert.records.calibration import CalibrationRecord, GptqLayer, LayerCalibration, OutputErrors
from k2convert.records.fingerprint import job_fingerprint, source_digest
from k2convert.records.ledger import build_ledger, parse_ledger

RECORD = CalibrationRecord(
    statistics="a" * 64,
    texts=(("emma.txt", "b" * 64),),
    tokens=131_072,
    window=2048,
    windows=64,
    dropped_windows=1,
    seed=0,
    weighted=True,
    smoothing=True,
    exponents_digest="c" * 64,
    layers={
        1: LayerCalibration(tokens=(70, 3), fallback=(1,), exponents={-1: 12, 0: 52}),
        10: LayerCalibration(tokens=(64, 64), fallback=(), exponents={0: 64}),
    },
)

GPTQ_LAYER = GptqLayer(
    ridge=0.15,
    ridge_gain=0.4,
    shrinkage=0.5,
    down_ridges=(None, 1.5),
    down_shrinkages=(0.6, None),
    fitted=OutputErrors(0.001, 0.1 + 0.2, 0.0025),
    held_out=OutputErrors(0.002, 0.1 + 0.3, 0.0035),
)
EMPTY_LAYER = GptqLayer(None, 0.0, None, (None, None), (None, None), OutputErrors(0.0, 0.0, 0.0))
GPTQ_RECORD = replace(
    RECORD,
    gptq=True,
    held_out_windows=4,
    layers={
        1: replace(RECORD.layers[1], gptq=GPTQ_LAYER),
        10: replace(RECORD.layers[10], gptq=EMPTY_LAYER),
    },
)


@pytest.mark.parametrize("record", [RECORD, GPTQ_RECORD], ids=["imatrix", "gptq"])
def test_a_ledger_with_a_calibration_reads_back_as_its_own_bytes(tiny: Path, record: CalibrationRecord) -> None:
    source = open_checkpoint(tiny)
    plan = plan_conversion(source=source, recipe=choose_recipe(source, None, {}))
    fingerprint = job_fingerprint(source=source, recipe=plan.recipe, revision=None, statistics=RECORD.statistics)
    assert fingerprint["statistics"] == RECORD.statistics
    assert fingerprint["source_headers"] == source_digest(source)
    ledger = build_ledger(
        plan=plan, source=source, records={}, fingerprint=fingerprint, repo=None, devices=["cpu"], calibration=record
    )
    read = parse_ledger(json.loads(ledger.to_bytes()))
    assert read.problems == ()
    assert read.calibration == record
    assert read.to_bytes() == ledger.to_bytes()
    assert b'"calibration"' not in replace(ledger, calibration=None).to_bytes()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("statistics", 5),
        ("texts", [{"name": "x"}]),
        ("tokens", -1),
        ("seed", True),
        ("imatrix", "yes"),
        ("smoothing", False),
        ("layers", {"01": {"tokens": [], "fallback": [], "exponents": {}}}),
        ("layers", {"1": {"tokens": [1], "fallback": []}}),
        ("exponents", {"1": {"tokens": [1], "fallback": [], "exponents": {"x": 1}}}),
        ("unknown", 1),
    ],
)
def test_a_damaged_field_is_named(field: str, value: object) -> None:
    document: dict[str, Any] = RECORD.to_dict() | {"layers" if field == "exponents" else field: value}
    with pytest.raises(ValueError, match=field):
        CalibrationRecord.from_dict(document)
    assert any(problem.startswith("calibration: ") for problem in parse_ledger({"calibration": document}).problems)


def test_a_record_without_gptq_is_written_as_before() -> None:
    assert list(RECORD.to_dict()) == [
        *("statistics", "texts", "tokens", "window", "windows", "dropped_windows", "seed"),
        *("imatrix", "smoothing", "exponents_digest", "layers"),
    ]
    assert RECORD.to_dict()["layers"]["1"] == {"tokens": [70, 3], "fallback": [1], "exponents": {"-1": 12, "0": 52}}
    assert not CalibrationRecord.from_dict(RECORD.to_dict()).gptq


def test_numbers_of_numpy_are_written_as_plain_numbers() -> None:
    layer = replace(GPTQ_LAYER, ridge=np.float32(0.5), down_ridges=(np.float64(2), None), ridge_gain=1)
    assert json.loads(json.dumps(layer.to_dict())) == layer.to_dict()
    assert GptqLayer.from_dict(layer.to_dict()) == replace(layer, ridge=0.5, down_ridges=(2.0, None))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ridge", "0.5"),
        ("ridge", -1.0),
        ("ridge_gain", None),
        ("ridge_gain", 1.5),
        ("shrinkage", True),
        ("shrinkage", 2),
        ("down_ridges", None),
        ("down_ridges", [0.5, math.inf]),
        ("down_shrinkages", [0.5]),
        ("down_shrinkages", [0.5, "x"]),
        ("inherited_error", None),
        ("mse_error", math.nan),
        ("gptq_error", -0.5),
        ("held_out", None),
        ("held_out", {"gptq_error": 0.1}),
        ("unknown", 1),
    ],
)
def test_a_damaged_field_of_gptq_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        GptqLayer.from_dict(GPTQ_LAYER.to_dict() | {field: value})


@pytest.mark.parametrize("field", EMPTY_LAYER.to_dict())
def test_a_missing_field_of_gptq_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        GptqLayer.from_dict({key: value for key, value in GPTQ_LAYER.to_dict().items() if key != field})


def test_where_the_errors_come_from_is_said() -> None:
    assert GPTQ_RECORD.measured_on == "on 4 of 68 windows that were kept out of the fit"
    empty = replace(GPTQ_RECORD, held_out_windows=0, layers={10: GPTQ_RECORD.layers[10]})
    assert empty.measured_on == "no held-out figure: no window was kept out of the fit"
    assert replace(empty, windows=1).measured_on == "no held-out figure: only one window"


def test_layers_that_are_worse_than_rule_mse_are_counted_and_the_worst_is_named() -> None:
    assert GPTQ_RECORD.warning is None
    layers = {
        number: replace(GPTQ_RECORD.layers[1], gptq=replace(GPTQ_LAYER, held_out=OutputErrors(0, *errors)))
        for number, errors in {1: (0.2, 0.1), 2: (0.2, 0.3), 3: (0.2, 0.25)}.items()
    }
    warning = replace(GPTQ_RECORD, layers=layers).warning
    assert warning is not None
    assert "In 2 of 3 layers" in warning
    assert "Layer 2 is the worst, with 0.3 instead of 0.2." in warning
    layers = {n: replace(layers[2], gptq=replace(GPTQ_LAYER, fitted=OutputErrors(0, 1, 2))) for n in (1, 2)}
    assert replace(GPTQ_RECORD, layers=layers).warning is None, "the error on the fitted windows does not matter"


@pytest.mark.parametrize("document", [None, [], "gptq"])
def test_gptq_that_is_no_object_is_named(document: object) -> None:
    with pytest.raises(ValueError, match="gptq is not an object"):
        GptqLayer.from_dict(document)


def test_all_layers_have_gptq_or_none() -> None:
    document = GPTQ_RECORD.to_dict()
    for damaged in (
        document | {"gptq": False},
        document | {"gptq": 1},
        {key: value for key, value in document.items() if key != "gptq"},
        RECORD.to_dict() | {"gptq": True},
    ):
        with pytest.raises(ValueError, match="gptq"):
            CalibrationRecord.from_dict(damaged)


def test_gptq_has_the_experts_of_its_layer() -> None:
    document = GPTQ_RECORD.to_dict()
    document["layers"]["1"]["tokens"].append(9)
    with pytest.raises(ValueError, match="gptq: 2 experts, but tokens has 3"):
        CalibrationRecord.from_dict(document)
