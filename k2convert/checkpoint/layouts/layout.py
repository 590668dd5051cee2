"""A layout of an NVFP4 checkpoint: tensor names, dtypes, shapes, the configs that declare them, and what reads them."""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import numpy as np

from k2convert.choices import BLOCK_SIZE, FP8_BLOCK, Activations, Layout
from k2convert.errors import FormatError

QUANTIZATION_KEYS: Final = ("quantization_config", "compression_config")
"""Keys of config.json under which engines look for a quantization, at the top level and in parts. The second is old."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Declarations in the configs of a result. `banks` are the converted layers, if engines look each up by name.

    `fp8_targets` are the names of the NVFP4 layers and those of the FP8 layers; empty without FP8, or if they are
    listed by name: `fp8_layers` are all names by which engines look up FP8 layers.
    """

    activations: str
    kv_cache: str | None
    excludes: Sequence[str]
    banks: Sequence[str] = ()
    fp8_targets: Sequence[Sequence[str]] = ()
    fp8_layers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """Description of a layout: the parameter names of a converted projection, and what depends on the layout."""

    name: Layout
    title: str
    weight: str
    block_scale: str
    global_scale: str
    input_scale: str
    is_divisor: bool  # scalars are stored as 1/g with shape [1]
    library: Literal["modelopt", "compressed-tensors"]  # its loader in an engine reads the config; it decodes, too
    declared_keys: tuple[str, ...]  # of the entry of config.json, which must be so
    quantization_config: Callable[[Quantization, str], dict[str, Any]]  # (declaration, version) -> entry of config.json
    read_activations: Callable[[Mapping[str, Any]], Activations | None]  # None if an entry is of another layout
    exclude_entry: Callable[[str, bool], str]  # (name part, whether more may follow) -> excluded modules
    hf_quant_config: Callable[[Quantization, str], dict[str, Any]] | None = None
    needs_marlin: bool = False  # SGLang, left to choose, would quantize the activations of a weight-only checkpoint
    vllm_reads_kv_cache: bool = True
    tensorrt_llm_note: str = ""  # set if not all of its releases read the layout
    transformers_note: str = ""

    @property
    def parameters(self) -> tuple[str, str, str, str]:
        """All parameters of a converted projection. The input scale is only there with 4-bit activations."""
        return self.weight, self.block_scale, self.global_scale, self.input_scale

    def tensors(
        self, *, num_rows: int, num_columns: int, has_input_scale: bool
    ) -> list[tuple[str, str, tuple[int, ...], int]]:
        """Return (parameter, dtype, shape, num_bytes) of a projection [num_rows, num_columns], in file order."""
        packed = (num_rows, num_columns // 2)
        blocks = (num_rows, num_columns // BLOCK_SIZE)
        scalar = (1,) if self.is_divisor else ()
        tensors: list[tuple[str, str, tuple[int, ...], int]] = [
            (self.weight, "U8", packed, packed[0] * packed[1]),
            (self.block_scale, "F8_E4M3", blocks, blocks[0] * blocks[1]),
            (self.global_scale, "F32", scalar, 4),
        ]
        if has_input_scale:
            tensors.append((self.input_scale, "F32", scalar, 4))
        return tensors

    def encode_scalar(self, value: float) -> bytes:
        """Return the FP32 bytes of a scale as this layout stores it; raises FormatError if FP32 cannot hold it."""
        try:
            return struct.pack("<f", 1.0 / value if self.is_divisor else value)
        except (OverflowError, ZeroDivisionError):
            stored = f"1/{value!r}" if self.is_divisor else repr(value)
            advice = " Use the layout modelopt." if self.is_divisor else ""
            raise FormatError(f"the scale {stored} does not fit into FP32.{advice}") from None

    def stores(self, value: float, raw: bytes) -> bool:
        """Return whether four stored bytes are exactly those of a scale."""
        try:
            return self.encode_scalar(value) == raw
        except (FormatError, TypeError, struct.error):
            return False

    def decode_scalar(self, raw: bytes) -> float:
        """Return the FP32 scale of four stored bytes, inverted in FP32 as engines do; infinite or zero if invalid."""
        (value,) = struct.unpack("<f", raw)
        if not self.is_divisor:
            return value
        with np.errstate(over="ignore"):
            if value:
                return float(np.float32(1.0) / np.float32(value))
            return float("inf")

    def quantized_config(self, config: Mapping[str, Any], declared: Quantization, *, version: str) -> dict[str, Any]:
        """Return config.json of the result: the source's with exactly one quantization_config, at the top level."""
        return unquantized_config(config) | {QUANTIZATION_KEYS[0]: self.quantization_config(declared, version)}


def fp8_tensors(rows: int, columns: int, *, has_blocks: bool) -> tuple[tuple[str, str, tuple[int, ...], int], ...]:
    """Return (parameter, dtype, shape, num_bytes) of an FP8 weight [rows, columns], in file order.

    Scales are those of rows, or of blocks as ModelOpt stores them, in four dimensions.
    """
    weight = ("weight", "F8_E4M3", (rows, columns), rows * columns)
    scales = (-(-rows // FP8_BLOCK), 1, -(-columns // FP8_BLOCK), 1) if has_blocks else (rows, 1)
    return weight, ("weight_scale", "F32", scales, 4 * math.prod(scales))


def unquantized_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without any quantization config. Engines would also read a stale one in `text_config`."""
    return {
        key: unquantized_config(cast(dict[str, Any], value)) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in QUANTIZATION_KEYS
    }
