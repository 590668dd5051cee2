"""A shard of a pruned result is compared with its source through the list of kept experts, not through the view."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.reader import Bytes
from k2convert.errors import InvalidCheckpointError
from k2convert.job import shard as converter
from k2convert.job.shard import ShardTask, convert_shard
from k2convert.plan.plan import plan_conversion
from k2convert.plan.pruning import KeptExperts, keep_experts
from k2convert.plan.recipe import load_recipe

KEPT = KeptExperts({1: (0, 3)})
SHARD = "model-00002-of-000005.safetensors"
ROUTER = "model.layers.1.mlp.gate"
EXPERTS = r"model\.layers\.1\.mlp\.experts"


def tasks_for(source: Path, folder: Path, view_of: KeptExperts = KEPT) -> dict[str, ShardTask]:
    """Plan the source with the experts of `view_of`, for checks against KEPT."""
    whole = open_checkpoint(source)
    whole = replace(whole, config_text=json.dumps(whole.config | {"num_experts_per_tok": 2}))
    plan = plan_conversion(source=keep_experts(whole, view_of), recipe=load_recipe("kimi-k2-thinking-nvfp4"))
    return {
        shard.name: ShardTask(
            shard=shard,
            recipe=plan.recipe,
            source_folder=source,
            destination=folder,
            device="cpu",
            fingerprint="0" * 64,
            header_digests={name: whole.headers[name].digest for name in shard.source_shards},
            inflight_bytes=1 << 26,
            for_upload=True,
            kept=KEPT,
        )
        for shard in plan.jobs
    }


def test_every_tensor_of_a_pruned_shard_is_compared(cut: Path, tmp_path: Path) -> None:
    """Gate and up of expert 0 lie in different shards of the source, those of expert 3 in one."""
    tasks = tasks_for(cut, tmp_path)
    for name, task in tasks.items():
        record = convert_shard(task)
        assert record.checked is not None, name
        compared = {*record.checked.copied, *record.checked.decoded}
        assert all({o.name, o.name.rpartition(".")[0]} & compared for o in task.shard.outputs)
        assert name != SHARD or f"{ROUTER}.e_score_correction_bias" in compared


@pytest.mark.parametrize(
    ("view_of", "words"),
    [
        ((0, 2), rf"{EXPERTS}\.1\.\w+\.weight_packed: is not read from where the source has it"),
        ((1, 3), rf"{EXPERTS}\.0\.\w+\.weight_packed: is not read from where the source has it"),
    ],
)
def test_another_expert_is_found(cut: Path, tmp_path: Path, view_of: tuple[int, int], words: str) -> None:
    task = tasks_for(cut, tmp_path, KeptExperts({1: view_of}))[SHARD]
    steps = tuple(step for step in task.shard.steps if not any(ROUTER in output.name for output in step.outputs))
    with pytest.raises(InvalidCheckpointError, match=words):
        convert_shard(replace(task, shard=replace(task.shard, steps=steps)))
    assert not (tmp_path / SHARD).exists()


def test_wrong_rows_of_the_router_are_found(cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first(self: converter.ShardReader, tensor: converter.TensorInfo, rows: tuple[int, ...]) -> Bytes:
        whole = self._bytes(tensor, tensor.begin, tensor.end, is_last_use=False)
        return whole.reshape(-1, tensor.num_bytes // len(rows))[: len(rows)].reshape(-1)

    monkeypatch.setattr(converter.ShardReader, "_rows", first)
    with pytest.raises(InvalidCheckpointError, match=rf"{ROUTER}\.\w+: the bytes to write are not the source's"):
        convert_shard(tasks_for(cut, tmp_path)[SHARD])
