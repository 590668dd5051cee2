"""JSON of any content, wherever it is read, never ends in a traceback, and is never quoted at length."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import messages_of, run_here

from k2convert.checkpoint.files import MAX_SMALL_FILE_BYTES
from scripts.fixture_maker.damage import edit_header, edit_index, edit_json

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
LEDGER = "k2convert.json"
RECORD = ".k2convert/done/model-00002-of-000003.safetensors.json"
LONGEST_LINE = 800  # with two paths of temporary folders

VALUES = [
    "null", "1", "-1", "1e400", "true", '"x"', "[]", "{}", '"\\ud800"', '{"\\ud800": 1}', "9" * 5000,
    "[" * 400 + "]" * 400, "[" * 20_000 + "]" * 20_000, json.dumps("y" * 100_000), json.dumps({"y" * 100_000: 1}),
]  # fmt: skip

Words = list[str | Path]


@pytest.fixture
def small(k2_shaped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(k2_shaped, tmp_path / "small"))


def paths_of(node: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path of a document; of long lists and objects the first and the last."""
    yield way
    keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    for key in keys if len(keys) <= 16 else [keys[0], keys[-1]]:
        yield from paths_of(node[key], (*way, key))


def replaced(text: str, way: tuple[Any, ...], value: str) -> str:
    if not way:
        return value
    document = node = json.loads(text)
    for key in way[:-1]:
        node = node[key]
    node[way[-1]] = "@value@"
    return json.dumps(document).replace('"@value@"', value)


def run(*words: str | Path) -> tuple[int, str]:
    done = run_here(*words)
    lines = messages_of(done.stderr).splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert done.returncode in (0, 1, 3)
    assert len(errors) == (done.returncode != 0), lines
    assert max(map(len, lines), default=0) < LONGEST_LINE, lines
    return done.returncode, "".join(errors)


FUZZED: dict[str, tuple[str, bool, Callable[[Path, Path], list[Words]]]] = {
    "the source's config": (CONFIG, True, lambda s, _: [["inspect", s], ["run", s, s.parent / "new", "--dry-run"]]),
    "the source's index": (INDEX, True, lambda s, _: [["inspect", s], ["run", s, s.parent / "new", "--dry-run"]]),
    "the result's config": (CONFIG, False, lambda _, d: [["validate", d], ["inspect", d]]),
    "the result's index": (INDEX, False, lambda _, d: [["validate", d]]),
    "hf_quant_config": ("hf_quant_config.json", False, lambda _, d: [["validate", d]]),
    "the ledger": (LEDGER, False, lambda s, d: [["validate", d], ["run", s, d, "--dry-run"]]),
    "the job": (".k2convert/job.json", False, lambda s, d: [["status", d], ["run", s, d, "--dry-run"]]),
    "a record": (RECORD, False, lambda s, d: [["status", d], ["run", s, d, "--dry-run"]]),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", FUZZED)
def test_any_json_at_any_place_ends_in_at_most_one_line(name: str, small: Path, converted: Path) -> None:
    file, is_source, commands = FUZZED[name]
    path = (small if is_source else converted) / file
    text = path.read_text()
    cases = [(way, value) for way in paths_of(json.loads(text)) for value in VALUES]
    for way, value in random.Random(name).sample(cases, 12):
        path.write_text(replaced(text, way, value))
        for words in commands(small, converted):
            run(*words)


def rename(old: str, new: str) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        shard = source / json.loads((source / INDEX).read_text())["weight_map"][old]
        edit_index(source, lambda names: names.update({new: names.pop(old)}))
        edit_header(shard, lambda header: header.update({new: header.pop(old)}))

    return change


NORM = "model.layers.1.input_layernorm.weight"
ROUTER = "model.layers.1.mlp.gate.e_score_correction_bias"
REST = "model.layers.1.self_attn.rest.weight"


def scalar_router(source: Path) -> None:
    shard = source / json.loads((source / INDEX).read_text())["weight_map"][ROUTER]

    def change(header: dict[str, Any]) -> None:
        begin, end = header[ROUTER]["data_offsets"]
        header[ROUTER] |= {"shape": [], "data_offsets": [begin, begin + 4]}
        header[REST] = {"dtype": "U8", "shape": [end - begin - 4], "data_offsets": [begin + 4, end]}

    edit_header(shard, change)
    edit_index(source, lambda names: names.update({REST: shard.name}))


SOURCES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a router tensor without dimensions": (scalar_router, ["e_score_correction_bias", "shape []"]),
    "a layer number of 5,000 digits": (rename(NORM, f"model.layers.{'9' * 5000}.input_layernorm.weight"), ["longer"]),
    "a layer number of 150 digits": (rename(NORM, f"model.layers.{'9' * 150}.input_layernorm.weight"), ["not part of"]),
    "a layer in other digits": (rename(NORM, "model.layers.\u0663.input_layernorm.weight"), ["not part of"]),
    "half of a surrogate pair": (rename(NORM, "model.layers.1.\ud800.weight"), ["surrogate", "ud800"]),
    "a config larger than any": (lambda s: os.truncate(s / CONFIG, MAX_SMALL_FILE_BYTES + 1), [CONFIG, "larger than"]),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", SOURCES)
def test_hostile_source_is_refused_in_one_line(name: str, small: Path, result: Path) -> None:
    damage, words = SOURCES[name]
    damage(small)
    code, line = run("run", small, small.parent / "new")
    assert code == 1
    assert all(word in line for word in words), line
    assert not (small.parent / "new").exists()
    assert run("validate", result, "--source", small)[0] in (1, 3)


RESULTS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "targets that is a number": (
        CONFIG,
        lambda c: c["quantization_config"]["config_groups"]["group_0"].update(targets=5),
    ),
    "index metadata that is no object": (INDEX, lambda i: i.update(metadata=[5])),
    "a weight_map value that is a list": (INDEX, lambda i: i["weight_map"].update({NORM: [1]})),
    "a ledger recipe that is no object": (LEDGER, lambda ledger: ledger.update(recipe=[1])),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", RESULTS)
def test_hostile_result_fails_its_validation(name: str, converted: Path, k2_shaped: Path) -> None:
    file, change = RESULTS[name]
    edit_json(converted / file, change)
    assert run("validate", converted)[0] == 3
    assert run("validate", converted, "--source", k2_shaped)[0] == 3
    run("report", converted)
    run("run", k2_shaped, converted)


def test_a_recipe_of_aliases_or_without_end_is_refused(small: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))
    number = "name: a\nrule: " + "9" * 5000
    keys = "? [1, 2]\n: 3\n"
    for text in (bomb, number, keys, "name: 2001-99-99", 'name: "\\ud800"', "#" * (2 << 20)):
        recipe.write_text(text)
        code, line = run("run", small, tmp_path / "new", "--recipe", recipe)
        assert (code, "recipe.yaml" in line) == (1, True), line
