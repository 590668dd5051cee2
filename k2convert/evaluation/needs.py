"""Needs of an evaluation: memory, counted from headers, and time, measured on one expert before it starts.

Every model costs a pass over the text (calibration/cost.py) without the search of smoothing exponents, and the output
matrix. Reading is not measured.
"""

from __future__ import annotations

import torch

from k2convert.calibration import cost
from k2convert.calibration.cost import LEAST_SHARE, MOST_SHARE, Time, pass_cost, pass_flops
from k2convert.calibration.sizes import Memory, ModelSizes, PassSize, pass_memory, read_sizes
from k2convert.checkpoint.index import Checkpoint
from k2convert.evaluation.checkpoints import head_names
from k2convert.evaluation.head import PIECE_TOKENS, TILE_ROWS, TILE_TOKENS
from k2convert.forward.moe import one_torch_thread


def evaluation_memory(model: ModelSizes, size: PassSize, *, models: int) -> Memory:
    """Return what an evaluation of `models` models holds at its peak: in a layer, or at the head."""
    held = pass_memory(model, size)
    states = 4 * size.chunk_windows * size.window * model.hidden
    tiles = 1 + -(-(size.workers + 1) * PIECE_TOKENS // TILE_TOKENS)
    head = models * (4 * max(TILE_TOKENS, size.window) + tiles * 2 * TILE_ROWS) * model.hidden
    if size.on_cpu:
        return Memory(held.main + max(states, head - states), 0)
    return Memory(held.main + max(states, head), max(held.gpu, held.gpu - states + head))


def _head_flop(source: Checkpoint, size: PassSize) -> float:
    rows, columns = source.tensors[head_names(source)[1]].shape
    return 2.0 * size.num_tokens * rows * columns


def layer_operations(source: Checkpoint, size: PassSize) -> tuple[float, ...]:
    """Return the operations of each layer of a model, and of the head: what an evaluation's progress counts."""
    return (*cost.layer_operations(read_sizes(source), size, is_walk=False), _head_flop(source, size))


def evaluation_flop(source: Checkpoint, size: PassSize, *, models: int) -> float:
    """Return about how many floating-point operations an evaluation needs."""
    return models * (pass_flops(read_sizes(source), size) + _head_flop(source, size))


def evaluation_time(source: Checkpoint, size: PassSize, *, models: int) -> Time:
    """Measure this machine for a second; the time on `size.workers` of its cores, or on its GPUs."""
    model = read_sizes(source)
    head = _head_flop(source, size)
    with torch.no_grad(), one_torch_thread():
        one = pass_cost(model, size, extra_flops=head)
    seconds = models * (one.experts + one.others) / (size.workers if size.on_cpu else len(size.devices))
    return Time(LEAST_SHARE * seconds, MOST_SHARE * seconds)
