"""The libraries' own dequantizers for written NVFP4 tensors, one for each library.

ModelOpt decodes what it exports, compressed-tensors what it packs. Both are compared with the exact product v * b * g.
If g is a power of two, nothing is rounded on the way, and a library must return that product rounded once to its dtype.
With any other g, its two or three steps in FP32 round, and the result must be as near as they allow. That is far nearer
than a wrong nibble or block scale would be.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.reader import ShardReader
from k2convert.choices import BLOCK_SIZE
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, dequantize_nvfp4
from k2convert.quantize.libraries import import_reference
from k2convert.records.ledger import read_ledger

Decoder = Callable[[NDArray[np.uint8], NDArray[np.uint8], float], Tensor]
"""decode(packed uint8 [N, K/2], block_scales uint8 [N, K/16], stored FP32 scalar) -> the library's weight [N, K]."""

FP32_STEPS_TOLERANCE: Final = 2.0**-22
"""Relative; four roundings to FP32 of at most 2**-24 each."""
SMALLEST_STEPS: Final = 8 * 2.0**-149
"""The largest error of a step rounded below FP32's normal range, times the largest element."""


def agrees(theirs: Tensor, exact_NK: NDArray[np.float64], *, stored: float) -> bool:
    """Return whether a library's weight [N, K] is the exact float64 one, within the rounding of its FP32 arithmetic.

    `stored` is the global scale as the file has it.
    """
    exact = torch.from_numpy(exact_NK)  # pyright: ignore[reportUnknownMemberType]
    if math.frexp(stored)[0] == 0.5:  # a power of two
        return torch.equal(theirs, exact.to(theirs.dtype))
    limits = torch.finfo(theirs.dtype)
    allowed = max(FP32_STEPS_TOLERANCE, limits.eps) * exact.abs() + max(SMALLEST_STEPS, limits.tiny * limits.eps)
    allowed = torch.where(exact == 0, 0.0, allowed)
    return bool(((theirs.to(torch.float64) - exact).abs() <= allowed).all())


def decoded_otherwise(folder: Path) -> tuple[int, list[str]]:
    """Count the converted tensors of a result, and name those that its layout's library decodes to other weights."""
    layout = read_ledger(folder).recipe.layout
    names = LAYOUTS[layout]
    decode = create_decoder(layout)
    checkpoint = open_checkpoint(folder)
    modules = [name.rpartition(".")[0] for name in checkpoint.tensors if name.endswith(f".{names.global_scale}")]
    wrong: list[str] = []
    with ShardReader(checkpoint.path) as reader:
        for module in modules:
            parts = [checkpoint.tensors[f"{module}.{name}"] for name in (names.weight, names.block_scale)]
            packed, scales = (reader.read(part).copy().reshape(part.shape) for part in parts)
            raw = reader.read(checkpoint.tensors[f"{module}.{names.global_scale}"]).tobytes()
            (stored,) = struct.unpack("<f", raw)
            exact = dequantize_nvfp4(Nvfp4Weight(packed, scales, names.decode_scalar(raw)))
            if not agrees(decode(packed, scales, stored), exact, stored=stored):
                wrong.append(module)
    return len(modules), wrong


def create_decoder(layout: str) -> Decoder:
    """The library decoder of a layout; MissingDependencyError if the library is not installed."""
    return _DECODERS[LAYOUTS[layout].library]()


def _modelopt_decoder() -> Decoder:
    qtensor: Any = import_reference("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor

    def decode(packed: NDArray[np.uint8], block_scales: NDArray[np.uint8], stored: float) -> Tensor:
        shape = torch.Size((packed.shape[0], packed.shape[1] * 2))
        return qtensor(shape, torch.float32, torch.as_tensor(packed)).dequantize(
            dtype=torch.float32,
            scale=torch.as_tensor(block_scales).view(torch.float8_e4m3fn),
            double_scale=torch.tensor(stored, dtype=torch.float32),
            block_sizes={-1: BLOCK_SIZE},
        )

    return decode


def _compressed_tensors_decoder() -> Decoder:
    compressor: Any = import_reference("compressed_tensors.compressors.nvfp4.base").NVFP4PackedCompressor
    quantization: Any = import_reference("compressed_tensors.quantization")
    weights = quantization.QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=BLOCK_SIZE
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)

    def decode(packed: NDArray[np.uint8], block_scales: NDArray[np.uint8], stored: float) -> Tensor:
        state = {
            "weight_packed": torch.as_tensor(packed),
            "weight_scale": torch.as_tensor(block_scales).view(torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([stored], dtype=torch.float32),
        }
        return compressor.decompress(state, scheme)["weight"]

    return decode


_DECODERS: Final = {"modelopt": _modelopt_decoder, "compressed-tensors": _compressed_tensors_decoder}
