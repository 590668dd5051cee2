"""Each made checkpoint contains what its maker claims, read by the safetensors library and compressed-tensors."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from k2convert.evaluation.streamed import LayerComparison
from k2convert.records.evaluation import find_evaluation
from scripts import fixture_maker as fixtures
from scripts.bench import k3_layers
from scripts.fixture_maker import k3
from scripts.fixture_maker.__main__ import main
from scripts.fixture_maker.edges import unpack
from scripts.fixture_maker.folder import read_small
from scripts.fixture_maker.inventory import TensorSpec
from scripts.fixture_maker.shaped import VOCABULARY
from scripts.fixture_maker.shards import write_streamed

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["tiny", "k25", "split", "reap", "i64", "minus8", "zeros", "subnormal", "wide", "k2_shaped"]


Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def whole(tiny: Path) -> Tensors:
    return tensors_of(tiny)


def tensors_of(folder: Path) -> Tensors:
    """Load every tensor of a small checkpoint with the safetensors library."""
    return read_small(folder).tensors()


def codes_of(tensors: Tensors, module: str) -> torch.Tensor:
    """Unpack a projection's codes with compressed-tensors."""
    return unpack(tensors[f"{module}.weight_packed"])


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def experts(layer: int, expert: int, kind: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj"


@pytest.mark.parametrize("name", SMALL)
def test_index_covers_the_shards_and_config_counts_the_experts(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    checkpoint = read_small(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: shard for shard, members in checkpoint.shards.items() for name in members}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in checkpoint.tensors().values())
    text = checkpoint.config.get("text_config", checkpoint.config)
    routers = [tensor for name, tensor in checkpoint.tensors().items() if name.endswith("mlp.gate.weight")]
    assert len(routers) == text["num_hidden_layers"] - text["first_k_dense_replace"]
    assert {router.shape for router in routers} == {(text["n_routed_experts"], text["hidden_size"])}


def test_streamed_shard_equals_the_file_of_the_library(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "a": torch.randn(4, 4).bfloat16(),
        "c": torch.tensor([1, 2]),
        "d.10": torch.randn(3),
        "d.9": torch.randn(2),
    }
    dtypes = {torch.int32: "I32", torch.bfloat16: "BF16", torch.int64: "I64", torch.float32: "F32"}
    specs = [TensorSpec(name, dtypes[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    write_streamed(tmp_path / "ours", specs, lambda spec: [tensors[spec.name].view(torch.uint8).numpy().tobytes()])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_k25_wraps_the_same_language_model(k25: Path, tiny: Path, whole: Tensors) -> None:
    wrapped = tensors_of(k25)
    assert all(same(wrapped[f"language_model.{name}"], tensor) for name, tensor in whole.items())
    others = {name for name in wrapped if not name.startswith("language_model.")}
    assert {name.split(".")[0] for name in others} == {"vision_tower", "mm_projector"}
    assert wrapped["vision_tower.patch_embed.proj.weight"].ndim == 4
    config = json.loads((k25 / "config.json").read_text())
    assert config["model_type"] == "kimi_k25"
    assert "quantization_config" not in config
    assert config["text_config"].items() >= json.loads((tiny / "config.json").read_text()).items()


def test_split_scatters_partners_and_changes_no_tensor(split: Path, whole: Tensors) -> None:
    scattered = tensors_of(split)
    assert scattered.keys() == whole.keys()
    assert all(same(scattered[name], whole[name]) for name in whole)
    where = json.loads((split / "model.safetensors.index.json").read_text())["weight_map"]
    for name, other in (
        (f"{experts(1, 0, 'gate')}.weight_packed", f"{experts(1, 0, 'up')}.weight_packed"),
        (f"{experts(2, 1, 'gate')}.weight_packed", f"{experts(2, 1, 'gate')}.weight_scale"),
        (f"{experts(3, 3, 'up')}.weight_packed", f"{experts(3, 3, 'up')}.weight_shape"),
        (f"{experts(1, 5, 'down')}.weight_packed", f"{experts(1, 4, 'down')}.weight_packed"),
    ):
        assert where[name] != where[other]


def test_i64_changes_only_the_dtype_of_shapes(i64: Path, whole: Tensors) -> None:
    changed = tensors_of(i64)
    for name, tensor in whole.items():
        assert same(changed[name], tensor.long() if name.endswith("weight_shape") else tensor)


def test_k2_shaped_values_look_like_quantization_aware_training(k2_shaped: Path) -> None:
    tensors = tensors_of(k2_shaped)
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    for expert in (0, 1):
        for kind, shape in fixtures.SMALL_SHAPE.projections().items():
            module = f"model.layers.1.mlp.experts.{expert}.{kind}"
            codes = codes_of(tensors, module)
            assert codes.shape == shape == tuple(tensors[f"{module}.weight_shape"].tolist())
            assert (codes.unflatten(1, (-1, 32)).abs().amax(2) == 7).all()
            scales = tensors[f"{module}.weight_scale"].float()
            assert ((scales > 1e-4) & (scales < 1)).all()
    first, second = (tensors[f"{experts(1, expert, 'up')}.weight_packed"] for expert in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.slow
def test_command_lists_and_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = subprocess.run([ROOT / "scripts" / "fixtures", "list"], capture_output=True, text=True, check=True).stdout
    assert {line.split()[0] for line in listed.splitlines()} >= {"k25", "split", "k2-shaped", "k2-thinking-headers"}
    out = tmp_path / "shaped"
    size = ["--experts", "2", "--hidden", "256", "--intermediate", "256", "--dense-layers", "0"]
    main(["k2-shaped", str(out), *size])
    assert str(out) in capsys.readouterr().out
    assert tensors_of(out)["model.layers.0.mlp.gate.weight"].shape == (2, 256)
    main(["token-ids", str(tmp_path / "ids.npy"), "--tokens", "300"])
    ids = np.load(tmp_path / "ids.npy").tolist()
    assert len(ids) == 300
    assert 0 <= min(ids) < max(ids) < json.loads((out / "config.json").read_text())["vocab_size"]


@pytest.mark.slow
def test_layers_of_kimi_k3_are_made_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(k3, "K3_SHAPE", replace(k3.TINY_SHAPE, vocabulary=VOCABULARY))
    for name in ("run", "run_reference"):
        monkeypatch.setattr(LayerComparison, name, getattr(LayerComparison, name))  # which is put back
    monkeypatch.setattr("sys.argv", ["k3_layers", str(tmp_path / "work")])
    fixtures.make_k3_shaped(tmp_path / "work" / "k3-shaped")
    k3_layers.main()
    evaluation = find_evaluation(tmp_path / "work" / "evaluation.json")
    assert evaluation is not None
    assert evaluation.rows[0].figures.divergence.maximum == 0
    names = [f"{layer}, {model}" for layer in k3_layers.LAYERS for model in ("reference", "model")]
    rows = capsys.readouterr().out.splitlines()[-8:]
    assert [row.split("|")[1].strip() for row in rows] == [*names, "output matrix of both models", "all"]
    tensors = tensors_of(tmp_path / "work" / "k3-shaped")
    assert all(tensor.any() == (tensor.dtype is not torch.uint8) for tensor in tensors.values())
