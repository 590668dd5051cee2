"""The counts of config.json that memory and layouts depend on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from k2convert.errors import FitError, quoted
from k2convert.models.config import max_positions, text_config
from k2convert.models.names import Family


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a mixture-of-experts model with multi-head latent attention (MLA).

    `kv_values` is what the KV cache keeps for a token and a layer: the latent (kv_lora_rank) and the rotary part.
    `num_dense_layers` come first and have no experts. `max_context` is None if config.json does not say.
    """

    num_layers: int
    num_dense_layers: int
    num_heads: int
    num_experts: int
    experts_per_token: int
    num_groups: int
    expert_width: int
    kv_values: int
    max_context: int | None

    def with_experts(self, count: int) -> "ModelShape":
        """Return the shape of a pruned model; raises FitError if the router cannot choose from that many experts."""
        if not self.experts_per_token <= count <= self.num_experts:
            raise FitError(
                f"--experts {count}: a layer has {self.num_experts} experts and each token takes "
                f"{self.experts_per_token}. Pass {self.experts_per_token} to {self.num_experts}."
            )
        if count % self.num_groups:
            raise FitError(
                f"--experts {count}: the router splits experts into {self.num_groups} groups (n_group). "
                "Pass a multiple."
            )
        return replace(self, num_experts=count)


def read_shape(config: Mapping[str, Any], *, family: Family, where: str) -> ModelShape:
    """Read config.json; raises PlanError for damaged counts, FitError if the attention is not MLA."""
    counts = family.read_architecture(config, where)
    text = text_config(config)

    def size(key: str, default: int | None = None) -> int:
        value = text.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise FitError(
                f"{where}: config.json: {key} is {quoted(value)}, expected a count. `fit` needs it; it knows models "
                "with multi-head latent attention (MLA) only."
            )
        return value

    return ModelShape(
        num_layers=counts.num_layers,
        num_dense_layers=counts.num_dense_layers,
        num_heads=size("num_attention_heads"),
        num_experts=counts.num_experts,
        experts_per_token=size("num_experts_per_tok"),
        num_groups=size("n_group", 1),
        expert_width=counts.moe_intermediate_size,
        kv_values=size("kv_lora_rank") + size("qk_rope_head_dim"),
        max_context=max_positions(config),
    )
