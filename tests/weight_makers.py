"""INT4, MXFP4 and BF16 weights, packed by compressed-tensors, with every corner of the formats among them."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import preset_name_to_scheme
from numpy.typing import NDArray
from torch import Tensor

from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.metrics.weight_metrics import MetricsSum, WeightMetrics

USABLE_BITS = 0x7E00
"""BF16 bits below these are zero, subnormal numbers, or normal numbers of which eight times is finite."""


def int4_weight(codes_NK: Tensor, scales_NG: Tensor) -> Int4Weight:
    """Pack codes -8..7 with the reference packer."""
    packed = pack_to_int32(codes_NK.to(torch.int8), 4).view(torch.uint8)
    return Int4Weight(packed=packed.numpy(), scale_bits=scales_NG.contiguous().view(torch.uint16).numpy())


def int4_from_bits(codes: NDArray[Any], scale_bits: NDArray[Any], columns: int = 256) -> Int4Weight:
    """Codes -8..7 in order, and the BF16 bits of a scale for every 32 of them, as a weight [N, columns]."""
    scales = bf16_from_bits(torch.as_tensor(scale_bits.astype(np.int64)))
    return int4_weight(torch.as_tensor(codes).reshape(-1, columns), scales.reshape(-1, columns // 32))


def bf16_weight(weight_NK: Tensor) -> Bf16Weight:
    """A bf16 tensor as the package takes it."""
    return Bf16Weight(weight_NK.contiguous().view(torch.uint16).numpy())


def scales_of(weight: Int4Weight) -> Tensor:
    """The scales bf16 [N, K/32] of a weight."""
    return torch.from_numpy(weight.scale_bits).view(torch.bfloat16)


def codes_of(weight: Int4Weight) -> Tensor:
    """The codes int8 [N, K] of a weight, unpacked by compressed-tensors."""
    return unpack_from_int32(torch.from_numpy(weight.packed).view(torch.int32), 4, weight.shape)


def bf16_tensor(weight: Bf16Weight) -> Tensor:
    """A BF16 weight as a tensor."""
    return torch.from_numpy(weight.bits).view(torch.bfloat16)


def bf16_bits(values: NDArray[np.float64]) -> NDArray[np.int64]:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.int64)


def trained_like(rows: int, columns: int = 256, *, seed: int, lowest: int = -7) -> Int4Weight:
    """Bell-shaped weights, the group's largest mapped to 7 (or, with -8 in use, to 7.5), as K2's were."""
    rng = np.random.default_rng(seed)
    groups = rows * columns // 32
    weights = 0.02 * rng.standard_normal((groups, 32)) * np.exp(0.4 * rng.standard_normal((groups, 1)))
    bits = bf16_bits(np.abs(weights).max(axis=1) / (7 if lowest == -7 else 7.5))
    scales = (bits.astype(np.uint32) << 16).view(np.float32)
    return int4_from_bits(np.clip(np.rint(weights / scales[:, None]), lowest, 7).astype(np.int8), bits, columns)


def any_codes(rows: int, columns: int, *, seed: int) -> Tensor:
    """Codes -8..7 int8 [rows, columns], from blocks of several kinds: dense, sparse, few magnitudes, one element."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(-8, 8, (rows * columns // 16, 16), generator=generator, dtype=torch.int8)
    kind = torch.arange(blocks.shape[0]) % 6
    sparse = torch.rand(blocks.shape, generator=generator) < 0.15
    limit = torch.randint(1, 9, (blocks.shape[0], 1), generator=generator).to(torch.int8)
    blocks = torch.where((kind == 1).unsqueeze(-1) & ~sparse, torch.zeros_like(blocks), blocks)
    blocks = torch.where((kind == 2).unsqueeze(-1), torch.maximum(torch.minimum(blocks, limit), -limit), blocks)
    blocks = torch.where((kind == 3).unsqueeze(-1), blocks[:, :1].expand_as(blocks), blocks)
    only = torch.zeros_like(blocks).scatter_(1, limit.long() + 3, blocks[:, :1])
    blocks = torch.where((kind == 4).unsqueeze(-1), only, blocks)
    blocks[0] = 0
    return blocks.reshape(rows, columns)


def bf16_from_bits(bits: Tensor) -> Tensor:
    """BF16 numbers from their bit patterns."""
    return bits.to(torch.int16).view(torch.bfloat16)


def blocks_of(weights_NK: Tensor) -> Tensor:
    """Cut [N, K] into blocks [N * K/16, 16]."""
    return weights_NK.reshape(-1, 16)


def any_bytes(rows: int = 64, *, seed: int = 1) -> Int4Weight:
    rng = np.random.default_rng(seed)
    return int4_from_bits(rng.integers(-8, 8, rows * 256), bf16_bits(rng.uniform(0.01, 0.03, rows * 8)))


def every_scale() -> Int4Weight:
    """Every BF16 number that a scale can be, minus zero too, once with few and once with many magnitudes in a block."""
    rng = np.random.default_rng(2)
    bits = np.concatenate([np.arange(USABLE_BITS), np.full(256, 0x8000)])
    dense = rng.integers(-8, 8, (bits.size, 32))
    sparse = rng.integers(-8, 8, (bits.size, 1)) * (rng.random((bits.size, 32)) < 0.2)
    return int4_from_bits(np.concatenate([dense, sparse]), np.concatenate([bits, bits]))


def few_magnitudes() -> Int4Weight:
    """Blocks of every pair of magnitudes, single and mixed, under mantissas that hit ties and those that do not."""
    rng = np.random.default_rng(3)
    pairs = [(a, b) for a in range(9) for b in range(9)] * 16
    codes = [np.where(rng.random(16) < rng.random(), a, b) * rng.choice([-1, 1], 16) for a, b in pairs]
    blocks = np.clip(np.array(codes), -8, 7).reshape(-1, 32)
    mantissas = rng.choice([0, 16, 32, 64, 96, 112, 127, 1, 85], blocks.shape[0])
    return int4_from_bits(blocks, 0x3C00 + mantissas)


def constant(code: int) -> Int4Weight:
    return int4_from_bits(np.full(256 * 16, code), 0x3C00 + np.arange(128))


def single_nonzero() -> Int4Weight:
    rng = np.random.default_rng(4)
    codes = np.zeros((128 * 2, 16), dtype=np.int64)
    codes[np.arange(256), rng.integers(0, 16, 256)] = rng.integers(-8, 8, 256)
    return int4_from_bits(codes, 0x3B80 + np.arange(128))


def wide_spread() -> Int4Weight:
    """Scales over 2**40: most blocks are best served outside the normal range."""
    rng = np.random.default_rng(5)
    bits = (rng.integers(87, 127, 512) << 7) | rng.integers(0, 128, 512)
    return int4_from_bits(np.clip(np.rint(3 * rng.standard_normal(512 * 32)), -8, 7).astype(np.int64), bits)


def zeros() -> Int4Weight:
    """Zero blocks, zero groups, zero scales under non-zero codes, minus zero."""
    rng = np.random.default_rng(6)
    codes = rng.integers(-8, 8, (64 * 8, 2, 16)) * (rng.random((64 * 8, 2, 1)) < 0.5)
    return int4_from_bits(codes, rng.choice([0, 0x8000, 0x3C00, 0x3C55], 64 * 8))


def all_zero() -> Int4Weight:
    return int4_from_bits(np.zeros(256 * 4, dtype=np.int64), np.zeros(32, dtype=np.int64))


MAKERS: dict[str, Callable[[], Int4Weight]] = {
    "trained": lambda: trained_like(96, seed=7),
    "trained-minus-eight": lambda: trained_like(96, seed=8, lowest=-8),
    "any-bytes": any_bytes,
    "every-scale": every_scale,
    "few-magnitudes": few_magnitudes,
    "all-minus-eight": lambda: constant(-8),
    "all-seven": lambda: constant(7),
    "all-minus-one": lambda: constant(-1),
    "single-nonzero": single_nonzero,
    "wide-spread": wide_spread,
    "zeros": zeros,
    "all-zero": all_zero,
}


def exponents_of(rng: np.random.Generator, reach: int, columns: int = 256) -> np.ndarray | None:
    if not reach:
        return None
    return np.where(rng.random(columns) < 0.5, 0, rng.integers(-reach, reach + 1, columns)).astype(np.int8)


def some_rows(maker: str, exponents: np.ndarray | None) -> Int4Weight:
    """Rows whose scales can be divided by 2**4 and multiplied by it."""
    weight = MAKERS[maker]()
    bits = weight.scale_bits & 0x7FFF
    fits = (
        ((bits == 0) | ((bits >= 0x0480) & (bits < 0x7C00))).all(axis=1) if exponents is not None else bits[:, 0] >= 0
    )
    chosen = np.flatnonzero(fits)
    chosen = chosen[:: max(1, chosen.size // 30)]
    return Int4Weight(weight.packed[chosen], weight.scale_bits[chosen], exponents)


def total_metrics(parts: Iterable[WeightMetrics]) -> WeightMetrics:
    """The metrics of several tensors together."""
    total = MetricsSum()
    for part in parts:
        total.add(part)
    return total.total()


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SCHEME = preset_name_to_scheme("MXFP4A16", ["Linear"])


def weight_of(nibbles: NDArray[Any], scale_bytes: NDArray[Any]) -> Mxfp4Weight:
    """Return the weight of nibbles [N, K] and scale bytes [N, K/32]; the library packs."""
    packed = pack_fp4_to_uint8(E2M1[torch.as_tensor(nibbles.astype(np.int64))])
    return Mxfp4Weight(packed.numpy(), scale_bytes.astype(np.uint8))


def draw(
    rng: np.random.Generator, *, rows: int = 64, columns: int = 256, low: int = 110, high: int = 120
) -> Mxfp4Weight:
    """Draw a weight whose scale bytes are in low..high, both of which occur."""
    scales = rng.integers(low, high + 1, (rows, columns // 32))
    scales[0, :2] = low, high
    nibbles = rng.integers(0, 16, (rows, columns))
    nibbles[0, :64] |= 1
    return weight_of(nibbles, scales)


def library_values(weight: Mxfp4Weight) -> torch.Tensor:
    """Return the BF16 values [N, K] as compressed-tensors decodes them."""
    state = {
        "weight_packed": torch.from_numpy(np.ascontiguousarray(weight.packed)),
        "weight_scale": torch.from_numpy(np.ascontiguousarray(weight.scale_bytes)),
    }
    return MXFP4PackedCompressor.decompress(state, SCHEME)["weight"]
