"""What `scripts/engines` does without an engine: its checkpoints, the plain decoder, defects, verdicts, the table."""

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from library_decoders import agrees, create_decoder

from k2convert.checkpoint.index import open_checkpoint
from k2convert.models import detect_family
from scripts.engine_checks.__main__ import KINDS, Task, check_defects, read_result, run_client, tolerance
from scripts.engine_checks.agreement import BF16_WEIGHTS, FLOAT32, FP4_TIES, Expected, compare
from scripts.engine_checks.clients.files import PROJECTIONS, Checkpoint
from scripts.engine_checks.clients.outcome import Outcome
from scripts.engine_checks.engines import ENGINES
from scripts.engine_checks.environments import QUARK, STEPS
from scripts.engine_checks.fp8 import configs
from scripts.engine_checks.variants import (
    BANK_MISSING,
    FOUND_BY,
    K2,
    K3,
    K25,
    ROOT,
    TENSOR_RENAMED,
    VARIANTS,
    Variant,
    convert,
    copy_with_defect,
    wrap_k25,
)

W4A16 = Variant(K2, "compressed-tensors", "w4a16", "mse")
K3_W4A4 = Variant(K3, "modelopt", "w4a4", "mse")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[Variant, Path]:
    folder = tmp_path_factory.mktemp("engines")
    kinds = (W4A16, Variant(K25, "modelopt", "w4a4", "max"), K3_W4A4)
    return {variant: convert(variant, folder) for variant in kinds}


def test_the_guide_and_the_readme_count_every_load() -> None:
    loads = [variant for engine in ENGINES.values() for variant in KINDS if engine.reads(variant)]
    of_k3 = sum(variant.form == K3 for variant in loads)
    guide = (ROOT / "k2convert/guide/engines.md").read_text()
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| .* \| .* \| w4a.* \| (\d+) \| (\d+|known defect|skips the codes) \|$", guide, flags=re.M)
    assert sum(int(count) for count, _ in rows) == len(loads) == 77
    whole = sum(int(count) for count, checks in rows if checks.isdecimal())
    text = " ".join(guide.split())
    assert f"K2's {len(loads) - of_k3} loads" in text
    assert f"Kimi K3 adds {of_k3} loads, and {len(FOUND_BY)} of copies with a defect" in text
    assert f"Of the {len(loads)} results, engines read {whole} completely" in text
    assert f"read every tensor in {whole} of {len(loads)} loads" in readme


def test_the_wrapped_checkpoint_is_of_the_k25_family(tiny: Path, tmp_path: Path) -> None:
    wrapped = open_checkpoint(wrap_k25(tiny, tmp_path / "k2.5"))
    assert detect_family(wrapped).name == "kimi-k2.5"
    assert {f"language_model.{name}" for name in open_checkpoint(tiny).tensors} < set(wrapped.tensors)


@pytest.mark.slow
def test_clients_decode_what_the_libraries_decode(converted: dict[Variant, Path]) -> None:
    for variant, folder in converted.items():
        files = Checkpoint(folder)
        decode = create_decoder(variant.layout)
        assert files.is_modelopt == (variant.layout == "modelopt")
        assert files.is_weight_only == (variant.activations == "w4a16")
        for projection in PROJECTIONS:
            name = files.expert(1, 0, projection)
            codes, scales, scalar = (files.get(f"{name}.{parameter}") for parameter in files.parameters[:3])
            theirs = decode(codes.numpy(), scales.view(torch.uint8).numpy(), scalar.item())
            assert agrees(theirs, files.weight(name).numpy(), stored=scalar.item())


def test_every_engine_has_an_environment_and_checkpoints() -> None:
    assert {engine.environment for engine in ENGINES.values()} == set(STEPS) - {QUARK}
    assert sorted(map(repr, KINDS)) == sorted(map(repr, VARIANTS))
    assert [Task(ENGINES["vllm-0.33"], variant).computes for variant in (K3_W4A4, W4A16)] == [False, True]
    assert [sum(map(engine.reads, VARIANTS)) for engine in ENGINES.values()] == [16, 20, 20, 4, 8, 1, 8]


@pytest.mark.slow
def test_copies_have_one_defect_each(converted: dict[Variant, Path], tmp_path: Path) -> None:
    result = converted[K3_W4A4]
    good = tmp_path / "k3"
    good.symlink_to(result)
    whole = Checkpoint(good)
    banks = copy_with_defect(good, BANK_MISSING)
    for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        before, after = (json.loads((at / name).read_text())[key]["quantized_layers"] for at in (result, banks))
        assert set(before) - set(after) == {layer for layer in before if "layers.1." in layer}
        assert len(before) == 18
        assert len(after) == 12
    assert set(Checkpoint(banks).tensors) == set(whole.tensors)
    renamed = Checkpoint(copy_with_defect(good, TENSOR_RENAMED))
    assert len(set(whole.tensors) - set(renamed.tensors)) == len(set(renamed.tensors) - set(whole.tensors)) == 1
    assert renamed.whole_config == whole.whole_config
    assert open_checkpoint(renamed.folder).tensors.keys() == renamed.tensors.keys()


@pytest.mark.slow
def test_a_defect_that_no_engine_names_is_a_problem(converted: dict[Variant, Path], tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / K3_W4A4.name).symlink_to(converted[K3_W4A4])
    lines: list[str] = []
    problems = check_defects(list(ENGINES.values()), tmp_path, tmp_path / "request.json", lines.append)
    assert [problem.split(",")[0] for problem in problems] == [name for name, _ in FOUND_BY]
    assert all("the client stopped" in line for line in lines)  # a crash is not a finding


def test_tolerances_follow_from_what_is_rounded() -> None:
    by_max = Variant(K2, "compressed-tensors", "w4a16", "max")
    w4a4 = Variant(K2, "compressed-tensors", "w4a4", "mse")
    assert tolerance(Task(ENGINES["vllm"], by_max)) is FLOAT32
    assert tolerance(Task(ENGINES["vllm"], w4a4)) is FP4_TIES
    assert tolerance(Task(ENGINES["transformers-4"], by_max)) is BF16_WEIGHTS
    assert tolerance(Task(ENGINES["transformers-5"], w4a4)) is FLOAT32


def test_logits_that_differ_are_a_problem() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 8, 32, generator=generator)
    ids = torch.arange(8).view(1, 8)
    expected = Expected(logits, [1, 2])
    same = compare(logits, torch.tensor([1, 2]), expected=expected, source=expected, windows=ids)
    assert same.problems(FLOAT32) == []
    other = compare(logits * 1.01, torch.tensor([1, 3]), expected=expected, source=expected, windows=ids)
    assert len(other.problems(FLOAT32)) == 4
    broken = compare(logits * float("nan"), None, expected=expected, source=expected, windows=ids)
    assert len(broken.problems(FP4_TIES)) == 3


def test_a_failed_check_and_a_crash_fail_the_checkpoint(tmp_path: Path) -> None:
    task = Task(ENGINES["sglang"], W4A16)
    outcome = Outcome("SGLang 1")
    outcome.check("one", True)
    outcome.check("two", False, "wrong")
    assert outcome.save(tmp_path) == 1
    result = read_result(task, tmp_path, None)
    assert (result.title, result.num_checks, result.failed) == ("SGLang 1", 2, ("two: wrong",))
    out = run_client(task, tmp_path / "no-environments", tmp_path / "request.json")
    assert "the client stopped" in read_result(task, out, None).failed[0]


def test_fp8_layers_are_asked_about_with_the_configs_that_are_written(tmp_path: Path) -> None:
    documents = configs(tmp_path)
    assert documents["k2"]["format"] == "mixed-precision"
    layers = documents["k3"]["quantized_layers"]
    assert layers["model.layers.3.self_attn.fused_qkv_a_proj_with_mqa"] == {"quant_algo": "FP8_PB_WO"}
    assert layers["model.layers.1.mlp.experts"]["quant_algo"] == "NVFP4"
