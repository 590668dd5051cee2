"""Measuring a weight converted from BF16: element by element, because there is no small table of values.

Terms of a block are added one after the other, then the blocks of a row, and the rows with math.fsum: a fixed order,
so that the figures are the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE
from k2convert.quantize.formats.blocks import row_chunks, sampled_blocks
from k2convert.quantize.formats.e2m1 import (
    DOUBLED_VALUES,
    QUADRUPLED_MIDPOINTS,
    decode_e2m1,
    nearest_code,
    unpack_nibbles,
)
from k2convert.quantize.formats.e4m3 import decode_e4m3
from k2convert.quantize.formats.lazy_torch import torch
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, dequantize_nvfp4
from k2convert.quantize.metrics.sampled_error import SampledError
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules.magnitude import Magnitude
from k2convert.quantize.rules.optimal_bf16 import sum_in_order
from k2convert.quantize.rules.plain import plain_global_scale, quantize_plain_blocks

if TYPE_CHECKING:
    from torch import Tensor

BOUND_BLOCKS: Final = 1 << 14
"""Blocks bounded at once (2 MB a temporary)."""


def measure_bf16_error(
    source_NK: Tensor, result: Nvfp4Weight, *, magnitude: Magnitude, sample_seed: int
) -> WeightMetrics:
    """Measure `result` against the bf16 [N, K] weight it was made of; figures about INT4 codes are None."""
    rows, columns = result.shape
    energies: list[NDArray[np.float64]] = []
    errors: list[NDArray[np.float64]] = []
    num_nonzero = equal_nonzero = equal_blocks = 0
    for start, stop in row_chunks(rows, columns):
        part = Nvfp4Weight(result.packed[start:stop], result.block_scales[start:stop], result.global_scale)
        wanted = _by_element(source_NK[start:stop].to(torch.float64))
        difference = wanted - _by_element(dequantize_nvfp4(part))
        energies.append(sum_in_order(sum_in_order(wanted * wanted)).cpu().numpy())
        errors.append(sum_in_order(sum_in_order(difference * difference)).cpu().numpy())
        num_nonzero += int(torch.count_nonzero(wanted))
        equal_nonzero += int(((wanted != 0) & (difference == 0)).sum())
        equal_blocks += int((difference == 0).all(dim=0).sum())
    return finish_bf16_metrics(
        energies=chain.from_iterable(energies),
        errors=chain.from_iterable(errors),
        num_nonzero=num_nonzero,
        equal_nonzero=equal_nonzero,
        equal_blocks=equal_blocks,
        scale_bytes=result.block_scales.cpu().numpy().ravel(),
        sampled=sample_bf16_error(source_NK, result, magnitude=magnitude, sample_seed=sample_seed),
    )


def finish_bf16_metrics(
    *,
    energies: Iterable[float],
    errors: Iterable[float],
    num_nonzero: int,
    equal_nonzero: int,
    equal_blocks: int,
    scale_bytes: NDArray[np.uint8],
    sampled: SampledError,
) -> WeightMetrics:
    """Put a BF16 weight's figures together: sums of squares by row, counts of weights and blocks, all block scales."""
    histogram = np.bincount(scale_bytes, minlength=1)
    used = tuple((byte, int(count)) for byte, count in enumerate(histogram) if count)
    return WeightMetrics(
        num_weights=scale_bytes.size * BLOCK_SIZE,
        num_blocks=scale_bytes.size,
        energy=math.fsum(energies),
        squared_error=math.fsum(errors),
        num_nonzero=num_nonzero,
        equal_nonzero=equal_nonzero,
        equal_blocks=equal_blocks,
        num_codes=None,
        max_error_steps=None,
        recoverable_codes=None,
        num_five_or_seven=None,
        num_minus_eight=None,
        blocks_outside_normal=None,
        scale_spread_exceeded=None,
        min_scale_byte=used[0][0] if used else None,
        max_scale_byte=used[-1][0] if used else None,
        scale_histogram=used,
        sampled_blocks=sampled.num_blocks,
        sampled_error_achieved=sampled.achieved,
        sampled_error_plain=sampled.plain,
        sampled_error_bound=sampled.bound,
    )


def sample_bf16_error(
    source_NK: Tensor, result: Nvfp4Weight, *, magnitude: Magnitude, sample_seed: int
) -> SampledError:
    """Compare the achieved error with plain's, at plain's own global scale, and with the bound, on sampled blocks."""
    chosen = sampled_blocks(result.block_scales.numel(), sample_seed=sample_seed, device=source_NK.device)
    blocks_ME = source_NK.reshape(-1, BLOCK_SIZE)[chosen].cpu()
    nibbles_ME = unpack_nibbles(result.packed.reshape(-1, BLOCK_SIZE // 2)[chosen].cpu())
    bytes_M = result.block_scales.flatten()[chosen].cpu()
    plain_scale = plain_global_scale(magnitude)
    plain_nibbles_ME, plain_bytes_M = quantize_plain_blocks(blocks_ME, plain_scale)
    bounds = [
        bf16_block_bounds(blocks_ME[start : start + BOUND_BLOCKS]).numpy()
        for start in range(0, blocks_ME.shape[0], BOUND_BLOCKS)
    ]
    return SampledError(
        num_blocks=int(chosen.numel()),
        achieved=_block_errors(blocks_ME, nibbles_ME, bytes_M, result.global_scale),
        plain=_block_errors(blocks_ME, plain_nibbles_ME, plain_bytes_M, plain_scale),
        bound=math.fsum(chain.from_iterable(bounds)),
    )


def bf16_block_bounds(blocks_ME: Tensor) -> Tensor:
    """Return the least squared error a real-valued scale can have, float64 [M], for bf16 blocks [M, 16].

    As in block_bound.py; the breakpoints are |w| / m for the sixteen weights of the block and the seven midpoints m.
    """
    weights_EM = blocks_ME.abs().to(torch.float64).T.contiguous()
    midpoints = torch.tensor(QUADRUPLED_MIDPOINTS, dtype=torch.float64) / 4
    breakpoints, _ = (weights_EM.unsqueeze(1) / midpoints.view(1, -1, 1)).flatten(0, 1).sort(dim=0)
    steps = torch.cat((breakpoints[:1] / 2, (breakpoints[1:] + breakpoints[:-1]) / 2))
    doubled = torch.tensor(DOUBLED_VALUES, dtype=torch.float64)
    explained_M = torch.zeros_like(weights_EM[0])
    for step_M in steps:
        # A step of zero belongs to no block; one of 1.0 in its place is as good as any other real scale.
        values_EM = doubled[nearest_code(weights_EM, torch.where(step_M > 0, step_M, 1.0)).to(torch.int32)]
        inner_M, norm_M = sum_in_order(weights_EM * values_EM), sum_in_order(values_EM * values_EM)
        explained_M = torch.maximum(explained_M, inner_M * inner_M / norm_M.clamp(min=1.0))
    return (sum_in_order(weights_EM * weights_EM) - explained_M).clamp(min=0.0)


def _block_errors(blocks_ME: Tensor, nibbles_ME: Tensor, bytes_M: Tensor, global_scale: float) -> float:
    written_ME = decode_e2m1(nibbles_ME) * (decode_e4m3(bytes_M) * global_scale).unsqueeze(-1)
    difference_EM = (blocks_ME.to(torch.float64) - written_ME).T
    return math.fsum(sum_in_order(difference_EM * difference_EM).numpy())


def _by_element(weights_NK: Tensor) -> Tensor:
    """Rearrange [N, K] into [16, K/16, N]: elements of a block first, then the blocks of a row."""
    return weights_NK.view(weights_NK.shape[0], -1, BLOCK_SIZE).permute(2, 1, 0).contiguous()
