"""The published pipeline as a quantizer: compressed-tensors dequantises INT4 to BF16, ModelOpt quantises to NVFP4.

It is the oracle of the `plain` rule and is as slow as the libraries are. The global scale is ModelOpt's formula on
the merged maximum of the tensors that share it, as its exporter unifies gate and up. Two things are ours, because the
libraries have no answer: a set without any non-zero weight, which ModelOpt turns into NaN, is written as `plain`
defines it, and the figures are those of formats/.
"""

from __future__ import annotations

import importlib
import warnings
import zlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from k2convert.choices import BLOCK_SIZE, GROUP_SIZE
from k2convert.errors import MissingDependencyError
from k2convert.quantize.formats.arrays import Nvfp4Arrays, SourceArrays, as_arrays
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.metrics.int4_error import measure_error
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules.magnitude import Magnitude, check_bf16, measure
from k2convert.quantize.rules.plain import plain_global_scale, quantize_plain


@dataclass(frozen=True, slots=True)
class ReferenceQuantizer:
    """compressed-tensors and ModelOpt in sequence, tensor by tensor, on the CPU."""

    decompressor: Any
    """compressed-tensors' PackedQuantizationCompressor."""
    scheme: Any
    """The QuantizationScheme of a pack-quantized INT4 weight."""
    qtensor: Any
    """ModelOpt's NVFP4QTensor."""

    def measure(self, source: SourceArrays, *, name: str) -> Magnitude:
        """Measure the dequantised weight with the libraries; FormatError where a source value is not usable."""
        scale_max = measure(source.to_torch(), name=name).scale_max
        weight = self.dequantize(source.to_torch())
        return Magnitude(scale_max=scale_max, amax=float(weight.abs().max()) if weight.numel() else 0.0)

    def global_scale(self, magnitude: Magnitude, *, is_int4: bool) -> float:  # noqa: ARG002
        """Choose the global scale as ModelOpt does: fp32(amax) / 2688."""
        if magnitude.amax == 0.0:
            return plain_global_scale(magnitude)
        return float(self.qtensor.get_weights_scaling_factor_2(torch.tensor([magnitude.amax])))

    def quantize(
        self, source: SourceArrays, *, name: str, magnitude: Magnitude, global_scale: float
    ) -> tuple[Nvfp4Arrays, WeightMetrics]:
        """Quantise one weight with the libraries, and measure it with ours."""
        weight = source.to_torch()
        result = self._quantize_bf16(self.dequantize(weight), global_scale, is_empty=magnitude.amax == 0.0)
        seed = zlib.crc32(name.encode())
        metrics = measure_error(weight, result, rule="plain", magnitude=magnitude, sample_seed=seed)
        return as_arrays(result), metrics

    def dequantize(self, source: Int4Weight | Tensor) -> Tensor:
        """Return the bf16 [N, K] weight as compressed-tensors dequantises it; a bf16 source as it is."""
        if not isinstance(source, Int4Weight):
            check_bf16(source, name="weight")
            return source.cpu()
        state = {
            "weight_packed": source.packed.cpu().contiguous().view(torch.int32),
            "weight_scale": source.scales.cpu(),
            "weight_shape": torch.tensor(source.shape),
        }
        return self.decompressor.decompress(state, self.scheme)["weight"]

    def _quantize_bf16(self, weight: Tensor, global_scale: float, *, is_empty: bool) -> Nvfp4Weight:
        if is_empty:
            return quantize_plain(weight, global_scale)
        scale_2 = torch.tensor(global_scale, dtype=torch.float32)
        quantized, block_scales, _ = self.qtensor.quantize(weight, BLOCK_SIZE, weights_scaling_factor_2=scale_2)
        return Nvfp4Weight(
            packed=quantized._quantized_data,  # ModelOpt's exporter reads it the same way
            block_scales=block_scales.view(torch.uint8),
            global_scale=global_scale,
        )


def create_reference_quantizer() -> ReferenceQuantizer:
    """Import the two libraries and create the quantizer; MissingDependencyError where one is not installed."""
    compressors = import_reference("compressed_tensors.compressors.pack_quantized.base")
    quantization = import_reference("compressed_tensors.quantization")
    nvfp4 = import_reference("modelopt.torch.quantization.qtensor.nvfp4_tensor")
    weights = quantization.QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP_SIZE
    )
    return ReferenceQuantizer(
        decompressor=compressors.PackedQuantizationCompressor,
        scheme=quantization.QuantizationScheme(targets=["Linear"], weights=weights),
        qtensor=nvfp4.NVFP4QTensor,
    )


def import_reference(module: str) -> ModuleType:
    """Import a module of the reference libraries; MissingDependencyError says how to install them."""
    try:
        with warnings.catch_warnings():
            # ModelOpt warns about the transformers version on import; no model is loaded here.
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"the reference quantizer needs compressed-tensors and nvidia-modelopt ({error}); "
            "install them with: pip install k2convert[reference]"
        ) from error
