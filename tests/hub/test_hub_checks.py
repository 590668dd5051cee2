"""What a job checks before main moves: a wrong byte anywhere, whoever wrote it, never reaches main."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import RunCli, messages_of
from damaged_files import edit_sealed, flip
from loopback import LoopbackHub
from published import JOB, assert_published, stop_before_main

from k2convert.checkpoint.header import read_header
from k2convert.job import publish, transfers
from k2convert.job import run as executor
from k2convert.job.shard import ShardTask
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.kernels import cpu
from k2convert.records.ledger import ShardRecord

SHARD = "model-00003-of-000005.safetensors"


def planted(monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path, ShardRecord], ShardRecord]) -> None:
    """Change a finished shard, or its record, between its conversion and its upload."""
    convert = executor.convert_shard

    def convert_and_plant(task: ShardTask, **options: Any) -> ShardRecord:
        record = convert(task, **options)
        return plant(task.destination / task.shard.name, record) if task.shard.name == SHARD else record

    monkeypatch.setattr(executor, "convert_shard", convert_and_plant)


def offset_of(path: Path, part: str) -> int:
    """The offset of a code byte, a block scale, a copied tensor's byte, or a byte of the header."""
    if part == "header":
        return path.read_bytes().index(b'"dtype":"') + len(b'"dtype":"')
    tensors = read_header(path).tensors
    dtype = {"code": "U8", "scale": "F8_E4M3", "copied": "BF16"}[part]
    return next(t.begin + t.num_bytes // 2 for t in tensors.values() if t.dtype == dtype)


def assert_nothing_on_main(server: LoopbackHub) -> None:
    repo = server.store.repos["me/out"]
    assert repo.num_commits("main") == 1
    assert list(repo.files()) == [".gitattributes"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("part", "with_xet"), [("code", True), ("scale", False), ("copied", True), ("header", False)])
def test_a_byte_planted_between_conversion_and_upload_stops_the_job(
    tiny_hub: LoopbackHub, cli: RunCli, part: str, with_xet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", not with_xet)

    def plant(path: Path, record: ShardRecord) -> ShardRecord:
        flip(path, offset_of(path, part))
        return record

    planted(monkeypatch, plant)
    done = cli(*JOB, code=1)
    [error] = [line for line in messages_of(done.stderr).splitlines() if line.startswith("error:")]
    assert f"{SHARD}: does not match its recorded hash. Delete it and rerun" in error
    assert_nothing_on_main(tiny_hub)


def test_a_result_below_the_budget_does_not_reach_main(tiny_hub: LoopbackHub, cli: RunCli, tmp_path: Path) -> None:
    recipe = tmp_path / "strict.yaml"
    recipe.write_text("name: strict\nrule: max\nbudget: {tensor_sqnr_db: 19.7}\n")
    done = cli(*JOB, "--recipe", str(recipe), code=3)
    assert "the result does not validate (rules 18), so main was not changed" in done.stderr
    assert_nothing_on_main(tiny_hub)


def edit_records(cwd: Path, change: Callable[[dict[str, Any]], object]) -> int:
    folder = cwd / "k2convert-work" / "me--out" / ".k2convert" / "done"
    paths = sorted(folder.iterdir())
    for path in paths:
        edit_sealed(path, change)
    return len(paths)


@pytest.mark.slow
def test_uncompared_shards_are_made_again(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path) -> None:
    stop_before_main(tiny_hub, cli)
    number = edit_records(cwd, lambda record: record.pop("checked"))
    done = cli(*JOB, "--json", code=0)
    assert f"{number} shards of an earlier run not validated" in " ".join(done.stderr.split())
    assert json.loads(done.stdout)["contract"] == {"rules": 19, "unchecked": [], "failed": []}
    assert_published(tiny_hub, local_result)


@pytest.mark.slow
def test_a_changed_side_file(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = transfers.copy_small_files

    def keep_changed(job: Any) -> Path:
        folder = keep(job)
        flip(folder / "tokenizer_config.json", 5)
        return folder

    monkeypatch.setattr(transfers, "copy_small_files", keep_changed)
    done = cli(*JOB, code=1)
    assert "tokenizer_config.json: differs from the file of moon/tiny" in " ".join(done.stderr.split())
    assert_nothing_on_main(tiny_hub)


@pytest.mark.parametrize(
    ("name", "words"),
    [(SHARD, "does not match its recorded hash"), ("tokenizer_config.json", "changed after it was validated")],
)
def test_publish_sends_only_what_it_validated(
    server: LoopbackHub,
    cli: RunCli,
    cwd: Path,
    local_result: Path,
    name: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(local_result, cwd / "out")
    send = publish.publish_folder

    def change_and_send(*args: Any, **options: Any) -> str:
        flip(cwd / "out" / name, 5)
        return send(*args, **options)

    monkeypatch.setattr(publish, "publish_folder", change_and_send)
    done = cli("publish", "out", "--repo", "me/out", "--yes", code=1)
    assert f"{name}: {words}" in " ".join(done.stderr.split())
    assert_nothing_on_main(server)


def test_a_wrong_kernel_stops_the_job(tiny_hub: LoopbackHub, cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = cpu.convert

    def convert_wrongly(weight: Int4Weight, **options: Any) -> Any:
        converted = convert(weight, **options)
        converted.weight.packed.reshape(-1)[7] ^= 0x10
        return converted

    monkeypatch.setattr(cpu, "convert", convert_wrongly)
    done = cli(*JOB, code=3)
    assert "codes are not the nearest ones" in " ".join(done.stderr.split())
    assert "The shard was not uploaded. Run the same command again" in " ".join(done.stderr.split())
    assert_nothing_on_main(tiny_hub)
