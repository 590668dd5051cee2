"""A finished shard of a job for the Hub is validated by the pass of `validate`: alone, and joined with the others."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from conversions import plan_job

from k2convert.check.results import ValidationReport
from k2convert.check.shards import check_finished_shard
from k2convert.check.validate import validate_checkpoint, validate_sent
from k2convert.checkpoint.header import read_header
from k2convert.errors import ChangedFileError, CheckpointError, InvalidCheckpointError
from k2convert.job.assemble import assemble
from k2convert.job.prepare import Job
from k2convert.job.resources import output_headers
from k2convert.job.shard import ShardTask, convert_shard
from k2convert.job.transfers import check_for_upload
from k2convert.models import find_family
from k2convert.plan.plan import CopyStep
from k2convert.records.document import encode, parse
from k2convert.records.ledger import ShardFindings, ShardRecord
from scripts.fixture_maker import damage

SHARD = "model-00003-of-000005.safetensors"


def tasks(job: Job) -> dict[str, ShardTask]:
    headers = job.source.checkpoint.headers
    job.destination.folder.mkdir(exist_ok=True)
    return {
        shard.name: ShardTask(
            shard=shard,
            recipe=job.plan.recipe,
            source_folder=job.source.checkpoint.folder,
            destination=job.destination.folder,
            fingerprint=job.digest,
            header_digests={name: headers[name].digest for name in shard.source_shards},
            inflight_bytes=1 << 26,
            family=job.plan.family,
        )
        for shard in job.plan.jobs
    }


def sent_record(task: ShardTask) -> ShardRecord:
    """Convert a shard and validate it, as a job for the Hub does."""
    return check_for_upload(task, convert_shard(replace(task, for_upload=True)))


def check(task: ShardTask, record: ShardRecord, **other: Any) -> ShardFindings:
    options = {"source_folder": task.source_folder, "recipe": task.recipe, "calibration": task.calibration}
    options |= {"family": find_family(task.family)}
    return check_finished_shard(task.destination / record.shard, record, **options | other)


@pytest.fixture
def task(tiny: Path, tmp_path: Path) -> ShardTask:
    return tasks(plan_job(tiny, tmp_path / "out"))[SHARD]


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("rule", ["mse", "max"])
def test_every_tensor_of_a_good_shard_is_compared(tiny: Path, tmp_path: Path, layout: str, rule: str) -> None:
    task = tasks(plan_job(tiny, tmp_path / "out", layout=layout, rule=rule))[SHARD]
    assert convert_shard(task).checked is None, "a local result is validated as a whole"
    record = sent_record(task)
    assert record.checked.decoded.keys() == {p.module for p in record.projections}
    names = set(read_header(tmp_path / "out" / SHARD).tensors)
    assert names == set(record.checked.copied) | {n for n in names if n.rpartition(".")[0] in record.checked.decoded}
    assert parse(ShardRecord, encode(record).decode(), where="record") == record


def tampered(task: ShardTask, change: Callable[[bytearray], object]) -> ShardRecord:
    """Convert a shard and change its file; the record has the hash of the changed one."""
    record = convert_shard(task)
    path = task.destination / task.shard.name
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return replace(record, blake3=blake3(data).hexdigest())


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (".weight", "codes are not the nearest ones"),
        (".weight_scale", "not the (nearest|best) ones"),
        (".weight_scale_2", "the rule gives"),
        ("layernorm.weight", "not the source's"),
    ],
)
def test_one_wrong_byte_is_found(task: ShardTask, part: str, words: str) -> None:
    def change(data: bytearray) -> None:
        tensors = read_header(task.destination / SHARD).tensors.values()
        is_copy = part.startswith("layernorm")
        tensor = next(t for t in tensors if t.name.endswith(part) and (is_copy or ".experts." in t.name))
        data[tensor.begin + tensor.num_bytes // 2] ^= 1

    with pytest.raises(InvalidCheckpointError, match=rf"^{SHARD}: .*{words}.*Run the same command"):
        check(task, tampered(task, change))


def test_tensors_that_changed_places_in_the_header_are_found(task: ShardTask) -> None:
    """Only the names are swapped: dtypes, shapes and places stay."""

    def change(data: bytearray) -> None:
        name, other = (f'model.layers.2.mlp.experts.{e}.down_proj.weight_scale"'.encode() for e in (0, 1))
        first, second = sorted((data.index(name), data.index(other)))
        data[first : first + len(name)], data[second : second + len(name)] = (
            data[second : second + len(name)],
            data[first : first + len(name)],
        )

    with pytest.raises(InvalidCheckpointError, match="not the nearest"):
        check(task, tampered(task, change))


def test_another_file_and_figures_that_are_not_those_of_the_bytes_are_found(task: ShardTask) -> None:
    record = convert_shard(task)
    with pytest.raises(ChangedFileError):
        check(task, replace(record, blake3="0" * 64))
    first = record.projections[0]
    wrong = replace(first, metrics=replace(first.metrics, squared_error=first.metrics.squared_error * 0.9))
    with pytest.raises(InvalidCheckpointError, match="squared_error"):
        check(task, replace(record, projections=(wrong, *record.projections[1:])))


def test_a_plan_that_reads_the_wrong_place_is_found_and_the_shard_is_removed(task: ShardTask) -> None:
    """A tensor is copied from the place of another one of the same form."""
    copies = [step for step in task.shard.steps if isinstance(step, CopyStep)]
    original, other = next((a, b) for a in copies for b in copies if a is not b and a.tensor.shape == b.tensor.shape)
    wrong = replace(original, tensor=original.tensor._replace(begin=other.tensor.begin, end=other.tensor.end))
    steps = tuple(wrong if step is original else step for step in task.shard.steps)
    with pytest.raises(InvalidCheckpointError, match=f"{original.tensor.name}: .* bytes are not the source's"):
        sent_record(replace(task, shard=replace(task.shard, steps=steps)))
    assert not (task.destination / SHARD).exists()


def test_a_source_whose_header_changed_is_refused(task: ShardTask) -> None:
    changed = replace(task, header_digests=dict.fromkeys(task.header_digests, "0" * 64))
    with pytest.raises(CheckpointError, match=r"its header changed since planning\. Run the same command again"):
        sent_record(changed)


@dataclass(frozen=True)
class Sent:
    """A whole local result, the records of its shards as a job for the Hub has them, and what stays on the disk."""

    job: Job
    records: list[ShardRecord]
    left: Path

    def validate(self, *changed: ShardRecord) -> ValidationReport:
        """Validate with some records replaced."""
        records = {record.shard: record for record in (*self.records, *changed)}
        headers = output_headers(self.job.plan, source={})
        source = self.job.source.checkpoint
        return validate_sent(self.left, headers=headers, source=source, records=list(records.values()))


def all_sent(job: Job) -> tuple[Job, list[ShardRecord]]:
    """Convert and validate every shard; the records are those that were written."""
    records = [sent_record(task) for task in tasks(job).values()]
    assemble(job, {record.shard: record for record in records})
    return job, [parse(ShardRecord, encode(record).decode(), where="record") for record in records]


@pytest.fixture(scope="module")
def converted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, list[ShardRecord]]:
    return all_sent(plan_job(tiny, tmp_path_factory.mktemp("sent") / "out"))


@pytest.fixture
def sent(converted: tuple[Job, list[ShardRecord]], tmp_path: Path) -> Sent:
    job, records = converted
    shards = shutil.ignore_patterns("*.safetensors")
    return Sent(job, records, shutil.copytree(job.destination.folder, tmp_path / "left", ignore=shards))


def test_findings_on_shards_with_fp8_weights_give_the_verdict_too(tiny: Path, tmp_path: Path) -> None:
    keys = {"layout": "compressed-tensors", "fp8": ("attention", "shared_experts", "dense_mlp")}
    job, records = all_sent(plan_job(tiny, tmp_path / "out", **keys))
    assert_same_verdict(Sent(job, records, tmp_path / "out"))
    task = tasks(job)[SHARD]
    codes = read_header(tmp_path / "out" / SHARD).tensors["model.layers.2.self_attn.o_proj.weight"]

    def change(data: bytearray) -> None:
        data[codes.begin + 100] ^= 1

    with pytest.raises(InvalidCheckpointError, match=r"o_proj: 1 of .* codes are not the nearest ones"):
        check(task, tampered(task, change))


def test_findings_on_single_shards_give_the_verdict_on_the_whole_folder(sent: Sent) -> None:
    assert_same_verdict(sent)


def assert_same_verdict(sent: Sent) -> None:
    """The findings on shards give the report on the folder."""
    report = sent.validate()
    whole = validate_checkpoint(folder=sent.job.destination.folder, source=sent.job.source.checkpoint)
    assert report.passed
    assert report.contract.unchecked == []
    assert report.contract.rules == whole.contract.rules
    assert replace(report.weights, journal_compared=0) == replace(whole.weights, journal_compared=0)


def test_a_shard_that_was_not_validated_fails(sent: Sent) -> None:
    for record in sent.records:
        expected = [*([7] if record.checked.copied else []), *([18] if record.checked.decoded else []), 19]
        for other in (replace(record, checked=None), replace(record, blake3="0" * 64)):
            assert sent.validate(other).contract.failed == expected


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda c: {"invalid_scales": {next(iter(c.scalars)): 3}}, 4),
        (lambda c: {"zero_blocks_with_codes": {next(iter(c.scalars)): 3}}, 4),
        (lambda c: {"scalars": dict.fromkeys(c.scalars, "00000000")}, 6),
        (lambda c: {"copied": c.copied[1:]}, 7),
        (lambda c: {"blake3": "0" * 64}, 19),
    ],
)
def test_findings_of_shards_decide(sent: Sent, change: Callable[[ShardFindings], Mapping[str, Any]], rule: int) -> None:
    record = next(record for record in sent.records if record.shard == SHARD)
    wrong = replace(record, checked=replace(record.checked, **change(record.checked)))
    assert rule in sent.validate(wrong).contract.failed


def test_figures_and_side_files_on_the_disk_are_checked_too(sent: Sent) -> None:
    damage.edit_json(sent.left / "k2convert.json", lambda d: d["totals"]["total"].update(squared_error=1.0))
    (sent.left / "tokenizer_config.json").write_text("{}")
    assert sent.validate().contract.failed == [17, 19]
