"""The search of smoothing exponents: powers of two on the channels of a MoE block's input, for FP4 activations.

The norm's weight is multiplied by s = 2^a and what reads its output is divided by it, so the function stays the same.
What changes is which 16 channels share an FP4 step. For each block of 16 channels c the search reduces

    sum_c mean(W_c^2) / s_c^2 * E(s x - fp4(s x))_c^2  +  0.6 * sum_c E[x_c^2] * s_c^2 * mean((W/s - nvfp4(W/s))_c^2)

by coordinate descent: each of the 16 positions in turn takes the best of the factors 1/2, 2, 1/4 and 4, if that removes
more than 1 / 2000 of the sum. x are inputs times the roots of their token weights, W rows of gate and up; nvfp4 is rule
`imatrix` with the importance E[x^2] s^2.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.calibrate.layer_statistics import MAX_EXPONENT
from k2convert.calibrate.scaled_tensors import (
    GateUpRows,
    exactly_scalable,
    find_scaled_tensors,
    read_gate_up,
    weight_values,
)
from k2convert.checkpoint.reader import ShardReader
from k2convert.choices import BLOCK_SIZE
from k2convert.forward.activations import quantize_activations
from k2convert.forward.weights import WeightReader
from k2convert.forward.workers import run_in_order
from k2convert.quantize.formats.channels import divide_columns
from k2convert.quantize.formats.int4 import Bf16Weight, SourceWeight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, dequantize_nvfp4
from k2convert.quantize.kernels.cpu import convert, measure_magnitude
from k2convert.quantize.rules.imatrix import block_importance
from k2convert.quantize.rules.mse import mse_global_scale

WEIGHT_SHARE: Final = 0.6
"""How much the error of the weights counts, relative to that of the activations."""
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
        proxy = Proxy(inputs, mean_square, read_gate_up(shards, tensors, seed=seed))
        return descend(proxy, free=exactly_scalable(shards, tensors))


@dataclass(frozen=True, slots=True)
class Proxy:
    """Estimates the error of a block for given exponents; see above for what it is."""

    inputs: Tensor
    mean_square: NDArray[np.float32]
    weights: GateUpRows

    def errors(self, exponents: NDArray[np.int8]) -> NDArray[np.float64]:
        """Return the error of each block of 16 channels, f64 [K/16], for exponents int8 [K]."""
        squares = np.ldexp(1.0, 2 * exponents.astype(np.int64))
        channels = self._input_errors(exponents) * self.weights.mean_square / squares
        scaled = (self.mean_square + _FLOOR_SHARE * self.mean_square.mean(dtype=np.float64)) * squares
        channels += WEIGHT_SHARE * scaled * self._weight_errors(exponents, scaled.astype(np.float32))
        return channels.reshape(-1, BLOCK_SIZE).sum(axis=1)

    def _input_errors(self, exponents: NDArray[np.int8]) -> NDArray[np.float64]:
        """Return the mean square f64 [K] of s x - fp4(s x)."""
        scaled = self.inputs * torch.as_tensor(np.ldexp(np.float32(1), exponents))
        errors = quantize_activations(scaled, _INPUT_SCALE).sub_(scaled)
        return errors.double().square_().mean(dim=0).numpy()

    def _weight_errors(self, exponents: NDArray[np.int8], mean_square: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the mean square f64 [K] of W/s - nvfp4(W/s)."""
        importance = block_importance(mean_square)
        errors = np.zeros(exponents.size)
        for weight in self.weights.rows:
            divided = divide_columns(weight, exponents, name="rows of gate and up")
            result = dequantize_nvfp4(_quantize(divided, importance))
            errors += np.square(result - np.ldexp(weight_values(weight), -exponents.astype(np.int32))).sum(axis=0)
        return errors / sum(weight.shape[0] for weight in self.weights.rows)


def _quantize(weight: SourceWeight, importance: NDArray[np.uint8]) -> Nvfp4Weight:
    """Quantize a weight by rule `imatrix`."""
    magnitude = measure_magnitude(weight, name="rows")
    global_scale = mse_global_scale(magnitude, is_int4=not isinstance(weight, Bf16Weight))
    return convert(weight, rule="imatrix", global_scale=global_scale, importance=importance).weight


def descend(proxy: Proxy, *, free: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Return the exponents int8 [K] that one pass over the positions of the blocks finds; 0 where not `free`."""
    exponents = np.zeros(free.size, dtype=np.int8)
    least = proxy.errors(exponents)
    workers = min(len(STEPS), len(os.sched_getaffinity(0)))
    for position in range(BLOCK_SIZE):
        channels = np.arange(position, free.size, BLOCK_SIZE)
        tried = [_stepped(exponents, channels[free[channels]], step) for step in STEPS]
        best = exponents[channels]
        for candidate, errors in zip(tried, run_in_order(proxy.errors, tried, workers=workers), strict=True):
            is_better = errors < least * LEAST_GAIN
            least = np.where(is_better, errors, least)
            best = np.where(is_better, candidate[channels], best)
        exponents[channels] = best
    return exponents


def _stepped(exponents: NDArray[np.int8], channels: NDArray[np.int64], step: int) -> NDArray[np.int8]:
    result = exponents.copy()
    result[channels] = np.clip(result[channels] + np.int8(step), -MAX_EXPONENT, MAX_EXPONENT)
    return result
