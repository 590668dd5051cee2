"""The attention of one decoder layer, with the two norms around it: transformers' own modules in FP32.

The config chooses the modules: MLA (`kv_lora_rank`) is DeepSeek-V3's, anything else is Glm4Moe's grouped-query
attention, the same MoE with Llama's attention. transformers does not know the model type kimi_k2, so its config is
built from the fields. No code of the checkpoint is run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor, nn

from k2convert.errors import CheckpointError, cut, quoted
from k2convert.forward.weights import DenseWeight, Fp8Weight, WeightReader, round_to_e4m3
from k2convert.models.config import network_fields
from k2convert.models.names import WEIGHT, WEIGHT_SCALE

_NO_TOKENS: Final = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""transformers warns of special tokens outside the vocabulary. Attention has no use for them."""
_NOT_WEIGHTS: Final = ("self_attn.rotary_emb.inv_freq",)
"""Old checkpoints store these, and they follow from the config."""
_CACHE_SCALES: Final = ("k_scale", "v_scale", "q_scale", "kv_scale")
"""Scales of an FP8 KV cache, which some checkpoints have below one module or another of the attention."""

_KERNEL: Final = "k2convert"
_COMPILER_FOLDER: Final = "TORCHINDUCTOR_CACHE_DIR"


class _Linear(nn.Module):
    """nn.Linear with a weight that keeps its stored dtype until it is used: half the memory of FP32."""

    def __init__(self, weight: Tensor | Fp8Weight, bias: Tensor | None) -> None:
        super().__init__()
        self._weight = weight if isinstance(weight, Fp8Weight) else DenseWeight(weight)
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        result = self._weight.linear(x.flatten(0, -2)).view(*x.shape[:-1], -1)
        if self._bias is None:
            return result
        return result + self._bias.float()


class Attention:
    """input_layernorm, attention and residual, post_attention_layernorm of one layer, on one device."""

    def __init__(self, reader: WeightReader, stem: str, *, device: str = "cpu", fp8_cache: bool = False) -> None:
        """Read the attention of the layer `stem` (`...layers.N`); CheckpointError if config and tensors disagree.

        With `fp8_cache`, everything that a KV cache holds is rounded to E4M3, as every later token reads it.
        """
        rotary, modules = build_attention(reader.checkpoint.config, where=str(reader.checkpoint.folder))
        _fill(modules, {name: value.to(device) for name, value in _read_state(reader, stem, modules).items()})
        keys = cache_scale(reader, stem, "k_scale", missing=1.0)
        values = cache_scale(reader, stem, "v_scale", missing=keys)  # as vLLM and SGLang do
        is_mla = hasattr(modules.self_attn, "kv_a_layernorm")
        modules.self_attn.cache_scales = (keys, keys if is_mla else values) if fp8_cache else None

        def cached(_module: nn.Module, _inputs: object, latent: Tensor) -> Tensor:
            return round_to_e4m3(latent, keys)

        if is_mla and fp8_cache:  # the rest goes through the cache in `_causal_attention`
            modules.self_attn.kv_a_layernorm.register_forward_hook(cached)
        self._modules: Any = modules.eval()
        self._rotary = rotary.to(device)
        self._device = device

    def __call__(self, hidden_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Map the hidden states f32 [T, K] of one window to (h + attention, its norm: the MLP's input), f32 [T, K]."""
        modules = self._modules
        hidden = hidden_TK.to(self._device)[None]
        embeddings = self._rotary(hidden, torch.arange(hidden.shape[1], device=self._device)[None])
        attended, _ = modules.self_attn(
            hidden_states=modules.input_layernorm(hidden), position_embeddings=embeddings, attention_mask=None
        )
        residual = hidden + attended
        return residual[0], modules.post_attention_layernorm(residual)[0]


def build_attention(config: Mapping[str, Any], *, where: str) -> tuple[Any, Any]:
    """Return the rotary embedding, and attention and norms without weights (on the meta device).

    CheckpointError for a config.json from which none can be built.
    """
    is_set = _COMPILER_FOLDER in os.environ
    from transformers import AttentionInterface

    if not is_set:  # torch's compiler, imported with it, sets it for children
        os.environ.pop(_COMPILER_FOLDER, None)
    kernels: Any = AttentionInterface
    kernels.register(_KERNEL, _causal_attention)
    # transformers completes what it is given in place: `rope_scaling` gets keys that the checkpoint does not have.
    fields = deepcopy(network_fields(config))
    try:
        built, kinds = _config_and_modules(fields | _NO_TOKENS)
        built._attn_implementation = _KERNEL
        rotary, attention, norm = kinds
        with torch.device("meta"):
            modules: Any = nn.Module()
            modules.self_attn = attention(built, 0)
            modules.input_layernorm = norm(built.hidden_size, eps=built.rms_norm_eps)
            modules.post_attention_layernorm = norm(built.hidden_size, eps=built.rms_norm_eps)
        frequencies = rotary(built)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # transformers raises whatever a field leads to
        raise CheckpointError(
            f"{where}: config.json: transformers cannot build the attention ({type(error).__name__}: "
            f"{cut(str(error))}). Use the model's own config.json."
        ) from error
    is_usable = (frequencies.inv_freq > 0).all() and frequencies.inv_freq.isfinite().all()
    if not is_usable or not 0 <= built.rms_norm_eps <= 1:
        raise CheckpointError(
            f"{where}: config.json: the attention's numbers are not those of a model: rms_norm_eps is "
            f"{quoted(built.rms_norm_eps)}, and rope_theta and rope_scaling must give positive frequencies. Use the "
            "model's own config.json."
        )
    return frequencies, modules


def _config_and_modules(fields: dict[str, Any]) -> tuple[Any, tuple[Any, Any, Any]]:
    if "kv_lora_rank" in fields:
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as mla

        kinds = (mla.DeepseekV3RotaryEmbedding, mla.DeepseekV3Attention, mla.DeepseekV3RMSNorm)
        return DeepseekV3Config(**fields), kinds
    from transformers import Glm4MoeConfig
    from transformers.models.glm4_moe import modeling_glm4_moe as gqa

    return Glm4MoeConfig(**fields), (gqa.Glm4MoeRotaryEmbedding, gqa.Glm4MoeAttention, gqa.Glm4MoeRMSNorm)


_State = Mapping[str, Tensor | Fp8Weight]
"""The weights of modules by name."""


def _read_state(reader: WeightReader, stem: str, modules: nn.Module) -> _State:
    """Read the weights of the modules; CheckpointError for other shapes, and for weights they do not have."""
    expected = modules.state_dict()
    prefix = f"{stem}.self_attn."
    for name, tensor in reader.checkpoint.tensors.items():
        if name.startswith(prefix) and (inner := name.removeprefix(f"{stem}.")) not in (*expected, *_NOT_WEIGHTS):
            if inner.rpartition(".")[2] in _CACHE_SCALES:
                continue
            if inner.endswith(f".{WEIGHT_SCALE}") and reader.is_fp8(name.rpartition(".")[0]):
                continue
            raise CheckpointError(
                f"{tensor.shard}: {name}: the attention that config.json describes has no {inner}. "
                "Use the model's own config.json."
            )
    for name, value in expected.items():
        info = reader.info(f"{stem}.{name}")
        if info.shape != tuple(value.shape):
            raise CheckpointError(
                f"{info.shard}: {info.name} has shape {list(info.shape)}, but config.json makes it "
                f"{list(value.shape)}. Use the model's own config.json."
            )
    return {name: _read(reader, f"{stem}.{name}") for name in expected}


def _read(reader: WeightReader, name: str) -> Tensor | Fp8Weight:
    module, _, parameter = name.rpartition(".")
    if parameter == WEIGHT and reader.is_fp8(module):
        return reader.read_fp8(module)
    return reader.read_numbers(name)


def cache_scale(reader: WeightReader, stem: str, which: str, *, missing: float) -> float:
    """Return the scale of the keys or values in the KV cache; `missing` if the checkpoint does not have it."""
    for name in reader.checkpoint.tensors:
        if name.startswith(f"{stem}.self_attn.") and name.endswith(f".{which}"):
            scale = float(reader.read_numbers(name).flatten()[0])
            if not 0 < scale < math.inf:
                raise CheckpointError(f"{reader.checkpoint.folder}: {name} is {scale}. Use the model's own checkpoint.")
            return scale
    return missing


def _cached(attention: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values as they come out of the cache, rounded to E4M3 if it has scales.

    MLA has its rotary key there, which all heads share.
    """
    if attention.cache_scales is None:
        return key, value
    first, second = attention.cache_scales
    if not hasattr(attention, "kv_a_layernorm"):
        return round_to_e4m3(key, first), round_to_e4m3(value, second)
    width: int = attention.qk_nope_head_dim
    rotary = round_to_e4m3(key[:, :1, :, width:], second)
    return torch.cat((key[..., :width], rotary.expand_as(key[..., width:])), dim=-1), value


def _fill(modules: Any, state: _State) -> None:
    """Give the modules their weights: norms in FP32, those of linear layers as they are stored."""
    for module in {name.rpartition(".")[0] for name in state}:
        submodule = modules.get_submodule(module)
        weight = state[f"{module}.weight"]
        bias = state.get(f"{module}.bias")
        assert not isinstance(bias, Fp8Weight)
        if isinstance(submodule, nn.Linear):
            parent, _, attribute = module.rpartition(".")
            setattr(modules.get_submodule(parent), attribute, _Linear(weight, bias))
        else:
            assert isinstance(weight, Tensor)
            submodule.weight = nn.Parameter(weight.float(), requires_grad=False)


def _causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' "sdpa" on values padded with zeros to the width of the keys.

    MLA's values are narrower, for which torch has no fused kernel on the CPU: 1,024 tokens of K2 take half the time
    and 0.1 GB instead of 0.7. Without a mask it is causal.
    """
    from transformers.integrations import sdpa_attention

    sdpa: Any = sdpa_attention
    key, value = _cached(module, key, value)
    width = value.shape[-1]
    padded = nn.functional.pad(value, (0, key.shape[-1] - width))
    attended, _ = sdpa.sdpa_attention_forward(module, query, key, padded, mask, **options)
    return attended[..., :width], None
