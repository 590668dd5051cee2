"""Ledger, calibration and packed records: written and read back they are equal; a damaged one is refused."""

import json
import math
import random
import re
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import run_here

from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CheckpointError, MalformedFileError
from k2convert.job.prepare import choose_recipe
from k2convert.plan.plan import plan_conversion
from k2convert.plan.recipe import Recipe
from k2convert.records.calibration import CalibrationRecord, GptqLayer, LayerCalibration, OutputErrors, SharedDown
from k2convert.records.document import encode, parse, plain
from k2convert.records.fingerprint import Source, job_fingerprint, source_digest
from k2convert.records.journal import Journal, PackedRecords
from k2convert.records.ledger import (
    ProjectionRecord,
    ShardRecord,
    below_budget,
    build_ledger,
    parse_ledger,
    read_ledger,
    summarize,
)
from scripts.fixture_maker.damage import edit_json


def test_a_ledger_read_back_gives_its_own_bytes(local_result: Path) -> None:
    ledger = read_ledger(local_result)
    assert encode(ledger) == (local_result / "k2convert.json").read_bytes()
    assert ledger.num_bytes == sum(path.stat().st_size for path in local_result.glob("*.safetensors"))


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "recipe.layout is 'best'": lambda d: d["recipe"].update(layout="best"),
    "fingerprint is missing": lambda d: d.pop("fingerprint"),
    "source.headers is missing": lambda d: d.update(source={"family": None, "repo": None, "revision": None}),
    "source.repo is 5": lambda d: d["source"].update(repo=5),
    "versions is": lambda d: d.update(versions=[]),
    "versions.python is": lambda d: d["versions"].update(python={"major": 3}),
    "k2convert is": lambda d: d.update(k2convert=[1]),
    "source.headers.x is 1": lambda d: d["source"]["headers"].update(x=1),
    "fingerprint.arithmetic is '1'": lambda d: d["fingerprint"].update(arithmetic="1"),
    "shards.*tensors is": lambda d: next(iter(d["shards"].values())).update(tensors={}),
    "not a file name": lambda d: d.update(shards={"../x.safetensors": {"blake3": "", "bytes": 1, "tensors": 1}}),
    "totals.total: energy": lambda d: d["totals"]["total"].update(energy=-1.0),
}


def test_figures_that_only_earlier_versions_measured_are_passed_over(local_result: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(local_result, tmp_path / "copy"))
    edit_json(
        folder / "k2convert.json", lambda d: d["totals"]["total"].update(sampled_error_bound=1.0, weighted_error=1.0)
    )
    assert read_ledger(folder) == read_ledger(local_result)


def test_a_ledger_of_an_earlier_release_keeps_the_name_of_its_rule(local_result: Path, tmp_path: Path) -> None:
    """Its other fields are passed over. The result is measured, and not checked by a rule."""
    folder = Path(shutil.copytree(local_result, tmp_path / "copy"))
    edit_json(folder / "k2convert.json", lambda d: d["recipe"].update(rule="weighted"))
    edit_json(folder / "k2convert.json", lambda d: d.update(colour="red"))
    ledger = read_ledger(folder)
    assert ledger.recipe.rule == "weighted"
    assert ledger.recipe.roles == read_ledger(local_result).recipe.roles
    assert ledger.totals == read_ledger(local_result).totals


@pytest.mark.parametrize("part", DAMAGE)
def test_a_damaged_part_is_named_with_the_remedy(part: str, local_result: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(local_result, tmp_path / "copy"))
    edit_json(folder / "k2convert.json", DAMAGE[part])
    with pytest.raises(CheckpointError, match=rf"k2convert\.json: .*{part}.*Delete the file and run the conversion"):
        read_ledger(folder)


def test_what_is_not_json_or_not_there_is_refused_with_the_remedy(local_result: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a finished conversion \(no k2convert\.json\)"):
        read_ledger(tmp_path)
    (tmp_path / "k2convert.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"not JSON .*Delete the file and run the conversion again"):
        read_ledger(tmp_path)


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
    assert GPTQ_RECORD.measured_on == "on the 4 of 68 windows that were kept out of the fit"
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


NUM_PROJECTIONS = 2688  # of a layer of Kimi K3


@pytest.fixture(scope="module")
def finished(k3_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardRecord, Recipe]:
    """A record with as many projections as a shard of Kimi K3, and figures as large, and the recipe of its job."""
    folder = tmp_path_factory.mktemp("records") / "out"
    run_here("run", k3_tiny, folder, "--device", "cpu", code=0)
    job = Journal(folder).job()
    record = Journal(folder).find_records(job.digest)[0]["model-00002-of-000007.safetensors"]
    choice = random.Random(0)
    projections: list[ProjectionRecord] = []
    for number in range(NUM_PROJECTIONS):
        measured = record.projections[number % len(record.projections)]
        histogram = {byte: choice.randrange(1 << 16) for byte in range(32, 120, 8)}
        metrics = replace(
            measured.metrics,
            energy=choice.random(),
            squared_error=choice.random() / 100,
            num_nonzero=choice.randrange(1 << 24),
            equal_nonzero=choice.randrange(1 << 24),
            sampled_error_max=choice.random(),
            scale_histogram=histogram,
        )
        projections.append(replace(measured, module=f"{measured.module}.{number}", metrics=metrics))
    return replace(record, projections=tuple(projections)), job.recipe


def test_a_projection_takes_at_most_150_bytes_and_its_record_is_equal(finished: tuple[ShardRecord, Recipe]) -> None:
    """247,296 projections of Kimi K3 then take 37 MB; as objects they would take 0.3 GB."""
    record = finished[0]
    packed = PackedRecords()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    packed[record.shard] = record
    taken = tracemalloc.get_traced_memory()[0] - before
    unpacked = packed[record.shard]
    as_objects = tracemalloc.get_traced_memory()[0] - before - taken
    tracemalloc.stop()
    assert unpacked == record
    assert taken < 150 * NUM_PROJECTIONS
    assert as_objects > 8 * taken


def test_totals_and_missed_budgets_are_those_of_the_records(finished: tuple[ShardRecord, Recipe]) -> None:
    record, recipe = finished
    packed = PackedRecords({record.shard: record, "other": replace(record, shard="other")}.items())
    assert summarize(packed.values()) == summarize([record, record])
    missed = below_budget(packed.values(), recipe)
    assert 0 < len(missed) < NUM_PROJECTIONS
    assert missed == below_budget([record], recipe)
    assert list(packed.only(["other"])) == ["other"]
    assert "other" in packed
    assert packed == {record.shard: record, "other": replace(record, shard="other")}
