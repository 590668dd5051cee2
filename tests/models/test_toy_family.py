"""A family is one file and one row: a toy one is added to a copy of the package, and its checkpoint is converted."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import k2convert
from k2convert.quantize.kernels import _cpu

TOY = '''
"""A toy family: K2's tensors under other names."""

import re
from functools import partial

from k2convert.models.config import read_architecture
from k2convert.models.names import WEIGHT, Family, ModelCardFacts, ModulePlace, Role

_BLOCK = re.compile(r"toy\\.blocks\\.(\\d+)\\.(.+)")
_EXPERT = re.compile(r"ffn\\.experts\\.(\\d+)\\.(gate|up|down)_proj")
_MLP = re.compile(r"ffn\\.(shared_experts\\.)?(gate|up|down)_proj")


def _classify(module):
    if module in ("toy.embed_tokens", "toy.norm", "lm_head"):
        return ModulePlace({"lm_head": Role.LM_HEAD, "toy.norm": Role.NORM}.get(module, Role.EMBEDDINGS))
    block = _BLOCK.fullmatch(module)
    if block is None:
        return None
    layer, inner = int(block[1]), block[2]
    if expert := _EXPERT.fullmatch(inner):
        return ModulePlace(Role.EXPERTS, layer, int(expert[1]), expert[2])
    if mlp := _MLP.fullmatch(inner):
        return ModulePlace(Role.SHARED_EXPERTS if mlp[1] else Role.DENSE_MLP, layer, None, mlp[2])
    if inner == "ffn.gate":
        return ModulePlace(Role.ROUTER, layer)
    return ModulePlace(Role.NORM if inner.endswith("layernorm") else Role.ATTENTION, layer)


def _unconverted(roles, architecture):
    dense = [(f"blocks.{i}.ffn", True) for i in range(architecture.num_dense_layers)]
    return [("self_attn", True), ("shared_experts", True), *dense, ("lm_head", True), ("ffn.gate", False)]


TOY = Family(
    name="toy",
    title="Toy",
    source_hint="Use the toy release.",
    recipe="toy-nvfp4",
    prefix="toy.",
    layer="toy.blocks.{layer}",
    router="toy.blocks.{layer}.ffn.gate",
    experts="toy.blocks.{layer}.ffn.experts",
    mlp_norm="toy.blocks.{layer}.post_attention_layernorm",
    classify=_classify,
    expected_name=lambda name: name,
    read_architecture=read_architecture,
    matches_config=lambda config: config.get("model_type") == "toy",
    unconverted=_unconverted,
    card=ModelCardFacts(model_kind="a toy", kept=("attention",)),
    router_parameters=(WEIGHT, "e_score_correction_bias"),
)
'''
RECIPE = "name: toy-nvfp4\nfamily: toy\nroles: [experts]\n"
COMMAND = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
import k2convert
assert k2convert.__file__.startswith(sys.argv[1]), k2convert.__file__
from k2convert.cli.app import main
main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the toy family added in the places that CONTRIBUTING.md lists."""
    root = tmp_path_factory.mktemp("copy")
    copied = root / "k2convert"
    original = Path(k2convert.__file__).parent
    shutil.copytree(original, copied, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(_cpu.__file__, copied / "quantize" / "kernels")
    shutil.copytree(original.parent / "recipes", root / "recipes")
    (copied / "models" / "toy.py").write_text(TOY)
    (root / "recipes" / "toy-nvfp4.yaml").write_text(RECIPE)
    table = copied / "models" / "__init__.py"
    text = table.read_text()
    changed = text.replace("from k2convert.models import kimi\n", "from k2convert.models import kimi, toy\n")
    changed = changed.replace("(kimi.K2_5, kimi.K2_THINKING)", "(kimi.K2_5, kimi.K2_THINKING, toy.TOY)")
    assert changed.count("toy") == text.count("toy") + 2
    table.write_text(changed)
    return root


def command(package: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", COMMAND, package, *arguments]
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, cwd=package, check=False)


def toy_name(name: str) -> str:
    return name.replace("model.", "toy.").replace(".layers.", ".blocks.").replace(".mlp.", ".ffn.")


@pytest.fixture(scope="module")
def toy(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint under the toy family's names."""
    folder = Path(shutil.copytree(tiny, tmp_path_factory.mktemp("toy") / "source"))
    for shard in folder.glob("*.safetensors"):
        tensors = {toy_name(name): tensor for name, tensor in load_file(shard).items()}
        save_file(tensors, shard, metadata={"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {toy_name(name): shard for name, shard in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "toy"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_toy_family_is_converted_and_validated(package: Path, toy: Path, tiny: Path, tmp_path: Path) -> None:
    done = command(package, "run", toy, tmp_path / "toy")
    assert done.returncode == 0, done.stderr
    checked = command(package, "validate", tmp_path / "toy", "--source", toy)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    inspected = json.loads(command(package, "inspect", toy, "--json").stdout)
    assert (inspected["family"], inspected["recipe"], inspected["int4_projections"]) == ("toy", "toy-nvfp4", 144)
    assert command(package, "run", tiny, tmp_path / "k2").returncode == 0
    for shard in tiny.glob("*.safetensors"):
        ours, toys = load_file(tmp_path / "k2" / shard.name), load_file(tmp_path / "toy" / shard.name)
        assert {toy_name(name) for name in ours} == set(toys)
        for name, tensor in ours.items():
            assert tensor.reshape(-1).view(torch.uint8).equal(toys[toy_name(name)].reshape(-1).view(torch.uint8))


def test_a_checkpoint_of_no_family_is_refused_naming_all(package: Path, toy: Path, run_cli: object) -> None:
    """The unchanged package refuses the toy checkpoint, and says what it converts."""
    done = subprocess.run(
        [sys.executable, "-m", "k2convert", "inspect", str(toy)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no tensor is named model.layers.* or language_model.model.layers.*" in done.stderr
