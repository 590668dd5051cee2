"""Reference layers: MoE blocks in isolation, all computed from the same hidden states.

Every version of a block reads the reference's hidden states of its layer: those that the source's layers below compute
on a text, or drawn ones. So an error is the layer's own. `k2convert evaluate` computes the same layers
in a row, where each model reads what its own layers below gave.

The layer is the source's (forward/decoder.py), with its router, which rule 7 of the contract has compared. Each of its
MLPs is computed in FP32 in every version: with the source's exact q * s and with the converted weights; with input
scales, both on FP4 activations too. Every core has an expert of its own, so a K2 layer needs under 4 GB.

An expert that no token chose is run on the tokens with the highest scores for it. So it is checked too, but it adds
nothing to the layer's output. Input scales are used as stored for each expert; engines that use one per layer take the
largest, which is the same number if they are constant.

Drawn states are for machines that cannot run the model. They have what matters for quantization: RMS-normed rows, the
layer's norm weight, a log-normal spread of channels, a few much larger channels, and a mean that is not zero. They do
not depend on the router, so they choose experts more evenly than real text does.
"""

from __future__ import annotations

import gc
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.check.contract.result import NO_SCALING, Scaling
from k2convert.check.results import (
    W4A4_VARIANTS,
    LayerResult,
    LayersReport,
    LayersRequest,
    Variant,
    VariantError,
    labels,
)
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import CheckpointError
from k2convert.forward.decoder import DecoderLayer, MlpBlock, embed
from k2convert.forward.moe import Mlp, MlpTokens, Routing, block_mlps, projection_names, read_activation
from k2convert.forward.weights import LinearLayer, WeightReader, exact_weight
from k2convert.machine import num_cores
from k2convert.models import detect_family, read_architecture
from k2convert.models.config import text_config
from k2convert.models.names import block_starts
from k2convert.plan.recipe import Budget
from k2convert.quantize.metrics.weight_metrics import decibels
from k2convert.records.events import SILENT, Events

PROBE_TOKENS: Final = 2
"""Tokens on which an expert is run if no token chose it."""

CHANNEL_SIGMA: Final = 0.6
OUTLIER_SHARE: Final = 0.003
OUTLIER_FACTOR: Final = 8.0
MEAN_SHARE: Final = 0.3


def check_layers_exist(source: Checkpoint, layers: Sequence[int]) -> None:
    """Refuse layers that do not exist or have no MoE block (CheckpointError); reads only the config."""
    known = read_architecture(source).moe_layers
    if unknown := [layer for layer in layers if layer not in known]:
        there = f"{known[0]}..{known[-1]}" if known else "none"
        raise CheckpointError(f"{source.folder}: layer {unknown[0]} has no MoE block. Layers that have: {there}.")


@torch.no_grad()
def check_layers(
    request: LayersRequest,
    *,
    source: Checkpoint,
    converted: Checkpoint,
    budget: Budget,
    scaling: Scaling = NO_SCALING,
    events: Events = SILENT,
) -> LayersReport:
    """Compute MoE layers from both checkpoints and judge the difference; CheckpointError if one cannot be computed.

    `scaling` is the converted checkpoint's smoothing: its blocks get the states that its norms give.
    """
    check_layers_exist(source, request.layers)
    with closing(WeightReader(source)) as from_source, closing(WeightReader(converted)) as from_converted:
        results: list[LayerResult] = []
        for layer, block, x_TK, routing in _layer_inputs(from_source, request, events):
            *_, down = projection_names(from_converted, f"{block.mlp}.experts.0")
            has_scales = from_converted.read_converted(down).input_scale is not None
            versions = _Versions(from_source, from_converted, has_scales, scaling.exponents.get(layer))
            errors, expert_sqnr_db = _compare(layer, block, x_TK, routing, versions, events)
            result = LayerResult(
                layer=layer,
                tokens=x_TK.shape[0],
                num_experts=len(expert_sqnr_db),
                num_reached=np.unique(routing.experts.cpu().numpy()).size,
                errors=tuple(errors),
                failures=_failures(errors, expert_sqnr_db, budget),
            )
            results.append(result)
    described = "synthetic, seed 0"
    if request.text is not None:
        described = f"text: {', '.join(name for name, _ in request.text.texts)}"
    return LayersReport(described, budget, tuple(results))


def _layer_inputs(
    source: WeightReader, request: LayersRequest, events: Events
) -> Iterator[tuple[int, MlpBlock, Tensor, Routing]]:
    """Yield each requested layer with its number, the input f32 [tokens, hidden] of its MLP, and its routing."""
    if request.text is not None:
        yield from layers_on_text(source, request.text.ids, request.layers, events=events)
        return
    config = source.checkpoint.config
    for layer in request.layers:
        stem = detect_family(source.checkpoint).layer.format(layer=layer)
        norm = source.read(f"{stem}.post_attention_layernorm.weight")
        x_TK = draw_hidden_states(norm, config=config, layer=layer, tokens=request.tokens)
        block = MlpBlock(source, layer, workers=num_cores())
        yield layer, block, x_TK, block.route(x_TK)


@torch.no_grad()
def layers_on_text(
    source: WeightReader, ids: NDArray[np.int64], layers: Collection[int], *, events: Events
) -> Iterator[tuple[int, MlpBlock, Tensor, Routing]]:
    """Yield each of `layers`, in their order in the model, with the input f32 [tokens, hidden] of its MLP.

    `ids` i64 [windows, tokens] are the text. The layers below are computed too; CheckpointError if one cannot be.
    """
    architecture = read_architecture(source.checkpoint)
    last = max(layers)
    hidden = embed(source, torch.as_tensor(ids))
    starts = block_starts(last, architecture.residual_block)
    blocks: list[Tensor] = []
    for number in range(last + 1):
        decoder = DecoderLayer(source, number, workers=num_cores())
        if number in layers:
            _, x_TK, routing = decoder.attend(hidden, blocks)
            assert routing is not None
            yield number, decoder, x_TK, routing
        if number < last:
            before = hidden
            hidden = decoder.run(before, blocks=blocks)
            if number in starts:
                blocks.append(before)
            if not bool(hidden.isfinite().all()):
                raise CheckpointError(
                    f"{source.checkpoint.folder}: layer {number}: the hidden states are not finite. The weights of "
                    "this layer or an earlier one are damaged. Download the source again."
                )
            experts = architecture.num_experts if number in architecture.moe_layers else 0
            for expert in range(experts):
                events.experts_computed(number, expert + 1, experts)
        del decoder
        gc.collect()  # its parts refer to each other


def draw_hidden_states(norm_weight: Tensor, *, config: dict[str, Any], layer: int, tokens: int) -> Tensor:
    """Draw f32 [tokens, hidden] for a layer with post_attention_layernorm weight [hidden]; always the same ones."""
    hidden_size = norm_weight.numel()
    generator = torch.Generator().manual_seed(zlib.crc32(f"0/{layer}".encode()))

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    channels = torch.exp(CHANNEL_SIGMA * gaussian(hidden_size))
    outliers = torch.randperm(hidden_size, generator=generator)[: max(1, round(OUTLIER_SHARE * hidden_size))]
    channels[outliers] *= OUTLIER_FACTOR
    states = (gaussian(tokens, hidden_size) + MEAN_SHARE * gaussian(hidden_size)) * channels
    epsilon = float(text_config(config).get("rms_norm_eps", 1e-6))
    return states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + epsilon) * norm_weight.float()


def _failures(errors: Sequence[VariantError], expert_sqnr_db: Sequence[float], budget: Budget) -> tuple[str, ...]:
    failures: list[str] = []
    for error in errors:
        if error.variant is Variant.CONVERTED and error.sqnr_db < budget.layer_sqnr_db:
            failures.append(f"output SQNR {error.sqnr_db:.2f} dB, under the budget of {budget.layer_sqnr_db:g} dB")
        elif error.sqnr_db == -math.inf:
            failures.append(f"{labels([e.variant for e in errors])[error.variant]}: the output is not finite")
    for expert, sqnr in sorted(enumerate(expert_sqnr_db), key=lambda item: item[1]):
        if sqnr < budget.expert_sqnr_db:
            failures.append(f"expert {expert}: SQNR {sqnr:.2f} dB, under the budget of {budget.expert_sqnr_db:g} dB")
    return tuple(failures)


def _compare(
    layer: int, block: MlpBlock, x_TK: Tensor, routing: Routing, versions: _Versions, events: Events
) -> tuple[list[VariantError], list[float]]:
    """Compute a block for f32 [T, hidden] in all versions; return the errors by variant, and the converted experts'.

    The latter are the SQNR in dB of the outputs of each expert with the converted weights alone.
    """
    variants = [variant for variant in Variant if versions.with_fp4_inputs or variant not in W4A4_VARIANTS]
    mlps = block_mlps(versions.source, block.mlp, routing)
    reached = {mlp.module for mlp in mlps if mlp.tokens.numel()}
    for index, mlp in enumerate(mlps):
        if mlp.expert is not None and mlp.module not in reached:
            mlps[index] = replace(mlp, tokens=routing.likeliest_tokens(mlp.expert, PROBE_TOKENS), weights=None)
    energies: dict[int | None, list[float]] = defaultdict(lambda: [0.0] * (1 + len(variants)))  # signal, then noise

    def add(inputs: Tensor, some: list[MlpTokens], sums_VTK: Tensor) -> None:
        with closing(block.outputs(inputs, some, read=versions.read)) as computed:
            for piece, output_VTK in computed:
                if piece.expert is not None and piece.expert not in energies:
                    events.experts_computed(layer, piece.expert + 1, routing.scores.shape[1])
                reference_TK = output_VTK[0].double()
                energies[piece.expert][0] += float(reference_TK.square().sum())
                for version, output_TK in enumerate(output_VTK[1:], start=1):
                    energies[piece.expert][version] += float((output_TK.double() - reference_TK).square().sum())
                if piece.module in reached:
                    weights = 1.0 if piece.weights is None else piece.weights[:, None]
                    sums_VTK.index_add_(1, piece.tokens, (output_VTK * weights).double())

    num_versions = 1 + len(variants)
    routed = block.routed_input(x_TK)
    sums_VTK = torch.zeros(num_versions, *routed.shape, dtype=torch.float64)
    add(routed, [mlp for mlp in mlps if mlp.expert is not None], sums_VTK)
    outputs_VTK = torch.stack([block.routed_output(sum_TK).double() for sum_TK in sums_VTK])
    add(x_TK, [mlp for mlp in mlps if mlp.expert is None], outputs_VTK)
    shared = energies.pop(None, None)
    errors: list[VariantError] = []
    for version, variant in enumerate(variants, start=1):
        experts = [decibels(energy[0], energy[version]) for energy in energies.values()]
        worst = min(range(len(experts)), key=experts.__getitem__)
        cosine = torch.nn.functional.cosine_similarity(outputs_VTK[0], outputs_VTK[version], dim=-1)
        noise = float((outputs_VTK[version] - outputs_VTK[0]).square().sum())
        error = VariantError(
            variant=variant,
            sqnr_db=decibels(float(outputs_VTK[0].square().sum()), noise),
            cosine=float(cosine.mean()),
            worst_cosine=float(cosine.min()),
            worst_expert=worst,
            worst_expert_sqnr_db=experts[worst],
            shared_experts_sqnr_db=None if shared is None else decibels(shared[0], shared[version]),
        )
        errors.append(error)
    return errors, [decibels(energy[0], energy[1]) for energy in energies.values()]


@dataclass(frozen=True, slots=True, eq=False)
class _Versions:
    """The versions of a block's MLPs: that of the source, then one for each variant.

    `with_fp4_inputs` adds those of W4A4; it needs a checkpoint with input scales. The converted weights get channel j
    of the input times 2**exponents[j], int8 [hidden], if given.
    """

    source: WeightReader
    converted: WeightReader
    with_fp4_inputs: bool
    exponents: NDArray[np.int8] | None

    def read(self, module: str, _device: str) -> Callable[[Tensor], Tensor]:
        """Read an MLP (a module name without its last part) from both checkpoints; CheckpointError if unusable.

        The result maps f32 [T, hidden] to the outputs f32 [V, T, hidden] of all versions, with the same input scales.
        """
        names = projection_names(self.source, module)
        raw = {name: self.source.read_source(name) for name in names}
        ours = [self.converted.read_converted(name, shape=(raw[name].shape[0], raw[name].shape[1])) for name in names]
        exact = [exact_weight(weight) for weight in raw.values()]
        scales = [projection.input_scale for projection in ours]
        activation = read_activation(self.source.checkpoint, self.source.family)
        return partial(
            self._outputs,
            Mlp(*map(LinearLayer, exact, scales), activation=activation),
            Mlp(*ours, activation=activation),
        )

    def _outputs(self, source: Mlp, converted: Mlp, x_TK: Tensor) -> Tensor:
        scaled_TK = x_TK
        if self.exponents is not None:
            scaled_TK = torch.ldexp(x_TK, torch.as_tensor(self.exponents.astype(np.int32)))
        if not self.with_fp4_inputs:
            return torch.stack([source(x_TK), converted(scaled_TK)])
        reference, activations_only = source.on_both_inputs(x_TK)
        return torch.stack([reference, *converted.on_both_inputs(scaled_TK), activations_only])
