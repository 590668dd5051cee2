"""The published pipeline as a quantizer: compressed-tensors dequantizes INT4 to BF16, ModelOpt quantizes to NVFP4.

It is the oracle of the `max` rule, and as slow as the libraries are. The global scale is ModelOpt's formula on the
merged maximum of the tensors that share it, as its exporter unifies gate and up. Two things are ours, because the
libraries have no answer: a set in which every weight is zero, which ModelOpt turns into NaN, is written as `max`
defines it, and the figures are those of metrics/.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from threading import Lock
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.choices import BLOCK_SIZE, GROUP_SIZE
from k2convert.errors import MissingDependencyError, install_remedy
from k2convert.quantize.formats.bf16 import Magnitude, SourceWeight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.metrics.measure import measure_quantized
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules.max import max_global_scale, quantize_max

_IMPORTING = Lock()
"""Held while filters of warnings are changed: of two threads at a time, one would put back those of the other."""


class ReferenceQuantizer:
    """compressed-tensors and ModelOpt in sequence, tensor by tensor, on the CPU."""

    def __init__(self) -> None:
        """Import the two libraries; MissingDependencyError if one is not installed."""
        compressors: Any = import_reference("compressed_tensors.compressors.pack_quantized.base")
        quantization: Any = import_reference("compressed_tensors.quantization")
        nvfp4: Any = import_reference("modelopt.torch.quantization.qtensor.nvfp4_tensor")
        mxfp4: Any = import_reference("compressed_tensors.compressors.mxfp4.base")
        weights = quantization.QuantizationArgs(
            num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP_SIZE
        )
        self._int4 = compressors.PackedQuantizationCompressor
        self._int4_scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
        self._qtensor = nvfp4.NVFP4QTensor
        self._mxfp4 = mxfp4.MXFP4PackedCompressor
        self._mxfp4_scheme = quantization.preset_name_to_scheme("MXFP4A16", ["Linear"])

    def measure(self, source: SourceWeight, *, name: str) -> Magnitude:
        """Measure the dequantized weight with the libraries; FormatError if a source value is not usable."""
        magnitude = source.magnitude(name=name)
        weight = self.dequantize(source)
        return replace(magnitude, amax=float(weight.abs().max()) if weight.numel() else 0.0)

    def global_scale(self, magnitude: Magnitude) -> float:
        """Choose the global scale as ModelOpt does: fp32(amax) / 2688."""
        if magnitude.amax == 0.0:
            return max_global_scale(magnitude)
        return float(self._qtensor.get_weights_scaling_factor_2(torch.tensor([magnitude.amax])))

    def quantize(
        self,
        source: SourceWeight,
        *,
        name: str,
        magnitude: Magnitude,
        global_scale: float,
    ) -> tuple[Nvfp4Weight, WeightMetrics]:
        """Quantize one weight with the libraries, and measure it with our metrics."""
        if magnitude.amax == 0.0:
            result = quantize_max(source, global_scale)
        else:
            weight = self.dequantize(source)
            scale_2 = torch.tensor(global_scale, dtype=torch.float32)
            quantized, block_scales, _ = self._qtensor.quantize(weight, BLOCK_SIZE, weights_scaling_factor_2=scale_2)
            result = Nvfp4Weight(
                packed=quantized._quantized_data.numpy(),  # ModelOpt's exporter reads it the same way
                block_scales=block_scales.view(torch.uint8).numpy(),
                global_scale=global_scale,
            )
        return result, measure_quantized(source, result, name=name, magnitude=magnitude)

    def dequantize(self, source: SourceWeight) -> Tensor:
        """Return the bf16 [N, K] weight as compressed-tensors dequantizes it; a BF16 source unchanged."""
        if isinstance(source, Mxfp4Weight):
            packed, scales = (torch.from_numpy(np.ascontiguousarray(a)) for a in (source.packed, source.scale_bytes))  # pyright: ignore[reportUnknownMemberType]
            state = {"weight_packed": packed, "weight_scale": scales}
            return self._mxfp4.decompress(state, self._mxfp4_scheme)["weight"]
        if not isinstance(source, Int4Weight) or source.channel_exponents is not None:
            # The library knows no columns. Their powers of two are exact in either order.
            return bf16_tensor(source.bits)
        state = {
            "weight_packed": torch.from_numpy(source.packed).contiguous().view(torch.int32),  # pyright: ignore[reportUnknownMemberType]
            "weight_scale": bf16_tensor(source.scale_bits),
            "weight_shape": torch.tensor(source.shape),
        }
        return self._int4.decompress(state, self._int4_scheme)["weight"]


def bf16_tensor(bits: NDArray[np.uint16]) -> Tensor:
    """Return BF16 bits as a bf16 tensor of the same shape and memory."""
    return torch.from_numpy(bits).view(torch.bfloat16)  # pyright: ignore[reportUnknownMemberType]


def import_reference(module: str) -> ModuleType:
    """Import a module of the reference libraries; MissingDependencyError says how to install them."""
    try:
        with _IMPORTING, warnings.catch_warnings():
            # ModelOpt warns about the transformers version on import; no model is loaded here.
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"the reference libraries compressed-tensors and nvidia-modelopt cannot be used ({error}). "
            f"{install_remedy(extra='reference')}"
        ) from error
