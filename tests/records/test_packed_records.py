"""Records of a job in memory: what a projection costs, and that packing changes nothing."""

import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from command import run_here

from k2convert.plan.recipe import Recipe
from k2convert.records.journal import Journal, PackedRecords
from k2convert.records.ledger import ProjectionRecord, ShardRecord, below_budget, summarize

NUM_PROJECTIONS = 2688  # of a layer of Kimi K3


@pytest.fixture(scope="module")
def finished(k3_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardRecord, Recipe]:
    """A record with as many projections as a shard of Kimi K3, and figures as large, and the recipe of its job."""
    folder = tmp_path_factory.mktemp("records") / "out"
    run_here("run", k3_tiny, folder, "--device", "cpu", code=0)
    job = Journal(folder).job()
    found = Journal(folder).records(job.digest)["model-00002-of-000007.safetensors"]
    choice = random.Random(0)
    projections: list[ProjectionRecord] = []
    for number in range(NUM_PROJECTIONS):
        measured = found.projections[number % len(found.projections)]
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
    return replace(found, projections=tuple(projections)), job.recipe


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
