"""The tiny checkpoint with values that INT4 allows but training never produced.

compressed-tensors unpacks and packs the codes. tests/job/test_result_bytes.py pins what they are converted to.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from scripts.fixture_maker.folder import SmallCheckpoint, write_small
from scripts.fixture_maker.inventory import GROUP_SIZE
from scripts.fixture_maker.layouts import read_tiny

_NUM_BITS = 4
_BLOCK = 16
_KINDS = ("gate_proj", "up_proj", "down_proj")


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack int8 codes [N, K] in -8..7 to int32 [N, K/8] with compressed-tensors."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    return pack_to_int32(codes, _NUM_BITS).contiguous()


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack int32 [N, K/8] to int8 codes [N, K] with compressed-tensors."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    rows, words = packed.shape
    return unpack_from_int32(packed, _NUM_BITS, torch.Size((rows, words * 8)))


def _projections(checkpoint: SmallCheckpoint, expert: int, kinds: tuple[str, ...] = _KINDS) -> Iterator[str]:
    """Yield the modules of one expert in every layer."""
    for name in sorted(checkpoint.tensors()):
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_packed" and f".experts.{expert}." in name and module.rsplit(".", 1)[1] in kinds:
            yield module


def _codes(checkpoint: SmallCheckpoint, module: str) -> torch.Tensor:
    return unpack(checkpoint.tensors()[f"{module}.weight_packed"])


def _scales(checkpoint: SmallCheckpoint, module: str) -> torch.Tensor:
    return checkpoint.tensors()[f"{module}.weight_scale"].clone()


def make_minus8(out: Path) -> Path:
    """Plant the code -8 in experts 0 to 3: one code in a hundred, and one whole row of each projection."""
    checkpoint = read_tiny()
    generator = torch.Generator().manual_seed(0)
    for expert in range(4):
        for module in _projections(checkpoint, expert):
            codes = _codes(checkpoint, module)
            codes[torch.rand(codes.shape, generator=generator) < 0.01] = -8
            codes[expert] = -8
            checkpoint.replace(f"{module}.weight_packed", pack(codes))
    return write_small(checkpoint, out)


def make_zeros(out: Path) -> Path:
    """Plant zeros of every kind.

    Expert 0: every tenth block of 16 has zero codes. Expert 1: every tenth group of 32 has scale 0, half of them with
    their codes left non-zero, and some other groups have scale -0. Expert 2: gate and down have only zero scales; up
    is unchanged. Expert 3: all codes are zero, scales are not. Expert 4: all codes and scales are zero.
    """
    checkpoint = read_tiny()
    generator = torch.Generator().manual_seed(0)
    for module in _projections(checkpoint, 0):
        codes = _codes(checkpoint, module).unflatten(1, (-1, _BLOCK))
        codes[torch.rand(codes.shape[:2], generator=generator) < 0.1] = 0
        checkpoint.replace(f"{module}.weight_packed", pack(codes.flatten(1)))
    for module in _projections(checkpoint, 1):
        codes = _codes(checkpoint, module).unflatten(1, (-1, GROUP_SIZE))
        scales = _scales(checkpoint, module)
        draw = torch.rand(scales.shape, generator=generator)
        scales[draw < 0.1] = 0
        codes[draw < 0.05] = 0
        scales[draw > 0.98] = -0.0
        checkpoint.replace(f"{module}.weight_packed", pack(codes.flatten(1)))
        checkpoint.replace(f"{module}.weight_scale", scales)
    for expert, kinds, zero_codes, zero_scales in (
        (2, ("gate_proj", "down_proj"), False, True),
        (3, _KINDS, True, False),
        (4, _KINDS, True, True),
    ):
        for module in _projections(checkpoint, expert, kinds):
            if zero_codes:
                checkpoint.replace(f"{module}.weight_packed", pack(torch.zeros_like(_codes(checkpoint, module))))
            if zero_scales:
                checkpoint.replace(f"{module}.weight_scale", torch.zeros_like(_scales(checkpoint, module)))
    return write_small(checkpoint, out)


def make_subnormal(out: Path) -> Path:
    """Plant subnormal BF16 scales: all of experts 0 and 1, one in ten of experts 2 and 3; 2^-133 is among them."""
    checkpoint = read_tiny()
    generator = torch.Generator().manual_seed(0)
    for expert in range(4):
        for module in _projections(checkpoint, expert):
            scales = _scales(checkpoint, module)
            # Bit patterns 1 to 127 with a zero exponent are exactly the subnormal BF16 numbers.
            subnormal = torch.randint(1, 128, scales.shape, generator=generator, dtype=torch.int16)
            subnormal.flatten()[0] = 1
            chosen = torch.rand(scales.shape, generator=generator) < (1.0 if expert < 2 else 0.1)
            scales[chosen] = subnormal.view(torch.bfloat16)[chosen]
            checkpoint.replace(f"{module}.weight_scale", scales)
    return write_small(checkpoint, out)


def make_wide(out: Path) -> Path:
    """Spread scales that share a global scale: factors 2^-30 to 1 in experts 0 and 1; gate 2^16 above up in expert 2.

    Expert 3 has one group with scale 2^100, so every other group becomes zero.
    """
    checkpoint = read_tiny()
    generator = torch.Generator().manual_seed(0)
    for expert in (0, 1):
        for module in _projections(checkpoint, expert):
            scales = _scales(checkpoint, module)
            exponents = torch.randint(-30, 1, scales.shape, generator=generator)
            checkpoint.replace(f"{module}.weight_scale", torch.ldexp(scales.float(), exponents).bfloat16())
    for module in _projections(checkpoint, 2, ("gate_proj",)):
        checkpoint.replace(f"{module}.weight_scale", (_scales(checkpoint, module).float() * 2.0**16).bfloat16())
    for module in _projections(checkpoint, 3):
        scales = _scales(checkpoint, module)
        scales[3, 1] = 2.0**100
        checkpoint.replace(f"{module}.weight_scale", scales)
    return write_small(checkpoint, out)
