"""The attention of a layer between attention residuals (Kimi K3): each part of a layer reads a mixture of states.

A token has a running sum p, and the sums b_1 .. b_m as they were before each layer that began a block. With
P = [b_1 .. b_m, p], the weight n of a norm and a projection w:

    mix(P; n, w) = sum_j softmax_j(rms(P_j) . (n * w)) P_j

    h = mix([b, p]; self_attention_res), or p while there is no b
    a = attention(input_layernorm(h));   the layer begins a block: append p to b, then p = a;   else p = p + a
    x = post_attention_layernorm(mix([b, p]; mlp_res));   p = p + mlp(x)

After the last layer, the final norm reads mix([b, p]; output_attn_res). The attention is KDA (delta.py), or MLA without
rotation: the channels for it are kept, and sigmoid(g(x)) gates the heads' outputs. Authority: Moonshot's own code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.errors import CheckpointError, quoted
from k2convert.forward.attention import cache_scale
from k2convert.forward.delta import DeltaAttention
from k2convert.forward.weights import DenseWeight, Fp8Weight, RmsNorm, WeightReader, round_to_e4m3
from k2convert.models import read_architecture
from k2convert.models.config import evaluate_shape, text_config
from k2convert.models.names import WEIGHT, AttentionKind

_COUNTS: Final = ("num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "attn_res_block_size")


@dataclass(frozen=True, slots=True)
class ResidualConfig:
    """The fields of config.json on which the attention depends, besides those that shapes follow from."""

    heads: int
    plain_width: int
    value_width: int
    latent_width: int
    block: int
    linear: dict[str, Any]


def read_residual_config(config: Mapping[str, Any], *, where: str) -> ResidualConfig:
    """Read config.json; CheckpointError names a field of which no attention can be computed."""
    text = text_config(config)
    linear = mapping_or_empty(text.get("linear_attn_config"))

    def check(key: str, value: object, is_known: bool) -> None:
        if not is_known:
            raise CheckpointError(
                f"{where}: config.json: {key} is {quoted(value)}, of which no attention can be computed. Use the "
                "model's own config.json."
            )

    for prefix, fields, names in (
        ("", text, _COUNTS),
        ("linear_attn_config.", linear, ("num_heads", "head_dim", "short_conv_kernel_size")),
    ):
        for name in names:
            value = fields.get(name)
            check(prefix + name, value, isinstance(value, int) and not isinstance(value, bool) and value > 0)
    bound = linear.get("gate_lower_bound")
    is_bound = bound is None or (isinstance(bound, int | float) and -math.inf < bound < 0)
    check("linear_attn_config.gate_lower_bound", bound, is_bound)
    full_rank = linear.get("use_full_rank_gate")
    check("linear_attn_config.use_full_rank_gate", full_rank, full_rank is True)
    check("mla_use_nope", text.get("mla_use_nope"), text.get("mla_use_nope") is True)
    epsilon = text.get("rms_norm_eps")
    check("rms_norm_eps", epsilon, isinstance(epsilon, int | float) and 0 <= epsilon <= 1)
    heads, plain, value, latent, block = (text[name] for name in _COUNTS)
    return ResidualConfig(heads, plain, value, latent, block, linear)


@dataclass(frozen=True, slots=True)
class Mixture:
    """mix(P; n, w) with n * w = `weight` f32 [K]."""

    weight: Tensor
    epsilon: float

    def __call__(self, *states: Tensor) -> Tensor:
        """Mix states f32 [.., K] of the same shape."""
        norm = RmsNorm(self.weight, self.epsilon)
        scores = torch.stack([norm(state).sum(dim=-1, keepdim=True) for state in states])
        return sum((share * state for share, state in zip(scores.softmax(dim=0), states, strict=True)), torch.zeros(()))


def read_mixture(reader: WeightReader, stem: str, *, device: str = "cpu") -> Mixture:
    """Read the norm `stem`_norm [K] and the projection `stem`_proj [1, K]."""
    norm = reader.read_norm(f"{stem}_norm.{WEIGHT}", device)
    projection = reader.read_numbers(f"{stem}_proj.{WEIGHT}").float().flatten().to(device)
    return Mixture(norm.weight * projection, norm.epsilon)


class GatedMla:
    """Multi-head latent attention of one layer without rotation, gated, on one device."""

    def __init__(
        self, reader: WeightReader, stem: str, config: ResidualConfig, *, device: str, fp8_cache: bool
    ) -> None:
        """Read the attention `stem` (`...self_attn`)."""
        self._config = config
        names = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj")
        self._linears = {
            name: reader.read_linear(f"{stem}.{name}").to(device)
            for name in names
            if reader.has(f"{stem}.{name}.{WEIGHT}")
        }
        expand = self._linears["kv_b_proj"]
        if isinstance(expand, Fp8Weight):  # engines make BF16 matrices of it, whose inputs are not rounded
            self._linears["kv_b_proj"] = DenseWeight(expand.decode())
        norms = [name for name in ("q_a_layernorm", "kv_a_layernorm") if reader.has(f"{stem}.{name}.{WEIGHT}")]
        # these two norms have the default epsilon of the class, not that of config.json
        self._norms = {
            name: RmsNorm(reader.read_norm(f"{stem}.{name}.{WEIGHT}", device).weight, 1e-6) for name in norms
        }
        self._scale = (
            cache_scale(reader, stem.removesuffix(".self_attn"), "k_scale", missing=1.0) if fp8_cache else None
        )

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Map the normed hidden states f32 [T, K] of one window to f32 [T, K]."""
        linears = self._linears
        heads = self._config.heads
        tokens = x_TK.shape[0]
        if "q_proj" in linears:
            query = linears["q_proj"].linear(x_TK)
        else:
            query = linears["q_b_proj"].linear(self._norms["q_a_layernorm"](linears["q_a_proj"].linear(x_TK)))
        compressed = linears["kv_a_proj_with_mqa"].linear(x_TK)
        latent = self._norms["kv_a_layernorm"](compressed[:, : self._config.latent_width])
        shared = compressed[:, self._config.latent_width :]
        if self._scale is not None:
            latent = round_to_e4m3(latent, self._scale)
            shared = round_to_e4m3(shared, self._scale)
        expanded = linears["kv_b_proj"].linear(latent).view(tokens, heads, -1).transpose(0, 1)
        width = self._config.plain_width
        key = torch.cat([expanded[..., :width], shared.expand(heads, -1, -1)], dim=-1)
        query = query.view(tokens, heads, -1).transpose(0, 1)
        # values as wide as keys have a fused kernel on the CPU
        value = torch.nn.functional.pad(expanded[..., width:], (0, key.shape[-1] - self._config.value_width))
        attended = torch.nn.functional.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)
        attended = attended[0, :, :, : self._config.value_width].transpose(0, 1).flatten(1)
        if "g_proj" in linears:
            attended = attended * linears["g_proj"].linear(x_TK).sigmoid()
        return linears["o_proj"].linear(attended)


class ResidualAttention:
    """The parts before the MLP of one layer: mixtures, norms and attention, on one device."""

    def __init__(
        self, reader: WeightReader, layer: int, kind: AttentionKind, *, device: str = "cpu", fp8_cache: bool = False
    ) -> None:
        """Read all of layer number `layer` but its MLPs; CheckpointError if config and tensors disagree.

        With `fp8_cache`, what the KV cache of MLA holds is rounded to E4M3. KDA has no such cache.
        """
        config = read_residual_config(reader.checkpoint.config, where=str(reader.checkpoint.folder))
        stem = reader.family.layer.format(layer=layer)
        _check_shapes(reader, layer, stem)
        self._begins_block = layer % config.block == 0
        self._before_attention = read_mixture(reader, f"{stem}.self_attention_res", device=device)
        self._before_mlp = read_mixture(reader, f"{stem}.mlp_res", device=device)
        self._attention_norm = reader.read_norm(f"{stem}.input_layernorm.{WEIGHT}", device)
        self._mlp_norm = reader.read_norm(f"{stem}.post_attention_layernorm.{WEIGHT}", device)
        module = f"{stem}.self_attn"
        self._attention: DeltaAttention | GatedMla
        if kind == "delta":
            self._attention = DeltaAttention(reader, module, config.linear, device=device)
        else:
            self._attention = GatedMla(reader, module, config, device=device, fp8_cache=fp8_cache)
        self._device = device

    def __call__(self, sum_TK: Tensor, *blocks_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Map the sum f32 [T, K] of one window to (the sum after the attention, the MLP's input), f32 [T, K]."""
        current = sum_TK.to(self._device)
        blocks = [block.to(self._device) for block in blocks_TK]
        mixed = self._before_attention(*blocks, current) if blocks else current
        attended = self._attention(self._attention_norm(mixed))
        if self._begins_block:
            blocks.append(current)
        else:
            attended = current + attended
        return attended, self._mlp_norm(self._before_mlp(*blocks, attended))


def _check_shapes(reader: WeightReader, layer: int, stem: str) -> None:
    """Refuse tensors that have other shapes than config.json gives them (CheckpointError)."""
    config = reader.checkpoint.config
    has_experts = layer in read_architecture(reader.checkpoint).moe_layers
    for name, text in reader.family.layer_tensors(config, layer, has_experts).items():
        expected = evaluate_shape(text.rpartition(": ")[2], config, str(reader.checkpoint.folder))
        if "self_attn." in name and reader.info(f"{stem}.{name}").shape != expected:
            info = reader.info(f"{stem}.{name}")
            raise CheckpointError(
                f"{info.shard}: {info.name} has shape {list(info.shape)}, but config.json makes it "
                f"{list(expected or ())}. Use the model's own config.json."
            )
