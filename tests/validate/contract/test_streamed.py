"""A result whose shards were removed from the disk is checked by the same rules as the whole folder."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from converted import check

from k2convert.checkpoint.header import TensorInfo, read_header
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.job.uploads import ShardHashes
from k2convert.validate.contract.streamed import check_streamed, scan_shard


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from k2convert.cli.app import main

    folder = tmp_path_factory.mktemp("streamed") / "out"
    with pytest.raises(SystemExit) as stopped:
        main(["run", str(tiny), str(folder)])
    assert stopped.value.code == 0
    return folder


def without_shards(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors", ".k2convert"))
    return target


def test_scans_of_single_shards_give_the_whole_folders_verdict(whole: Path, tmp_path: Path) -> None:
    shards = sorted(whole.glob("*.safetensors"))
    scans = [json.loads(json.dumps(scan_shard(whole, shard.name))) for shard in shards]
    headers = {shard.name: read_header(shard) for shard in shards}
    streamed = check_streamed(without_shards(whole, tmp_path / "left"), headers=headers, scans=scans)
    complete = check(whole)
    assert streamed.passed
    assert streamed.rules == complete.rules


def test_a_shard_that_is_not_the_recorded_one_fails(whole: Path, tmp_path: Path) -> None:
    shards = sorted(whole.glob("*.safetensors"))
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for shard in shards:
        shutil.copyfile(shard, damaged / shard.name)
    data = bytearray((damaged / shards[2].name).read_bytes())
    data[-1] ^= 1
    (damaged / shards[2].name).write_bytes(data)
    scans = [scan_shard(damaged, shard.name) for shard in shards]
    headers = {shard.name: read_header(shard) for shard in shards}
    assert not check_streamed(without_shards(whole, tmp_path / "left"), headers=headers, scans=scans).passed


def test_a_missing_scan_fails(whole: Path, tmp_path: Path) -> None:
    shards = sorted(whole.glob("*.safetensors"))
    scans = [scan_shard(whole, shard.name) for shard in shards[1:]]
    headers = {shard.name: read_header(shard) for shard in shards}
    assert not check_streamed(without_shards(whole, tmp_path / "left"), headers=headers, scans=scans).passed


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
