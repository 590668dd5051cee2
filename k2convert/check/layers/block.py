"""The MoE block of one layer, computed expert by expert for every variant.

Every core has an expert of its own: an expert sees few tokens, so there is little for several threads to share. The
outputs are added in the order of the experts, so they do not depend on threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.check.layers.result import W4A4_VARIANTS, Variant, VariantError
from k2convert.forward.moe import PROJECTIONS, Mlp, MlpTokens, Routing, block_mlps, run_in_order
from k2convert.forward.weights import CodedWeight, DenseWeight, LinearLayer, WeightReader, exact_weight, nvfp4_weight
from k2convert.machine import num_cores
from k2convert.quantize.formats.bf16 import Bf16Weight, SourceWeight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.metrics.weight_metrics import decibels
from k2convert.quantize.quantizer import NativeQuantizer

Result = TypeVar("Result")

PROBE_TOKENS = 2
"""Tokens on which an expert is run if no token chose it."""


def compute_block(
    stem: str,
    hidden_TK: Tensor,
    routing: Routing,
    *,
    source: WeightReader,
    converted: WeightReader,
    with_fp4_inputs: bool,
    exponents: NDArray[np.int8] | None = None,
    progress: Callable[[int, int], None],
) -> tuple[list[VariantError], list[float], int]:
    """Compute the block `stem` for f32 [T, hidden] from both checkpoints and compare every variant's output.

    Returns the errors by variant, the weight-only SQNR of each expert's output in dB, and how many experts a token
    chose.
    `with_fp4_inputs` adds the W4A4 variants; it needs a checkpoint with input scales. The converted weights get channel
    j of the input times 2**exponents[j], int8 [hidden].
    """
    variants = [variant for variant in Variant if with_fp4_inputs or variant not in W4A4_VARIANTS]
    expected = torch.zeros_like(hidden_TK, dtype=torch.float64)
    outputs = {variant: torch.zeros_like(expected) for variant in variants}
    expert_sqnr_db: dict[Variant, list[float]] = {variant: [] for variant in variants}
    shared_sqnr_db: dict[Variant, float] = {}
    num_reached = 0
    scaled_TK = hidden_TK
    if exponents is not None:
        scaled_TK = torch.ldexp(hidden_TK, torch.as_tensor(exponents.astype(np.int32)))

    def run(mlp: MlpTokens) -> MlpOutputs:
        tokens = mlp.tokens
        if mlp.expert is not None and not tokens.numel():
            tokens = routing.likeliest_tokens(mlp.expert, PROBE_TOKENS)
        versions = read_mlp(mlp.module, source=source, converted=converted)
        return run_mlp(versions, hidden_TK[tokens], scaled_TK[tokens], with_fp4_inputs=with_fp4_inputs)

    with closing(_run_block(stem, routing, run, source=source, progress=progress)) as computed:
        for mlp, (reference, results) in computed:
            sqnr = {variant: sqnr_db(reference, result) for variant, result in results.items()}
            if mlp.expert is None:
                shared_sqnr_db.update(sqnr)
            else:
                for variant, found in sqnr.items():
                    expert_sqnr_db[variant].append(found)
                num_reached += int(mlp.tokens.numel() > 0)
            if mlp.tokens.numel():
                factor = 1.0 if mlp.weights is None else mlp.weights.unsqueeze(-1)
                expected.index_add_(0, mlp.tokens, (reference * factor).double())
                for variant, result in results.items():
                    outputs[variant].index_add_(0, mlp.tokens, (result * factor).double())
    errors: list[VariantError] = []
    for variant in variants:
        experts = expert_sqnr_db[variant]
        worst = min(range(len(experts)), key=experts.__getitem__)
        cosine = torch.nn.functional.cosine_similarity(expected, outputs[variant], dim=-1)
        error = VariantError(
            variant=variant,
            sqnr_db=sqnr_db(expected, outputs[variant]),
            cosine=float(cosine.mean()),
            worst_cosine=float(cosine.min()),
            worst_expert=worst,
            worst_expert_sqnr_db=experts[worst],
            shared_experts_sqnr_db=shared_sqnr_db.get(variant),
        )
        errors.append(error)
    return errors, expert_sqnr_db[Variant.CONVERTED], num_reached


def _run_block(
    stem: str,
    routing: Routing,
    run: Callable[[MlpTokens], Result],
    *,
    source: WeightReader,
    progress: Callable[[int, int], None],
) -> Generator[tuple[MlpTokens, Result]]:
    """Yield every MLP of the block `stem` with what `run` gives for it, in order."""
    mlps = block_mlps(source, stem, routing)
    with run_in_order(run, mlps, workers=num_cores()) as computed:
        for mlp, result in zip(mlps, computed, strict=True):
            yield mlp, result
            if mlp.expert is not None:
                progress(mlp.expert + 1, routing.scores.shape[1])


def sqnr_db(reference: Tensor, result: Tensor) -> float:
    """Return 10 log10 of signal over noise energy; infinity without noise, -infinity if a value is not finite."""
    signal = float(reference.double().square().sum())
    return decibels(signal, float((result.double() - reference.double()).square().sum()))


MlpOutputs = tuple[Tensor, dict[Variant, Tensor]]
"""The output f32 [T, hidden] with the source's weights, and that of every variant."""


def run_mlp(versions: tuple[Mlp, Mlp, Mlp], x_TK: Tensor, scaled_TK: Tensor, *, with_fp4_inputs: bool) -> MlpOutputs:
    """Return the source's output f32 [T, hidden] of an MLP from `read_mlp` for f32 [T, hidden], and every variant's.

    `scaled_TK` is the input of the converted weights: the same, or with smoothing.
    """
    source, converted, by_max = versions
    if not with_fp4_inputs:
        return source(x_TK), {Variant.CONVERTED: converted(scaled_TK), Variant.MAX: by_max(x_TK)}
    reference, activations_only = source.on_both_inputs(x_TK)
    weights_only, converted_w4a4 = converted.on_both_inputs(scaled_TK)
    max_only, max_w4a4 = by_max.on_both_inputs(x_TK)
    return reference, {
        Variant.CONVERTED: weights_only,
        Variant.CONVERTED_W4A4: converted_w4a4,
        Variant.MAX: max_only,
        Variant.MAX_W4A4: max_w4a4,
        Variant.ACTIVATIONS_ONLY: activations_only,
    }


def read_mlp(stem: str, *, source: WeightReader, converted: WeightReader) -> tuple[Mlp, Mlp, Mlp]:
    """Read the MLP `stem` (a module name without its last part) from both checkpoints; CheckpointError if unusable.

    Returns it with the source's weights, the converted ones, and those of `max`; all with the same input scales.
    """
    raw = {name: source.read_source(f"{stem}.{name}") for name in PROJECTIONS}
    ours = [
        converted.read_converted(f"{stem}.{name}", shape=(raw[name].shape[0], raw[name].shape[1]))
        for name in PROJECTIONS
    ]
    exact = [exact_weight(weight) for weight in raw.values()]
    by_max = exact
    if converted.is_nvfp4(f"{stem}.{PROJECTIONS[0]}"):
        by_max = _max_weights(raw)
    scales = [projection.input_scale for projection in ours]
    return Mlp(*map(LinearLayer, exact, scales)), Mlp(*ours), Mlp(*map(LinearLayer, by_max, scales))


def _max_weights(raw: Mapping[str, Int4Weight | Tensor]) -> list[DenseWeight | CodedWeight]:
    by_max = NativeQuantizer("max")
    sources: dict[str, SourceWeight] = {
        name: weight if isinstance(weight, Int4Weight) else Bf16Weight(weight.view(torch.uint16).numpy())
        for name, weight in raw.items()
    }
    measured = {name: by_max.measure(source, name=name) for name, source in sources.items()}
    gate_up = measured["gate_proj"].merge(measured["up_proj"])
    weights: list[DenseWeight | CodedWeight] = []
    for name, source in sources.items():
        magnitude = measured[name] if name == "down_proj" else gate_up
        scale = by_max.global_scale(magnitude)
        result, _ = by_max.quantize(source, name=name, magnitude=magnitude, global_scale=scale)
        packed = torch.as_tensor(result.packed)
        block_scales = torch.as_tensor(result.block_scales)
        weights.append(nvfp4_weight(packed, block_scales, result.global_scale))
    return weights
