"""A shard for the Hub is compared with its source while it is written: what a wrong converter writes is found."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from statistics_makers import random_statistics

from k2convert.calibrate.statistics import Statistics, open_statistics
from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.writer import ShardWriter
from k2convert.errors import CheckpointError, InvalidCheckpointError
from k2convert.job import shard as converter
from k2convert.job.places import Destination, Source
from k2convert.job.prepare import choose_recipe, prepare
from k2convert.job.shard import ShardTask, convert_shard
from k2convert.quantize.quantizer import create_quantizer
from k2convert.records.shard_record import ShardRecord
from k2convert.validate.validation import validate_checkpoint

SHARD = "model-00003-of-000005.safetensors"


def task_for(
    source: Path, folder: Path, shard: str = SHARD, *, statistics: Statistics | None = None, **overrides: Any
) -> ShardTask:
    checkpoint = open_checkpoint(source)
    recipe = choose_recipe(checkpoint, None, overrides)
    job = prepare(
        source=Source(checkpoint),
        destination=Destination(folder),
        recipe=recipe,
        statistics=statistics,
        device="cpu",
    )
    planned = next(s for s in job.plan.jobs if s.name == shard)
    return ShardTask(
        shard=planned,
        recipe=job.plan.recipe,
        source_folder=source,
        destination=folder,
        device="cpu",
        fingerprint=job.digest,
        header_digests={name: checkpoint.headers[name].digest for name in planned.source_shards},
        inflight_bytes=1 << 26,
        for_upload=True,
        calibration=job.calibration,
    )


@pytest.fixture
def task(tiny: Path, tmp_path: Path) -> ShardTask:
    return task_for(tiny, tmp_path)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("rule", ["optimal", "plain"])
def test_every_tensor_of_a_good_shard_is_compared(tiny: Path, tmp_path: Path, layout: str, rule: str) -> None:
    source, folder = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    folder.mkdir()
    for path in tiny.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    task = task_for(source, folder, layout=layout, rule=rule)
    record = convert_shard(task)
    assert record.is_checked
    assert record.checked is not None
    assert record.checked.decoded.keys() == {p.module for p in record.projections}
    names = set(read_header(folder / SHARD).tensors)
    assert names == set(record.checked.copied) | {n for n in names if n.rpartition(".")[0] in record.checked.decoded}
    assert ShardRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_the_figures_are_those_of_validating_the_written_folder(tiny: Path, tmp_path: Path) -> None:
    """The decoded errors of a job for the Hub, and those of `validate --source` on the local result."""
    from k2convert.cli.app import main

    with pytest.raises(SystemExit):
        main(["run", str(tiny), str(tmp_path / "out")])
    found = validate_checkpoint(folder=tmp_path / "out", source=open_checkpoint(tiny)).weights
    (tmp_path / "one").mkdir()
    record = convert_shard(task_for(tiny, tmp_path / "one"))
    assert found is not None
    assert record.checked is not None
    for module, figures in record.checked.decoded.items():
        error = found.errors[module]
        assert figures.pop("sampled_blocks") > 0
        assert figures == error.to_dict()


@pytest.mark.parametrize("part", ["packed", "block_scales"])
def test_a_wrong_byte_of_the_quantizer_is_found(task: ShardTask, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.right = create_quantizer(*args, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.right, name)

        def quantize(self, *args: Any, **options: Any) -> Any:
            result, metrics = self.right.quantize(*args, **options)
            data = getattr(result, part).reshape(-1)
            data[np.flatnonzero(data & 7)[5]] ^= 1
            return result, metrics

    monkeypatch.setattr(converter, "create_quantizer", Wrong)
    with pytest.raises(InvalidCheckpointError, match=rf"^{SHARD}: .* differ.*Run the same command"):
        convert_shard(task)


def wrong_scalar(monkeypatch: pytest.MonkeyPatch) -> None:
    right = converter.scalar_bytes
    monkeypatch.setattr(converter, "scalar_bytes", lambda *a: [bytes([*right(*a)[0][:3], 0x3E]), *right(*a)[1:]])


def wrong_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    right = converter._Conversion._copy_step

    def flipped(*args: Any) -> Any:
        (data,), records = right(*args)
        data[-1] ^= 1
        return [data], records

    monkeypatch.setattr(converter._Conversion, "_copy_step", flipped)


def wrong_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader takes the bytes of a place next to the right one."""
    right = converter.ShardReader._read
    monkeypatch.setattr(converter.ShardReader, "_read", lambda self, t, b, e: right(self, t, b - 1, e - 1))


def wrong_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors of the same form change their places, in the header only."""
    right = converter.encode_header

    def swapped(tensors: list[Any], **options: Any) -> bytes:
        one, other = next(
            (i, k) for i, t in enumerate(tensors) for k in range(i) if t[3] > 8 and t[1:] == tensors[k][1:]
        )
        tensors[one], tensors[other] = tensors[other], tensors[one]
        return right(tensors, **options)

    monkeypatch.setattr(converter, "encode_header", swapped)


def wrong_write(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ShardWriter.write
    monkeypatch.setattr(ShardWriter, "write", lambda self, data: right(self, bytes(data)[:-1] + b"\x00"))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (wrong_scalar, "the rule gives"),
        (wrong_copy, "the bytes to write are not the source's"),
        (wrong_read, "not the source's|differ"),
        (wrong_header, "not where the header says|not the source's|differ"),
        (wrong_write, "does not hold the bytes that were compared"),
    ],
)
def test_every_other_wrong_part_is_found(
    task: ShardTask, break_it: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises((InvalidCheckpointError, CheckpointError), match=words):
        convert_shard(task)


def test_a_source_whose_header_changed_is_refused(task: ShardTask) -> None:
    changed = replace(task, header_digests=dict.fromkeys(task.header_digests, "0" * 64))
    with pytest.raises(CheckpointError, match=r"its header changed since planning\. Run the same command again"):
        convert_shard(changed)


def test_a_local_result_has_no_findings_in_its_record(task: ShardTask) -> None:
    record = convert_shard(replace(task, for_upload=False))
    assert record.checked is None
    assert "checked" not in record.to_dict()


CUT_SHARD = "model-00002-of-000005.safetensors"
ROUTER, GATE = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.0.gate_proj"


@pytest.fixture
def calibrated(cut: Path, tmp_path: Path) -> ShardTask:
    """A shard of a job with statistics: norm, router and experts."""
    statistics = open_statistics(random_statistics(tmp_path / "cut.stats", cut))
    (tmp_path / "out").mkdir()
    return task_for(cut, tmp_path / "out", CUT_SHARD, statistics=statistics, rule="weighted")


def test_a_shard_made_with_statistics_is_compared_with_them(calibrated: ShardTask) -> None:
    record = convert_shard(calibrated)
    assert record.checked is not None
    assert ROUTER in record.checked.copied
    assert record.checked.decoded[GATE]["weighted_error"] > 0
    assert ShardRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


@pytest.mark.parametrize("part", ["copy", "weight", "importance"])
def test_one_wrong_exponent_or_importance_is_found_before_the_upload(
    calibrated: ShardTask, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"copy": "scaled_copy", "weight": "divided_weight", "importance": "projection_importance"}[part]
    right = getattr(converter, name)

    def wrong(*args: Any) -> Any:
        if part == "copy" and args[1].name == ROUTER:
            return right(*args[:-1], np.roll(args[-1], 1))
        if part == "weight" and args[1].module == GATE:
            return right(*args[:-1], np.roll(args[-1], 1))
        found = right(*args)
        return np.full_like(found, 255) if part == "importance" and args[0].module == GATE else found

    monkeypatch.setattr(converter, name, wrong)
    with pytest.raises(InvalidCheckpointError, match=ROUTER if part == "copy" else f"{GATE}.* differ"):
        convert_shard(calibrated)
