"""A new rule, source format, layout or family is a file and a row: toy ones are added to a copy of the package."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from command import RunCli, messages_of, python
from safetensors.torch import load_file

import k2convert
from k2convert.quantize.formats.int4 import unpack_int4
from k2convert.quantize.kernels import _cpu
from scripts.fixture_maker.damage import edit_checkpoint
from scripts.fixture_maker.folder import SmallCheckpoint

RULE = """
from k2convert.quantize.formats.bf16 import Magnitude, bf16_values
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, pack_nibbles
from k2convert.quantize.rules.max import max_block_scales, max_global_scale, max_steps, max_nibbles


def toy_global_scale(magnitude: Magnitude) -> float:
    return 2 * max_global_scale(magnitude)


def quantize_toy(weight, global_scale):
    rows, columns = weight.shape
    blocks = bf16_values(weight.bits).reshape(-1, 16)
    scales = max_block_scales(abs(blocks).max(axis=1), global_scale * 4 / 6)
    nibbles = max_nibbles(blocks, max_steps(scales, global_scale)[:, None])
    return Nvfp4Weight(pack_nibbles(nibbles.reshape(rows, columns)), scales.reshape(rows, -1), global_scale)
"""

ROW = '''
    "toy": RuleArithmetic(
        summary="Every block gets its largest weight over 4 as scale.",
        global_scale=toy_global_scale,
        quantize=quantize_toy,
    ),
}
"""One row for each word'''


BYTES_OF_RULE = """
import numpy as np
from k2convert.quantize.formats.bf16 import bf16_bits, Bf16Weight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.quantizer import create_quantizer
from k2convert.quantize.rules.toy import quantize_toy

random = np.random.default_rng(0)
scales = bf16_bits(random.uniform(0.01, 0.02, (4, 2)).astype(np.float32))
int4 = Int4Weight(random.integers(0, 256, (4, 32), dtype=np.uint8), scales)
quantizer = create_quantizer("native", rule="toy")
for weight in (int4, Bf16Weight(int4.bits)):
    size = weight.magnitude()
    scale = quantizer.global_scale(size)
    found, _ = quantizer.quantize(weight, name="weight", magnitude=size, global_scale=scale)
    defined = quantize_toy(weight, scale)
    assert found.packed.tobytes() == defined.packed.tobytes()
    assert found.block_scales.tobytes() == defined.block_scales.tobytes()
"""

FORMAT = """
import numpy as np

from k2convert.quantize.formats.bf16 import Bf16Weight, bf16_bits, bf16_values


class ToyWeight(Bf16Weight):
    \"\"\"q int16 [N, K] times s BF16 [N, K/32], rounded to BF16.\"\"\"

    @classmethod
    def load(cls, packed, scale, rows, name):
        scales = bf16_values(scale.view(np.uint16).reshape(rows, -1))
        return cls(bf16_bits(packed.view(np.int16).reshape(rows, -1) * scales.repeat(32, axis=1)))
"""

FORMAT_ROW = """
TOY: Final = SourceFormat(
    title="INT16",
    parameters=INT4.parameters,
    packed_dtype="I16",
    scale_dtypes=("BF16",),
    columns_per_element=1,
    bits=16.5,
    known_config={"quant_method": "toy"},
    known_group={},
    known_weights={},
    export="export the model with the toy tool.",
    load=ToyWeight.load,
)
SOURCE_FORMATS: Final = (INT4, MXFP4, TOY)
"""

FAMILY = '''
"""A toy family: K2's tensors under other names, with experts in the toy format."""

import re
from functools import partial

from k2convert.models.config import read_architecture
from k2convert.models.names import Family, ModelCardFacts, ModulePlace, Role
from k2convert.models.source_formats import TOY as INT8

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
    model_types=("toy",),
    unconverted=_unconverted,
    card=ModelCardFacts(model_kind="a toy", unquantized=("attention",)),
    source_format=INT8,
)
'''
LAYOUT = """
from k2convert.checkpoint.layouts.layout import CheckpointLayout


def _declare(declared, version):
    scheme = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    group = {"weights": scheme, "targets": ["Linear"]}
    if declared.activations == "w4a4":
        group["input_activations"] = scheme
    return {"quant_method": "toy", "config_groups": {"0": group}, "ignore": list(declared.excludes)}


TOY_LAYOUT = CheckpointLayout(
    name="toy",
    title="`toy`",
    weight="codes",
    block_scale="steps",
    global_scale="toy_scale",
    input_scale="toy_input",
    is_divisor=True,
    library="modelopt",
    declared_keys=("quant_method",),
    quantization_config=_declare,
    read_activations=lambda stated: "w4a4" if stated.get("quant_method") == "toy" else None,
    exclude_entry=lambda part, is_open: f"*{part}*" if is_open else f"*{part}",
)
"""
COMMAND = "from k2convert.cli.app import main; main(sys.argv[2:])"
START = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
import k2convert
assert k2convert.__file__.startswith(sys.argv[1]), k2convert.__file__
"""


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with a toy of each kind added in the places that CONTRIBUTING.md lists."""
    root = tmp_path_factory.mktemp("copy")
    copied = root / "k2convert"
    original = Path(k2convert.__file__).parent
    shutil.copytree(original, copied, ignore=shutil.ignore_patterns("__pycache__", "*.so", "cpp"))
    shutil.copy(_cpu.__file__, copied / "quantize" / "kernels")
    shutil.copytree(original.parent / "recipes", root / "recipes")
    edit(copied / "choices.py", "\nRule = Literal[", '\nRule = Literal["toy", ')
    (copied / "quantize" / "rules" / "toy.py").write_text(RULE)
    rules = copied / "quantize" / "rules" / "__init__.py"
    line = "from k2convert.quantize.rules.toy import quantize_toy, toy_global_scale\n"
    edit(rules, "\n\n@dataclass", f"{line}\n\n@dataclass")
    edit(rules, '\n}\n"""One row for each word', ROW)
    edit(copied / "choices.py", "\nLayout = Literal[", '\nLayout = Literal["toy", ')
    layouts = copied / "checkpoint" / "layouts"
    (layouts / "toy.py").write_text(LAYOUT)
    edit(layouts / "__init__.py", "\n\nLAYOUTS", "\nfrom k2convert.checkpoint.layouts.toy import TOY_LAYOUT\n\nLAYOUTS")
    edit(layouts / "__init__.py", '\n}\n"""One row', '\n    "toy": TOY_LAYOUT,\n}\n"""One row')
    certificate = copied / "check" / "certificate.py"
    edit(
        certificate,
        "_PARAMETERS: Final = {",
        '_PARAMETERS: Final = {"toy": ("codes", "steps", "toy_scale", "toy_input"),',
    )
    edit(certificate, "_DIVISORS: Final = (", '_DIVISORS: Final = ("toy", ')
    (copied / "quantize" / "formats" / "toy.py").write_text(FORMAT)
    formats = copied / "models" / "source_formats.py"
    line = "from k2convert.quantize.formats.toy import ToyWeight\n"
    edit(formats, "from k2convert.quantize.formats.mxfp4", f"{line}from k2convert.quantize.formats.mxfp4")
    edit(formats, "SOURCE_FORMATS: Final = (INT4, MXFP4)\n", FORMAT_ROW)
    (copied / "models" / "toy.py").write_text(FAMILY)
    (root / "recipes" / "toy-nvfp4.yaml").write_text("name: toy-nvfp4\nfamily: toy\nroles: [experts]\n")
    families = copied / "models" / "__init__.py"
    edit(families, "from k2convert.models import kimi, kimi_k3\n", "from k2convert.models import kimi, kimi_k3, toy\n")
    edit(families, "kimi.K2_THINKING)", "toy.TOY, kimi.K2_THINKING)")
    return root


def in_copy(package: Path, program: str, *words: str | Path) -> str:
    """Run a program that imports the copy; what it prints."""
    done = python(START + program, package, *words, cwd=package)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_toy_rule_converts_and_measures(package: Path, cut: Path, tmp_path: Path) -> None:
    """The rule has no kernel. The certificate has the ledger's sums of errors from the bytes alone."""
    in_copy(package, COMMAND, "run", cut, tmp_path / "out", "--rule", "toy", "--quiet")
    assert re.search(
        r"^certificate: all [0-9,]+ rows of 12 tensors checked by their error alone \(.* rule toy .*; 0 differ$",
        in_copy(package, COMMAND, "validate", tmp_path / "out", "--source", cut, "--quiet"),
        re.MULTILINE,
    )
    in_copy(package, BYTES_OF_RULE)


def toy_name(name: str) -> str:
    return name.replace("model.", "toy.").replace(".layers.", ".blocks.").replace(".mlp.", ".ffn.")


@pytest.fixture(scope="module")
def toy(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint under the toy family's names, its codes two bytes each."""

    def change(checkpoint: SmallCheckpoint) -> None:
        for shard, members in checkpoint.shards.items():
            checkpoint.shards[shard] = {toy_name(name): tensor for name, tensor in members.items()}
        for name, tensor in checkpoint.tensors().items():
            if name.endswith(".weight_packed"):
                nibbles = torch.from_numpy(unpack_int4(tensor.view(torch.uint8).numpy()))
                checkpoint.replace(name, nibbles.view(torch.int8).to(torch.int16))
        checkpoint.config["model_type"] = "toy"
        del checkpoint.config["quantization_config"]

    folder = Path(shutil.copytree(tiny, tmp_path_factory.mktemp("toy") / "source"))
    edit_checkpoint(folder, change)
    return folder


@pytest.mark.slow
def test_a_toy_family_in_a_toy_format_is_converted(package: Path, toy: Path, tiny: Path, tmp_path: Path) -> None:
    for rule in ("mse", "max"):
        in_copy(package, COMMAND, "run", toy, tmp_path / rule, "--rule", rule)
    inspected = json.loads(in_copy(package, COMMAND, "inspect", toy, "--json"))
    assert (inspected["family"], inspected["recipe"]) == ("toy", "toy-nvfp4")
    in_copy(package, COMMAND, "run", tiny, tmp_path / "k2", "--rule", "max")
    for shard in tiny.glob("*.safetensors"):
        ours = load_file(tmp_path / "k2" / shard.name)
        toys = load_file(tmp_path / "max" / shard.name)
        assert {toy_name(name) for name in ours} == set(toys)
        for name, tensor in ours.items():
            assert tensor.reshape(-1).view(torch.uint8).equal(toys[toy_name(name)].reshape(-1).view(torch.uint8))


def test_a_toy_layout_is_written_validated_and_inspected(package: Path, cut: Path, tmp_path: Path) -> None:
    in_copy(package, COMMAND, "run", cut, tmp_path / "toy", "--layout", "toy", "--quiet")
    in_copy(package, COMMAND, "run", cut, tmp_path / "usual", "--quiet")
    validated = in_copy(package, COMMAND, "validate", tmp_path / "toy", "--source", cut, "--quiet")
    assert "(toy, w4a4)" in validated
    inspected = json.loads(in_copy(package, COMMAND, "inspect", tmp_path / "toy", "--json"))
    assert inspected["conversion"]["layout"] == "toy"
    assert json.loads((tmp_path / "toy" / "config.json").read_text())["quantization_config"]["quant_method"] == "toy"
    assert not (tmp_path / "toy" / "hf_quant_config.json").exists()
    renamed = {"codes": "weight", "steps": "weight_scale"}
    toys: dict[str, torch.Tensor] = {}
    ours: dict[str, torch.Tensor] = {}
    for shard in cut.glob("*.safetensors"):
        toys |= load_file(tmp_path / "toy" / shard.name)
        ours |= load_file(tmp_path / "usual" / shard.name)
    assert len(toys) == len(ours)
    scales = [name for name in toys if name.endswith(".toy_scale")]
    assert scales
    for scale in scales:
        module = scale.removesuffix(".toy_scale")
        assert float(toys[scale]) == 1 / float(ours[f"{module}.weight_scale_2"])
        for name, usual in renamed.items():
            assert torch.equal(toys[f"{module}.{name}"].view(torch.uint8), ours[f"{module}.{usual}"].view(torch.uint8))


def test_a_checkpoint_of_no_family_is_refused_naming_all(toy: Path, run_cli: RunCli) -> None:
    """The unchanged package refuses the toy checkpoint, and says what it converts."""
    done = run_cli("inspect", toy)
    assert done.returncode == 1
    assert "no tensor is named model.layers.* or language_model.model.layers.*" in messages_of(done.stderr)
