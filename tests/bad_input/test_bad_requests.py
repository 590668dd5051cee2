"""Destinations, recipes and kinds of source that cannot be what was meant are refused; so are senseless words."""

import re
import resource
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command import RunCli, command, messages_of, run, run_here, start_cli
from places import put_into_cache

from k2convert.errors import parse_size
from scripts import fixture_maker as fixtures
from scripts.fixture_maker.damage import edit_checkpoint, edit_config, edit_json
from scripts.fixture_maker.folder import SmallCheckpoint

Refuse = Callable[..., str]


def linked(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


def filled(path: Path) -> Path:
    path.mkdir()
    (path / "thesis.txt").write_text("the only copy")
    (path / "model.gguf").write_text("the only copy")
    return path


def a_file(path: Path) -> Path:
    path.write_text("a file")
    return path


DESTINATIONS: dict[str, tuple[Callable[[Path, Path], Path], list[str]]] = {
    "the source": (lambda source, _: source, ["is the source", "new folder"]),
    "the source by another way": (lambda source, _: source / ".." / source.name, ["is the source", "new folder"]),
    "a link to the source": (lambda source, dest: linked(dest, source), ["is the source", "new folder"]),
    "inside the source": (lambda source, _: source / "nvfp4", ["inside the source", "outside"]),
    "around the source": (lambda source, _: source.parent, ["contains the source", "next to it"]),
    "not empty and not ours": (lambda _, dest: filled(dest), ["model.gguf", "not from k2convert", "different folder"]),
    "a file": (lambda _, dest: a_file(dest), ["is not a folder", "Choose a folder"]),
    "under a file": (lambda _, dest: a_file(dest) / "sub", ["dest", "folder"]),
    "a link to nothing": (lambda _, dest: linked(dest, dest.parent / "nowhere"), ["dest", "link"]),
}


@pytest.mark.parametrize("name", DESTINATIONS)
def test_destination_that_could_harm_is_refused(name: str, source: Path, dest: Path, refuse: Refuse) -> None:
    choose, words = DESTINATIONS[name]
    chosen = choose(source, dest)
    refuse(source=source, dest=chosen, says=[str(chosen), *words])


def test_source_that_is_no_folder_is_refused(tmp_path: Path, dest: Path, refuse: Refuse) -> None:
    assert "no such folder" in refuse(source=tmp_path / "nowhere", dest=dest)
    assert "is a file" in refuse(source=a_file(tmp_path / "file"), dest=dest)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "no such folder" in refuse(source=tmp_path / "link", dest=dest)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in refuse(source=empty, dest=dest)


@pytest.mark.parametrize(
    "words",
    [
        ("run", "SOURCE", ""),
        ("run", "", "out"),
        ("prune", "SOURCE", "", "--keep", "kept.json"),
        ("validate", ""),
        ("validate", "SOURCE", "--source="),
        ("report", "SOURCE", "--out", ""),
        ("evaluate", "SOURCE", "--text="),
        ("status", ""),
    ],
)
def test_an_empty_argument_is_no_name_of_this_folder(
    words: tuple[str, ...], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell passes one for a variable that is not set."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    done = run_here(*(str(source) if word == "SOURCE" else word for word in words), code=2)
    assert "is empty. Is a shell variable unset?" in done.stderr
    assert not list(here.iterdir())


@pytest.mark.parametrize("levels", [1, 2])
def test_a_folder_above_a_checkpoint(source: Path, dest: Path, tmp_path: Path, refuse: Refuse, levels: int) -> None:
    """That of several models, and that of a repository in the Hub's cache."""
    snapshot = put_into_cache(source, tmp_path / "hub", repo="moon/k2")
    above = snapshot.parents[levels - 1]
    (above / "loop").symlink_to("loop")  # cannot be looked at
    assert f"{above}: has no config.json, but {snapshot} has one. Pass that folder." in refuse(source=above, dest=dest)
    for words in (["validate"], ["report"], ["status"], ["publish", "--repo", "me/k2"]):
        assert f"but {snapshot} has one" in run_here(*words, above, code=1).stderr, words


def test_too_little_disk_is_refused_with_both_numbers(tmp_path: Path, dest: Path, refuse: Refuse) -> None:
    free = shutil.disk_usage(tmp_path).free
    # Sparse: embedding and head take more than the disk has, on paper.
    rows = (free + 10_000_000_000) // (fixtures.SMALL_SHAPE.hidden * 4)
    shape = replace(fixtures.SMALL_SHAPE, vocabulary=rows)
    huge = fixtures.make_k2_thinking_headers(tmp_path / "huge", shape=shape)
    message = refuse(source=huge, dest=dest)
    assert str(dest) in message
    stated = re.search(r"at least \S+ .B of disk at once, but may use (\S+ .B)\.", message)
    assert stated is not None, message
    assert parse_size(stated[1]) == pytest.approx(free, rel=0.01, abs=8e9), "other processes use the disk meanwhile"
    assert "Free " in message
    assert not dest.exists()


RECIPES: dict[str, tuple[str, list[str]]] = {
    "unknown key": ("name: a\nrule: max\nruel: mse\n", ["'ruel'", "known keys", "rule"]),
    "unknown key inside": ("name: a\ninput_scale: {gate: 1.0}\n", ["input_scale.gate", "gate_up"]),
    "unknown role": ("name: a\nroles: [experts, router]\n", ["roles", "shared_experts"]),
    "roles that are a word": ("name: a\nroles: experts\n", ["roles: must be a list, as in"]),
    "experts left out": ("name: a\nroles: [dense_mlp]\n", ["roles", "experts"]),
    "unknown rule": ("name: a\nrule: best\n", ["rule: 'best' must be 'gptq', 'mse' or 'max'"]),
    "mse by the reference": ("name: a\nrule: mse\nquantizer: reference\n", ["reference", "max"]),
    "negative input scale": ("name: a\ninput_scale: {down: -1.0}\n", ["input_scale.down", "must be between"]),
    "input scale beyond FP32": ("name: a\ninput_scale: {down: 1.0e+39}\n", ["input_scale.down", "must be between"]),
    "input scale without a reciprocal": ("name: a\ninput_scale: {down: 3.0e+38}\n", ["input_scale.down", "between"]),
    "infinite input scale": ("name: a\ninput_scale: {down: .inf}\n", ["input_scale.down", "must be between"]),
    "not YAML": ("name: [a\n", ["not YAML"]),
    "a tag that would run code": ("!!python/object/apply:os.getcwd []\n", ["not YAML"]),
    "duplicate key": ("name: a\nrule: max\nrule: mse\n", ["rule", "duplicate key"]),
    "not a mapping": ("- name\n", ["mapping"]),
    "empty": ("", ["mapping"]),
    "for another family": ("name: a\nfamily: kimi-k2.5\n", ["kimi-k2.5", "kimi-k2-thinking"]),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_means_another_thing(name: str, tiny: Path, dest: Path, tmp_path: Path, refuse: Refuse) -> None:
    text, words = RECIPES[name]
    recipe = tmp_path / "my-recipe.yaml"
    recipe.write_text(text)
    message = refuse("--recipe", recipe, source=tiny, dest=dest, says=words)
    assert "my-recipe.yaml" in message or "recipe a" in message
    assert not dest.exists()


def test_role_and_recipe_that_are_not_there_are_refused(tmp_path: Path, dest: Path, refuse: Refuse) -> None:
    shape = replace(fixtures.SMALL_SHAPE, dense_layers=0)
    source = fixtures.make_k2_thinking_headers(tmp_path / "all-moe", shape=shape)
    refuse("--recipe", "kimi-k2-thinking-nvfp4-mlp", source=source, dest=dest, says=["dense_mlp", "no tensor has it"])
    shipped = ["kimi-k3", "max-modelopt"]
    refuse("--recipe", "kimi-k3", source=source, dest=dest, says=shipped)


def without_int4(dtype: torch.dtype) -> Callable[[SmallCheckpoint], None]:
    """Turn every INT4 projection into a `.weight` of another dtype."""

    def change(checkpoint: SmallCheckpoint) -> None:
        for members in checkpoint.shards.values():
            for name in [name for name in members if name.endswith(".weight_packed")]:
                module = name.removesuffix(".weight_packed")
                rows, columns = members.pop(f"{module}.weight_shape").tolist()
                del members[name], members[f"{module}.weight_scale"]
                members[f"{module}.weight"] = torch.zeros(rows, columns).to(dtype)

    return change


def renamed(old: str, new: str) -> Callable[[SmallCheckpoint], None]:
    def change(checkpoint: SmallCheckpoint) -> None:
        for shard, members in checkpoint.shards.items():
            checkpoint.shards[shard] = {name.replace(old, new, 1): tensor for name, tensor in members.items()}

    return change


KINDS: dict[str, tuple[Callable[[SmallCheckpoint], None], list[str]]] = {
    "FP8": (without_int4(torch.float8_e4m3fn), ["FP8", "INT4 release"]),
    "BF16": (without_int4(torch.bfloat16), ["weight_packed", "INT4 release"]),
    "early NVFP4 names": (renamed("model.layers.", "language_model.layers."), ["language_model.layers."]),
    "another model": (
        renamed("model.layers.", "transformer.h."),
        ["not a Kimi K2 or Kimi K3 checkpoint", "K2-Thinking"],
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_source_that_is_not_int4_kimi_is_refused(name: str, source: Path, dest: Path, refuse: Refuse) -> None:
    change, words = KINDS[name]
    edit_checkpoint(source, change)
    edit_config(source, quantization_config=None)
    refuse(source=source, dest=dest, says=words)
    assert not dest.exists()


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k25", "", None, ["kimi_k2"], "x" * 5_000])
def test_model_type_of_another_model_is_refused(model_type: object, source: Path, dest: Path, refuse: Refuse) -> None:
    # DeepSeek-V3 has the same tensor names. Its conversion would be published with Kimi's tags.
    edit_config(source, model_type=model_type, n_group=8)
    message = refuse(source=source, dest=dest)
    reason = "model_type is missing" if model_type is None else f"model_type is {repr(model_type)[:30]}"
    assert reason in message
    assert len(message) < 500
    assert "have the names of kimi-k2-thinking, whose model_type is kimi_k2. Use the model's own config.json" in message
    assert not dest.exists()
    assert reason in run_here("inspect", source, code=1).stderr


def test_model_type_inside_a_multimodal_config_is_free(k25: Path, tmp_path: Path, dest: Path) -> None:
    # Moonshot states kimi_k2 there, NVIDIA deepseek_v3.
    source = Path(shutil.copytree(k25, tmp_path / "source"))
    edit_json(source / "config.json", lambda config: config["text_config"].update(model_type="deepseek_v3"))
    assert run("run", source, dest, "--dry-run") == 0


OTHER_SCHEMES: list[tuple[str, object]] = [
    ("group_size", 64),
    ("group_size", -1),
    ("symmetric", False),
    ("num_bits", 8),
    ("type", "float"),
    ("quant_method", "gptq"),
    ("format", "int-quantized"),
]


def state(scheme: dict[str, Any], field: str, value: object) -> None:
    """State one field of the weights' scheme, where that field stands."""
    (scheme if field in scheme else scheme["config_groups"]["group_0"]["weights"])[field] = value


@pytest.mark.parametrize(("field", "value"), OTHER_SCHEMES)
def test_a_config_of_another_scheme(field: str, value: object, source: Path, dest: Path, refuse: Refuse) -> None:
    """By the field's name; also under the older name of the scheme."""
    edit_json(source / "config.json", lambda config: state(config["quantization_config"], field, value))
    assert f".{field} is {value!r}" in refuse(source=source, dest=dest)

    def rename(config: dict[str, Any]) -> None:
        config["compression_config"] = config.pop("quantization_config")

    edit_json(source / "config.json", rename)
    assert "config.json: compression_config." in refuse(source=source, dest=dest)
    assert not dest.exists()


def test_another_scheme_in_text_config_is_refused(k25: Path, tmp_path: Path, dest: Path, refuse: Refuse) -> None:
    source = Path(shutil.copytree(k25, tmp_path / "source"))
    scheme = "text_config.quantization_config"
    edit_json(source / "config.json", lambda c: state(c["text_config"]["quantization_config"], "group_size", 64))
    assert f"{scheme}.config_groups.group_0.weights.group_size" in refuse(source=source, dest=dest)


def test_config_that_says_nothing_of_the_scheme_is_taken(source: Path, dest: Path) -> None:
    edit_json(source / "config.json", lambda config: config.pop("quantization_config"))
    assert run("run", source, dest, "--dry-run") == 0


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_own_result_is_refused_as_a_source(layout: str, k2_shaped: Path, tmp_path: Path, refuse: Refuse) -> None:
    converted = tmp_path / "converted"
    run_here("run", k2_shaped, converted, "--layout", layout, "--device", "cpu", "--json", code=0)
    assert "already NVFP4" in refuse(source=converted, dest=tmp_path / "twice")


def test_write_that_fails_on_the_way_keeps_what_is_finished(k2_shaped: Path, dest: Path) -> None:
    # A limit on file size fails the write of every shard above 1 MB, as a filesystem of small files would.
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    words = ("run", k2_shaped, dest, "--device", "cpu", "--workers", "1")
    process = start_cli(*words, stderr=subprocess.PIPE, preexec_fn=limit)
    errors = process.communicate()[1]
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    assert "writing failed (File too large)" in errors
    assert "model-0000" in errors
    assert not list(dest.rglob("*.tmp"))
    assert not (dest / "config.json").exists()


USAGE_ERRORS = [
    ("run", "Missing argument"),
    ("run a b --fast", "No such option: --fast"),
    ("run a b --public", "--public"),
    ("run a b --rule max --set rule=mse", "--set rule: there is an option"),
    ("convert a b", "No such command 'convert'. Did you mean 'run'"),
    ("verify a b", "No such command 'verify'. Did you mean 'validate'"),
    ("inspct a b", "No such command 'inspct'. Did you mean 'inspect'"),
    ("run a b --max-disk 1TB", "--max-disk only applies to hf:// sources or destinations"),
    ("run a b --workers 0", "'--workers': .*greater than or equal to 1"),
    ("run a b --max-disk lots", "'--max-disk': .*200GB"),
    ("run a b --rule best", "'--rule': .*mse"),
    ("run a b --activations w8a8", "'--activations': .*w4a16"),
]


@pytest.mark.parametrize(("words", "expected"), USAGE_ERRORS)
def test_senseless_words_are_usage_errors(words: str, expected: str, tiny: Path, dest: Path, run_cli: RunCli) -> None:
    done = run_cli(*({"a": tiny, "b": dest}.get(word, word) for word in words.split()), code=2)
    assert "Traceback" not in done.stderr
    message = messages_of(done.stderr).splitlines()[-1]
    assert re.search(expected, message), message
    assert "Value error" not in message
    assert not dest.exists()


SETTINGS = [
    ("input_scale.down=0", "input_scale.down: must be between"),
    ("input_scale.gate_up=.nan", "must be between"),
    ("input_scale.down=1.0e-50", "between"),
    ("calibration.token=1", "unknown key 'calibration.token'; known keys: tokens, window"),
    ("ruel=plain", "unknown key 'ruel'; known keys: name"),
    ("rule", "not a setting. Use key=value"),
    ("=plain", "not a setting. Use key=value"),
    ("rule=[", "the value is not YAML"),
    ("quantizer=reference", "does not support rule mse. Use rule max"),
]


@pytest.mark.parametrize(("setting", "expected"), SETTINGS)
def test_bad_settings(setting: str, expected: str, tiny: Path, dest: Path, tmp_path: Path, refuse: Refuse) -> None:
    recipe = tmp_path / "my-recipe.yaml"
    recipe.write_text("name: a\nrule: mse\n")
    message = refuse("--recipe", recipe, "--set", setting, source=tiny, dest=dest)
    assert expected in message
    assert "my-recipe.yaml" not in message
    assert not dest.exists()


@pytest.mark.quick(1)
@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">&-", "2>/dev/full"])
def test_a_job_needs_no_stream_to_talk_to(streams: str, k2_shaped: Path, dest: Path) -> None:
    words = shlex.join(command("run", k2_shaped, dest, "--device", "cpu"))
    done = subprocess.run(["/bin/sh", "-c", f"{words} {streams}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert run("validate", dest, "--source", k2_shaped, "--json") == 0
