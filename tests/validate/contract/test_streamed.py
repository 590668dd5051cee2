"""A result whose shards were removed from the disk is checked by the same rules as the whole folder."""

import hashlib
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from k2convert.checkpoint.header import ShardHeader, TensorInfo, read_header
from k2convert.checkpoint.index import Checkpoint, open_checkpoint
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.job import run as executor
from k2convert.job.places import Destination, Source
from k2convert.job.prepare import choose_recipe, prepare
from k2convert.job.shard import ShardTask, convert_shard
from k2convert.job.uploads import ShardHashes
from k2convert.records.shard_record import ShardRecord
from k2convert.validate.contract.findings import ContractReport
from k2convert.validate.contract.streamed import scan_shard
from k2convert.validate.streamed import validate_streamed
from k2convert.validate.validation import validate_checkpoint


@dataclass(frozen=True)
class Result:
    """A whole local result of `source`, its headers, and the records of its shards as compared with the source."""

    folder: Path
    source: Checkpoint
    headers: dict[str, ShardHeader]
    records: list[ShardRecord]

    def check(
        self, folder: Path, scans: list[dict[str, Any]], records: list[ShardRecord] | None = None
    ) -> ContractReport:
        """Check the rules on a folder without shards."""
        found = self.records if records is None else records
        return validate_streamed(folder, headers=self.headers, scans=scans, source=self.source, records=found).contract


@pytest.fixture(scope="module")
def result(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A local result, and the records of the same shards as a job for the Hub writes them."""
    folder, again = tmp_path_factory.mktemp("streamed") / "out", tmp_path_factory.mktemp("again")
    tasks: list[ShardTask] = []

    def remember(task: ShardTask, **options: Any) -> ShardRecord:
        tasks.append(task)
        return convert_shard(task, **options)

    with pytest.MonkeyPatch.context() as during:
        during.setattr(executor, "convert_shard", remember)
        source = open_checkpoint(tiny)
        recipe = choose_recipe(source, None, {})
        job = prepare(source=Source(source), destination=Destination(folder), recipe=recipe, device="cpu")
        executor.execute(job)
    records = [convert_shard(replace(task, destination=again, for_upload=True)) for task in tasks]
    return Result(folder, source, {path.name: read_header(path) for path in folder.glob("*.safetensors")}, records)


@pytest.fixture(scope="module")
def whole(result: Result) -> Path:
    return result.folder


def without_shards(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors", ".k2convert"))
    return target


def test_scans_of_single_shards_give_the_whole_folders_verdict(result: Result, tmp_path: Path) -> None:
    scans = [json.loads(json.dumps(scan_shard(result.folder, name))) for name in sorted(result.headers)]
    left = without_shards(result.folder, tmp_path / "left")
    streamed = validate_streamed(
        left, headers=result.headers, scans=scans, source=result.source, records=result.records
    )
    complete = validate_checkpoint(folder=result.folder, source=result.source)
    assert streamed.passed
    assert streamed.contract.unchecked == []
    assert streamed.contract.rules == complete.contract.rules
    assert streamed.weights == complete.weights


def test_a_shard_that_is_not_the_recorded_one_fails(result: Result, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for name in result.headers:
        shutil.copyfile(result.folder / name, damaged / name)
    changed = damaged / sorted(result.headers)[2]
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    scans = [scan_shard(damaged, name) for name in result.headers]
    assert result.check(without_shards(result.folder, tmp_path / "left"), scans).failed == [19]


def test_a_missing_scan_fails(result: Result, tmp_path: Path) -> None:
    scans = [scan_shard(result.folder, name) for name in sorted(result.headers)[1:]]
    assert result.check(without_shards(result.folder, tmp_path / "left"), scans).failed == [19]


def test_a_missing_comparison_with_the_source_fails(result: Result, tmp_path: Path) -> None:
    scans = [scan_shard(result.folder, name) for name in result.headers]
    left = without_shards(result.folder, tmp_path / "left")
    for record in result.records:
        assert record.checked is not None
        without = [replace(r, checked=None) if r is record else r for r in result.records]
        expected = [*([7] if record.checked.copied else []), *([18] if record.checked.decoded else [])]
        assert result.check(left, scans, without).failed == expected


def test_figures_that_are_not_the_ledgers_fail(result: Result, tmp_path: Path) -> None:
    scans = [scan_shard(result.folder, name) for name in result.headers]
    left = without_shards(result.folder, tmp_path / "left")
    ledger = json.loads((left / "k2convert.json").read_text())
    ledger["totals"]["total"]["squared_error"] *= 0.5
    (left / "k2convert.json").write_text(json.dumps(ledger))
    assert result.check(left, scans).failed == [19]


def test_a_side_file_that_differs_from_the_sources_fails(result: Result, tmp_path: Path) -> None:
    scans = [scan_shard(result.folder, name) for name in result.headers]
    left = without_shards(result.folder, tmp_path / "left")
    (left / "tokenizer_config.json").write_text("{}")
    assert result.check(left, scans).failed == [17]


def test_a_files_sha256_can_be_taken_from_the_scan(whole: Path) -> None:
    hashes = ShardHashes()
    for shard in whole.glob("*.safetensors"):
        scan_shard(whole, shard.name, visitor=hashes)
        assert hashes.sha256(shard.name) == hashlib.sha256(shard.read_bytes()).hexdigest()


def test_with_its_blake3_a_scan_finds_the_same_and_reads_only_scales(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def count(reader: ShardReader, tensor: TensorInfo, **place: int) -> Bytes:
        data = plain_read(reader, tensor, **place)
        read.append(data.size)
        return data

    plain_read = ShardReader.read
    monkeypatch.setattr(ShardReader, "read", count)
    headers = {path.name: read_header(path) for path in whole.glob("*.safetensors")}
    scales = {n: [t for t in h.tensors.values() if t.name.endswith("weight_scale")] for n, h in headers.items()}
    shard = tmp_path / max(scales, key=lambda name: len(scales[name]))
    data = bytearray((whole / shard.name).read_bytes())
    for tensor, value in zip(scales[shard.name], (0x7F, 0x01, 0x00), strict=False):
        data[tensor.begin] = value
    shard.write_bytes(data)
    found = scan_shard(tmp_path, shard.name)
    everything = sum(read)
    read.clear()
    again = scan_shard(tmp_path, shard.name, blake3=found["digests"][shard.name])
    assert again == found
    assert found["invalid_scales"]
    assert found["subnormal_scales"]
    assert found["zero_blocks_with_codes"]
    assert everything >= len(data)
    assert sum(read) < len(data) / 4
