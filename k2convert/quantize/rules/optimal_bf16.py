"""The `optimal` rule for BF16 sources: the normal E4M3 scale with the least squared error, for every block.

    E(c) = sum over e = 0..15 of (|w_e| - v_e * c)**2       c = b * g, v_e the nearest E2M1 value, ties to the even code

computed in float64, the sixteen terms added in this order, so that any backend arrives at the same sums and bytes.
Ties go to the larger scale; a block of zeros gets b = 1.0 and codes 0; never -0. The definition ranges over all 119
normal scales. It is enough to try the 25 from amax/14 to amax/1.75:

  * c < amax/14 leaves an error of more than (amax - 6c)**2 > .32 amax**2 on the largest element alone, and the scale
    next above amax/4 has less: c * v leaves at most c/4 .. c/2 <= .141 amax on each of sixteen elements.
  * c > amax/3.5 uses codes up to 3 only, so c/2 can hold the same values: no term of E(c/2) is larger, and rounding
    is monotone, so neither is the sum. A scale beyond amax/1.75 can thus at best tie with one in
    amax/3.5 .. amax/1.75, and only where that one is a winner itself.

Blocks whose winner lies in that last octave, or for which no scale next above amax/4 exists, are searched in full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from k2convert.choices import BLOCK_SIZE
from k2convert.quantize.formats.blocks import row_chunks
from k2convert.quantize.formats.e2m1 import E2M1_MAX, SIGN_BIT, nearest_code, pack_nibbles
from k2convert.quantize.formats.e4m3 import E4M3_MAX, MAX_BYTE, MIN_NORMAL_BYTE, ONE_BYTE, decode_e4m3
from k2convert.quantize.formats.lazy_torch import torch
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.rules.optimal import global_exponent

if TYPE_CHECKING:
    from torch import Tensor

NUM_WINDOW_SCALES: Final = 25
"""Three octaves of eight, both ends included."""

SMALLEST_NORMAL: Final = 2.0**-6


def quantize_optimal_bf16(weight_NK: Tensor, global_scale: float) -> Nvfp4Weight:
    """Quantise a bf16 [N, K] weight with the best scale of every block for g = 2**k, in bounded memory."""
    global_exponent(global_scale)
    rows, columns = weight_NK.shape
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight_NK.device)
    block_scales = torch.empty(rows, columns // BLOCK_SIZE, dtype=torch.uint8, device=weight_NK.device)
    for start, stop in row_chunks(rows, columns):
        blocks_ME = weight_NK[start:stop].reshape(-1, BLOCK_SIZE)
        scale_bytes_M = best_scale_bytes(blocks_ME, global_scale)
        steps_M1 = (decode_e4m3(scale_bytes_M) * global_scale).unsqueeze(-1)
        codes_ME = nearest_code(blocks_ME.abs().to(torch.float64), steps_M1)
        nibbles_ME = torch.where((codes_ME > 0) & (blocks_ME < 0), codes_ME | SIGN_BIT, codes_ME)
        packed[start:stop] = pack_nibbles(nibbles_ME.view(stop - start, columns))
        block_scales[start:stop] = scale_bytes_M.view(stop - start, -1)
    return Nvfp4Weight(packed=packed, block_scales=block_scales, global_scale=global_scale)


def best_scale_bytes(blocks_ME: Tensor, global_scale: float) -> Tensor:
    """Return the E4M3 byte (uint8 [M]) of the best normal scale of each bf16 block [M, 16]."""
    weights_EM = blocks_ME.abs().to(torch.float64).T.contiguous()
    amax_M = weights_EM.amax(dim=0)
    all_bytes = torch.arange(MIN_NORMAL_BYTE, MAX_BYTE + 1, dtype=torch.uint8, device=blocks_ME.device)
    steps = decode_e4m3(all_bytes) * global_scale
    first_M = torch.searchsorted(steps, amax_M / 14).clamp(max=len(steps) - 1)
    best_M = _search(weights_EM, steps, first_M, NUM_WINDOW_SCALES)
    in_last_octave = 2 * amax_M < 7 * steps[best_M]
    out_of_reach = (amax_M > 4 * E4M3_MAX * global_scale) | (amax_M < 4 * SMALLEST_NORMAL * global_scale)
    unsure = torch.nonzero((in_last_octave | out_of_reach) & (amax_M > 0)).flatten()
    if unsure.numel():
        best_M[unsure] = _search(weights_EM[:, unsure], steps, torch.zeros_like(unsure), len(steps))
    return torch.where(amax_M == 0, ONE_BYTE, all_bytes[best_M])


def sum_in_order(terms_EM: Tensor) -> Tensor:
    """Add float64 terms [E, M] one after the other along the first dimension, giving [M]."""
    total_M = terms_EM[0].clone()
    for terms_M in terms_EM[1:]:
        total_M += terms_M
    return total_M


def _search(weights_EM: Tensor, steps: Tensor, first_M: Tensor, num_scales: int) -> Tensor:
    """Return the index into `steps` of the best of `num_scales` scales from `first_M` on; int64 [M]."""
    best_M = first_M.clone()
    least_M = torch.full_like(weights_EM[0], torch.inf)
    for index in range(num_scales):
        candidate_M = (first_M + index).clamp(max=len(steps) - 1)
        step_M = steps[candidate_M]
        difference_EM = weights_EM - _nearest_value(weights_EM, step_M) * step_M
        error_M = sum_in_order(difference_EM * difference_EM)
        # Scales come in ascending order, so a tie goes to the larger one.
        better = error_M <= least_M
        least_M = torch.where(better, error_M, least_M)
        best_M = torch.where(better, candidate_M, best_M)
    return best_M


def _nearest_value(weights_EM: Tensor, step_M: Tensor) -> Tensor:
    # The quotient of an 8-bit by a 4-bit significand is rounded, but never onto or across a midpoint it does not
    # equal: they are at least 2**-13 apart. Rounding half to even in units of .5, 1 or 2 is then rounding to E2M1.
    ratio = weights_EM / step_M
    unit = torch.where(ratio < 2, 0.5, torch.where(ratio < 4, 1.0, 2.0))
    return (torch.round(ratio / unit) * unit).clamp(max=E2M1_MAX)
