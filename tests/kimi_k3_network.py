"""Kimi K3 by Moonshot's own modelling code, as llm-compressor carries it: logits and routing of a checkpoint.

It computes in FP32, and in FP64 within `computing_in_fp64`, as our layer pass does there too.

The code imports fla, whose kernels need a GPU. Its functions are replaced here by plain torch ones of transformers.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward import layers, weights
from k2convert.forward.decoder import DecoderLayer
from k2convert.forward.moe import quantize_activations
from k2convert.forward.weights import WeightReader
from k2convert.models.config import text_config
from k2convert.quantize.formats.bf16 import bf16_values
from k2convert.quantize.formats.mxfp4 import decode_mxfp4
from scripts.fixture_maker.config import write_sidecars
from scripts.fixture_maker.folder import SmallCheckpoint, write_small
from scripts.fixture_maker.k3 import SIDECARS, TINY_SHAPE, tiny_checkpoint

WRAPPER = "language_model."


def make_lively_k3(folder: Path, *, block: int = 2, layers: int = 5) -> Path:
    """A small K3 in which every part matters: decays of all speeds, convolutions, gates and mixtures of the size of 1.

    It has an MLA layer in four, and the last layer is MLA. `block` is the number of layers in a block.
    """
    shape = replace(TINY_SHAPE, layers=layers, mla=(*range(3, layers, 4), layers - 1))
    checkpoint: SmallCheckpoint = tiny_checkpoint(folder / "none", shape)
    random = torch.Generator().manual_seed(5)
    for tensors in checkpoint.shards.values():
        for name, value in tensors.items():
            noise = torch.randn(value.shape, generator=random)
            if name.endswith("A_log"):
                value[: shape.heads] = (1 + 3 * torch.rand(shape.heads, generator=random)).log()
            elif name.endswith("dt_bias"):
                value[:] = noise - 2
            elif "_conv1d." in name:
                value[:] = 0.5 * noise
            elif "embed_tokens" in name:
                value[:] = noise.to(value.dtype)
            elif "_res_proj" in name:
                value[:] = (2 * noise / math.sqrt(shape.hidden)).to(value.dtype)
            elif ".self_attn." in name and value.ndim == 2:
                value[:] = (noise / math.sqrt(value.shape[1])).to(value.dtype)
            elif name.endswith("e_score_correction_bias"):
                value[:] = 0.1 * noise
    checkpoint.config["text_config"]["attn_res_block_size"] = block
    write_small(checkpoint, folder)
    write_sidecars(folder, SIDECARS)
    return folder


class _TorchOfFp64:
    """torch for a module that names float32 where it computes."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def computing_in_fp64() -> Iterator[None]:
    """Let our layer pass and Moonshot's network compute in FP64.

    Weights are decoded, and hidden states are stored between layers, in FP32 as always: these are the same numbers.
    """
    from llmcompressor.modeling.kimi_k3 import modeling_kimi_linear as moonshot
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

    run, embed = DecoderLayer.run, layers.embed
    with pytest.MonkeyPatch.context() as patch:
        for module in (moonshot, kimi_linear):
            patch.setattr(module, "torch", _TorchOfFp64())
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(weights, "multiply", lambda x, weight: x.double() @ weight.double().T)
        patch.setattr(layers, "embed", lambda *arguments: embed(*arguments).to(torch.float32))
        patch.setattr(
            DecoderLayer,
            "run",
            lambda self, p, observer, b: run(self, p.double(), observer, [block.double() for block in b]),
        )
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


class _ShortConvolution(nn.Module):
    def __init__(self, hidden_size: int, kernel_size: int, activation: str) -> None:
        super().__init__()
        assert activation == "silu"
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size))

    def forward(self, x: Tensor, **_: object) -> tuple[Tensor, None]:
        from transformers.models.kimi_linear.modeling_kimi_linear import causal_conv1d_fn

        weight = self.weight.squeeze(1)
        return causal_conv1d_fn(x.transpose(1, 2), weight=weight, bias=None, activation="silu").transpose(1, 2), None


class _FusedRMSNormGated(nn.Module):
    def __init__(self, size: int, eps: float, activation: str) -> None:
        super().__init__()
        assert activation == "sigmoid"
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight * gate.sigmoid()


def _chunk_kda(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, **options: Any
) -> tuple[Tensor, None]:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    assert options["use_qk_l2norm_in_kernel"]
    assert options["use_gate_in_kernel"]
    assert options["use_beta_sigmoid_in_kernel"]
    raw = g + dt_bias.view(*g.shape[-2:])
    if options["lower_bound"] is None:
        decay = -A_log.exp()[:, None] * nn.functional.softplus(raw)
    else:
        decay = options["lower_bound"] * torch.sigmoid(A_log.exp()[:, None] * raw)
    output, _ = chunk_kimi_delta_attention(q, k, v, g=decay, beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True)
    return output, None


def _rearrange(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    if pattern == "b t h d -> b t (h d)":
        return x.flatten(2)
    assert pattern == "... (h d) -> ... h d"
    return x.unflatten(-1, (-1, sizes["d"]))


def _round_groups(_layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """FP8 with one scale for every 128 columns of a token: amax over 448, E4M3, ties to even."""
    parts = []
    for x in inputs[0].split(128, dim=-1):
        scale = x.abs().amax(dim=-1, keepdim=True) / 448
        parts.append(torch.where(scale > 0, (x / scale).to(torch.float8_e4m3fn).float() * scale, x))
    return (torch.cat(parts, dim=-1),)


def network_of(folder: Path, *, w4a4: bool = False) -> Any:
    """Moonshot's network with a checkpoint's weights: MXFP4 or NVFP4 experts, decoded."""
    from llmcompressor.modeling.kimi_k3 import modeling_kimi_linear as moonshot
    from llmcompressor.modeling.kimi_k3.configuration_kimi_k3 import KimiLinearConfig

    moonshot.rearrange = _rearrange
    moonshot.ShortConvolution = _ShortConvolution
    moonshot.FusedRMSNormGated = _FusedRMSNormGated
    moonshot.chunk_kda = _chunk_kda
    checkpoint = open_checkpoint(folder)
    fields = {k: v for k, v in text_config(checkpoint.config).items() if not k.endswith("token_id")}
    fields.pop("quantization_config", None)
    config = KimiLinearConfig(**fields | {"use_cache": False, "pad_token_id": None})
    config._attn_implementation = "eager"
    network: Any = moonshot.KimiLinearForCausalLM(config).to(torch.get_default_dtype()).eval()
    reader = WeightReader(checkpoint)
    heads = config.linear_attn_config["num_heads"]
    state: dict[str, Tensor] = {}
    for name in checkpoint.tensors:
        module, _, parameter = name.rpartition(".")
        inner = module.removeprefix(WRAPPER)
        if not name.startswith(WRAPPER):
            continue
        if ".experts." in name:
            if reader.is_nvfp4(module):
                state[f"{inner}.weight"] = reader.read_converted(module).weight.decode()
            else:
                stored: Any = reader.read_source(module)
                decoded = bf16_values(decode_mxfp4(stored.packed, stored.scale_bytes))
                state[f"{inner}.weight"] = torch.as_tensor(decoded.astype(np.float32))
        elif parameter == "weight_scale":
            continue
        elif parameter == "weight" and f"{name}_scale" in checkpoint.tensors:
            rows, columns = reader.info(name).shape
            codes = reader.raw(name).view(torch.float8_e4m3fn).float().view(rows, columns)
            scales = reader.read(f"{name}_scale")[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
            state[f"{inner}.weight"] = codes * scales[:rows, :columns]
            if not module.endswith("kv_b_proj"):
                network.get_submodule(inner).register_forward_pre_hook(_round_groups)
        else:
            value = reader.read(name).float()
            state[f"{inner}.{parameter}"] = value[:heads] if parameter == "A_log" else value
    network.load_state_dict(state)
    if w4a4:
        for module, linear in network.named_modules():
            if ".experts." in module and isinstance(linear, nn.Linear):
                scale = reader.read_converted(WRAPPER + module).input_scale
                linear.register_forward_pre_hook(lambda _m, args, s=scale or 1.0: (quantize_activations(args[0], s),))
    reader.close()
    return network


class NetworkRun(NamedTuple):
    """Logits [W, T, V]; p [W, T, K] after every layer; the experts and weights [W T, k] of every MoE layer."""

    logits: Tensor
    states: list[Tensor]
    routings: dict[int, tuple[Tensor, Tensor]]


@torch.inference_mode()
def run_network(folder: Path, ids: Tensor, *, w4a4: bool = False) -> NetworkRun:
    network = network_of(folder, w4a4=w4a4)
    states: list[Tensor] = []
    routings: dict[int, tuple[Tensor, Tensor]] = {}

    def store(_layer: nn.Module, _inputs: object, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        stored = output[0].to(torch.float32)
        states.append(stored)
        return stored.to(output[0].dtype), output[1]

    for number, layer in enumerate(network.model.layers):
        layer.register_forward_hook(store)
        if hasattr(layer, "block_sparse_moe"):
            layer.block_sparse_moe.gate.register_forward_hook(
                lambda _m, _a, output, number=number: routings.update({number: output})
            )
    logits = network.lm_head(network.model(ids, use_cache=False).last_hidden_state)
    return NetworkRun(logits, states, routings)
