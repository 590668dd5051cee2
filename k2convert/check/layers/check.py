"""Reference layers: a MoE block computed from the source's INT4 weights and from the converted bytes.

The router, every routed expert and the shared experts are computed in FP32 on the same hidden states, once with the
source's exact q * s and once for each variant: the converted weights, the same on FP4 activations, the weights that
`max` gives for the same source, the same on FP4 activations, and the source's weights on FP4 activations. Experts are
read one by one, so a K2 layer needs under 4 GB.

An expert that no token chose is run on the tokens with the highest scores for it. So it is checked too, but it adds
nothing to the layer's output. Input scales are used as stored for each expert; engines that use one per layer take the
largest, which is the same number if they are constant.

Cost of a check, said before it starts: layers, experts, bytes to read. Real text needs the layers below too: their
experts are computed once, from the source's weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.calibration.text import Windows
from k2convert.check.layers.block import compute_block
from k2convert.check.layers.result import LayerResult, LayersReport, Variant, VariantError, labels
from k2convert.check.remote import layer_bytes
from k2convert.check.scaling import NO_SCALING, Scaling, misfit
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import CheckpointError
from k2convert.forward.hidden_states import draw_hidden_states, load_hidden_states
from k2convert.forward.layer_pass import LayerLoop, each_layer
from k2convert.forward.moe import Routing, read_router
from k2convert.forward.weights import WeightReader
from k2convert.forward.work import HiddenStates, ReadStates, WriteStates
from k2convert.machine import num_cores
from k2convert.models import detect_family, parse_tensor_name, read_architecture
from k2convert.plan.recipe import Budget
from k2convert.records.events import SILENT, Events


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
    hidden_states: Path | Windows | None = None,
    tokens: int = 256,
    budget: Budget,
    scaling: Scaling = NO_SCALING,
    events: Events = SILENT,
) -> LayersReport:
    """Compute MoE layers from both checkpoints and judge the difference; CheckpointError if one cannot be computed.

    `hidden_states` is a file of captured states (see forward/hidden_states.py), or the windows of a text, which the
    source's layers compute in FP32; without it they are drawn.
    `scaling` is the converted checkpoint's smoothing: its blocks get the states that its norms give.
    """
    check_layers_exist(source, layers)
    with (
        closing(WeightReader(source)) as from_source,
        closing(WeightReader(converted)) as from_converted,
    ):
        results: list[LayerResult] = []
        if isinstance(hidden_states, Windows):
            found = states_of_text(source, hidden_states.ids, layers, events=events)
        else:
            found = _given_states(from_source, layers, hidden_states, tokens=tokens)
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
    if hidden_states is not None:
        described = f"captured: {getattr(hidden_states, 'name', '')}"
    if isinstance(hidden_states, Windows):
        described = f"text: {', '.join(name for name, _ in hidden_states.texts)}"
    return LayersReport(described, budget, tuple(results))


def _given_states(
    source: WeightReader, layers: Sequence[int], captured: Path | None, *, tokens: int
) -> Iterator[tuple[int, Tensor]]:
    config = source.checkpoint.config
    for layer in layers:
        stem = detect_family(source.checkpoint).layer.format(layer=layer)
        norm = source.read(f"{stem}.post_attention_layernorm.weight")
        if captured is not None:
            yield layer, load_hidden_states(captured, layer=layer, hidden_size=norm.numel(), tokens=tokens)
        else:
            yield layer, draw_hidden_states(norm, config=config, layer=layer, tokens=tokens, seed=0)


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


@torch.no_grad()
def states_of_text(
    source: Checkpoint, ids: NDArray[np.int64], layers: Collection[int], *, events: Events
) -> Iterator[tuple[int, Tensor]]:
    """Yield each of `layers`, in their order in the model, with the input f32 [tokens, hidden] of its MLP.

    `ids` i64 [windows, tokens] are the text. The layers below are computed too; CheckpointError if one cannot be.
    """
    layer_pass = LayerLoop(
        ids=ids,
        num_layers=max(layers) + 1,
        hidden_size=read_architecture(source).hidden_size,
        chunk=ids.shape[0],
        devices=("cpu",),
        workers=num_cores(),
        around=lambda _: nullcontext(source),
    )
    with closing(each_layer(layer_pass, _Memory(), events=events)) as passed:
        for layer in passed:
            observer = _Observer(layer.number, events)
            found: list[Tensor] = []
            with layer.writing() as write:
                for first, (states,) in layer.chunks():
                    if layer.is_last:
                        found.append(layer.decoder.attend(torch.as_tensor(states))[1])
                        continue
                    layer.run(first, states, observer)
                    found += [] if observer.states is None else [observer.states]
                    write(states)
            if layer.number in layers:
                yield layer.number, torch.cat(found)


class _Memory:
    def __init__(self) -> None:
        self.kept: dict[int, list[HiddenStates]] = {}

    def num_finished(self) -> int:
        return 0

    def sweep(self, first: int) -> None:
        self.kept.pop(first - 1, None)

    @contextmanager
    def reading(self, stream: str, layer: int, shape: tuple[int, int, int]) -> Generator[ReadStates]:  # noqa: ARG002
        states = np.concatenate(self.kept[layer])
        yield lambda first, stop: states[first:stop]

    @contextmanager
    def writing(self, stream: str, layer: int, shape: tuple[int, int, int]) -> Generator[WriteStates]:  # noqa: ARG002
        self.kept[layer] = []
        yield self.kept[layer].append


@dataclass(slots=True)
class _Observer:
    """Keeps the input of a layer's MLP, and reports experts. One that no token chose counts as computed."""

    layer: int
    events: Events
    states: Tensor | None = None
    done: int = 0
    total: int = 0

    def block(self, x_TK: Tensor, routing: Routing | None) -> None:
        self.states = x_TK
        self.total = 0 if routing is None else routing.scores.shape[1]

    def expert(
        self,
        expert: int | None,
        tokens_t: Tensor,  # noqa: ARG002
        weights_t: Tensor | None,  # noqa: ARG002
        inner_tI: Tensor,  # noqa: ARG002
        output_tK: Tensor,  # noqa: ARG002
    ) -> None:
        self._reach(self.done if expert is None else min(expert + 1, self.total))

    def output(self, h_TK: Tensor) -> None:  # noqa: ARG002
        self._reach(self.total)

    def _reach(self, done: int) -> None:
        while self.done < done:
            self.done += 1
            self.events.experts_computed(self.layer, self.done, self.total)


@dataclass(frozen=True, slots=True)
class LayersCost:
    """The cost of computing `layers`.

    `num_below` of the layers are computed only to get the hidden states of a text; `num_experts` has theirs too.
    """

    layers: tuple[int, ...]
    num_below: int
    num_experts: int
    num_bytes: int


def layers_cost(
    *, source: Checkpoint, converted: Checkpoint | None, layers: Sequence[int], is_text: bool
) -> LayersCost:
    """Return the cost of computing `layers` (empty: all) from both checkpoints.

    `converted` is None if shards are still to be fetched. `is_text`: the hidden states are those of a text, which the
    layers below compute.
    """
    family = detect_family(source)
    architecture = read_architecture(source)
    chosen = tuple(layers) or architecture.moe_layers
    num_bytes = sum(layer_bytes(checkpoint, chosen, family=family) for checkpoint in (source, converted or source))
    below = range(max(chosen)) if is_text and chosen else range(0)
    stems_below = tuple(f"{family.layer.format(layer=layer)}." for layer in below)
    num_bytes += sum(t.num_bytes for name, t in source.tensors.items() if name.startswith(stems_below))
    experts = architecture.num_experts * len(chosen)
    experts_below = architecture.num_experts * len([layer for layer in below if layer in architecture.moe_layers])
    return LayersCost(chosen, len(below), experts + experts_below, num_bytes)
