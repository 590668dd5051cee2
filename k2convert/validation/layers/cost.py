"""Cost of a check of reference layers, said before it starts: layers, experts, bytes to read, time.

The time is an estimate: one expert is read and computed now, in one thread, and every core is to do as well. Real text
needs the layers below too: their experts are computed once, from the source's weights.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import K2ConvertError
from k2convert.forward.moe import read_mlp as read_source_mlp
from k2convert.forward.weights import WeightReader
from k2convert.machine import num_cores
from k2convert.models import detect_family, read_architecture
from k2convert.validation.layers.block import read_mlp
from k2convert.validation.remote import layer_bytes

_TOKENS_AN_EXPERT = 8


@dataclass(frozen=True, slots=True)
class LayersCost:
    """The cost of computing `layers`; `seconds` is None if the first expert cannot be computed.

    `num_below` of the layers are computed only to get the hidden states of a text; `num_experts` has theirs too, and
    those of the whole layers that a pruned result is compared with.
    """

    layers: tuple[int, ...]
    num_below: int
    num_experts: int
    num_bytes: int
    seconds: float | None


def layers_cost(
    *, source: Checkpoint, whole: Checkpoint, converted: Checkpoint | None, layers: Sequence[int], is_text: bool
) -> LayersCost:
    """Return the cost of computing `layers` (empty: all) from both checkpoints. Computes one expert a few times.

    `converted` is None if shards are still to be fetched: then no time is measured. `is_text`: the hidden states are
    those of a text, which the layers below compute. `whole` is the source with all experts: of a pruned result, not
    `source`.
    """
    family = detect_family(source)
    architecture = read_architecture(source)
    chosen = tuple(layers) or architecture.moe_layers
    is_pruned = whole is not source
    read = (source, converted or source, *((whole,) if is_pruned else ()))
    num_bytes = sum(layer_bytes(checkpoint, chosen, family=family) for checkpoint in read)
    below = range(max(chosen)) if is_text and chosen else range(0)
    stems_below = tuple(f"{family.layer.format(layer=layer)}." for layer in below)
    num_bytes += sum(t.num_bytes for name, t in whole.tensors.items() if name.startswith(stems_below))
    experts = architecture.num_experts * len(chosen)
    num_whole = read_architecture(whole).num_experts
    experts_below = num_whole * len([layer for layer in below if layer in architecture.moe_layers])
    experts_below += num_whole * len(chosen) if is_pruned else 0
    seconds = None
    if chosen and converted is not None:
        stem = f"{family.layer.format(layer=chosen[0])}.mlp.experts.0"
        seconds = _seconds(stem, source, converted, experts=experts, experts_below=experts_below)
    return LayersCost(chosen, len(below), experts + experts_below, num_bytes, seconds)


@torch.inference_mode()
def _seconds(stem: str, source: Checkpoint, converted: Checkpoint, *, experts: int, experts_below: int) -> float | None:
    """Return the seconds of all experts on all cores, measured on one of them in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with closing(WeightReader(source)) as ours, closing(WeightReader(converted)) as theirs:

            def check() -> None:
                mlp = read_mlp(stem, source=ours, converted=theirs)
                states = torch.ones(_TOKENS_AN_EXPERT, mlp.source.gate.weight.shape[1])
                mlp.run(states, states, with_fp4_inputs=mlp.converted.gate.input_scale is not None)

            def run() -> None:
                mlp = read_source_mlp(ours, stem)
                mlp(torch.ones(_TOKENS_AN_EXPERT, mlp.gate.weight.shape[1]))

            total = experts * _second_time(check) + (experts_below * _second_time(run) if experts_below else 0)
    except K2ConvertError:  # the check itself names the problem
        return None
    finally:
        torch.set_num_threads(threads)
    return total / num_cores()


def _second_time(call: Callable[[], None]) -> float:
    """Return the seconds of a second call; the first one warms up."""
    call()
    begin = time.monotonic()
    call()
    return time.monotonic() - begin
