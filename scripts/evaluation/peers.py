"""Runs published calibrations on the same model: the INT4 weights of the routed experts in FP32, and the same tokens.

Each routed expert becomes a module of three `nn.Linear`, which is what llm-compressor and ModelOpt look for. They see
the exact values of the INT4 weights, quantize only the routed experts, weights only, and give gate and up one global
scale. Their quantized weights are read back in FP32 and scored like any other variant. W4A4 rows give the experts'
inputs the same FP4 with the same constant scale as the rows of k2convert.

AMD Quark calibrates nothing in its file-to-file mode. It converts the folder, and its result is read like our own.
"""

import copy
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from k2convert.forward.moe import Mlp
from k2convert.forward.weights import DenseWeight, LinearLayer
from scripts.bench.peers import quark_python
from scripts.evaluation.models import ExpertsModule, Mlps, build_model, converted_mlps, routed_sum, source_mlps

ROOT = Path(__file__).resolve().parents[2]
_ROUTED = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"


class LinearExpert(nn.Module):
    """One routed expert: gate, up and down as `nn.Linear` in FP32."""

    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (_linear(p) for p in (mlp.gate, mlp.up, mlp.down))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


def _linear(projection: LinearLayer) -> nn.Linear:
    weight = projection.weight.decode()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return linear


class LinearExperts(nn.ModuleList):
    """The routed experts of a layer: same arguments and sum as the model's own."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return routed_sum(self, hidden_states, top_k_index, top_k_weights)


def linear_network(source: Path, mlps: Mlps) -> Any:
    """Build the source's network with its INT4 weights in FP32, the routed experts as `nn.Linear`."""
    model = build_model(source)
    model.install(mlps)
    for name, bank in model.replaced.items():
        if isinstance(bank, ExpertsModule):
            parent = model.network.get_submodule(name.rpartition(".")[0])
            parent.experts = LinearExperts(LinearExpert(mlp) for mlp in bank.mlps)  # type: ignore[assignment]
    return model.network


def _llm_compressor(network: Any, windows: Tensor) -> None:
    """NVFP4A16 by GPTQ."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    recipe = GPTQModifier(scheme="NVFP4A16", targets=[_ROUTED])
    rows = [{"input_ids": ids[None], "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)} for ids in windows]
    with TemporaryDirectory() as folder:  # the tool reads the model's config from the disk
        network.config.save_pretrained(folder)
        network.config.name_or_path = folder
        oneshot(
            model=network,
            processor=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE())),  # asked for, but the rows hold ids
            recipe=recipe,
            dataset=DataLoader(rows, batch_size=None),
            clear_sparse_session=True,
        )


def _modelopt(network: Any, windows: Tensor, *, method: str) -> None:
    """NVFP4 weights, all FP8 scales."""
    import modelopt.torch.kernels.quantization.gemm as kernels
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(mtq.NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG)
    weights = next(e["cfg"] for e in config["quant_cfg"] if e["quantizer_name"] == "*weight_quantizer" and e.get("cfg"))
    config["quant_cfg"] = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*mlp.experts.*weight_quantizer", "cfg": weights},
    ]
    config["algorithm"] = {"method": method, "fp8_scale_sweep": True}

    def forward(model: Any) -> None:
        for window in windows:
            model(window.unsqueeze(0), use_cache=False)

    with patch.multiple(
        kernels, create=True, IS_AVAILABLE=True, static_blockwise_fp4_fake_quant=_static_blockwise_fp4_fake_quant
    ):
        mtq.quantize(network, config, forward_loop=forward)
        for module in network.modules():
            if hasattr(module, "weight_quantizer") and module.weight_quantizer.is_enabled:
                module.register_buffer("quantized_weight", module.weight_quantizer(module.weight))


def _static_blockwise_fp4_fake_quant(
    x: Tensor, amax: Tensor, global_amax: Tensor, _quantize: bool, _maximum: float, _dtype: torch.dtype | None
) -> Tensor:
    """ModelOpt's function of this name is a triton kernel for CUDA; this is its arithmetic: FP8 scales, FP4 values."""
    from modelopt.torch.quantization.tensor_quant import scaled_e4m3_impl

    scales = scaled_e4m3_impl(amax.float() / 6, global_amax.float() / 6).view(-1, 1)
    values = x.float().reshape(len(scales), -1) / torch.where(scales > 0, scales, 1.0)
    magnitude = values.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = ((magnitude / step).round() * step).clamp(max=6) * values.sign()
    return (rounded * scales).view_as(x).to(x.dtype)


QUARK = "Quark 0.13"
PEERS: dict[str, Callable[[Any, Tensor], None]] = {
    "llm-compressor GPTQ": _llm_compressor,
    "ModelOpt mse": partial(_modelopt, method="mse"),
    "ModelOpt local_hessian": partial(_modelopt, method="local_hessian"),
}


Weights = dict[str, tuple[Tensor, Tensor, Tensor]]
"""Quantized gate, up and down in FP32 by the name of the expert's module."""


@torch.no_grad()
def peer_weights(source: Path, name: str, windows: Tensor) -> Weights:
    """Calibrate with a peer on ids [W, T] and return the quantized weights of the routed experts."""
    network = linear_network(source, source_mlps(source))
    PEERS[name](network, windows)
    return {
        f"{module_name}.{expert}": (_quantized(mlp.gate_proj), _quantized(mlp.up_proj), _quantized(mlp.down_proj))
        for module_name, module in network.named_modules()
        if isinstance(module, LinearExperts)
        for expert, mlp in enumerate(module)
    }


def mlps_of(weights: Weights) -> Mlps:
    """Return the experts as MLPs with unquantized inputs."""
    return {name: Mlp(*(LinearLayer(DenseWeight(weight)) for weight in three)) for name, three in weights.items()}


def _quantized(linear: Any) -> Tensor:
    """Return the weight that the tool's own forward pass multiplies with."""
    if hasattr(linear, "quantized_weight"):
        weight = linear.quantized_weight
    else:
        from compressed_tensors.quantization.lifecycle import fake_quantize

        weight = fake_quantize(
            linear.weight,
            linear.weight_scale,
            linear.weight_zero_point if hasattr(linear, "weight_zero_point") else None,
            linear.quantization_scheme.weights,
            global_scale=linear.weight_global_scale,
        )
    return weight.detach().float()


def quark_mlps(source: Path, folder: Path) -> Mlps:
    """Convert with AMD Quark, file to file, in its own environment, unless that was done. Inputs have no scales."""
    if not (folder / "config.json").exists():  # written last
        command = [quark_python(), "-m", "scripts.bench.peers", "quark", source, folder]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return converted_mlps(folder)
