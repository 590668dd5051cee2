"""Somebody else's decoders: the libraries' own dequantisers for written NVFP4 tensors, one a layout.

ModelOpt decodes what it exports, compressed-tensors what it packs; `validate --reference` holds both against the
exact product v * b * g, rounded once to the dtype in which the library answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k2convert.checkpoint.layouts import BLOCK_SIZE, MODELOPT
from k2convert.quantizers.reference import import_reference

Decoder = Callable[[Tensor, Tensor, float], Tensor]
"""decode(packed uint8 [N, K/2], block_scales uint8 [N, K/16], stored FP32 scalar) -> the library's weight [N, K]."""


def create_decoder(layout: str) -> Decoder:
    """The library decoder of a layout; MissingDependencyError where the library is not installed."""
    return _modelopt_decoder() if layout == MODELOPT else _compressed_tensors_decoder()


def _modelopt_decoder() -> Decoder:
    qtensor: Any = import_reference("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor

    def decode(packed: Tensor, block_scales: Tensor, stored: float) -> Tensor:
        shape = torch.Size((packed.shape[0], packed.shape[1] * 2))
        return qtensor(shape, torch.float32, packed).dequantize(
            dtype=torch.float32,
            scale=block_scales.view(torch.float8_e4m3fn),
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

    def decode(packed: Tensor, block_scales: Tensor, stored: float) -> Tensor:
        state = {
            "weight_packed": packed,
            "weight_scale": block_scales.view(torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([stored], dtype=torch.float32),
        }
        return compressor.decompress(state, scheme)["weight"]

    return decode
