"""Index, config and sidecars that do not fit the shards are refused, before anything is made."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.fixture_maker.damage import edit_config, edit_index, edit_json, split_shard, write_raw

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-000005.safetensors"
OTHER = "model-00003-of-000005.safetensors"
NORM = "model.layers.1.input_layernorm.weight"

Damage = Callable[[Path], object]
Refuse = Callable[..., str]


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


DAMAGED_INDEXES: dict[str, tuple[Damage, list[str]]] = {
    "file that is not there": (mapped_to("model-00009-of-000005.safetensors"), ["model-00009", "missing", "ownload"]),
    "path above the folder": (mapped_to("../source/" + SHARD), [INDEX, NORM, "outside", "ownload"]),
    "absolute path": (mapped_to("/etc/x.safetensors"), [INDEX, NORM, "outside", "ownload"]),
    "path in a subfolder": (mapped_to("sub/" + SHARD), [INDEX, NORM, "plain file name"]),
    "name that no file can have": (mapped_to("\ud800.safetensors"), [INDEX, NORM, "ud800"]),
    "name too long for a file": (mapped_to("x" * 300 + ".safetensors"), ["xxx", "name too long"]),
    "not a shard": (mapped_to("config.json"), [INDEX, NORM, "config.json"]),
    "not a string": (mapped_to(7), [INDEX, NORM, "7"]),
    "another shard than the true one": (mapped_to(OTHER), [INDEX, NORM, SHARD, OTHER, "ownload"]),
    "tensor that no shard has": (
        lambda s: edit_index(s, lambda m: m.update({"model.layers.1.extra.weight": SHARD})),
        [INDEX, "model.layers.1.extra.weight", "ownload"],
    ),
    "tensor that the index lacks": (lambda s: edit_index(s, lambda m: m.pop(NORM)), [INDEX, NORM, SHARD, "Add it"]),
    "tensor in two shards": (duplicate_tensor, [NORM, SHARD, OTHER, "ownload"]),
    "duplicate tensor name": (repeat_key, [INDEX, NORM, "duplicate key", "ownload"]),
    "no weight_map": (lambda s: edit_json(s / INDEX, lambda i: i.pop("weight_map")), [INDEX, "weight_map", "ownload"]),
    "empty weight_map": (lambda s: edit_index(s, dict.clear), [INDEX, "weight_map", "ownload"]),
    "metadata not an object": (lambda s: edit_json(s / INDEX, lambda i: i.update(metadata=[1])), [INDEX, "metadata"]),
    "not JSON": (replace_text(INDEX, "<html>"), [INDEX, "JSON", "ownload"]),
    "nested too deep": (replace_text(INDEX, "[" * 200_000), [INDEX, "JSON", "ownload"]),
    "a pointer left by git": (
        replace_text(INDEX, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        [INDEX, "Git LFS pointer", "git lfs pull"],
    ),
    "missing index": (lambda s: (s / INDEX).unlink(), [INDEX, "download"]),
    "index is a link to nothing": (link_to(INDEX, "gone"), [INDEX, "link to 'gone'", "ownload"]),
    "config is a link to itself": (link_to("config.json", "config.json"), ["config.json", "leads to no file"]),
    "missing config": (lambda s: (s / "config.json").unlink(), ["config.json", "missing", "ownload"]),
    "config not JSON": (replace_text("config.json", "{"), ["config.json", "JSON", "ownload"]),
    "duplicate config key": (
        replace_text("config.json", '{"n_routed_experts": 16, "n_routed_experts": 384}'),
        ["config.json", "n_routed_experts", "duplicate key", "ownload"],
    ),
    "config not UTF-8": (
        lambda s: (s / "config.json").write_bytes(b'{"a": "\xff"}'),
        ["config.json", "UTF-8", "ownload"],
    ),
    "a billion layers": (
        lambda s: edit_config(s, num_hidden_layers=10**9),
        ["config.json", "num_hidden_layers", "1,000", "Use the model's own config"],
    ),
    "as many experts as no number": (
        lambda s: edit_config(s, n_routed_experts=10**400),
        ["config.json", "n_routed_experts", "10,000", "Use the model's own config"],
    ),
    "config not an object": (replace_text("config.json", "[]"), ["config.json", "object", "ownload"]),
    "tokenizer is a link to a device": (link_to("tokenizer.json", "/dev/null"), ["tokenizer.json", "device"]),
}


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", DAMAGED_INDEXES)
def test_index_and_config_that_do_not_fit_are_refused(name: str, refuse_at_once: Refuse) -> None:
    refuse_at_once(*DAMAGED_INDEXES[name])
