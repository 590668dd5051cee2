"""Rules 16, 17 and 19 find their own faults in the folder, and no other rule does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import Converted, check, only, seal, validate
from safetensors.torch import save_file

from k2convert.check.results import Verdict
from scripts.fixture_maker import damage
from scripts.fixture_maker.shards import INDEX_NAME


def shard_of(converted: Converted, number: int) -> Path:
    return sorted(converted.folder.glob("*.safetensors"))[number]


Fault = Callable[[Converted], object]


def total(size: object) -> Fault:
    return lambda c: damage.edit_json(c.folder / INDEX_NAME, lambda index: index["metadata"].update(total_size=size))


def index(apply: Callable[[dict[str, str], Converted], object]) -> Fault:
    return lambda c: damage.edit_index(c.folder, lambda weight_map: apply(weight_map, c))


def ledger(apply: Callable[[dict[str, Any]], object]) -> Fault:
    return lambda c: damage.edit_json(c.folder / "k2convert.json", apply)


def written(name: str, text: str) -> Fault:
    return lambda c: (c.folder / name).write_text(text)


def relined(apply: Callable[[list[str], int], object]) -> Fault:
    """Change the lines of the index, of which that of this number is an entry with others around it."""

    def change(converted: Converted) -> None:
        path = converted.folder / INDEX_NAME
        lines = path.read_text().splitlines(keepends=True)
        apply(lines, next(i for i, line in enumerate(lines) if '"weight_map"' in line) + 2)
        path.write_text("".join(lines))

    return change


def gone(name: str) -> Fault:
    return lambda c: (c.folder / name).unlink()


def longer(name: str) -> Fault:
    return lambda c: (c.folder / name).write_bytes((c.folder / name).read_bytes() + b"\n")


def stray(name: str) -> Fault:
    def add(converted: Converted) -> None:
        (converted.folder / name).parent.mkdir(exist_ok=True)
        save_file({"x": torch.zeros(4)}, converted.folder / name)

    return add


STRAYS = ("model-extra.safetensors", "model-00001-of-000005.safetensors.tmp", "config.json.part", "docs/x.incomplete")
FAULTS: list[tuple[int, str, Fault]] = [
    *((16, "total_size", total(size)) for size in (0, 1, None, "7")),
    (16, "norm.weight", index(lambda w, c: w.pop(c.layers.removesuffix("layers") + "norm.weight"))),
    (16, "nothing.here", index(lambda w, c: w.update({"nothing.here": shard_of(c, 1).name}))),
    (16, "norm.weight", index(lambda w, c: w.update({f"{c.layers}.2.input_layernorm.weight": shard_of(c, 0).name}))),
    (16, INDEX_NAME, gone(INDEX_NAME)),
    *((16, INDEX_NAME, written(INDEX_NAME, text)) for text in ("", "[]", '{"metadata": {}}')),
    (16, INDEX_NAME, relined(lambda lines, at: lines.insert(at, lines[at]))),
    (16, INDEX_NAME, relined(lambda lines, at: lines.insert(at, lines[at].replace(",", "")))),
    (16, INDEX_NAME, relined(lambda lines, _: lines.insert(-2, lines.pop(-3).replace("\n", ",\n")))),
    (16, INDEX_NAME, relined(lambda lines, at: lines.insert(at, '  }, "other": {\n'))),
    (16, INDEX_NAME, relined(lambda lines, _: lines.pop())),
    (16, ".weight", relined(lambda lines, at: lines.insert(2, lines.pop(at)))),
    *((16, name, stray(name)) for name in STRAYS),
    (17, "tokenizer.json", longer("tokenizer.json")),
    (17, "tokenizer_config.json", gone("tokenizer_config.json")),
    (17, "generation_config.json", longer("generation_config.json")),
    (17, "modeling_surprise.py", written("modeling_surprise.py", "raise SystemExit")),
    (19, "", ledger(lambda document: document.pop("recipe"))),
    (19, "", ledger(lambda document: document["shards"].pop(min(document["shards"])))),
    (19, "", ledger(lambda document: document["shards"].update({"model-9.safetensors": {"blake3": "00", "bytes": 1}}))),
    (19, "", ledger(lambda document: next(iter(document["shards"].values())).update(blake3="0" * 64))),
    (19, "", ledger(lambda document: next(iter(document["shards"].values())).update(bytes=1))),
    (19, "k2convert.json", gone("k2convert.json")),
    *((19, "k2convert.json", written("k2convert.json", text)) for text in ("", "[]")),
]


@pytest.mark.parametrize(("rule", "name", "fault"), FAULTS)
def test_a_fault_is_found_by_its_rule_alone(breakable: Converted, rule: int, name: str, fault: Fault) -> None:
    fault(breakable)
    assert name in only(breakable.check(), rule).offenders[0].name


@pytest.mark.parametrize("form", ["one line", "no spaces", "CRLF", "weight_map first", "backwards", "escapes"])
def test_an_index_may_have_any_form_of_json(breakable: Converted, form: str) -> None:
    path = breakable.folder / INDEX_NAME
    document = json.loads(path.read_text())
    entries = document["weight_map"]
    texts = {
        "one line": json.dumps(document),
        "no spaces": json.dumps(document, indent=0, separators=(",", ":")),
        "CRLF": path.read_text().replace("\n", "\r\n"),
        "weight_map first": json.dumps({"weight_map": entries, "metadata": document["metadata"]}, indent=2),
        "backwards": json.dumps(document | {"weight_map": dict(reversed(entries.items()))}, indent=2),
        "escapes": path.read_text().replace("layers", "l\\u0061yers", 1),
    }
    path.write_bytes(texts[form].encode())
    assert breakable.check().passed


def test_journal_hidden_folders_card_and_report_are_no_part_of_the_package(breakable: Converted) -> None:
    (breakable.folder / "README.md").write_text("# Card")
    (breakable.folder / "report.html").write_text("<p>Report")
    (breakable.folder / ".cache" / "huggingface").mkdir(parents=True)
    (breakable.folder / ".cache" / "huggingface" / "x.incomplete").write_bytes(b"")
    assert (breakable.folder / ".k2convert").is_dir()
    assert breakable.check().passed


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "k2convert.json", INDEX_NAME, "shard"])
def test_a_link_to_a_file_is_followed_one_to_nothing_is_not(breakable: Converted, name: str, tmp_path: Path) -> None:
    path = shard_of(breakable, 1) if name == "shard" else breakable.folder / name
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert breakable.check().passed
    elsewhere.unlink()
    assert not breakable.check().passed


@pytest.mark.parametrize("kind", ["longer", "truncated", "gap", "no header", "missing"])
def test_rule_16_a_shard_that_is_not_whole(breakable: Converted, kind: str) -> None:
    path = shard_of(breakable, 2)
    raw = path.read_bytes()
    if kind == "gap":
        header, data = damage.split_shard(path)
        last = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1])
        header[last]["data_offsets"] = [offset + 16 for offset in header[last]["data_offsets"]]
        damage.write_raw(path, json.dumps(header).encode(), data + bytes(16))
    elif kind == "missing":
        path.unlink()
    else:
        path.write_bytes({"longer": raw + b"\0", "truncated": raw[:-100], "no header": b"\xff" * 8 + raw[8:]}[kind])
    seal(breakable.folder)
    report = breakable.check()
    rule = only(report, 16)
    assert rule.offenders[0].name == path.name
    # What cannot be said about the tensors is not said.
    for number in (1, 3, 4, 7, 8, 9, 14):
        assert report.rules[number - 1].verdict is Verdict.SKIPPED
        assert path.name in report.rules[number - 1].note


@pytest.mark.parametrize("where", ["codes", "block scales", "header"])
def test_rule_19_any_single_bit(breakable: Converted, where: str) -> None:
    path = shard_of(breakable, 1)
    raw = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(raw[:8], "little")
    header, _ = damage.split_shard(path)
    module = breakable.expert(1, 2, "down")
    if where == "header":
        position = begin - 1  # padding: the JSON stays what it is
        assert raw[position] == ord(" ")
        raw[position] = ord("\t")
    else:
        parameter = breakable.names.weight if where == "codes" else breakable.names.block_scale
        position = begin + header[f"{module}.{parameter}"]["data_offsets"][0] + 77
        raw[position] ^= 1
    path.write_bytes(raw)
    # Codes and scales stay valid numbers: without the hash, only their error would tell.
    assert only(breakable.check(), 19).offenders[0].name == path.name


@pytest.mark.parametrize("kind", ["missing", "empty", "no header"])
def test_rules_18_and_19_do_not_judge_the_whole_if_a_shard_cannot_be_read(modelopt: Converted, kind: str) -> None:
    path = shard_of(modelopt, 2)
    raw = path.read_bytes()
    path.unlink()
    if kind != "missing":
        path.write_bytes({"empty": b"", "no header": b"\xff" * 8 + raw[8:]}[kind])
    errors, rule = validate(modelopt).contract.rules[17:]
    assert errors.verdict is Verdict.SKIPPED
    assert errors.note.endswith(f"{path.name} cannot be read, see rule 16")
    assert rule.note == "totals were not compared: not every converted weight was measured"
    assert all(offender.name == path.name for offender in rule.offenders)


def test_rule_19_warns_of_another_source(breakable: Converted) -> None:
    other = {"revision": "0" * 40, "headers": {"other.safetensors": "00"}}
    damage.edit_json(breakable.folder / "k2convert.json", lambda ledger: ledger["source"].update(other))
    only(breakable.check(), 19, Verdict.WARN)


def test_a_folder_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        check(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert {11, 16} <= set(check(tmp_path / "empty").failed)


def test_the_int4_source_itself_is_no_nvfp4_checkpoint(breakable: Converted) -> None:
    report = check(breakable.source)
    assert {1, 11} <= set(report.failed)
