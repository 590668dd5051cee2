"""The ledger's part `calibration`: read back as it was written, and refused by field when it is damaged."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import MalformedFileError
from k2convert.job.prepare import choose_recipe
from k2convert.plan.plan import plan_conversion
from k2convert.records.calibration import CalibrationRecord, GptqLayer, LayerCalibration, OutputErrors, SharedDown
from k2convert.records.document import encode, parse, plain
from k2convert.records.fingerprint import Source, job_fingerprint, source_digest
from k2convert.records.ledger import build_ledger, parse_ledger

RECORD = CalibrationRecord(
    texts=(("emma.txt", "b" * 64),),
    tokens=131_072,
    window=2048,
    windows=64,
    dropped_windows=1,
    seed=0,
    smoothing=True,
    exponents_digest="c" * 64,
    layers={
        1: LayerCalibration(tokens=(70, 3), exponents={-1: 12, 0: 52}),
        10: LayerCalibration(tokens=(64, 64), exponents={0: 64}),
    },
)

GPTQ_LAYER = GptqLayer(
    shrinkage=0.5,
    down_ridges=(None, 1.5),
    down_shrinkages=(0.6, None),
    fitted=OutputErrors(0.001, 0.1 + 0.2, 0.0025),
    held_out=OutputErrors(0.002, 0.1 + 0.3, 0.0035),
)
EMPTY_LAYER = GptqLayer(None, (None, None), (None, None), OutputErrors(0.0, 0.0, 0.0))
GPTQ_RECORD = replace(
    RECORD,
    held_out_windows=4,
    dense_layers={0: GptqLayer(0.5, (), (), OutputErrors(0.0, 0.2, 0.1), shared_down=SharedDown(None, 0.5))},
    layers={1: replace(RECORD.layers[1], gptq=GPTQ_LAYER), 10: replace(RECORD.layers[10], gptq=EMPTY_LAYER)},
)


@pytest.mark.parametrize("record", [RECORD, GPTQ_RECORD], ids=["before", "gptq"])
def test_a_ledger_with_a_calibration_reads_back_as_its_own_bytes(tiny: Path, record: CalibrationRecord) -> None:
    source = open_checkpoint(tiny)
    plan = plan_conversion(source=source, recipe=choose_recipe(source, None, {}))
    fingerprint = job_fingerprint(source=source, recipe=plan.recipe, revision=None)
    assert fingerprint["source_headers"] == source_digest(source)
    ledger = build_ledger(plan=plan, source=Source(source), records={}, fingerprint=fingerprint, calibration=record)
    read = parse_ledger(encode(ledger).decode(), where="k2convert.json")
    assert read.calibration == record
    assert encode(read) == encode(ledger)
    assert b'"calibration"' not in encode(replace(ledger, calibration=None))


def in_layer(**fields: Any) -> dict[str, Any]:
    document = plain(GPTQ_RECORD)
    document["layers"]["1"]["gptq"] |= fields
    return document


FIRST = {"tokens": [1], "exponents": {}}
DAMAGED: list[tuple[str, dict[str, Any]]] = [
    ("tokens is -5", plain(RECORD) | {"tokens": -5}),
    ("exponents_digest without smoothing", plain(RECORD) | {"smoothing": False}),
    ("'01' is not the number of a layer", plain(RECORD) | {"layers": {"01": FIRST}}),
    ("layers.1.exponents.x", plain(RECORD) | {"layers": {"1": FIRST | {"exponents": {"x": 1}}}}),
    ("shared_down.ridge is -1.0", in_layer(shared_down={"ridge": -1.0, "shrinkage": None})),
    ("down_ridges.1 is inf", in_layer(down_ridges=[0.5, math.inf])),
    ("a different number of experts", in_layer(down_shrinkages=[0.5])),
    ("a different number of experts", in_layer(down_ridges=[0.5], down_shrinkages=[0.5])),
    ("some layers have gptq, others have none", in_layer() | {"layers": in_layer()["layers"] | {"2": FIRST}}),
]


@pytest.mark.parametrize(("problem", "document"), DAMAGED, ids=[problem for problem, _ in DAMAGED])
def test_a_damaged_field_is_named(problem: str, document: dict[str, Any]) -> None:
    with pytest.raises(MalformedFileError, match=re.escape(problem)) as refused:
        parse(CalibrationRecord, json.dumps(document), where="here")
    assert str(refused.value).startswith("here: ")
    assert "\n" not in str(refused.value)


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
    assert "In 2 of 3 layers" in warning
    assert "Layer 2 is the worst, with 0.3 instead of 0.2." in warning
    layers = {n: replace(layers[2], gptq=replace(GPTQ_LAYER, fitted=OutputErrors(0, 1, 2))) for n in (1, 2)}
    assert replace(GPTQ_RECORD, layers=layers).warning is None, "the error on the fitted windows does not matter"
