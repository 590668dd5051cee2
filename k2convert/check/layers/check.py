"""Reference layers: MoE blocks of two checkpoints in isolation, computed from the same hidden states.

Every model reads the reference's hidden states of a layer: those that the source's layers below compute on a text, or
drawn ones. So an error is the layer's own. `k2convert evaluate` computes the same layers in a row,
where each model reads what its own layers below gave.

Router, routed experts and shared experts are computed in FP32, once with the source's exact q * s and once for each
variant: the converted weights, the same on FP4 activations, the weights that `max` gives for the same source, the same
on FP4 activations, and the source's weights on FP4 activations. Every core has an expert of its own, so a K2 layer
needs under 4 GB. Outputs are added in the order of the experts: the same figures with any number of cores.

An expert that no token chose is run on the tokens with the highest scores for it. So it is checked too, but it adds
nothing to the layer's output. Input scales are used as stored for each expert; engines that use one per layer take the
largest, which is the same number if they are constant.
"""

from __future__ import annotations

import gc
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.check.layers.result import (
    W4A4_VARIANTS,
    LayerResult,
    LayersReport,
    Variant,
    VariantError,
    labels,
)
from k2convert.check.scaling import NO_SCALING, Scaling, misfit
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import CheckpointError
from k2convert.forward.decoder import DecoderLayer, embed
from k2convert.forward.moe import PROJECTIONS, Mlp, MlpTokens, Routing, block_mlps, read_router, run_in_order
from k2convert.forward.weights import CodedWeight, DenseWeight, LinearLayer, WeightReader, exact_weight, nvfp4_weight
from k2convert.machine import num_cores
from k2convert.models import detect_family, parse_tensor_name, read_architecture
from k2convert.models.config import text_config
from k2convert.plan.recipe import Budget
from k2convert.quantize.formats.bf16 import Bf16Weight, SourceWeight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.metrics.weight_metrics import decibels
from k2convert.quantize.quantizer import NativeQuantizer
from k2convert.records.events import SILENT, Events
from k2convert.text.windows import Windows

PROBE_TOKENS = 2
"""Tokens on which an expert is run if no token chose it."""

CHANNEL_SIGMA: Final = 0.6
OUTLIER_SHARE: Final = 0.003
OUTLIER_FACTOR: Final = 8.0
MEAN_SHARE: Final = 0.3
"""Spread of the channels of synthetic hidden states, share and size of those that are much larger, and their mean."""


def check_layers_exist(source: Checkpoint, layers: Sequence[int]) -> None:
    """Refuse layers that do not exist or have no MoE block (CheckpointError); reads only the config."""
    known = read_architecture(source).moe_layers
    if unknown := [layer for layer in layers if layer not in known]:
        there = f"{known[0]}..{known[-1]}" if known else "none"
        raise CheckpointError(f"{source.folder}: layer {unknown[0]} has no MoE block. Layers that have: {there}.")


@torch.no_grad()
def check_layers(
    *,
    source: Checkpoint,
    converted: Checkpoint,
    layers: Sequence[int],
    text: Windows | None = None,
    tokens: int = 256,
    budget: Budget,
    scaling: Scaling = NO_SCALING,
    events: Events = SILENT,
) -> LayersReport:
    """Compute MoE layers from both checkpoints and judge the difference; CheckpointError if one cannot be computed.

    The hidden states are those that the source's layers compute in FP32 on `text`; without it they are drawn.
    `scaling` is the converted checkpoint's smoothing: its blocks get the states that its norms give.
    """
    check_layers_exist(source, layers)
    with (
        closing(WeightReader(source)) as from_source,
        closing(WeightReader(converted)) as from_converted,
    ):
        results: list[LayerResult] = []
        if text is None:
            found = _drawn_states(from_source, layers, tokens=tokens)
        else:
            found = states_of_text(source, text.ids, layers, events=events)
        for layer, states in found:
            stem = f"{detect_family(source).layer.format(layer=layer)}.mlp"
            progress = partial(events.experts_computed, layer)
            errors, expert_sqnr_db, num_reached = compute_block(
                stem,
                states,
                read_router(from_source, stem)(states),
                source=from_source,
                converted=from_converted,
                with_fp4_inputs=from_converted.read_converted(f"{stem}.experts.0.down_proj").input_scale is not None,
                exponents=scaling.exponents.get(layer),
                progress=progress,
            )
            router = (f"{stem}.gate.{name}" for name in ("weight", "e_score_correction_bias"))
            unchanged = all(_is_same(name, from_source, from_converted, scaling) for name in router)
            result = LayerResult(
                layer=layer,
                tokens=states.shape[0],
                num_experts=len(expert_sqnr_db),
                num_reached=num_reached,
                router_unchanged=unchanged,
                errors=tuple(errors),
                failures=_failures(errors, expert_sqnr_db, budget=budget, router_unchanged=unchanged),
            )
            results.append(result)
    described = "synthetic, seed 0"
    if text is not None:
        described = f"text: {', '.join(name for name, _ in text.texts)}"
    return LayersReport(described, budget, tuple(results))


def _drawn_states(source: WeightReader, layers: Sequence[int], *, tokens: int) -> Iterator[tuple[int, Tensor]]:
    config = source.checkpoint.config
    for layer in layers:
        stem = detect_family(source.checkpoint).layer.format(layer=layer)
        norm = source.read(f"{stem}.post_attention_layernorm.weight")
        yield layer, draw_hidden_states(norm, config=config, layer=layer, tokens=tokens, seed=0)


def draw_hidden_states(norm_weight: Tensor, *, config: dict[str, Any], layer: int, tokens: int, seed: int) -> Tensor:
    """Draw f32 [tokens, hidden] for a layer with post_attention_layernorm weight [hidden]; a seed fixes the values.

    They have what matters for quantization: RMS-normed rows, the layer's norm weight, a log-normal spread of channels,
    a few much larger channels, and a mean that is not zero. They do not depend on the router, so they choose experts
    more evenly than real text does.
    """
    hidden_size = norm_weight.numel()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{layer}".encode()))

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    channels = torch.exp(CHANNEL_SIGMA * gaussian(hidden_size))
    outliers = torch.randperm(hidden_size, generator=generator)[: max(1, round(OUTLIER_SHARE * hidden_size))]
    channels[outliers] *= OUTLIER_FACTOR
    states = (gaussian(tokens, hidden_size) + MEAN_SHARE * gaussian(hidden_size)) * channels
    epsilon = float(text_config(config).get("rms_norm_eps", 1e-6))
    return states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + epsilon) * norm_weight.float()


@torch.no_grad()
def states_of_text(
    source: Checkpoint, ids: NDArray[np.int64], layers: Collection[int], *, events: Events
) -> Iterator[tuple[int, Tensor]]:
    """Yield each of `layers`, in their order in the model, with the input f32 [tokens, hidden] of its MLP.

    `ids` i64 [windows, tokens] are the text. The layers below are computed too; CheckpointError if one cannot be.
    """
    architecture = read_architecture(source)
    last = max(layers)
    with closing(WeightReader(source)) as reader:
        hidden = embed(reader, torch.as_tensor(ids))
        for number in range(last + 1):
            decoder = DecoderLayer(reader, number, workers=num_cores())
            if number in layers:
                yield number, decoder.attend(hidden)[1]
            if number < last:
                hidden = decoder.run(hidden)
                if not bool(hidden.isfinite().all()):
                    raise CheckpointError(
                        f"{source.folder}: layer {number}: the hidden states are not finite. The weights of this layer "
                        "or an earlier one are damaged. Download the source again."
                    )
                experts = architecture.num_experts if number in architecture.moe_layers else 0
                for expert in range(experts):
                    events.experts_computed(number, expert + 1, experts)
            del decoder
            gc.collect()  # its parts refer to each other


def _is_same(name: str, source: WeightReader, converted: WeightReader, scaling: Scaling) -> bool:
    one = source.info(name)
    other = converted.info(name)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    family = detect_family(source.checkpoint)
    exponents = scaling.of_copy(parse_tensor_name(name, family=family), family=family)
    before = source.raw(name)
    after = converted.raw(name)
    if exponents is None:
        return torch.equal(before, after)
    return not misfit(before.numpy(), after.numpy(), dtype=one.dtype, begin=0, exponents=exponents)


def _failures(
    errors: Sequence[VariantError], expert_sqnr_db: Sequence[float], *, budget: Budget, router_unchanged: bool
) -> tuple[str, ...]:
    failures: list[str] = []
    if not router_unchanged:
        failures.append("the router's weight or correction bias differs from the source's")
    for error in errors:
        if error.variant is Variant.CONVERTED and error.sqnr_db < budget.layer_sqnr_db:
            failures.append(f"output SQNR {error.sqnr_db:.2f} dB, under the budget of {budget.layer_sqnr_db:g} dB")
        elif error.sqnr_db == -math.inf:
            failures.append(f"{labels([e.variant for e in errors])[error.variant]}: the output is not finite")
    for expert, sqnr in sorted(enumerate(expert_sqnr_db), key=lambda item: item[1]):
        if sqnr < budget.expert_sqnr_db:
            failures.append(f"expert {expert}: SQNR {sqnr:.2f} dB, under the budget of {budget.expert_sqnr_db:g} dB")
    return tuple(failures)


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

    mlps = block_mlps(source, stem, routing)
    with run_in_order(run, mlps, workers=num_cores()) as computed:
        for mlp, (reference, results) in zip(mlps, computed, strict=True):
            sqnr = {variant: sqnr_db(reference, result) for variant, result in results.items()}
            if mlp.expert is None:
                shared_sqnr_db.update(sqnr)
            else:
                for variant, found in sqnr.items():
                    expert_sqnr_db[variant].append(found)
                num_reached += int(mlp.tokens.numel() > 0)
                progress(mlp.expert + 1, routing.scores.shape[1])
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
