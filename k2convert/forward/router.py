"""The router of a Kimi K2 MoE block: sigmoid scores, a correction bias only for the choice, group-limited top-k.

Kimi K2 uses DeepSeek-V3's router (`topk_method` noaux_tc). The arithmetic here equals transformers'
DeepseekV3TopkRouter (5.17) in FP32 bit for bit. The conversion does not change the router, which decides which experts
a wrong weight reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k2convert.errors import CheckpointError, quoted
from k2convert.forward.weights import WeightReader
from k2convert.models.config import text_config

SCORES_PER_GROUP = 2
"""The score of a group is the sum of its two best scores."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The routing fields of config.json."""

    experts_per_token: int
    num_groups: int
    chosen_groups: int
    normalize: bool
    scaling_factor: float


@dataclass(frozen=True, slots=True)
class Routing:
    """For T tokens and k experts each: `experts` int64 [T, k], `weights` f32 [T, k]; `scores` f32 [T, E] of all."""

    experts: Tensor
    weights: Tensor
    scores: Tensor

    @staticmethod
    def concatenate(parts: Sequence[Routing]) -> Routing:
        """Join the routings of neighboring tokens."""
        return Routing(
            torch.cat([part.experts for part in parts]),
            torch.cat([part.weights for part in parts]),
            torch.cat([part.scores for part in parts]),
        )

    def tokens_of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return the tokens (int64 [t]) that chose an expert, and the weights (f32 [t]) they give it."""
        tokens, places = torch.where(self.experts == expert)
        return tokens, self.weights[tokens, places]

    def likeliest_tokens(self, expert: int, count: int) -> Tensor:
        """Return the tokens (int64) with the highest scores for an expert, whether they chose it or not."""
        return torch.topk(self.scores[:, expert], min(count, self.scores.shape[0])).indices


def read_router_config(config: dict[str, Any], *, where: str) -> RouterConfig:
    """Read the routing fields of config.json; CheckpointError names a field that is missing or not DeepSeek-V3's."""
    text = text_config(config)

    def field(key: str, kind: type) -> Any:
        value = text.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{where}: config.json: {key} is {quoted(value)}, which the router cannot use.")
        return value

    for key, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if text.get(key, known) != known:
            raise CheckpointError(
                f"{where}: config.json: {key} is {quoted(text[key])}, not {known!r}. This is not Kimi K2's router."
            )
    return RouterConfig(
        experts_per_token=field("num_experts_per_tok", int),
        num_groups=field("n_group", int),
        chosen_groups=field("topk_group", int),
        normalize=field("norm_topk_prob", bool),
        scaling_factor=float(field("routed_scaling_factor", int | float)),  # type: ignore[arg-type]
    )


def route(hidden_TK: Tensor, weight_EK: Tensor, bias_E: Tensor, config: RouterConfig) -> Routing:
    """Choose experts for FP32 hidden states [T, K] by router weight [E, K] and e_score_correction_bias [E]."""
    num_experts = weight_EK.shape[0]
    scores_TE = torch.nn.functional.linear(hidden_TK.float(), weight_EK.float()).sigmoid()
    # The bias balances the load. It affects the choice but not the weight.
    choice_TE = scores_TE + bias_E.float()
    grouped = choice_TE.view(-1, config.num_groups, num_experts // config.num_groups)
    group_scores = grouped.topk(SCORES_PER_GROUP, dim=-1).values.sum(dim=-1)
    chosen = torch.topk(group_scores, k=config.chosen_groups, dim=-1, sorted=False).indices
    is_open = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, chosen, True)
    choice_TE = grouped.masked_fill(~is_open.unsqueeze(-1), float("-inf")).reshape(-1, num_experts)
    experts = torch.topk(choice_TE, k=config.experts_per_token, dim=-1, sorted=False).indices
    weights = scores_TE.gather(1, experts)
    if config.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(experts=experts, weights=weights * config.scaling_factor, scores=scores_TE)


@dataclass(frozen=True, slots=True)
class Router:
    """The router of one block: weight f32 [E, K] and e_score_correction_bias f32 [E]."""

    weight: Tensor
    bias: Tensor
    config: RouterConfig

    def __call__(self, hidden_TK: Tensor) -> Routing:
        """Route hidden states f32 [T, K]."""
        return route(hidden_TK, self.weight, self.bias, self.config)


def read_router(source: WeightReader, stem: str, *, device: str = "cpu") -> Router:
    """Read the router of the block `stem` (`...layers.N.mlp`); CheckpointError if it is not Kimi K2's."""
    config = read_router_config(source.checkpoint.config, where=str(source.checkpoint.folder))
    weight, bias = source.read(f"{stem}.gate.weight"), source.read(f"{stem}.gate.e_score_correction_bias")
    return Router(weight.float().to(device), bias.float().to(device), config)
