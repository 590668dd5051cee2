"""Experts that a walk through the layers converted go into shards as they are, and are measured wherever others are
regenerated. The walk's codes are made by hand here: those of a rule, some of them changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import plan_job
from damaged_files import flip
from results import raw_tensors

from k2convert.calibration.statistics import Statistics, open_statistics
from k2convert.check.results import Verdict, validation_document
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.choices import Layout
from k2convert.errors import CalibrationError, RecipeError
from k2convert.job.prepare import Job
from k2convert.job.run import execute
from k2convert.job.shard import ShardTask, convert_shard, shard_task
from k2convert.job.transfers import check_for_upload
from k2convert.models import locate_module
from k2convert.models.names import Role
from k2convert.plan.recipe import build_recipe, settle_recipe
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.records.document import encode, parse
from k2convert.records.ledger import ShardRecord

ROLES = ("experts", "shared_experts", "dense_mlp")
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj"
ZERO = 8  # an E2M1 nibble that no walk writes: minus zero


@dataclass(frozen=True)
class Codes:
    found: Mapping[str, Nvfp4Weight]

    def read(self, module: str) -> Nvfp4Weight:
        return self.found[module]


def plan(source: Path, folder: Path, statistics: Statistics, *, layout: Layout, smoothing: bool) -> Job:
    keys = {"rule": "imatrix", "layout": layout, "roles": ROLES, "smoothing": smoothing}
    return plan_job(source, folder, statistics=statistics, **keys)


def with_codes(job: Job, codes: Codes) -> Job:
    assert job.calibration is not None
    recipe = job.plan.recipe.model_copy(update={"rule": "gptq"})
    return replace(
        job,
        plan=replace(job.plan, recipe=recipe),
        description=replace(job.description, recipe=recipe),
        calibration=replace(job.calibration, codes=codes),
    )


def tensors_of(folder: Path) -> dict[str, Any]:
    shapes = {n: t.shape for path in folder.glob("*.safetensors") for n, t in read_header(path).tensors.items()}
    return {name: (np.frombuffer(data, np.uint8), shapes[name]) for name, data in raw_tensors(folder).items()}


def codes_of(folder: Path) -> Codes:
    """Read the experts of a result in ModelOpt's layout, and change one code in fifty."""
    rng = np.random.default_rng(1)
    names = LAYOUTS["modelopt"]
    tensors = tensors_of(folder)
    found: dict[str, Nvfp4Weight] = {}
    for name, (data, shape) in tensors.items():
        module, _, parameter = name.rpartition(".")
        place = locate_module(module)
        if place is None or place.role is not Role.EXPERTS or parameter != names.weight:
            continue
        packed = data.reshape(shape).copy()
        changed = rng.random(packed.shape) < 0.02
        changed &= ((packed & 7) > 0) & ((packed & 7) < 7)
        packed[changed] += 1
        scales, scales_shape = tensors[f"{module}.{names.block_scale}"]
        scale = names.decode_scalar(tensors[f"{module}.{names.global_scale}"][0].tobytes())
        found[module] = Nvfp4Weight(packed, scales.reshape(scales_shape), scale)
    assert len(found) == 12
    return Codes(found)


@pytest.fixture(scope="module")
def statistics(statistics: Path) -> Statistics:
    return open_statistics(statistics)


@pytest.fixture(scope="module")
def walked(
    cut: Path, statistics: Statistics, tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, tuple[Codes, dict[str, Any]]]:
    """By smoothing: the codes of a walk, and the other tensors of the result."""
    made: dict[bool, tuple[Codes, dict[str, Any]]] = {}
    for smoothing in (False, True):
        folder = tmp_path_factory.mktemp("by-rule") / "out"
        execute(plan(cut, folder, statistics, layout="modelopt", smoothing=smoothing))
        made[smoothing] = codes_of(folder), tensors_of(folder)
    return made


def tasks_of(job: Job) -> list[ShardTask]:
    job.destination.folder.mkdir()
    tasks = (shard_task(job, shard.name) for shard in job.plan.jobs)
    return [replace(task, for_upload=True, calibration=job.calibration) for task in tasks]


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [False, True], ids=["as-is", "smoothing"])
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_the_codes_of_the_walk_are_written_and_compared(
    cut: Path, statistics: Statistics, walked: Any, tmp_path: Path, layout: Layout, smoothing: bool
) -> None:
    """Gate and up lie in different shards and have one global scale."""
    codes, by_rule = walked[smoothing]
    job = with_codes(plan(cut, tmp_path / "out", statistics, layout=layout, smoothing=smoothing), codes)
    records = [check_for_upload(task, convert_shard(task)) for task in tasks_of(job)]
    tensors = tensors_of(tmp_path / "out")
    names = LAYOUTS[layout]
    for module, expected in codes.found.items():
        assert np.array_equal(tensors[f"{module}.{names.weight}"][0], expected.packed.reshape(-1))
        assert np.array_equal(tensors[f"{module}.{names.block_scale}"][0], expected.block_scales.reshape(-1))
        assert names.stores(expected.global_scale, tensors[f"{module}.{names.global_scale}"][0].tobytes())
    gate, up = (EXPERT.format(0, kind) for kind in ("gate", "up"))
    assert codes.found[gate].global_scale == codes.found[up].global_scale
    if layout == "modelopt":
        others = [name for name in by_rule if name.rpartition(".")[0] not in codes.found]
        assert len(others) > 12
        assert all(np.array_equal(tensors[name][0], by_rule[name][0]) for name in others)
    for record in records:
        assert record.checked is not None
        assert parse(ShardRecord, encode(record).decode(), where="record") == record
        for projection in record.projections:
            found = projection.metrics
            assert found is not None
            assert (found.weighted_error or 0) > 0
    assert {p.module for record in records for p in record.projections} > codes.found.keys()


def test_codes_of_another_source_are_refused(cut: Path, statistics: Statistics, walked: Any, tmp_path: Path) -> None:
    doubled = {m: replace(w, global_scale=2 * w.global_scale) for m, w in walked[True][0].found.items()}
    job = with_codes(plan(cut, tmp_path / "out", statistics, layout="modelopt", smoothing=True), Codes(doubled))
    tasks = [task for task in tasks_of(job) if any(".experts." in o.name for o in task.shard.outputs)]
    with pytest.raises(CalibrationError, match=r"the walk's codes are .* start again in a different folder"):
        convert_shard(tasks[0])


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_result_is_validated_against_its_source_with_and_without_statistics(
    cut: Path, statistics: Statistics, walked: Any, tmp_path: Path, layout: Layout
) -> None:
    codes = walked[True][0]
    folder = tmp_path / "out"
    execute(with_codes(plan(cut, folder, statistics, layout=layout, smoothing=True), codes))
    for given in (None, statistics)[: 2 if layout == "modelopt" else 1]:
        report = validate_checkpoint(folder=folder, source=open_checkpoint(cut), statistics=given)
        document = validation_document(report)["weights"]
        assert report.contract.passed
        assert (document["verdicts"]["certificate"], document["verdicts"]["journal"]) == (Verdict.PASS, Verdict.PASS)
        assert (document["certificate"]["rule"], document["certificate"]["tensors"]) == ("gptq", 18)
    name = f"{EXPERT.format(3, 'up')}.{LAYOUTS[layout].weight}"
    tensor = open_checkpoint(folder).tensors[name]
    flip(folder / tensor.shard, tensor.begin + 40)
    report = validate_checkpoint(folder=folder, source=open_checkpoint(cut))
    assert report.weights is not None
    assert report.weights.journal_mismatches == (EXPERT.format(3, "up"),)
    offenders = [str(offender) for rule in report.contract.rules for offender in rule.offenders]
    assert any("totals.experts" in offender for offender in offenders)


def test_a_recipe_with_text_is_settled() -> None:
    unset = build_recipe({"name": "a", "activations": "w4a16"}, where="a")
    settled = settle_recipe(unset, has_text=True)
    assert (settled.rule, settled.smoothing) == ("gptq", False)
    with_fp4 = build_recipe({"name": "a", "activations": "w4a4"}, where="a")
    assert settle_recipe(with_fp4, has_text=True).smoothing
    off = settle_recipe(build_recipe({"name": "a", "rule": "gptq", "smoothing": False}, where="a"), has_text=True)
    assert (off.rule, off.smoothing) == ("gptq", False)
    assert settled.budget.tensor_sqnr_db < unset.budget.tensor_sqnr_db, "codes of a walk keep outputs, not weights"
    strict = build_recipe({"name": "a", "budget": {"tensor_sqnr_db": 21.0}}, where="a")
    assert settle_recipe(strict, has_text=True).budget == strict.budget


@pytest.mark.parametrize(
    ("recipe", "given", "problem"),
    [
        ({"rule": "gptq"}, (False, False), "--calibrate FILE"),
        ({"rule": "gptq"}, (True, False), "Add --calibrate FILE, without --statistics"),
        ({}, (True, True), "Leave out --statistics"),
        ({"rule": "mse"}, (False, True), "by rule gptq, not mse"),
        ({"rule": "max", "quantizer": "reference"}, (False, True), "quantizer reference cannot be calibrated"),
        ({"target": "bf16"}, (False, True), "target bf16 cannot be calibrated"),
    ],
)
def test_a_recipe_that_cannot_use_it_is_refused(recipe: dict[str, Any], given: tuple[bool, bool], problem: str) -> None:
    has_statistics, has_text = given
    with pytest.raises(RecipeError, match=problem):
        settle_recipe(build_recipe({"name": "a"} | recipe, where="a"), has_statistics=has_statistics, has_text=has_text)
