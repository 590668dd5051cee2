"""The two NVFP4 checkpoint layouts: tensor names, dtypes, shapes, and the configs that declare them.

`modelopt` is what NVIDIA's ModelOpt 0.47 exports. vLLM, SGLang and TensorRT-LLM read it. `compressed-tensors` is the
format nvfp4-pack-quantized of compressed-tensors 0.13 and later; 0.12 refuses the key `scale_dtype`. Both hold the same
codes and block scales. The second stores both scalars as divisors (1/g): if g is a power of two both hold the same
numbers, any other 1/g is rounded to FP32.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from k2convert.checkpoint.files import dump_json
from k2convert.choices import BLOCK_SIZE
from k2convert.errors import FormatError

QUANTIZATION_KEYS: Final = ("quantization_config", "compression_config")
"""Keys of config.json under which engines look for a quantization, at the top level and in parts. The second is old."""

MODELOPT = "modelopt"
COMPRESSED_TENSORS = "compressed-tensors"
MIXED_PRECISION = "MIXED_PRECISION"
SCALE_DTYPE = "torch.float8_e4m3fn"  # without it compressed-tensors does not round the block scales of activations


@dataclass(frozen=True, slots=True)
class LayoutNames:
    """Parameter names of one converted projection. `is_divisor`: scalars are stored as 1/g with shape [1]."""

    weight: str
    block_scale: str
    global_scale: str
    input_scale: str
    is_divisor: bool

    @property
    def parameters(self) -> tuple[str, str, str, str]:
        """All parameters of a converted projection. The input scale is only there with 4-bit activations."""
        return self.weight, self.block_scale, self.global_scale, self.input_scale

    @property
    def scalar_shape(self) -> tuple[int, ...]:
        return (1,) if self.is_divisor else ()

    def encode_scalar(self, value: float) -> bytes:
        """Return the FP32 bytes of a scale as this layout stores it; raises FormatError if FP32 cannot hold it."""
        try:
            return struct.pack("<f", 1.0 / value if self.is_divisor else value)
        except (OverflowError, ZeroDivisionError):
            stored = f"1/{value!r}" if self.is_divisor else repr(value)
            advice = f" Use the layout {MODELOPT}." if self.is_divisor else ""
            raise FormatError(f"the scale {stored} does not fit into FP32.{advice}") from None

    def stores(self, value: float, raw: bytes) -> bool:
        """Return whether four stored bytes are exactly those of a scale."""
        try:
            return self.encode_scalar(value) == raw
        except (FormatError, TypeError, struct.error):
            return False

    def decode_scalar(self, raw: bytes) -> float:
        """Return the FP32 scale that four stored bytes mean; infinite or zero if the bytes are invalid.

        The reciprocal of a divisor is taken in FP32, as engines do.
        """
        (value,) = struct.unpack("<f", raw)
        if not self.is_divisor:
            return value
        with np.errstate(over="ignore"):
            return float(np.float32(1.0) / np.float32(value)) if value else float("inf")


LAYOUTS = {
    MODELOPT: LayoutNames("weight", "weight_scale", "weight_scale_2", "input_scale", is_divisor=False),
    COMPRESSED_TENSORS: LayoutNames(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", is_divisor=True
    ),
}


def projection_tensors(
    *, layout: str, num_rows: int, num_columns: int, has_input_scale: bool
) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Return (parameter, dtype, shape, num_bytes) of a converted projection [num_rows, num_columns], in file order."""
    names = LAYOUTS[layout]
    packed = (num_rows, num_columns // 2)
    blocks = (num_rows, num_columns // BLOCK_SIZE)
    tensors = [
        (names.weight, "U8", packed, packed[0] * packed[1]),
        (names.block_scale, "F8_E4M3", blocks, blocks[0] * blocks[1]),
        (names.global_scale, "F32", names.scalar_shape, 4),
    ]
    if has_input_scale:
        tensors.append((names.input_scale, "F32", names.scalar_shape, 4))
    return tensors


@dataclass(frozen=True, slots=True)
class Quantization:
    """Declarations in the configs of a result. `banks` are the converted layers, if engines look each up by name."""

    layout: str
    activations: str
    kv_cache: str | None
    excludes: Sequence[str]
    banks: Sequence[str] = ()

    @property
    def quant_algo(self) -> str:
        """ModelOpt's name of the whole scheme."""
        return MIXED_PRECISION if self.banks else quant_algo(self.activations)

    @property
    def quant_method(self) -> str:
        """The quant_method of config.json: engines ignore the map of layers under the plain one."""
        return "modelopt_mixed" if self.banks else "modelopt"

    @property
    def quantized_layers(self) -> dict[str, dict[str, Any]]:
        """ModelOpt's map of the converted layers; empty without banks."""
        return {bank: {"quant_algo": quant_algo(self.activations), "group_size": BLOCK_SIZE} for bank in self.banks}


def quantized_config(config: dict[str, Any], declared: Quantization, *, version: str) -> dict[str, Any]:
    """Return config.json of the result: the source's with exactly one quantization_config, at the top level."""
    result = unquantized_config(config)
    if declared.layout == MODELOPT:
        result["quantization_config"] = _modelopt_config(declared, version)
    else:
        result["quantization_config"] = _compressed_tensors_config(declared)
    return result


def unquantized_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without any quantization config. Engines would also read a stale one in `text_config`."""
    return {
        key: unquantized_config(cast(dict[str, Any], value)) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in QUANTIZATION_KEYS
    }


def quant_algo(activations: str) -> str:
    """Return ModelOpt's name of the scheme: with 4-bit activations, or weight-only."""
    return "NVFP4" if activations == "w4a4" else "W4A16_NVFP4"


def hf_quant_config(declared: Quantization, *, version: str) -> bytes:
    """Return hf_quant_config.json of the modelopt layout. vLLM's fallback reader requires the producer "modelopt"."""
    layers = {"quantized_layers": declared.quantized_layers} if declared.banks else {}
    return dump_json(
        {
            "producer": {"name": "modelopt", "version": f"k2convert {version}"},
            "quantization": {
                "quant_algo": declared.quant_algo,
                "kv_cache_quant_algo": "FP8" if declared.kv_cache == "fp8" else None,
                "group_size": BLOCK_SIZE,
                **layers,
                "exclude_modules": list(declared.excludes),
            },
        }
    )


def _modelopt_config(declared: Quantization, version: str) -> dict[str, Any]:
    tensor = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
    group: dict[str, Any] = {"input_activations": tensor} if declared.activations == "w4a4" else {}
    group |= {"weights": dict(tensor), "targets": list(declared.banks) or ["Linear"]}
    result: dict[str, Any] = {"config_groups": {"group_0": group}}
    if declared.banks:
        result["quantized_layers"] = declared.quantized_layers
    result |= {"ignore": list(declared.excludes), "quant_algo": declared.quant_algo, "group_size": BLOCK_SIZE}
    if declared.kv_cache == "fp8":
        result["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return result | {"producer": {"name": "k2convert", "version": version}, "quant_method": declared.quant_method}


def _compressed_tensors_config(declared: Quantization) -> dict[str, Any]:
    shared: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "group_size": BLOCK_SIZE,
        "num_bits": 4,
        "observer_kwargs": {},
        "scale_dtype": SCALE_DTYPE,
        "strategy": "tensor_group",
        "symmetric": True,
        "type": "float",
    }
    group: dict[str, Any] = {
        "input_activations": (shared | {"dynamic": "local", "observer": "static_minmax"})
        if declared.activations == "w4a4"
        else None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": shared | {"dynamic": False, "observer": "memoryless_minmax"},
    }
    kv_scheme = {"dynamic": False, "num_bits": 8, "strategy": "tensor", "symmetric": True, "type": "float"}
    return {
        "config_groups": {"group_0": group},
        "format": "nvfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": list(declared.excludes),
        "kv_cache_scheme": kv_scheme if declared.kv_cache == "fp8" else None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
