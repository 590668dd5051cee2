"""A refusal names the way out that cures its cause: download again only what a download replaces."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run_here, said
from test_bad_tensors import GATE, LAYER, SHARD, added, changed, without

from scripts.fixture_maker.damage import edit_header, edit_index, edit_json

EXPORT = ("export the model", "symmetric", "group_size 32", "scales in BF16")


def in_groups_of_64(source: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64

    edit_json(source / "config.json", change)


def as_pointer(source: Path) -> None:
    (source / SHARD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


CASES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "groups of 64": (in_groups_of_64, EXPORT),
    "FP16 scales": (changed(f"{GATE}.weight_scale", torch.Tensor.half), EXPORT),
    "FP32 scales": (changed(f"{GATE}.weight_scale", torch.Tensor.float), EXPORT),
    "zero points": (added(f"{GATE}.weight_zero_point", torch.zeros(1)), EXPORT),
    "an order": (added(f"{GATE}.weight_g_idx", torch.zeros(256)), EXPORT),
    "no shape": (without(f"{GATE}.weight_shape"), EXPORT),
    "INT4 attention": (
        added(f"{LAYER}.self_attn.o_proj.weight_packed", torch.zeros(256, 16, dtype=torch.int32)), EXPORT,
    ),
    "a tensor outside the index": (
        lambda source: edit_index(source, lambda names: names.pop(f"{GATE}.weight_scale")),
        ("Add it to its weight_map",),
    ),
    "a pointer": (as_pointer, ("is a Git LFS pointer", "`git lfs pull`")),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_no_download_is_advised_that_would_not_help(what: str, refuse_at_once: Callable[..., str]) -> None:
    assert "hf download" not in refuse_at_once(*CASES[what])


def test_null_metadata_is_read_as_the_library_reads_it(source: Path, dest: Path) -> None:
    edit_header(source / SHARD, lambda header: header.update(__metadata__=None))
    run_here("run", source, dest, "--dry-run", code=0)


def test_a_list_is_asked_for_in_plain_words(source: Path, dest: Path) -> None:
    line = said(run_here("run", source, dest, "--set", "roles=experts,shared_experts", code=1).stderr)
    assert "roles: must be a list, as in" in line
    assert "tuple" not in line
