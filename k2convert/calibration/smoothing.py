"""Smoothing exponents of a layer, chosen by a sample of its tokens while the layer runs.

Smoothing exponents are powers of two on the channels of a MoE block's input, for FP4 activations. The norm's weight is
multiplied by s = 2^a and what reads its output is divided by it, so the function stays the same. What changes is which
16 channels share an FP4 step. For each block of 16 channels c the search reduces

    sum_c mean(W_c^2) / s_c^2 * E(s x - fp4(s x))_c^2  +  0.6 * sum_c E[x_c^2] * s_c^2 * mean((W/s - nvfp4(W/s))_c^2)

by coordinate descent: each of the 16 positions in turn takes the best of the factors 1/2, 2, 1/4 and 4, if that removes
more than 1 / 2000 of the sum. x are inputs times the roots of their token weights, W rows of gate and up, rounded to
BF16; nvfp4 is rule `mse`.

Of the tensors that it changes the search reads, in bounded memory:

    rows of gate and up   neighboring rows of every routed expert: the mean squares of columns, and a few whole rows
    exponents             of every BF16 or FP32 number, INT4 scales included: where a power of two would not be exact

A token's weight is 1 / ||h||^2 of the layer's output h, which is known last, so the input of a chunk is kept until
then. Sums are FP64, added in the order of the tokens, and divided once at the end.

At K2's size a layer has 768 such projections of 2048 x 7168: 21 rows of each are read, and all scales.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.reader import ShardReader
from k2convert.choices import BLOCK_SIZE, GROUP_SIZE, MAX_COLUMN_EXPONENT
from k2convert.errors import CalibrationError
from k2convert.forward.moe import Routing, quantize_activations, run_in_order
from k2convert.forward.weights import WeightReader
from k2convert.machine import num_cores
from k2convert.models import detect_family, parse_tensor_name
from k2convert.models.names import WEIGHT, Role, reads_norm
from k2convert.models.projections import Projection, projection_of
from k2convert.quantize.formats.bf16 import Bf16Weight, SourceWeight
from k2convert.quantize.formats.int4 import FIRST_UNUSABLE_BITS, Int4Weight
from k2convert.quantize.formats.nvfp4 import dequantize_nvfp4
from k2convert.quantize.kernels.cpu import convert
from k2convert.quantize.rules.mse import mse_global_scale

READ_ROWS: Final = 16384
"""Rows of gate and up that are read, of all experts together: column norms then err by about 1 %."""
SAMPLED_ROWS: Final = 96
"""Of them, rows that are quantized again and again during the search."""

SAMPLED_TOKENS: Final = 256
"""Tokens that exponents are chosen by."""

_FIRST_UNUSABLE_FIELD: Final = FIRST_UNUSABLE_BITS >> 7


@dataclass(frozen=True, slots=True)
class ScaledTensors:
    """The tensors of a MoE layer that smoothing changes: projections are gate and up, shared ones apart."""

    norm: TensorInfo
    routers: tuple[TensorInfo, ...]
    experts: tuple[Projection, ...]
    shared: tuple[Projection, ...]


def find_scaled_tensors(source: Checkpoint, layer: int) -> ScaledTensors:
    """Find the tensors of a layer by their names; raises PlanError for what is not part of the family."""
    family = detect_family(source)
    stem = f"{family.layer.format(layer=layer)}."
    routers: list[TensorInfo] = []
    projections: dict[str, Projection] = {}
    for name, tensor in source.tensors.items():
        if not name.startswith(stem):
            continue
        parts = parse_tensor_name(name, family=family)
        if not reads_norm(parts):
            continue
        if parts.role is Role.ROUTER:
            routers += [tensor] if parts.parameter == WEIGHT else []
        elif parts.module not in projections:
            projections[parts.module] = projection_of(source, parts)
    return ScaledTensors(
        norm=source.tensors[f"{family.mlp_norm.format(layer=layer)}.{WEIGHT}"],
        routers=tuple(routers),
        experts=tuple(p for p in projections.values() if p.role is Role.EXPERTS),
        shared=tuple(p for p in projections.values() if p.role is not Role.EXPERTS),
    )


def read_gate_up(reader: ShardReader, tensors: ScaledTensors, *, seed: int) -> tuple[NDArray[np.float64], Bf16Weight]:
    """Read READ_ROWS rows of the experts' gate and up, as many of each, at places drawn by `seed`.

    Returns the mean squares of their columns f64 [K], and sampled rows [n, K], INT4 ones rounded to BF16.
    """
    projections = tensors.experts
    generator = np.random.RandomState(zlib.crc32(f"rows/{seed}/{tensors.norm.name}".encode()))
    count = min(projections[0].num_rows, max(1, READ_ROWS // len(projections)))
    retained = set(generator.permutation(count * len(projections))[:SAMPLED_ROWS].tolist())
    squares = np.zeros(projections[0].num_columns)
    sampled: list[NDArray[np.uint16]] = []
    for number, projection in enumerate(projections):
        weight = _read_rows(reader, projection, int(generator.randint(projection.num_rows - count + 1)), count)
        # NumPy adds rows in order, the same on every machine.
        squares += np.square(weight.values().astype(np.float64)).sum(axis=0)
        sampled += [weight.select(slice(row, row + 1)).bits for row in range(count) if number * count + row in retained]
    return squares / (count * len(projections)), Bf16Weight(np.concatenate(sampled))


def _read_rows(reader: ShardReader, projection: Projection, start: int, count: int) -> SourceWeight:
    def read(tensor: TensorInfo) -> NDArray[np.uint8]:
        width = tensor.num_bytes // projection.num_rows
        return reader.read(tensor, begin=start * width, end=(start + count) * width)

    if projection.weight is not None:
        return Bf16Weight(read(projection.weight).view(np.uint16).reshape(count, -1))
    assert projection.packed is not None
    assert projection.scale is not None
    return Int4Weight(
        packed=read(projection.packed).reshape(count, -1),
        scale_bits=read(projection.scale).view(np.uint16).reshape(count, -1),
    )


def exactly_scalable(reader: ShardReader, tensors: ScaledTensors) -> NDArray[np.bool_]:
    """Return bool [K]: the channels of which every number may be multiplied by 2^-4 .. 2^4 without losing a bit.

    A channel whose norm weight is zero is not scaled either, so that the exponents show in the norm's weight.
    """
    columns = tensors.norm.shape[-1]
    usable = _are_in_range(reader, tensors.norm, columns, zeros=False)
    for router in tensors.routers:
        usable &= _are_in_range(reader, router, columns)
    for projection in (*tensors.experts, *tensors.shared):
        if projection.weight is not None:
            usable &= _are_in_range(reader, projection.weight, columns)
        else:
            assert projection.scale is not None
            groups = _are_in_range(reader, projection.scale, columns // GROUP_SIZE, end=_FIRST_UNUSABLE_FIELD)
            usable &= groups.repeat(GROUP_SIZE)
    return usable


def _are_in_range(
    reader: ShardReader, tensor: TensorInfo, columns: int, *, end: int = 255, zeros: bool = True
) -> NDArray[np.bool_]:
    """Return bool [columns]: whether the 8-bit exponents of a column's numbers stay within 1 .. end - 1 when scaled.

    A column of zeros is in range if `zeros`. A dtype other than BF16 and FP32 never is.
    """
    if tensor.dtype not in ("BF16", "F32"):
        return np.zeros(columns, dtype=np.bool_)
    kind, mantissa = (np.uint16, 7) if tensor.dtype == "BF16" else (np.uint32, 23)
    bits: NDArray[Any] = reader.read(tensor).view(kind).reshape(-1, columns)
    magnitudes = bits & kind(np.iinfo(kind).max >> 1)
    largest = magnitudes.max(axis=0)
    # The smallest that is not zero: minus one, zero is the largest number; back again, a column of zeros is zero.
    smallest = (magnitudes - kind(1)).min(axis=0) + kind(1)
    below = (smallest >> mantissa).astype(np.int64)
    above = (largest >> mantissa).astype(np.int64)
    is_zero = largest == 0
    return np.where(is_zero, zeros, (below - MAX_COLUMN_EXPONENT >= 1) & (above + MAX_COLUMN_EXPONENT < end))


WEIGHT_SHARE: Final = 0.6
"""Weight of the error of the weights, relative to that of the activations."""
STEPS: Final = (-1, 1, -2, 2)
"""Exponents of the factors that a channel tries."""
LEAST_GAIN: Final = 0.9995
"""A factor must leave less than this share of a block's error."""

_FLOOR_SHARE: Final = 1e-4  # of the mean: a channel that was always zero still has a weight
_INPUT_SCALE: Final = 1.0


def find_exponents(
    reader: WeightReader, layer: int, *, inputs: Tensor, mean_square: NDArray[np.float32], seed: int
) -> NDArray[np.int8]:
    """Return the smoothing exponents int8 [K] of a MoE layer.

    `inputs` f32 [n, K] are weighted inputs of the block, `mean_square` f32 [K] is that of all tokens, and `seed` draws
    rows of the weights. Channels that could not be scaled exactly get 0.
    """
    tensors = find_scaled_tensors(reader.checkpoint, layer)
    with ShardReader(reader.checkpoint.path) as shards:
        proxy = Proxy(inputs, mean_square, *read_gate_up(shards, tensors, seed=seed))
        return descend(proxy, free=exactly_scalable(shards, tensors))


@dataclass(frozen=True, slots=True)
class Proxy:
    """Estimates the error of a block for given exponents; see above for what it is.

    `mean_square` f32 [K] is that of the inputs, `column_squares` f64 [K] that of the columns of the weights, of which
    `rows` [n, K] are sampled.
    """

    inputs: Tensor
    mean_square: NDArray[np.float32]
    column_squares: NDArray[np.float64]
    rows: Bf16Weight

    def errors(self, exponents: NDArray[np.int8]) -> NDArray[np.float64]:
        """Return the error of each block of 16 channels, f64 [K/16], for exponents int8 [K]."""
        squares = np.ldexp(1.0, 2 * exponents.astype(np.int64))
        inputs = self.inputs * torch.as_tensor(np.ldexp(np.float32(1), exponents))
        of_inputs = quantize_activations(inputs, _INPUT_SCALE).sub_(inputs).double().square_().mean(dim=0).numpy()
        scaled = (self.mean_square + _FLOOR_SHARE * self.mean_square.mean(dtype=np.float64)) * squares
        divided = self.rows.divide_columns(exponents, name="rows of gate and up")
        global_scale = mse_global_scale(divided.magnitude())
        result = dequantize_nvfp4(convert(divided, rule="mse", global_scale=global_scale).weight)
        of_weights = np.square(result - divided.values()).mean(axis=0, dtype=np.float64)
        channels = of_inputs * self.column_squares / squares
        channels += WEIGHT_SHARE * scaled * of_weights
        return channels.reshape(-1, BLOCK_SIZE).sum(axis=1)


def descend(proxy: Proxy, *, free: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Return the exponents int8 [K] that one pass over the positions of the blocks finds; 0 where not `free`."""
    exponents = np.zeros(free.size, dtype=np.int8)
    least = proxy.errors(exponents)
    workers = min(len(STEPS), num_cores())
    for position in range(BLOCK_SIZE):
        channels = np.arange(position, free.size, BLOCK_SIZE)
        tried = [_stepped(exponents, channels[free[channels]], step) for step in STEPS]
        best = exponents[channels]
        with run_in_order(proxy.errors, tried, workers=workers) as results:
            for candidate, errors in zip(tried, results, strict=True):
                is_better = errors < least * LEAST_GAIN
                least = np.where(is_better, errors, least)
                best = np.where(is_better, candidate[channels], best)
        exponents[channels] = best
    return exponents


def _stepped(exponents: NDArray[np.int8], channels: NDArray[np.int64], step: int) -> NDArray[np.int8]:
    result = exponents.copy()
    result[channels] = np.clip(result[channels] + np.int8(step), -MAX_COLUMN_EXPONENT, MAX_COLUMN_EXPONENT)
    return result


class TokenSample:
    """SAMPLED_TOKENS of the tokens that come: those with the smallest of random numbers, which `name` draws."""

    def __init__(self, name: str) -> None:
        self._generator = np.random.RandomState(zlib.crc32(name.encode()))
        self._numbers = np.empty(0)
        self._inputs = torch.empty(0)
        self._weights = torch.empty(0, dtype=torch.float64)

    def add(self, x_TK: Tensor, weights: Tensor) -> None:
        """Take from inputs f32 [T, K] with token weights f64 [T]."""
        before = self._numbers.size
        numbers = np.concatenate([self._numbers, self._generator.random_sample(x_TK.shape[0])])
        sampled = np.sort(np.argsort(numbers, kind="stable")[:SAMPLED_TOKENS])
        old = torch.as_tensor(sampled[sampled < before])
        new = torch.as_tensor(sampled[sampled >= before] - before).to(x_TK.device)
        inputs = x_TK[new].cpu()
        self._numbers = numbers[sampled]
        self._inputs = torch.cat([self._inputs[old], inputs]) if before else inputs
        self._weights = torch.cat([self._weights[old], weights[new].cpu()])

    def weighted(self, mean_weight: float) -> Tensor:
        """Return the inputs times the roots of their weights over `mean_weight`, f32 [n, K]."""
        return self._inputs * (self._weights / mean_weight).sqrt().float()[:, None]


_CHUNK_ROWS: Final = 64  # in FP64 they fit into a core's cache
_CUDA_CHUNK_ROWS: Final = 1 << 15


class LayerAccumulator:
    """Counts the tokens of each routed expert of a layer, and sums its weighted input, over chunks in order.

    `seed` draws the tokens that smoothing is chosen by.
    """

    def __init__(self, layer: int, *, num_experts: int, seed: int) -> None:
        self.tokens_E = np.zeros(num_experts, dtype=np.int64)
        self._layer = layer
        self._seed = seed
        self._num_tokens = 0
        self._weight = 0.0
        self._squares_K: Tensor | None = None
        self._sample = TokenSample(f"tokens/{seed}/{layer}")

    def add(self, x_TK: Tensor, routing: Routing, weights_T: Tensor) -> None:
        """Add a chunk: the MLP's input f32 [T, K], its routing, and the weights f64 [T] of its tokens."""
        chosen = routing.experts.flatten().cpu().numpy()
        self.tokens_E += np.bincount(chosen, minlength=self.tokens_E.size)
        added_K = torch.zeros(x_TK.shape[1], dtype=torch.float64, device=x_TK.device)
        for rows in _chunks(x_TK):
            added_K += x_TK[rows].double().square_().mul_(weights_T[rows, None]).sum(dim=0)
        self._squares_K = added_K if self._squares_K is None else self._squares_K + added_K
        self._num_tokens += x_TK.shape[0]
        self._weight += float(weights_T.sum())
        self._sample.add(x_TK, weights_T)

    def find_exponents(self, reader: WeightReader) -> NDArray[np.int8] | None:
        """Return the smoothing exponents int8 [K]; None if no channel gains, or with fewer than SAMPLED_TOKENS tokens.

        Raises CalibrationError if there is nothing to divide by, and what reading the source raises.
        """
        if self._num_tokens < SAMPLED_TOKENS:  # 64 tokens made k2-tiny worse by 2 %
            return None
        if not self._weight > 0:
            raise CalibrationError(
                f"layer {self._layer}: no hidden state is finite and not zero. Check the source and the text."
            )
        assert self._squares_K is not None
        mean_weight = self._weight / self._num_tokens
        exponents = find_exponents(
            reader,
            self._layer,
            inputs=self._sample.weighted(mean_weight),
            mean_square=(self._squares_K / (mean_weight * self._num_tokens)).float().cpu().numpy(),
            seed=self._seed,
        )
        return exponents if exponents.any() else None


def token_weights(h_TK: Tensor) -> Tensor:
    """Return 1 / ||h||^2 of each token, f64 [T]; 0 for a hidden state of zeros."""
    squares_T = torch.empty(h_TK.shape[0], dtype=torch.float64, device=h_TK.device)
    for rows in _chunks(h_TK):
        squares_T[rows] = h_TK[rows].double().square_().sum(dim=1)
    return torch.where(squares_T > 0, 1 / squares_T, 0.0)


def _chunks(values: Tensor) -> Iterator[slice]:
    """Yield rows of f32 [t, I] that are summed in FP64 at once: few on a CPU, many on a GPU."""
    step = _CUDA_CHUNK_ROWS
    if values.device.type == "cpu":
        step = _CHUNK_ROWS
    for start in range(0, values.shape[0], step):
        yield slice(start, start + step)
