"""Every release of compressed-tensors from 0.13 on reads our results and the sources as k2convert does.

`scripts/check` runs this file with 0.13, 0.20 and the installed release, so it imports only what all of them have.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import run
from library_decoders import agrees
from safetensors.torch import load_file
from torch import Tensor

from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, dequantize_nvfp4

compressors = pytest.importorskip("compressed_tensors.compressors")
quantization = pytest.importorskip("compressed_tensors.quantization")
Tensors = dict[str, Tensor]


def library(folder: Path) -> Callable[[Tensors], Tensor]:
    """The library's decoder of a projection, as a folder's config.json declares it."""
    declared = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(declared)
    scheme = config.config_groups["group_0"]
    kind: Any = compressors.BaseCompressor.get_value_from_registry(config.format)

    def before_0_15(state: Tensors) -> Tensor:
        scale = state["weight_scale"]
        if scale.dtype == torch.float8_e4m3fn:  # 0.13 cannot multiply it; from 0.14 on this is its own first step
            state = state | {"weight_scale": scale.to(torch.bfloat16)}
        return kind().decompress_weight(compressed_data=state, quantization_args=scheme.weights)

    if hasattr(kind, "decompress_weight"):
        return before_0_15
    return lambda state: kind.decompress(state, scheme)["weight"]


def projections(folder: Path) -> dict[str, Tensors]:
    """The tensors of every quantized projection, as the library names them."""
    modules: dict[str, Tensors] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            module, _, parameter = name.rpartition(".")
            modules.setdefault(module, {})[parameter] = tensor
    return {module: state for module, state in modules.items() if "weight_packed" in state}


def bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("activations", ["w4a4", "w4a16"])
@pytest.mark.parametrize("rule", ["mse", "max"])
def test_it_reads_the_numbers_of_a_result(rule: str, activations: str, tiny: Path, tmp_path: Path) -> None:
    options = ["--rule", rule, "--layout", "compressed-tensors", "--activations", activations, "--json"]
    assert run("run", tiny, tmp_path / "out", *options) == 0
    decode = library(tmp_path / "out")
    states = projections(tmp_path / "out")
    assert len(states) == 144
    with torch.compiler.set_stance("force_eager"):  # old releases compile their unpacking
        for state in states.values():
            stored = state["weight_global_scale"].item()
            global_scale = float(np.float32(1.0 / stored))
            ours = Nvfp4Weight(bytes_of(state["weight_packed"]), bytes_of(state["weight_scale"]), global_scale)
            assert agrees(decode(state), dequantize_nvfp4(ours), stored=stored)


def test_it_reads_the_numbers_of_a_source(tiny: Path) -> None:
    decode = library(tiny)
    states = projections(tiny)
    assert len(states) == 144
    for state in states.values():
        scale_bits = state["weight_scale"].view(torch.uint16).numpy()
        ours = Bf16Weight(Int4Weight(bytes_of(state["weight_packed"]), scale_bits).bits)
        assert np.array_equal(decode(state).view(torch.uint16).numpy(), ours.bits)
