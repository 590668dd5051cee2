"""Builds models with transformers from a config and fills in weights decoded by k2convert.

transformers' quantized loading is not used because release 5.17 drops the global scale of NVFP4 experts. The modules
that a conversion changes are replaced by modules that hold decoded FP32 weights and, for W4A4, quantize their inputs.
Everything else is transformers' code in FP32 with the source's BF16 values.
"""

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward.moe import PROJECTIONS, Mlp
from k2convert.forward.weights import DenseWeight, LinearLayer, WeightReader, exact_weight
from k2convert.models import detect_family, parse_tensor_name
from k2convert.models.names import Role

Mlps = dict[str, Mlp]
"""The weights of each MLP by module name (`model.layers.1.mlp.experts.0`)."""

_MLP_ROLES = (Role.EXPERTS, Role.SHARED_EXPERTS, Role.DENSE_MLP)


class MlpModule(nn.Module):
    """Replaces a dense MLP or the shared experts of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp: Mlp | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        assert self.mlp is not None
        return self.mlp(hidden_states.flatten(0, -2)).view_as(hidden_states)


class ExpertsModule(nn.Module):
    """Replaces the routed experts of transformers: same arguments, same sum."""

    def __init__(self) -> None:
        super().__init__()
        self.mlps: list[Mlp] = []

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return routed_sum(self.mlps, hidden_states, top_k_index, top_k_weights)


def routed_sum(
    experts: Iterable[Callable[[Tensor], Tensor]], hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return each token's sum of the outputs of its experts, weighted."""
    result = torch.zeros_like(hidden_states)
    for number, expert in enumerate(experts):
        tokens, slots = torch.where(top_k_index == number)
        if tokens.numel():
            result.index_add_(0, tokens, expert(hidden_states[tokens]) * top_k_weights[tokens, slots, None])
    return result


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A transformers model whose MLPs can be replaced."""

    network: nn.Module
    replaced: dict[str, MlpModule | ExpertsModule]

    @property
    def vocabulary(self) -> int:
        """Return the number of token ids."""
        return int(self.network.config.vocab_size)  # type: ignore[union-attr]

    def install(self, mlps: Mlps) -> None:
        """Set the MLPs, whose tensors are shared."""
        for name, module in self.replaced.items():
            if isinstance(module, MlpModule):
                module.mlp = mlps[name]
            else:
                module.mlps = [
                    mlps[f"{name}.{expert}"] for expert in range(sum(k.startswith(name + ".") for k in mlps))
                ]

    def logits(self, tokens: Tensor) -> Tensor:
        """Return next-token logits f32 [B, T, vocabulary] for ids [B, T]."""
        return self.network(tokens, use_cache=False).logits


def build_model(source: Path) -> EvaluatedModel:
    """Build the source's architecture and load everything but its MLPs."""
    checkpoint = open_checkpoint(source)
    with torch.device("meta"):
        network = _architecture(checkpoint.parse_config())
    replaced: dict[str, MlpModule | ExpertsModule] = {}
    for number, layer in enumerate(network.model.layers):
        stem = f"model.layers.{number}.mlp"
        if hasattr(layer.mlp, "experts"):
            replaced[f"{stem}.experts"] = layer.mlp.experts = ExpertsModule()
            replaced[f"{stem}.shared_experts"] = layer.mlp.shared_experts = MlpModule()
        else:
            replaced[stem] = layer.mlp = MlpModule()
    network = network.to_empty(device="cpu").float().eval()
    rotary = network.model.rotary_emb
    network.model.rotary_emb = type(rotary)(network.config)  # computes its buffers, which no file has
    _load_rest(network, source)
    return EvaluatedModel(network, replaced)


def _architecture(config: dict[str, Any]) -> Any:
    """Return a DeepSeek-V3 model if the attention is MLA, else Glm4Moe: the same MoE with Llama's attention."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

    fields = {k: v for k, v in config.items() if k not in ("quantization_config", "model_type", "architectures")}
    if "kv_lora_rank" in fields:
        return DeepseekV3ForCausalLM(DeepseekV3Config(**fields))
    return Glm4MoeForCausalLM(Glm4MoeConfig(**fields))


def _load_rest(network: Any, source: Path) -> None:
    checkpoint = open_checkpoint(source)
    family = detect_family(checkpoint)
    rest = [n for n in checkpoint.tensors if parse_tensor_name(n, family=family).role not in _MLP_ROLES]
    with closing(WeightReader(checkpoint)) as reader:
        state = {name: reader.read(name).float() for name in rest}
    if network.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    network.load_state_dict(state, strict=True, assign=True)


def source_mlps(source: Path) -> Mlps:
    """Read every MLP of the INT4 source, exactly, in FP32."""
    with closing(WeightReader(open_checkpoint(source))) as reader:

        def read(module: str) -> LinearLayer:
            return LinearLayer(exact_weight(reader.read_source(module)))

        return {stem: _decoded(read(f"{stem}.{name}") for name in PROJECTIONS) for stem in _stems(reader)}


def converted_mlps(folder: Path) -> Mlps:
    """Read every MLP of a converted checkpoint in FP32, with its input scales."""
    with closing(WeightReader(open_checkpoint(folder))) as reader:
        return {
            stem: _decoded(reader.read_converted(f"{stem}.{name}") for name in PROJECTIONS) for stem in _stems(reader)
        }


def _decoded(projections: Iterable[LinearLayer]) -> Mlp:
    return Mlp(*(LinearLayer(DenseWeight(p.weight.decode()), p.input_scale) for p in projections))


def _stems(reader: WeightReader) -> list[str]:
    family = detect_family(reader.checkpoint)
    names = (parse_tensor_name(name, family=family) for name in reader.checkpoint.tensors)
    return sorted({name.module.rsplit(".", 1)[0] for name in names if name.role in _MLP_ROLES})


def with_input_scales(weights: Mlps, scales: Mlps) -> Mlps:
    """Combine the weights of one set of MLPs with the input scales of the other."""

    def combined(mlp: Mlp, other: Mlp) -> Mlp:
        pairs = zip((mlp.gate, mlp.up, mlp.down), (other.gate, other.up, other.down), strict=True)
        return Mlp(*(LinearLayer(layer.weight, scaled.input_scale) for layer, scaled in pairs))

    return {stem: combined(mlp, scales[stem]) for stem, mlp in weights.items()}


def without_input_scales(mlps: Mlps) -> Mlps:
    """Return the same weights without input scales, so inputs stay FP32."""
    return {stem: Mlp(*(LinearLayer(p.weight) for p in (m.gate, m.up, m.down))) for stem, m in mlps.items()}
