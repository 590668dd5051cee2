"""The per-shard function: a task and a record travel between processes, and the bytes are those of a whole job."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversions import plan_job

from k2convert.job import resources
from k2convert.job import run as executor
from k2convert.job.shard import ShardTask, convert_shard
from k2convert.records.ledger import ShardRecord

IN_ANOTHER_PROCESS = """
import pickle, sys
from k2convert.job.shard import convert_shard
tasks = pickle.loads(sys.stdin.buffer.read())
sys.stdout.buffer.write(pickle.dumps([convert_shard(task) for task in tasks]))
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("overrides", [{}, {"rule": "max", "layout": "compressed-tensors"}, {"target": "bf16"}])
def test_a_task_is_pickled_and_converted_in_another_process(
    split: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: dict[str, Any],
) -> None:
    tasks: list[ShardTask] = []

    def remember(task: ShardTask, **options: Any) -> ShardRecord:
        tasks.append(task)
        return convert_shard(task, **options)

    monkeypatch.setattr(executor, "convert_shard", remember)
    source: dict[str, Any] = {"source": split}
    whole = executor.execute(plan_job(folder=tmp_path / "whole", **source, **overrides))
    assert len(tasks) == len(whole.records) > 1 or overrides == {"target": "bf16"}
    (tmp_path / "apart").mkdir()
    there = [replace(task, destination=tmp_path / "apart") for task in tasks]
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS], input=pickle.dumps(there), capture_output=True, check=True
    )
    for task, record in zip(tasks, pickle.loads(done.stdout), strict=True):
        name = task.shard.name
        assert record == whole.records[name]
        assert (tmp_path / "apart" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_each_header_of_a_result_is_encoded_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = resources.encode_header
    encoded = list[Any]()

    def counted(tensors: Any, **options: Any) -> bytes:
        encoded.append(tensors)
        return encode(tensors, **options)

    monkeypatch.setattr(resources, "encode_header", counted)
    job = plan_job(tiny, tmp_path / "out")
    assert len(encoded) == len(job.plan.jobs) == 5
    executor.execute(job)
    assert len(encoded) == 10, "and once more when its shard is written"
    sizes = {item.name: item.output_bytes for item in job.items}
    assert sizes == {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")}
