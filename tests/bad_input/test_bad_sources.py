"""Checkpoints that are damaged in one place are refused before anything is made, by what is wrong and what cures it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import messages_of, peak_of, run_here

from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.reader import ShardReader
from k2convert.errors import SourceReadError
from scripts.fixture_maker.damage import (
    edit_checkpoint,
    edit_config,
    edit_entry,
    edit_header,
    edit_index,
    edit_json,
    edit_tensor,
    split_shard,
    write_raw,
)
from scripts.fixture_maker.folder import SmallCheckpoint

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-000005.safetensors"
OTHER = "model-00003-of-000005.safetensors"
LAYER = "model.layers.1"
NORM = f"{LAYER}.input_layernorm.weight"
GATE = f"{LAYER}.mlp.experts.3.gate_proj"
DOWN = f"{LAYER}.mlp.experts.3.down_proj"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"

Damage = Callable[[Path], object]
Refuse = Callable[..., str]
Cases = dict[str, tuple[Damage, list[str]]]


def relink(source: Path, target: str) -> None:
    (source / SHARD).rename(source.parent / "elsewhere.safetensors")
    (source / SHARD).symlink_to(target)


def cut(source: Path, size: int) -> None:
    os.truncate(source / SHARD, size)


def claim_huge_header(source: Path, *, file_bytes: int) -> None:
    path = source / SHARD
    write_raw(path, b"", claim=150_000_000)
    os.truncate(path, file_bytes)


def shift(source: Path, tensor: str, by: int) -> None:
    begin, end = split_shard(source / SHARD)[0][tensor]["data_offsets"]
    edit_entry(source / SHARD, tensor, data_offsets=[begin + by, end + by])


def repeat_tensor(source: Path) -> None:
    header, data = split_shard(source / SHARD)
    text = json.dumps(header)[:-1] + f', "{NORM}": {json.dumps(header[NORM])}}}'
    write_raw(source / SHARD, text.encode(), data)


def append(source: Path, extra: bytes) -> None:
    with (source / SHARD).open("ab") as file:
        file.write(extra)


def raw_header(text: bytes) -> Damage:
    return lambda source: write_raw(source / SHARD, text, bytes(64))


def entry(**fields: object) -> Damage:
    return lambda source: edit_entry(source / SHARD, NORM, **fields)


def mapped_to(shard: object) -> Damage:
    return lambda source: edit_index(source, lambda weight_map: weight_map.update({NORM: shard}))


def replace_text(name: str, text: str) -> Damage:
    return lambda source: (source / name).write_text(text)


def duplicate_tensor(source: Path) -> None:
    """Put one tensor into a second shard, in its header and data; the index cannot say so."""
    header, data = split_shard(source / OTHER)
    size = len(data)
    header[NORM] = {"dtype": "BF16", "shape": [256], "data_offsets": [size, size + 512]}
    write_raw(source / OTHER, json.dumps(header).encode(), data + bytes(512))


def repeat_key(source: Path) -> None:
    text = (source / INDEX).read_text()
    line = f'"{NORM}": "{SHARD}"'
    (source / INDEX).write_text(text.replace(line, f"{line}, {line}"))


def link_to(name: str, target: str) -> Damage:
    def damage(source: Path) -> None:
        (source / name).unlink()
        (source / name).symlink_to(target)

    return damage


def without(name: str) -> Damage:
    return lambda source: edit_tensor(source, name, lambda _: None)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return lambda source: edit_tensor(source, name, change)


def added(name: str, tensor: torch.Tensor) -> Damage:
    return lambda source: edit_checkpoint(source, lambda c: c.shards[SHARD].update({name: tensor}))


def cut_columns(source: Path) -> None:
    """248 input columns: not a multiple of 32, in packed words, scales and shape alike."""

    def change(checkpoint: SmallCheckpoint) -> None:
        tensors = checkpoint.tensors()
        checkpoint.replace(f"{GATE}.weight_packed", tensors[f"{GATE}.weight_packed"][:, :31])
        checkpoint.replace(f"{GATE}.weight_shape", torch.tensor([128, 248], dtype=torch.int32))

    edit_checkpoint(source, change)


def cut_rows(source: Path) -> None:
    """96 of 128 rows, in packed words, scales and shape alike: consistent, but not what config.json says."""

    def change(checkpoint: SmallCheckpoint) -> None:
        for leaf in ("weight_packed", "weight_scale"):
            checkpoint.replace(f"{GATE}.{leaf}", checkpoint.tensors()[f"{GATE}.{leaf}"][:96])
        checkpoint.replace(f"{GATE}.weight_shape", torch.tensor([96, 256], dtype=torch.int32))

    edit_checkpoint(source, change)


def without_module(module: str) -> Damage:
    def change(checkpoint: SmallCheckpoint) -> None:
        for members in checkpoint.shards.values():
            for name in [name for name in members if name.startswith(module + ".")]:
                del members[name]

    return lambda source: edit_checkpoint(source, change)


def in_groups_of_64(source: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64

    edit_json(source / "config.json", change)


SHARDS: Cases = {
    "data cut short": (lambda s: cut(s, 500_000), ["truncated", "ownload"]),
    "header cut short": (lambda s: cut(s, 1000), ["truncated", "ownload"]),
    "length cut short": (lambda s: cut(s, 5), ["too short", "ownload"]),
    "empty file": (lambda s: cut(s, 0), ["too short", "ownload"]),
    "header longer than the file": (lambda s: claim_huge_header(s, file_bytes=90_000_000), ["150,000,000", "ownload"]),
    "header over 100 MB": (lambda s: claim_huge_header(s, file_bytes=200_000_000), ["limit", "ownload"]),
    "header of 2^63 bytes": (lambda s: write_raw(s / SHARD, b"{}", claim=1 << 63), ["limit", "ownload"]),
    "overlap": (lambda s: shift(s, NORM, -2), ["overlap", "ownload"]),
    "gap": (lambda s: shift(s, NORM, 2), [NORM, "gap", "ownload"]),
    "trailing bytes": (lambda s: append(s, bytes(8)), ["longer", "ownload"]),
    "duplicate tensor name": (repeat_tensor, [NORM, "duplicate key", "ownload"]),
    "not JSON": (raw_header(b"{{{{"), ["JSON", "ownload"]),
    "not UTF-8": (raw_header(b'{"\xff": 1}'), ["JSON", "ownload"]),
    "not an object": (raw_header(b"[1, 2]"), ["object", "ownload"]),
    "nested too deep": (raw_header(b"[" * 200_000), ["JSON", "ownload"]),
    "a number of 5,000 digits": (raw_header(b'{"a": ' + b"9" * 5000 + b"}"), ["ownload"]),
    "metadata not strings": (lambda s: edit_header(s / SHARD, lambda h: h.update(__metadata__={"a": 1})), ["metadata"]),
    "unknown dtype": (entry(dtype="Q4"), [NORM, "Q4"]),
    "shape larger than its bytes": (entry(shape=[257]), [NORM, "512", "514"]),
    "shape smaller than its bytes": (entry(shape=[128]), [NORM, "512", "256"]),
    "offsets reversed": (entry(data_offsets=[512, 0]), [NORM]),
    "entry without dtype": (lambda s: edit_header(s / SHARD, lambda h: h[NORM].pop("dtype")), [NORM, "dtype"]),
    "link to a folder": (lambda s: relink(s, ".."), ["is a link to '..'", "a folder", "ownload"]),
    "link to nothing": (lambda s: relink(s, "nowhere"), ["is a link to 'nowhere'", "leads to no file", "ownload"]),
    "pipe in place of a shard": (lambda s: ((s / SHARD).unlink(), os.mkfifo(s / SHARD)), ["device", "ownload"]),
    "control characters in a name": (
        lambda s: edit_header(s / SHARD, lambda h: h.update({"a\x1b[2J\nb": h.pop(NORM)})),
        ["\\x1b[2J\\nb", "control characters", "ownload"],
    ),
    "missing shard": (lambda s: (s / SHARD).unlink(), ["missing", "ownload"]),
    "folder in place of a shard": (lambda s: ((s / SHARD).unlink(), (s / SHARD).mkdir()), ["folder"]),
}
FILES: Cases = {
    "file that is not there": (mapped_to("model-00009-of-000005.safetensors"), ["model-00009", "missing", "ownload"]),
    "path above the folder": (mapped_to("../source/" + SHARD), [INDEX, NORM, "outside", "ownload"]),
    "absolute path": (mapped_to("/etc/x.safetensors"), [INDEX, NORM, "outside", "ownload"]),
    "path in a subfolder": (mapped_to("sub/" + SHARD), [INDEX, NORM, "plain file name"]),
    "name that no file can have": (mapped_to("\ud800.safetensors"), [INDEX, NORM, "ud800"]),
    "name too long for a file": (mapped_to("x" * 300 + ".safetensors"), ["xxx", "name too long"]),
    "not a shard": (mapped_to("config.json"), [INDEX, NORM, "config.json"]),
    "another shard than the true one": (mapped_to(OTHER), [INDEX, NORM, SHARD, OTHER, "ownload"]),
    "tensor that no shard has": (
        lambda s: edit_index(s, lambda m: m.update({"model.layers.1.extra.weight": SHARD})),
        [INDEX, "model.layers.1.extra.weight", "ownload"],
    ),
    "tensor in two shards": (duplicate_tensor, [NORM, SHARD, OTHER, "ownload"]),
    "duplicate tensor name": (repeat_key, [INDEX, NORM, "duplicate key", "ownload"]),
    "no weight_map": (lambda s: edit_json(s / INDEX, lambda i: i.pop("weight_map")), [INDEX, "weight_map", "ownload"]),
    "empty weight_map": (lambda s: edit_index(s, dict.clear), [INDEX, "weight_map", "ownload"]),
    "not JSON": (replace_text(INDEX, "<html>"), [INDEX, "JSON", "ownload"]),
    "a pointer left by git": (replace_text(INDEX, POINTER), [INDEX, "Git LFS pointer", "git lfs pull"]),
    "missing index": (lambda s: (s / INDEX).unlink(), [INDEX, "download"]),
    "index is a link to nothing": (link_to(INDEX, "gone"), [INDEX, "link to 'gone'", "ownload"]),
    "config is a link to itself": (link_to("config.json", "config.json"), ["config.json", "leads to no file"]),
    "missing config": (lambda s: (s / "config.json").unlink(), ["config.json", "missing", "ownload"]),
    "config not JSON": (replace_text("config.json", "{"), ["config.json", "JSON", "ownload"]),
    "duplicate config key": (
        replace_text("config.json", '{"a": 1, "a": 2}'),
        ["config.json", "duplicate key", "ownload"],
    ),
    "config not UTF-8": (lambda s: (s / "config.json").write_bytes(b'"\xff"'), ["config.json", "UTF-8", "ownload"]),
    "tokenizer is a link to a device": (link_to("tokenizer.json", "/dev/null"), ["tokenizer.json", "device"]),
}
TENSORS: Cases = {
    "missing scale": (without(f"{GATE}.weight_scale"), [SHARD, f"{GATE}.weight_scale", "missing", "ownload"]),
    "missing packed words": (without(f"{GATE}.weight_packed"), [SHARD, GATE, "weight_packed", "ownload"]),
    "packed words as I64": (changed(f"{GATE}.weight_packed", torch.Tensor.long), [SHARD, GATE, "I64", "I32"]),
    "packed words in one dimension": (changed(f"{GATE}.weight_packed", torch.Tensor.flatten), [SHARD, GATE, "2 dim"]),
    "scale of another group size": (
        changed(f"{GATE}.weight_scale", lambda t: t[:, ::2]),
        [SHARD, f"{GATE}.weight_scale", "[128, 4]", "[128, 8]"],
    ),
    "shape as F32": (changed(f"{GATE}.weight_shape", torch.Tensor.float), [SHARD, GATE, "F32", "I32"]),
    "shape of three": (
        changed(f"{GATE}.weight_shape", lambda t: torch.cat([t, t[:1]])),
        [SHARD, f"{GATE}.weight_shape", "[3]", "[2]"],
    ),
    "columns no multiple of 32": (cut_columns, [SHARD, GATE, "248", "32"]),
    "rows that config.json does not know": (cut_rows, [SHARD, GATE, "96", "moe_intermediate_size"]),
    "missing projection": (without_module(DOWN), [f"{DOWN} is missing", "ownload"]),
    "missing expert": (without_module(f"{LAYER}.mlp.experts.3"), ["layer 1", "15 experts", "n_routed_experts = 16"]),
    "missing layer": (without_module("model.layers.2"), ["layers", "config.json"]),
    "expert count of another model": (lambda s: edit_config(s, n_routed_experts=384), ["n_routed_experts = 384"]),
    "layer count of another model": (lambda s: edit_config(s, num_hidden_layers=61), ["1..60", "config.json"]),
    "hidden size of another model": (lambda s: edit_config(s, hidden_size=7168), ["hidden_size", "7168", "256"]),
    "count that is a string": (lambda s: edit_config(s, n_routed_experts="16"), ["n_routed_experts", "'16'", "config"]),
    "unknown tensor": (added(f"{LAYER}.mlp.experts.3.side_proj.weight", torch.zeros(2)), ["side_proj", "Kimi K2"]),
}
EXPORT = ["export the model", "symmetric", "group_size 32", "scales in BF16"]
NOT_BY_DOWNLOAD: Cases = {
    "groups of 64": (in_groups_of_64, EXPORT),
    "FP16 scales": (changed(f"{GATE}.weight_scale", torch.Tensor.half), [SHARD, GATE, "F16", "BF16", *EXPORT]),
    "FP32 scales": (changed(f"{GATE}.weight_scale", torch.Tensor.float), [SHARD, GATE, "F32", "BF16", *EXPORT]),
    "asymmetric": (added(f"{GATE}.weight_zero_point", torch.zeros(1)), [f"{GATE}.weight_zero_point", *EXPORT]),
    "act-order": (added(f"{GATE}.weight_g_idx", torch.zeros(256)), [f"{GATE}.weight_g_idx", *EXPORT]),
    "no shape": (without(f"{GATE}.weight_shape"), [SHARD, f"{GATE}.weight_shape", "missing", *EXPORT]),
    "INT4 attention": (added(f"{LAYER}.self_attn.o_proj.weight_packed", torch.zeros(256, 16).int()), EXPORT),
    "a tensor outside the index": (
        lambda s: edit_index(s, lambda names: names.pop(NORM)),
        [INDEX, NORM, SHARD, "Add it to its weight_map"],
    ),
    "a pointer": (replace_text(SHARD, POINTER), [SHARD, "is a Git LFS pointer", "`git lfs pull`"]),
}


def cases(of: Cases) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("damage", "words"), of.values(), ids=of)


@pytest.mark.quick(10)
@cases(SHARDS)
def test_a_damaged_shard_is_named(damage: Damage, words: list[str], refuse_at_once: Refuse) -> None:
    assert SHARD in refuse_at_once(damage, words)


@pytest.mark.quick(8)
@cases(FILES)
def test_files_that_do_not_fit_are_refused(damage: Damage, words: list[str], refuse_at_once: Refuse) -> None:
    refuse_at_once(damage, words)


@pytest.mark.quick(10)
@cases(TENSORS)
def test_tensors_that_do_not_fit_are_refused(damage: Damage, words: list[str], refuse_at_once: Refuse) -> None:
    refuse_at_once(damage, words)


@cases(NOT_BY_DOWNLOAD)
def test_no_download_is_advised_that_would_not_help(damage: Damage, words: list[str], refuse_at_once: Refuse) -> None:
    assert "hf download" not in refuse_at_once(damage, words)


def one_scale(value: float) -> Damage:
    def change(scales: torch.Tensor) -> torch.Tensor:
        scales[5, 2] = value
        return scales

    return changed(f"{DOWN}.weight_scale", change)


VALUES: Cases = {
    "scale NaN": (one_scale(float("nan")), [f"{DOWN}.weight_scale", "[5, 2]", "nan", "ownload"]),
    "scale infinite": (one_scale(float("inf")), [f"{DOWN}.weight_scale", "[5, 2]", "inf", "ownload"]),
    "scale negative": (one_scale(-0.5), [f"{DOWN}.weight_scale", "[5, 2]", "-0.5", "ownload"]),
    "weight_shape that disagrees": (
        changed(f"{DOWN}.weight_shape", lambda t: t.flip(0)),
        [f"{DOWN}.weight_shape", "[128, 256]", "[256, 128]", "ownload"],
    ),
}


@pytest.mark.quick(1)
@cases(VALUES)
def test_values_found_bad_on_the_way_leave_no_half_shard_and_the_whole_ones(
    damage: Damage, words: list[str], tiny: Path, source: Path, dest: Path, refuse: Refuse
) -> None:
    damage(source)
    refuse("--workers", "1", source=source, dest=dest, says=[SHARD, *words])
    mtimes = {path: path.stat().st_mtime_ns for path in dest.glob("*.safetensors")}
    assert [path.name for path in mtimes] == [SHARD.replace("00002", "00001", 1)]
    shutil.copy(tiny / SHARD, source)
    run_here("run", source, dest, code=0)
    assert {path: path.stat().st_mtime_ns for path in mtimes} == mtimes


@pytest.mark.parametrize("harm", ["cut", "removed"])
def test_shard_harmed_after_the_start_is_named_with_its_tensor(harm: str, source: Path) -> None:
    checkpoint = open_checkpoint(source)
    tensor = checkpoint.tensors[f"{DOWN}.weight_packed"]
    path = source / SHARD
    if harm == "cut":
        os.truncate(path, tensor.begin + 100)
    else:
        path.unlink()
    with ShardReader(checkpoint.path) as reader, pytest.raises(SourceReadError) as raised:
        reader.read(tensor)
    assert str(path) in str(raised.value)
    assert tensor.name in str(raised.value)
    assert "run the same command again" in str(raised.value)


def test_null_metadata_is_read_as_the_library_reads_it(source: Path, dest: Path) -> None:
    edit_header(source / SHARD, lambda header: header.update(__metadata__=None))
    run_here("run", source, dest, "--dry-run", code=0)


def test_a_list_is_asked_for_in_plain_words(source: Path, dest: Path) -> None:
    line = messages_of(run_here("run", source, dest, "--set", "roles=experts,shared_experts", code=1).stderr)
    assert "roles: must be a list, as in" in line
    assert "tuple" not in line


NUM_TENSORS = 16_000


def peak_megabytes(*words: object) -> float:
    return peak_of(*words, "--json") / 2**20


def add_empty_tensors(folder: Path) -> int:
    """Add tensors without bytes to the first shard and the index; return how many bytes of JSON they take."""
    shard = min(folder.glob("*.safetensors"))
    before = (folder / INDEX).stat().st_size + shard.stat().st_size
    names = [f"model.layers.0.self_attn.empty{i}.k_scale" for i in range(NUM_TENSORS)]

    def change(header: dict[str, Any]) -> None:
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        header.update({name: {"dtype": "BF16", "shape": [0], "data_offsets": [end, end]} for name in names})

    edit_header(shard, change)
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(dict.fromkeys(names, shard.name)))
    return (folder / INDEX).stat().st_size + shard.stat().st_size - before


@pytest.mark.slow
def test_empty_tensors_take_no_more_memory_than_their_entries(source: Path, dest: Path, tmp_path: Path) -> None:
    few = peak_megabytes("run", source, tmp_path / "few", "--device", "cpu")
    few_checked = peak_megabytes("validate", tmp_path / "few", "--source", source)
    megabytes = add_empty_tensors(source) / 1e6
    many = peak_megabytes("run", source, dest, "--device", "cpu")
    many_checked = peak_megabytes("validate", dest, "--source", source)
    assert many - few < 15 * megabytes, (few, many, megabytes)
    assert many_checked - few_checked < 2 * 15 * megabytes, "of two checkpoints"
    assert len(json.loads((dest / INDEX).read_text())["weight_map"]) > NUM_TENSORS
