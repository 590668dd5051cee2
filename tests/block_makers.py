"""INT4 weights for the tests, packed by compressed-tensors, with awkward blocks among them."""

from collections.abc import Iterable

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from torch import Tensor

from k2convert.choices import GROUP_SIZE
from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.metrics.weight_metrics import MetricsSum, WeightMetrics


def int4_weight(codes_NK: Tensor, scales_NG: Tensor) -> Int4Weight:
    """Pack codes -8..7 with the reference packer."""
    packed = pack_to_int32(codes_NK.to(torch.int8), 4).view(torch.uint8)
    return Int4Weight(packed=packed.numpy(), scale_bits=scales_NG.contiguous().view(torch.uint16).numpy())


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


def trained_like(rows: int, columns: int, *, seed: int) -> Int4Weight:
    """Gaussian weights quantized as K2's were: s = bf16(amax / 7), codes -7..7."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, columns // GROUP_SIZE, GROUP_SIZE, generator=generator) * 0.02
    scales = (weights.abs().amax(dim=-1) / 7).to(torch.bfloat16)
    codes = torch.round(weights / scales.to(torch.float32).unsqueeze(-1)).clamp(-8, 7)
    return int4_weight(codes.view(rows, columns), scales)


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


def total_metrics(parts: Iterable[WeightMetrics]) -> WeightMetrics:
    """The metrics of several tensors together."""
    total = MetricsSum()
    for part in parts:
        total.add(part)
    return total.total()
