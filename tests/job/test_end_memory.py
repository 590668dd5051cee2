"""The memory that a job for the Hub needs at its end, with the headers of K2 and K3 and no weights.

The records are made up: each has the figures of its shard's projections, and those of a check that found nothing.
"""

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import cli_environment

from k2convert.hub.client import Hub
from k2convert.hub.preflight import Target
from k2convert.job import publish
from k2convert.job.assemble import assemble
from k2convert.job.locations import Destination
from k2convert.job.prepare import Job, JobOptions, memory_bytes, open_job
from k2convert.job.resources import Item
from k2convert.job.transfers import Uploads
from k2convert.machine import peak_bytes
from k2convert.plan.plan import ConvertStep, CopyStep, ShardJob
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.records.journal import PackedRecords
from k2convert.records.ledger import ProjectionRecord, ShardFindings, ShardRecord

TARGET = Target("me/out", private=True, head=None, files={}, notices=())


def metrics(num_weights: int, number: int) -> WeightMetrics:
    """Figures that no other projection has, so that each takes the memory of its own."""
    energy = num_weights * (1 + number / 1e6)
    blocks = num_weights // 16
    histogram = {byte: blocks // 60 + (number + byte) % 7 for byte in range(30, 90)}
    return WeightMetrics(
        num_weights, blocks, energy, energy / 200, num_weights, num_weights // 2, 999, num_weights, 0.9 + number / 1e9,
        num_weights, 12345, 0, 0, 0, 30, 89, histogram, blocks // 64, energy / 9999, energy / 5000,
    )  # fmt: skip


def record_of(job: Job, shard: ShardJob, item: Item) -> ShardRecord:
    members = [member for step in shard.steps if isinstance(step, ConvertStep) for member in step.members]
    figures = [metrics(m.num_rows * m.num_columns, i) for i, m in enumerate(members)]
    projections = (ProjectionRecord(m.module, m.role, 2.0**-11, f) for m, f in zip(members, figures, strict=True))
    scalars = {".weight_scale_2": struct.pack("<f", 2.0**-11).hex(), ".input_scale": struct.pack("<f", 1.0).hex()}
    findings = ShardFindings(
        blake3="ab" * 32,
        copied=tuple(sorted(step.tensor.name for step in shard.steps if isinstance(step, CopyStep))),
        scaled=(),
        decoded={m.module: replace(f, scale_histogram={}) for m, f in zip(members, figures, strict=True)},
        certified_rows=dict.fromkeys((m.module for m in members), 2),
        certified_whole=False,
        invalid_scales={},
        subnormal_scales={},
        zero_blocks_with_codes={},
        scalars={o.name: data for o in shard.outputs for end, data in scalars.items() if o.name.endswith(end)},
    )
    headers = {name: job.source.checkpoint.headers[name].digest for name in shard.source_shards}
    return ShardRecord(
        shard.name, job.digest, "ab" * 32, item.output_bytes, shard.num_outputs, headers, tuple(projections),
        sha256="cd" * 32, checked=findings,
    )  # fmt: skip


class Sent(Uploads):
    """All shards are on the branch."""

    def commit_to_main(self, **_: Any) -> str:
        return "c" * 40


def end(source: Path, out: Path) -> None:
    """Do what a job does after its last shard; print its verdict, its peak, and the memory that was planned."""
    publish.published_card = lambda *_: None
    publish.card_to_commit = lambda *_, **__: None
    with open_job(JobOptions(str(source), Destination(out)), hub=Hub()) as job:
        planned = memory_bytes(replace(job, target=TARGET))
        out.mkdir()
        records = PackedRecords()
        for shard, item in zip(job.plan.jobs, job.items, strict=True):
            records[shard.name] = record_of(job, shard, item)
        names = assemble(job, records)
        uploads = Sent(None, None, records)  # type: ignore[arg-type]
        _, validation = publish.publish_result(job, TARGET, uploads, names)
        failed = validation.contract.failed
    sys.stdout.write(json.dumps({"failed": failed, "peak": peak_bytes(), "planned": planned}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("headers", "limit", "memory"), [("k2_headers", 0.6e9, 640 << 20), ("k3_headers", 1.0e9, 1 << 30)]
)
def test_the_end_of_a_whole_job_stays_within_what_the_dry_run_says(
    headers: str, limit: float, memory: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    from test_job_memory import cgroup  # which loads torch, and the other process must not

    words = [sys.executable, __file__, request.getfixturevalue(headers), tmp_path / "out"]
    environment = cli_environment() | {"HF_HUB_DISABLE_XET": "1"}
    environment["PYTHONPATH"] += f":{Path(__file__).parents[1]}"
    with cgroup(memory=memory, cores=1) as enter:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, preexec_fn=enter)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["failed"] == []
    assert report["peak"] < limit
    assert report["peak"] / 1.25 < report["planned"] < memory


if __name__ == "__main__":
    end(*map(Path, sys.argv[1:]))
