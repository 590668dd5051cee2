"""Codes that follow a target under a curvature: GPTQ with a search of every block's scale, then coordinate descent.

The columns of a row are rounded from left to right. A block of 16 tries 16 neighboring E4M3 scales, each with its own
compensation inside the block, and keeps the one with the least loss. Its errors then move the columns behind it. Sweeps
look at every block again, given all others: the search from the block's optimum, then its columns one by one. Two
sweeps win 3 % of KL on SmolLM2. Scales are normal E4M3 numbers, as in rule `mse`; a block of zeros gets the same
bytes as there, and -0 is never written.

There are two kernels: compiled for the CPU (cpp/gptq.hpp), and in torch for any device, many rows at a time. Their sums
are taken in a different order, so a few codes differ.

How far the curvature is trusted is its shrinkage towards the diagonal. With at least max(1024, 4 K) tokens it is .5.
With fewer, 64 rows are really quantized with the curvature of one half of the tokens and measured on the other half,
with each shrinkage and without any curvature. If the last is best, or with fewer than 64 tokens, there is no
correction: 16 tokens per expert without this rule lost to codes made without data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.choices import BLOCK_SIZE
from k2convert.quantize.formats.nvfp4 import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    MAX_BYTE,
    MIN_NORMAL_BYTE,
    ONE_BYTE,
    SIGN_BIT,
    SMALLEST_NORMAL,
    Nvfp4Weight,
    decode_e4m3,
    dequantize_nvfp4,
)
from k2convert.quantize.gptq.curvature import Curvature, even_curvature, make_curvature
from k2convert.quantize.gptq.moments import Moments
from k2convert.quantize.gptq.tiles import ALONE, SMALL, CheckStop, Team, go_on
from k2convert.quantize.kernels import _cpu


def kernel_for(device: str, threads: int = 1, check_stop: CheckStop = go_on) -> RoundingKernel:
    """Return the kernel for a torch device; `threads` of the CPU, which do not change the bytes.

    It calls `check_stop` every few seconds.
    """
    return CpuKernel(threads, check_stop) if device == "cpu" else TorchKernel(check_stop)


def round_gptq(
    target_NK: Tensor, global_scale: float, curvature: Curvature, kernel: RoundingKernel, *, sweeps: int = 2
) -> Nvfp4Weight:
    """Return an NVFP4 weight close to a finite target f32 [N, K], on the device of the curvature."""
    packed, block_scales = kernel.round(target_NK.float() / global_scale, curvature, sweeps=sweeps)
    return Nvfp4Weight(packed, block_scales, global_scale)


MIN_TOKENS: Final = 64
LEAST_FULL_TOKENS: Final = 1024
FULL_TOKENS_PER_COLUMN: Final = 4
FULL_SHRINKAGE: Final = 0.5
SHRINKAGES: Final = (0.1, 0.3, 0.6, 0.9)
NUM_ROWS: Final = 64
"""Rows that are quantized to choose."""


def choose_shrinkage(
    moments: Moments, weight_NK: Tensor, global_scale: float, kernel: RoundingKernel, team: Team = ALONE
) -> float | None:
    """Return the shrinkage for a weight f32 [N, K] on the device of the moments; None for no error feedback.

    The moments must be complete.
    """
    rows, columns = weight_NK.shape
    if moments.tokens >= max(LEAST_FULL_TOKENS, FULL_TOKENS_PER_COLUMN * columns):
        return FULL_SHRINKAGE
    if moments.tokens < MIN_TOKENS or min(moments.weights) <= 0:
        return None
    sample_NK = weight_NK[:: max(1, rows // NUM_ROWS)][:NUM_ROWS].float()
    is_small = columns <= SMALL  # then several curvatures have room beside each other

    def lost(curvature: Curvature, form_KK: Tensor) -> float:
        codes = round_gptq(sample_NK, global_scale, curvature, kernel, sweeps=0)
        error_NK = torch.as_tensor(dequantize_nvfp4(codes)).to(sample_NK) - sample_NK
        return float(((error_NK @ form_KK) * error_NK).sum(dtype=torch.float64))

    def try_half(shrinkage: float, a: int) -> float:
        curvature = make_curvature(moments.half(a), shrinkage, ALONE if is_small else team)
        return lost(curvature, moments.half(1 - a))

    even = even_curvature(columns, device=str(weight_NK.device))
    least = sum(lost(even, moments.half(half)) for half in (0, 1))
    tries = [partial(try_half, shrinkage, a) for shrinkage in SHRINKAGES for a in (0, 1)]
    losses = team.run(tries) if is_small else ALONE.run(tries)
    best = None
    for number, shrinkage in enumerate(SHRINKAGES):
        loss = losses[2 * number] + losses[2 * number + 1]
        if loss < least:
            least = loss
            best = shrinkage
    return best


@dataclass(frozen=True, slots=True)
class CpuKernel:
    """Splits rows over threads. The bytes depend on the CPU's instructions, but not on the number of threads."""

    threads: int
    check_stop: CheckStop

    def round(
        self, target_NK: Tensor, curvature: Curvature, *, sweeps: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return codes uint8 [N, K/2] and scale bytes uint8 [N, K/16] for a target f32 in units of the global scale.

        For CPU tensors; ValueError if the shapes do not fit.
        """
        rows, columns = target_NK.shape
        packed = np.empty((rows, columns // 2), dtype=np.uint8)
        scale_bytes = np.empty((rows, columns // BLOCK_SIZE), dtype=np.uint8)
        step = PIECE_ROWS * self.threads
        for start in range(0, rows, step):
            self.check_stop()
            piece = slice(start, start + step)
            _cpu.round_gptq(
                _flat(target_NK[piece]),
                _flat(curvature.form),
                _flat(curvature.factor),
                _flat(curvature.block_factors),
                sweeps,
                self.threads,
                packed[piece].reshape(-1),
                scale_bytes[piece].reshape(-1),
            )
        return packed, scale_bytes


def _flat(values: Tensor) -> NDArray[np.float32]:
    return values.contiguous().view(-1).numpy()


PIECE_ROWS: Final = 96
"""Rows for each thread that are rounded before a stop is looked for: two tiles of the kernel, 3 s at K2's width."""

NUM_SCALES: Final = 16
BELOW: Final = 5
"""Scales to try: from five below the E4M3 number nearest to the largest weight over 6."""

PANEL: Final = 128
"""Columns whose errors are collected before the columns behind them see any."""

MAX_ROWS: Final = 1 << 16
"""Rows handled at once: 1 GB for the 16 scales of their blocks."""

WORTHWHILE: Final = 0.9999
"""A block takes a new scale only for a gain larger than rounding errors."""


@dataclass(frozen=True, slots=True)
class TorchKernel:
    """Handles all rows of a chunk together."""

    check_stop: CheckStop

    def round(
        self, target_NK: Tensor, curvature: Curvature, *, sweeps: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """As CpuKernel, for tensors on one device."""
        chunks = [_Chunk(rows, curvature, self.check_stop).round(sweeps) for rows in torch.split(target_NK, MAX_ROWS)]
        return np.concatenate([codes for codes, _ in chunks]), np.concatenate([scales for _, scales in chunks])


RoundingKernel = CpuKernel | TorchKernel
"""Makes codes on one device; holds no state, so threads may share it."""


class _Chunk:
    """Rows f32 [n, K] with the values that they have got, their scale bytes int64 [n, K/16], and (w - q) H."""

    def __init__(self, target_NK: Tensor, curvature: Curvature, check_stop: CheckStop) -> None:
        rows, columns = target_NK.shape
        self._check_stop = check_stop
        self._target = target_NK
        self._curvature = curvature
        self._values = torch.zeros_like(target_NK)
        self._bytes = torch.zeros(rows, columns // BLOCK_SIZE, dtype=torch.int64, device=target_NK.device)
        self._scale_values = torch.as_tensor(decode_e4m3(np.arange(MAX_BYTE + 1, dtype=np.uint8))).to(target_NK)
        factors = curvature.block_factors
        self._block_inverses = factors.mT @ factors

    def round(self, sweeps: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the codes and the scale bytes."""
        weights = self._target.clone()
        for start, stop in _panels(weights.shape[1]):
            self._check_stop()
            errors = self._round_panel(weights, start, stop)
            weights[:, stop:] -= errors @ self._curvature.factor[start:stop, stop:]
        if sweeps:
            gradient = (self._target - self._values) @ self._curvature.form
            for _ in range(sweeps):
                for start, stop in _panels(weights.shape[1]):
                    self._check_stop()
                    self._improve_panel(gradient, start, stop)
        return self._encode()

    def _round_panel(self, weights: Tensor, start: int, stop: int) -> Tensor:
        factor = self._curvature.factor
        errors = torch.zeros(weights.shape[0], stop - start, device=weights.device)
        for begin in range(start, stop, BLOCK_SIZE):
            block = slice(begin, begin + BLOCK_SIZE)
            behind = slice(begin + BLOCK_SIZE, stop)
            scales, values, own, _ = self._search(weights[:, block], factor[block, block])
            self._bytes[:, begin // BLOCK_SIZE], self._values[:, block] = scales, values
            errors[:, begin - start : begin - start + BLOCK_SIZE] = own
            weights[:, behind] -= own @ factor[block, behind]
        return errors

    def _search(self, weights_nJ: Tensor, factor_JJ: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the best scale byte [n] of blocks, their values and errors over U_jj [n, 16], and their losses [n]."""
        first_n = _first_byte(weights_nJ.abs().amax(dim=1))
        bytes_nS = first_n[:, None] + torch.arange(NUM_SCALES, device=weights_nJ.device)
        steps_nS = self._scale_values[bytes_nS]
        inverses_nS = 1 / steps_nS
        rest_nJS = weights_nJ[:, :, None].repeat(1, 1, NUM_SCALES)
        values_nJS = torch.empty_like(rest_nJS)
        errors_nJS = torch.empty_like(rest_nJS)
        losses_nS = torch.zeros_like(steps_nS)
        for j in range(BLOCK_SIZE):
            values = nearest_value(rest_nJS[:, j] * inverses_nS) * steps_nS
            errors = (rest_nJS[:, j] - values) / factor_JJ[j, j]
            values_nJS[:, j] = values
            errors_nJS[:, j] = errors
            losses_nS.addcmul_(errors, errors)
            rest_nJS[:, j + 1 :] -= errors[:, None] * factor_JJ[j, j + 1 :, None]
        best_n1 = losses_nS.argmin(dim=1, keepdim=True)
        chosen_nJ1 = best_n1[:, None].expand(-1, BLOCK_SIZE, -1)
        values_nJ, errors_nJ = (t.gather(2, chosen_nJ1).squeeze(2) for t in (values_nJS, errors_nJS))
        return bytes_nS.gather(1, best_n1).squeeze(1), values_nJ, errors_nJ, losses_nS.gather(1, best_n1).squeeze(1)

    def _improve_panel(self, gradient: Tensor, start: int, stop: int) -> None:
        form = self._curvature.form
        changes = torch.zeros(gradient.shape[0], stop - start, device=gradient.device)
        for begin in range(start, stop, BLOCK_SIZE):
            block = slice(begin, begin + BLOCK_SIZE)
            before = self._values[:, block].clone()
            self._improve_block(gradient, begin)
            change = self._values[:, block] - before
            changes[:, begin - start : begin - start + BLOCK_SIZE] = change
            gradient[:, start:stop] -= change @ form[block, start:stop]
        gradient[:, :start] -= changes @ form[start:stop, :start]
        gradient[:, stop:] -= changes @ form[start:stop, stop:]

    def _improve_block(self, gradient: Tensor, begin: int) -> None:
        block = slice(begin, begin + BLOCK_SIZE)
        index = begin // BLOCK_SIZE
        form_JJ = self._curvature.form[block, block]
        values = self._values[:, block]
        own = gradient[:, block].clone()
        optimum = own @ self._block_inverses[index]
        current = (optimum * own).sum(dim=1)
        scales, found, _, losses = self._search(optimum + values, self._curvature.block_factors[index])
        better = losses < current * WORTHWHILE
        self._bytes[:, index] = torch.where(better, scales, self._bytes[:, index])
        change = torch.where(better[:, None], found - values, 0)
        own -= change @ form_JJ
        values += change
        steps = self._scale_values[self._bytes[:, index]]
        for j in range(BLOCK_SIZE):
            best = values[:, j] + own[:, j] / form_JJ[j, j]
            value = nearest_value(best / steps) * steps
            own -= (value - values[:, j])[:, None] * form_JJ[j]
            values[:, j] = value

    def _encode(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        rows, columns = self._values.shape
        scaled = (
            self._values.view(rows, columns // BLOCK_SIZE, BLOCK_SIZE) / self._scale_values[self._bytes][:, :, None]
        )
        levels = torch.tensor(E2M1_VALUES).to(scaled.device)
        codes = torch.bucketize(scaled.abs(), (levels[1:] + levels[:-1]) / 2)
        empty = (codes == 0).all(dim=2)
        nibbles = (codes + SIGN_BIT * ((codes > 0) & (scaled < 0))).view(rows, columns)
        packed = nibbles[:, 0::2] + 16 * nibbles[:, 1::2]
        scales = torch.where(empty, ONE_BYTE, self._bytes)
        return packed.to(torch.uint8).cpu().numpy(), scales.to(torch.uint8).cpu().numpy()


def _panels(columns: int) -> list[tuple[int, int]]:
    return [(start, min(start + PANEL, columns)) for start in range(0, columns, PANEL)]


def nearest_value(scaled: Tensor) -> Tensor:
    """Return E2M1's nearest value to each f32, ties to the even code, saturating."""
    size = scaled.abs().clamp_max_(E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / step).round_() * step).copysign_(scaled)


def _first_byte(largest: Tensor) -> Tensor:
    """Return the first of the bytes to try, int64: E4M3's nearest to largest / 6, minus BELOW, and normal."""
    scale = (largest / E2M1_MAX).clamp(SMALLEST_NORMAL, E4M3_MAX)
    bits = scale.view(torch.int32).long()
    nearest = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    return (nearest - BELOW).clamp(MIN_NORMAL_BYTE, MAX_BYTE + 1 - NUM_SCALES)
