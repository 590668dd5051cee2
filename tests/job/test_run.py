"""The main job through the real command, on every kind of source, in every layout, held against the libraries."""

import filecmp
import json
import pickle
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import RunCli, peak_of, run_here
from conversions import plan_job
from damaged_files import flip
from library_decoders import agrees, create_decoder, decoded_otherwise
from results import raw_tensors
from safetensors.torch import load_file

from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.job import resources
from k2convert.job import run as executor
from k2convert.job.shard import ShardTask, convert_shard
from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, dequantize_nvfp4
from k2convert.records.ledger import ShardRecord

SOURCES = ("tiny", "k25", "split", "reap", "minus8", "zeros", "i64", "subnormal", "wide")


def convert(source: Path, destination: Path, *options: str) -> Path:
    done = run_here("run", source, destination, "--json", *options)
    assert done.returncode == 0 or (source.name == "wide" and done.returncode == 3), "wide misses the error budget"
    return destination


def load(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(index["weight_map"].values())):
        tensors |= load_file(folder / shard)
    assert tensors.keys() == index["weight_map"].keys()
    assert sum(t.nbytes for t in tensors.values()) == index["metadata"]["total_size"]
    return tensors


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("tiny", ("--recipe", "kimi-k2-thinking-nvfp4-mlp")),
        *((name, ()) for name in ("minus8", "zeros", "subnormal", "wide", "k25", "split", "reap", "i64")),
    ],
)
def test_max_is_the_libraries(name: str, more: tuple[str, ...], request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source: Path = request.getfixturevalue(name)
    native = convert(source, tmp_path / "native", *more, "--rule", "max")
    reference = convert(source, tmp_path / "reference", *more, "--rule", "max", "--set", "quantizer=reference")
    for path in sorted((*native.glob("*.safetensors"), *reference.glob("*.safetensors"))):
        assert (native / path.name).read_bytes() == (reference / path.name).read_bytes()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "layout"),
    [*zip(SOURCES, ("modelopt", "compressed-tensors") * 5, strict=False), ("tiny", "compressed-tensors")],
)
def test_all_holds_on_every_source(name: str, layout: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source: Path = request.getfixturevalue(name)
    result = convert(source, tmp_path / "out", "--layout", layout)
    done = run_here("validate", result, "--source", source, "--json")
    report = json.loads(done.stdout)
    failed = [rule for rule in report["contract"]["rules"] if rule["verdict"] == "fail"]
    # A wholly zero or absurdly spread tensor cannot meet an SQNR budget; everything else must hold there too.
    expected = {18} if source.name in ("zeros", "subnormal", "wide") else set()
    assert {rule["number"] for rule in failed} <= expected, failed
    assert done.returncode == (3 if failed else 0)
    num_decoded, wrong = decoded_otherwise(result)
    assert num_decoded > 0
    assert wrong == []
    assert report["weights"]["journal"]["mismatches"] == []


@pytest.fixture(params=["modelopt", "compressed-tensors"])
def max_result(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> Path:
    """A conversion whose global scales are no powers of two."""
    return convert(tiny, tmp_path / "out", "--rule", "max", "--layout", request.param)


@pytest.mark.quick(1)
def test_a_flipped_block_scale_is_found_and_a_missing_file_at_once(max_result: Path, tiny: Path) -> None:
    words = ("validate", max_result, "--source", tiny)
    weights = json.loads(run_here(*words, "--json", code=0).stdout)["weights"]
    assert weights["journal"] == {"compared": 144, "mismatches": []}
    assert decoded_otherwise(max_result) == (144, [])
    shard = max_result / "model-00002-of-000005.safetensors"
    name, tensor = next(item for item in read_header(shard).tensors.items() if item[0].endswith(".weight_scale"))
    flip(shard, (tensor.begin + tensor.end) // 2)
    weights = json.loads(run_here(*words, "--json", code=3).stdout)["weights"]
    assert weights["journal"]["mismatches"] == [name.removesuffix(".weight_scale")]
    error = run_here(*words, "--layers", "9", code=1).stderr  # and not 3, as after the pass
    assert "layer 9 has no MoE block" in error.replace("\n", " ")


def test_a_library_that_decoded_one_other_byte_would_not_agree(max_result: Path) -> None:
    layout = "compressed-tensors" if "compressed" in (max_result / "config.json").read_text() else "modelopt"
    names = LAYOUTS[layout]
    decode = create_decoder(layout)
    tensors = load(max_result)
    module = "model.layers.1.mlp.experts.0.down_proj"
    packed = tensors[f"{module}.{names.weight}"].numpy()
    scales = tensors[f"{module}.{names.block_scale}"].view(torch.uint8).numpy()
    stored = tensors[f"{module}.{names.global_scale}"].item()
    exact = dequantize_nvfp4(Nvfp4Weight(packed, scales, names.decode_scalar(struct.pack("<f", stored))))
    assert agrees(decode(packed, scales, stored), exact, stored=stored)
    row, column = (int(i) for i in np.argwhere(exact[:, ::2] != 0)[0])
    other_packed = packed.copy()
    other_scales = scales.copy()
    other_packed[row, column] ^= 1
    other_scales[row, column // 8] ^= 1
    assert not agrees(decode(other_packed, scales, stored), exact, stored=stored)
    assert not agrees(decode(packed, other_scales, stored), exact, stored=stored)


def test_a_scale_without_a_reciprocal_is_refused_in_one_line(subnormal: Path, run_cli: RunCli, tmp_path: Path) -> None:
    options = ("--rule", "max", "--layout", "compressed-tensors")
    done = run_cli("run", subnormal, tmp_path / "out", *options, code=1)
    assert "does not fit into FP32. Use the layout modelopt." in done.stderr
    assert "Traceback" not in done.stderr


def test_split_partners_give_the_bytes_of_a_whole_checkpoint(local_result: Path, split: Path, tmp_path: Path) -> None:
    assert raw_tensors(local_result) == raw_tensors(convert(split, tmp_path / "apart"))


def test_nothing_but_converted_tensors_differs(k25: Path, tmp_path: Path) -> None:
    before = open_checkpoint(k25)
    after = open_checkpoint(convert(k25, tmp_path / "out"))
    source = raw_tensors(k25)
    result = raw_tensors(tmp_path / "out")
    copied = [name for name in source if ".experts." not in name]
    assert copied
    for name in copied:
        tensor = before.tensors[name]
        other = after.tensors[name]
        assert (tensor.dtype, tensor.shape, source[name]) == (other.dtype, other.shape, result[name])
    assert before.tensor_bytes == after.tensor_bytes
    for sidecar in ("tokenizer.json", "chat_template.jinja"):
        assert (k25 / sidecar).read_bytes() == (tmp_path / "out" / sidecar).read_bytes()


@pytest.mark.slow
def test_a_large_file_beside_the_weights_is_never_whole_in_memory(tiny: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    with (source / "samples.tar").open("wb") as file:
        file.truncate(600_000_000)
        file.seek(300_000_000)
        file.write(b"in the middle")
    for _ in range(2):  # the second run looks whether everything stands as it should
        assert peak_of("run", source, tmp_path / "out", "--device", "cpu") < 500e6, "without the file about 300 MB"
    assert filecmp.cmp(source / "samples.tar", tmp_path / "out" / "samples.tar", shallow=False)


def test_stale_quantization_configs_are_removed(k25: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(k25, tmp_path / "source"))
    stale = json.loads((source / "config.json").read_text())
    parts = stale, stale["text_config"], stale["vision_config"], stale["text_config"].setdefault("part", {})
    for part in parts:
        part["compression_config"] = part["quantization_config"] = stale["text_config"]["quantization_config"]
    (source / "config.json").write_text(json.dumps(stale))
    config = json.loads((convert(source, tmp_path / "out") / "config.json").read_text())
    assert json.dumps(config).count("compression_config") == 0
    assert json.dumps(config).count("quantization_config") == 1
    assert config["quantization_config"]["quant_algo"] == "NVFP4"
    assert config["quantization_config"]["quant_method"] == "modelopt"


def test_input_scales_and_kv_cache_are_settable(tiny: Path, tmp_path: Path) -> None:
    options = ("--set", "input_scale={gate_up: 0.5, down: 0.25}", "--set", "kv_cache=fp8")
    result = convert(tiny, tmp_path / "out", *options)
    tensors = load(result)
    scales = {(name.split(".")[-2], t.item()) for name, t in tensors.items() if name.endswith("input_scale")}
    assert scales == {("gate_proj", 0.5), ("up_proj", 0.5), ("down_proj", 0.25)}
    assert json.loads((result / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    quantization = json.loads((result / "hf_quant_config.json").read_text())["quantization"]
    assert quantization["kv_cache_quant_algo"] == "FP8"


def test_a_kv_cache_that_vllm_would_not_read_is_refused(tiny: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: mine\nlayout: compressed-tensors\nkv_cache: fp8\n")
    both = ("--layout", "compressed-tensors", "--set", "kv_cache=fp8")
    half = tmp_path / "half.yaml"
    half.write_text("name: mine\nlayout: compressed-tensors\n")
    for options in (both, ("--recipe", str(recipe)), ("--recipe", str(half), "--set", "kv_cache=fp8")):
        message = " ".join(run_here("run", tiny, tmp_path / "out", *options, code=1).stderr.split())
        assert "no effect in vLLM" in message
        assert "--kv-cache-dtype fp8" in message
    assert not (tmp_path / "out").exists()


def test_bf16_equals_the_librarys_dequantisation(tiny: Path, tmp_path: Path) -> None:
    before = load(tiny)
    after = load(convert(tiny, tmp_path / "out", "--set", "target=bf16"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    modules = [name.removesuffix(".weight_packed") for name in before if name.endswith(".weight_packed")]
    for module in modules:
        packed = before[f"{module}.weight_packed"].view(torch.uint8).numpy()
        expected = Bf16Weight(Int4Weight(packed, before[f"{module}.weight_scale"].view(torch.uint16).numpy()).bits)
        assert np.array_equal(after[f"{module}.weight"].view(torch.uint16).numpy(), expected.bits)
    assert not [name for name in after if "weight_packed" in name or "weight_shape" in name]


def test_error_is_half_of_plains(tiny: Path, run_cli: RunCli, tmp_path: Path) -> None:
    mse = json.loads(run_cli("run", tiny, tmp_path / "o", "--json").stdout)["totals"]["experts"]
    by_max = json.loads(run_cli("run", tiny, tmp_path / "p", "--rule", "max", "--json").stdout)["totals"]["experts"]
    assert mse["squared_error"] / by_max["squared_error"] <= 0.56
    assert mse["achieved_to_max"] == pytest.approx(mse["squared_error"] / by_max["squared_error"], rel=1e-12)
    assert mse["sqnr_db"] == pytest.approx(22.617, abs=0.005)
    assert by_max["sqnr_db"] == pytest.approx(19.655, abs=0.005)


def test_the_error_of_fp8_is_named_apart(tiny: Path, run_cli: RunCli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = run_cli("run", tiny, out, "--recipe", "kimi-k2-thinking-nvfp4-fp8", code=0).stdout
    run_cli("report", out, code=0)
    report = (out / "report.md").read_text()
    assert "attention, FP8" in report
    for shown in (ran, run_cli("validate", out, "--source", tiny, code=0).stdout):
        assert re.search(r"\ntotal, NVFP4 .* 4,718,592 .* 22.62 dB .*\ntotal, FP8 .* 1,269,760 .* 31.71 dB", shown)
    assert "**22.62 dB** SQNR: of 4,718,592 NVFP4 weights" in report


def test_the_reference_quantizer_says_that_its_rule_is_max(tiny: Path, run_cli: RunCli, tmp_path: Path) -> None:
    pytest.importorskip("modelopt")
    words = ("run", tiny, tmp_path / "out", "--set", "quantizer=reference", "--dry-run")
    note = "note: quantizer reference converts by rule max only, so that is the rule"
    assert note in run_cli(*words, code=0).stderr
    assert note not in run_cli(*words, "--rule", "max", code=0).stderr


def test_inspect_names_what_it_finds(k25: Path, run_cli: RunCli) -> None:
    document = json.loads(run_cli("inspect", k25, "--json").stdout)
    assert document["family"] == "kimi-k2.5"
    assert document["quantization"]["where"] == "config.json text_config"
    assert {"vision_tower", "mm_projector"} <= {holding["role"] for holding in document["holdings"]}


def test_a_result_below_the_budget_ends_with_3(k2_shaped: Path, tmp_path: Path, run_cli: RunCli) -> None:
    """A few tensors miss the budget by rule max."""
    recipe = tmp_path / "strict.yaml"
    recipe.write_text("name: strict\nrule: max\nbudget: {tensor_sqnr_db: 22.5}\n")
    words = ("run", k2_shaped, tmp_path / "out", "--recipe", recipe, "--device", "cpu")
    for more in ((), ("--json",)):  # finished once, it is said again
        done = run_cli(*words, *more, code=3)
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert "below the error budget of 22.5 dB, so `validate` fails: " in line
        assert "_proj has " in line
        assert "next: " not in done.stderr, "a validation would fail"
    assert (tmp_path / "out" / "config.json").exists()
    below_budget = json.loads(done.stdout)["below_budget"]
    checked = run_cli("validate", tmp_path / "out", "--source", k2_shaped, "--json", code=3)
    rule = next(rule for rule in json.loads(checked.stdout)["contract"]["rules"] if rule["number"] == 18)
    assert below_budget["tensor_sqnr_db"] == 22.5
    assert len(below_budget["tensors"]) == rule["count"]
    for name, figure in below_budget["tensors"].items():
        assert figure < 22.5
        assert f"has {figure:.2f} dB" in line or len(below_budget["tensors"]) > 3, name


def test_a_result_within_the_budget_says_nothing_of_it(k2_shaped: Path, tmp_path: Path, run_cli: RunCli) -> None:
    done = run_cli("run", k2_shaped, tmp_path / "out", "--rule", "max", "--device", "cpu", "--json", code=0)
    assert json.loads(done.stdout)["below_budget"] is None


IN_ANOTHER_PROCESS = """
import pickle, sys
from k2convert.job.shard import convert_shard
tasks = pickle.loads(sys.stdin.buffer.read())
sys.stdout.buffer.write(pickle.dumps([convert_shard(task) for task in tasks]))
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("overrides", [{}, {"rule": "max", "layout": "compressed-tensors"}, {"target": "bf16"}])
def test_a_task_is_pickled_and_converted_in_another_process(
    split: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, Any]
) -> None:
    tasks: list[ShardTask] = []

    def remember(task: ShardTask, **options: Any) -> ShardRecord:
        tasks.append(task)
        return convert_shard(task, **options)

    monkeypatch.setattr(executor, "convert_shard", remember)
    source: dict[str, Any] = {"source": split}
    whole = executor.execute(plan_job(folder=tmp_path / "whole", **source, **overrides))
    assert len(tasks) == len(whole.records) > 1 or overrides == {"target": "bf16"}
    (tmp_path / "apart").mkdir()
    there = [replace(task, destination=tmp_path / "apart") for task in tasks]
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS], input=pickle.dumps(there), capture_output=True, check=True
    )
    for task, record in zip(tasks, pickle.loads(done.stdout), strict=True):
        name = task.shard.name
        assert record == whole.records[name]
        assert (tmp_path / "apart" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_each_header_of_a_result_is_encoded_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = resources.encode_header
    encoded = list[Any]()

    def counted(tensors: Any, **options: Any) -> bytes:
        encoded.append(tensors)
        return encode(tensors, **options)

    monkeypatch.setattr(resources, "encode_header", counted)
    job = plan_job(tiny, tmp_path / "out")
    assert len(encoded) == len(job.plan.jobs) == 5
    executor.execute(job)
    assert len(encoded) == 10, "and once more when its shard is written"
    sizes = {item.name: item.output_bytes for item in job.items}
    assert sizes == {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")}
