"""The MoE block of one layer, computed expert by expert for every variant.

Every core has an expert of its own: an expert sees few tokens, so there is little for several threads to share. The
outputs are added in the order of the experts, so they do not depend on threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.forward.mlp import PROJECTIONS
from k2convert.forward.mlp import read_mlp as read_source_mlp
from k2convert.forward.router import Routing
from k2convert.forward.weights import WeightReader
from k2convert.forward.workers import run_in_order
from k2convert.quantize.metrics.weight_metrics import decibels
from k2convert.validate.layers.result import AGAINST_WHOLE, W4A4_VARIANTS, Variant, VariantError
from k2convert.validate.layers.versions import MlpOutputs, read_mlp

PROBE_TOKENS = 2
"""Tokens on which an expert is run if no token chose it."""


@dataclass(frozen=True, slots=True)
class BlockError:
    """Errors of one block by variant; `expert_sqnr_db` is the weight-only SQNR of each expert's output."""

    errors: tuple[VariantError, ...]
    expert_sqnr_db: tuple[float, ...]
    num_reached: int


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Outputs f64 [T, hidden] of the block so far, and the SQNR of each expert's output."""

    reference: Tensor
    variants: dict[Variant, Tensor]
    expert_sqnr_db: dict[Variant, list[float]] = field(default_factory=dict[Variant, list[float]])
    shared_sqnr_db: dict[Variant, float] = field(default_factory=dict[Variant, float])

    def add(self, tokens: Tensor, reference: Tensor, outputs: dict[Variant, Tensor], weights: Tensor | None) -> None:
        """Add an MLP's outputs f32 [t, hidden], weighted by f32 [t], to those of the block."""
        factor = 1.0 if weights is None else weights.unsqueeze(-1)
        self.reference.index_add_(0, tokens, (reference * factor).double())
        for variant, output in outputs.items():
            self.variants[variant].index_add_(0, tokens, (output * factor).double())


def compute_block(
    stem: str,
    hidden_TK: Tensor,
    routing: Routing,
    *,
    source: WeightReader,
    converted: WeightReader,
    with_fp4_inputs: bool,
    exponents: NDArray[np.int8] | None = None,
    whole: Tensor | None = None,
    progress: Callable[[int, int], None],
) -> BlockError:
    """Compute the block `stem` for f32 [T, hidden] from both checkpoints and compare every variant's output.

    `with_fp4_inputs` adds the W4A4 variants; it needs a checkpoint with input scales. The converted weights get channel
    j of the input times 2**exponents[j], int8 [hidden]. `whole` is the output f64 [T, hidden] of the block before it
    was pruned, if it was.
    """
    num_experts = routing.scores.shape[1]
    left_out = AGAINST_WHOLE if with_fp4_inputs else (*AGAINST_WHOLE, *W4A4_VARIANTS)
    variants = [variant for variant in Variant if variant not in left_out]
    outputs = _Outputs(
        torch.zeros_like(hidden_TK, dtype=torch.float64),
        {variant: torch.zeros_like(hidden_TK, dtype=torch.float64) for variant in variants},
        {variant: [] for variant in variants},
    )
    num_reached, workers = 0, os.cpu_count() or 1
    scaled_TK = hidden_TK if exponents is None else torch.ldexp(hidden_TK, torch.as_tensor(exponents.astype(np.int32)))

    def run_mlp(call: tuple[str, Tensor]) -> MlpOutputs:
        module, tokens = call
        mlp = read_mlp(module, source=source, converted=converted)
        return mlp.run(hidden_TK[tokens], scaled_TK[tokens], with_fp4_inputs=with_fp4_inputs)

    experts = [(f"{stem}.experts.{expert}", _probe_tokens(routing, expert)) for expert in range(num_experts)]
    for expert, (reference, results) in enumerate(run_in_order(run_mlp, experts, workers=workers)):
        for variant, result in results.items():
            outputs.expert_sqnr_db[variant].append(sqnr_db(reference, result))
        tokens, weights = routing.tokens_of(expert)
        if tokens.numel() > 0:
            num_reached += 1
            outputs.add(tokens, reference, results, weights)
        progress(expert + 1, num_experts)
    if source.has(f"{stem}.shared_experts.gate_proj.weight"):
        reference, results = run_mlp((f"{stem}.shared_experts", torch.arange(hidden_TK.shape[0])))
        outputs.shared_sqnr_db.update({variant: sqnr_db(reference, result) for variant, result in results.items()})
        outputs.add(torch.arange(hidden_TK.shape[0]), reference, results, None)
    errors = tuple(_variant_error(variant, outputs) for variant in variants)
    if whole is not None:
        served = Variant.CONVERTED_W4A4 if with_fp4_inputs else Variant.CONVERTED
        errors += (
            _output_error(Variant.PRUNING_ALONE, whole, outputs.reference),
            _output_error(Variant.PRUNED_RESULT, whole, outputs.variants[served]),
        )
    return BlockError(errors, tuple(outputs.expert_sqnr_db[Variant.CONVERTED]), num_reached)


def int4_output(
    stem: str, hidden_TK: Tensor, routing: Routing, *, source: WeightReader, progress: Callable[[int, int], None]
) -> Tensor:
    """Return the output f64 [T, hidden] of the block `stem` with the source's weights."""
    total, num_experts = torch.zeros_like(hidden_TK, dtype=torch.float64), routing.scores.shape[1]
    mlps = [(f"{stem}.experts.{expert}", *routing.tokens_of(expert)) for expert in range(num_experts)]
    if source.has_layer(f"{stem}.shared_experts.{PROJECTIONS[0]}"):
        mlps.append((f"{stem}.shared_experts", torch.arange(hidden_TK.shape[0]), torch.ones(hidden_TK.shape[0])))

    def run_mlp(call: tuple[str, Tensor, Tensor]) -> Tensor:
        module, tokens, weights = call
        if tokens.numel() == 0:
            return hidden_TK[tokens]
        return read_source_mlp(source, module)(hidden_TK[tokens]) * weights.unsqueeze(-1)

    for place, output in enumerate(run_in_order(run_mlp, mlps, workers=os.cpu_count() or 1)):
        total.index_add_(0, mlps[place][1], output.double())
        if place < num_experts:
            progress(place + 1, num_experts)
    return total


def _probe_tokens(routing: Routing, expert: int) -> Tensor:
    """Return the tokens that chose an expert, or a few with high scores for it if none did."""
    tokens, _ = routing.tokens_of(expert)
    return tokens if tokens.numel() > 0 else routing.likeliest_tokens(expert, PROBE_TOKENS)


def _variant_error(variant: Variant, outputs: _Outputs) -> VariantError:
    experts = outputs.expert_sqnr_db[variant]
    worst = min(range(len(experts)), key=experts.__getitem__)
    return replace(
        _output_error(variant, outputs.reference, outputs.variants[variant]),
        worst_expert=worst,
        worst_expert_sqnr_db=experts[worst],
        shared_experts_sqnr_db=outputs.shared_sqnr_db.get(variant),
    )


def _output_error(variant: Variant, reference: Tensor, result: Tensor) -> VariantError:
    cosine = torch.nn.functional.cosine_similarity(reference, result, dim=-1)
    return VariantError(
        variant=variant,
        sqnr_db=sqnr_db(reference, result),
        cosine=float(cosine.mean()),
        worst_cosine=float(cosine.min()),
        worst_expert=None,
        worst_expert_sqnr_db=None,
        shared_experts_sqnr_db=None,
    )


def sqnr_db(reference: Tensor, result: Tensor) -> float:
    """Return 10 log10 of signal over noise energy; infinity without noise, -infinity if a value is not finite."""
    signal = float(reference.double().square().sum())
    return decibels(signal, float((result.double() - reference.double()).square().sum()))
