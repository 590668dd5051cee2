"""What a check of reference layers costs, said before it starts: layers, experts, bytes to read, time.

The time is an estimate: one expert is read and computed now, in one thread, and every core is to do as well.
"""

import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import K2ConvertError
from k2convert.forward.weights import WeightReader
from k2convert.models import detect_family
from k2convert.validate.layers.check import moe_layers
from k2convert.validate.layers.versions import read_mlp

_TOKENS_AN_EXPERT = 8


@dataclass(frozen=True, slots=True)
class LayersCost:
    """What computing `layers` takes; `seconds` is None if the first expert cannot be computed."""

    layers: tuple[int, ...]
    num_experts: int
    num_bytes: int
    seconds: float | None


def layers_cost(*, source: Checkpoint, converted: Checkpoint | None, layers: Sequence[int]) -> LayersCost:
    """Return the cost of computing `layers` (empty: all) from both checkpoints. Computes one expert twice.

    `converted` is None if shards are still to be fetched: then no time is measured.
    """
    family = detect_family(source)
    architecture = family.read_architecture(source.config, str(source.folder))
    chosen = tuple(layers) or moe_layers(source)
    stems = tuple(f"{family.layer.format(layer=layer)}.mlp." for layer in chosen)
    num_bytes = sum(
        tensor.num_bytes
        for checkpoint in (source, converted or source)
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(stems)
    )
    num_experts = architecture.num_experts * len(chosen)
    one = _expert_seconds(f"{stems[0]}experts.0", source, converted) if stems and converted is not None else None
    return LayersCost(
        chosen, num_experts, num_bytes, None if one is None else one * num_experts / len(os.sched_getaffinity(0))
    )


@torch.inference_mode()
def _expert_seconds(stem: str, source: Checkpoint, converted: Checkpoint) -> float | None:
    """Return the seconds that the second computation of one expert takes; the first one warms up."""
    begin, threads = 0.0, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with closing(WeightReader(source)) as ours, closing(WeightReader(converted)) as theirs:
            for _ in range(2):
                begin = time.monotonic()
                mlp = read_mlp(stem, source=ours, converted=theirs)
                states = torch.ones(_TOKENS_AN_EXPERT, mlp.source.gate.weight.shape[1])
                mlp.run(states, with_fp4_inputs=mlp.converted.gate.input_scale is not None)
    except K2ConvertError:  # the check itself says what is wrong
        return None
    finally:
        torch.set_num_threads(threads)
    return time.monotonic() - begin
