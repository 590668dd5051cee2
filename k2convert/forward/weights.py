"""Weights read from a checkpoint one layer at a time, and decoded a few rows at a time.

The decoders and their tables are not those of quantize/formats: they follow the format documents, so a mistake in the
formats' arithmetic shows as a wrong layer.

    MXFP4  the nibbles of NVFP4; times 2**(byte - 127) per 32
    INT4   byte k of a row: column 2k in the low nibble, 2k + 1 in the high one, code q + 8; times BF16 s per 32
    NVFP4  the same nibble order; nibble = sign << 3 | index of {0, .5, 1, 1.5, 2, 3, 4, 6}; times E4M3 b per 16,
           times g (modelopt layout) or divided by 1/g (compressed-tensors layout)
    FP8    a byte is an E4M3 number; times FP32 s of its row, or of its block of 128 x 128
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

import torch
from torch import Tensor

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.layouts.layout import CheckpointLayout
from k2convert.checkpoint.reader import ShardReader
from k2convert.choices import FP8_BLOCK
from k2convert.errors import CheckpointError
from k2convert.models import detect_family
from k2convert.models.config import text_config
from k2convert.models.names import WEIGHT, WEIGHT_PACKED, WEIGHT_SCALE, Family
from k2convert.quantize.formats.fp8 import quantize_fp8
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.formats.nvfp4 import E4M3_MAX
from k2convert.quantize.kernels.cpu import encode_fp8

_DTYPES: Final = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "U8": torch.uint8}
_NUMBERS: Final = ("BF16", "F32", "F16")
FP8_DTYPE: Final = "F8_E4M3"
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


CHUNK_WEIGHTS: Final = 1 << 19
"""Weights decoded at once on a CPU: 2 MB in FP32, which the cache holds and the allocator keeps."""


def _pairs(values: list[float]) -> Tensor:
    """Return the table from a byte to the values of its two nibbles, low nibble first: f32 pairs as int64 [256]."""
    return torch.tensor([(values[byte & 15], values[byte >> 4]) for byte in range(256)]).view(torch.int64).flatten()


_INT4_PAIRS: Final = _pairs([float(nibble - 8) for nibble in range(16)])
_E2M1_PAIRS: Final = _pairs([*_E2M1, *(-value for value in _E2M1)])
_E8M0: Final = torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), math.nan])
_E4M3: Final = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def round_to_e4m3(x: Tensor, scale: float | Tensor) -> Tensor:
    """Round FP32 values to E4M3 times `scale`: to nearest even, saturating at 448, as a KV cache in FP8 does."""
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def round_tokens_to_fp8(x: Tensor) -> Tensor:
    """Round FP32 inputs [.., K] to E4M3 times one scale for each token, its largest number over 448; f32 [.., K]."""
    amax = x.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(amax > 0, amax / E4M3_MAX, 1.0)
    return round_to_e4m3(x, scale)


def round_groups_to_fp8(x: Tensor) -> Tensor:
    """The same with one scale for every 128 columns of a token, the last of which may be fewer."""
    return torch.cat([round_tokens_to_fp8(group) for group in torch.split(x, FP8_BLOCK, dim=-1)], dim=-1)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension; the weight is f32 [K]."""

    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        """Map f32 [.., K] to f32 [.., K]."""
        return self.weight * (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.epsilon))


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A weight [N, K] in BF16 or FP32."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.values.shape[0], self.values.shape[1]

    def linear(self, x_TK: Tensor) -> Tensor:
        """Return x W^T in f32 [T, N]."""
        if self.values.dtype != torch.float32:
            return _linear(self, x_TK)
        return multiply(x_TK, self.values)

    def decode(self) -> Tensor:
        """Return the weight as f32 [N, K]."""
        return self.values.float()

    def rows(self, start: int, stop: int) -> Tensor:
        """Return some rows of the weight as f32 [stop - start, K]."""
        return self.values[start:stop].float()

    def to(self, device: str) -> DenseWeight:
        """Return the weight on a device."""
        return DenseWeight(self.values.to(device))


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """Codes uint8 [N, K/2], the values of each byte (f32 pairs as int64 [256]), and f32 steps [N, K/block]."""

    packed: Tensor
    pairs: Tensor
    steps: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def linear(self, x_TK: Tensor) -> Tensor:
        """Return x W^T in f32 [T, N], decoding a few rows of the weight at a time."""
        return _linear(self, x_TK)

    def decode(self) -> Tensor:
        """Return the weight as f32 [N, K]."""
        return self.rows(0, self.shape[0])

    def rows(self, start: int, stop: int) -> Tensor:
        """Return some rows of the weight as f32 [stop - start, K]."""
        values = self.pairs.index_select(0, self.packed[start:stop].flatten().int()).view(torch.float32)
        steps = self.steps[start:stop]
        values.view(*steps.shape, -1).mul_(steps.unsqueeze(-1))
        return values.view(stop - start, self.shape[1])

    def to(self, device: str) -> CodedWeight:
        """Return the weight on a device, still packed."""
        return CodedWeight(self.packed.to(device), self.pairs.to(device), self.steps.to(device))


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight in FP8, whose inputs are rounded too: codes uint8 [N, K], f32 scales [N, 1], or [R, C] of blocks.

    With scales of rows, inputs have one scale for each token; with scales of blocks, one for every 128 columns of it.
    kv_b_proj is an exception: engines make BF16 matrices of it, so its inputs are not rounded (use `decode`).
    """

    codes: Tensor
    scales: Tensor
    has_blocks: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    def linear(self, x_TK: Tensor) -> Tensor:
        """Return x W^T in f32 [T, N], x rounded to FP8 as kernels do, which multiply nothing else."""
        return _linear(self, (round_groups_to_fp8 if self.has_blocks else round_tokens_to_fp8)(x_TK))

    def decode(self) -> Tensor:
        """Return the weight as f32 [N, K]."""
        return self.rows(0, self.shape[0])

    def rows(self, start: int, stop: int) -> Tensor:
        """Return some rows of the weight as f32 [stop - start, K]."""
        values = self.codes[start:stop].view(torch.float8_e4m3fn).float()
        if not self.has_blocks:
            return values * self.scales[start:stop]
        blocks = torch.arange(start, stop, device=self.scales.device) // FP8_BLOCK
        return values * self.scales[blocks].repeat_interleave(FP8_BLOCK, dim=1)[:, : values.shape[1]]

    def to(self, device: str) -> Fp8Weight:
        """Return the weight on a device."""
        return Fp8Weight(self.codes.to(device), self.scales.to(device), self.has_blocks)


Weight = DenseWeight | CodedWeight | Fp8Weight


def _linear(weight: Weight, x_TK: Tensor) -> Tensor:
    """Return x W^T in f32 [T, N]; a CPU decodes a few rows at a time, a GPU all of them."""
    rows, columns = weight.shape
    if x_TK.device.type != "cpu":
        return multiply(x_TK, weight.decode())
    result = torch.empty(x_TK.shape[0], rows)
    step = max(CHUNK_WEIGHTS // columns // 16 * 16, 16)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        result[:, start:stop] = multiply(x_TK, weight.rows(start, stop))
    return result


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer; `input_scale` is None if its input is not quantized to FP4."""

    weight: Weight
    input_scale: float | None = None

    def to(self, device: str) -> LinearLayer:
        """Return the layer with its weight on a device."""
        return LinearLayer(self.weight.to(device), self.input_scale)


StoredWeight = Int4Weight | Mxfp4Weight | Tensor
"""A weight as a source stores it: INT4, MXFP4, or numbers [N, K]."""


class WeightReader:
    """Reads the tensors of one checkpoint by name; keeps files open until closed.

    A source is read as its result will be, with `becomes_fp8` of a module: BF16 linear layers as FP8 with scales of
    rows.
    """

    def __init__(self, checkpoint: Checkpoint, *, becomes_fp8: Callable[[str], bool] = lambda _: False) -> None:
        self.checkpoint = checkpoint
        self._shards = ShardReader(checkpoint.path)
        self._becomes_fp8 = becomes_fp8

    @cached_property
    def family(self) -> Family:
        """The family of the checkpoint, which is found once: it is told by all names."""
        return detect_family(self.checkpoint)

    def close(self) -> None:
        """Close the files."""
        self._shards.close()

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of that name."""
        return name in self.checkpoint.tensors

    def info(self, name: str) -> TensorInfo:
        """Return the place of a tensor; CheckpointError if the checkpoint does not have it."""
        tensor = self.checkpoint.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{self.checkpoint.folder}: tensor {name} is missing, so the layer cannot be computed."
            )
        return tensor

    def raw(self, name: str) -> Tensor:
        """Return the bytes of a tensor, uint8 [num_bytes]."""
        return torch.frombuffer(self._shards.read(self.info(name)), dtype=torch.uint8)

    def read(self, name: str, *, first_row: int = 0, num_rows: int | None = None) -> Tensor:
        """Return a floating-point or U8 tensor in its stored dtype and shape, or `num_rows` of its rows."""
        info = self.info(name)
        if info.dtype not in _DTYPES:
            raise CheckpointError(f"{info.shard}: {name} is {info.dtype}; expected one of {', '.join(_DTYPES)}.")
        shape = info.shape
        if num_rows is not None:
            shape = (num_rows, *info.shape[1:])
        dtype = _DTYPES[info.dtype]
        begin = first_row * math.prod(info.shape[1:]) * dtype.itemsize
        buffer = self._shards.read(info, begin=begin, end=begin + math.prod(shape) * dtype.itemsize)
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def read_numbers(self, name: str, *, first_row: int = 0, num_rows: int | None = None) -> Tensor:
        """The same for a tensor of floating-point numbers; CheckpointError for one that is quantized."""
        info = self.info(name)
        if info.dtype not in _NUMBERS or self._layout(name.removesuffix(f".{WEIGHT}")) is not None:
            raise CheckpointError(
                f"{self.checkpoint.folder}: {name} is quantized ({info.dtype}) in a form that cannot be computed here. "
                "Use a checkpoint that has it in BF16."
            )
        return self.read(name, first_row=first_row, num_rows=num_rows)

    def read_norm(self, name: str, device: str = "cpu") -> RmsNorm:
        """Return an RMS norm by the name of its weight [K], with the epsilon of config.json."""
        epsilon = text_config(self.checkpoint.config).get("rms_norm_eps", 1e-6)
        return RmsNorm(self.read_numbers(name).float().to(device), float(epsilon))

    def read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Return some rows of a floating-point matrix, [len(rows), columns]; reads only these."""
        info = self.info(name)
        if info.dtype not in _DTYPES or len(info.shape) != 2:
            raise CheckpointError(f"{info.shard}: {name} is {info.dtype} {list(info.shape)}, not a matrix of numbers.")
        result = torch.empty(len(rows), info.shape[1], dtype=_DTYPES[info.dtype])
        for index, row in enumerate(rows):
            result[index] = self.read(name, first_row=row, num_rows=1)
        return result

    def read_source(self, module: str) -> StoredWeight:
        """Return a layer's weight as a source stores it: INT4, MXFP4, or bf16 [N, K]."""
        if not self.has(f"{module}.{WEIGHT_PACKED}"):
            return self.read_numbers(f"{module}.{WEIGHT}")
        stored = self.info(f"{module}.{WEIGHT_PACKED}")
        rows = stored.shape[0]
        packed = self.raw(stored.name).view(rows, -1)
        if stored.dtype == "U8":
            return Mxfp4Weight(packed.numpy(), self.raw(f"{module}.{WEIGHT_SCALE}").view(rows, -1).numpy())
        scale_bits = self.read(f"{module}.{WEIGHT_SCALE}").view(torch.uint16)
        return Int4Weight(packed=packed.numpy(), scale_bits=scale_bits.numpy())

    def is_nvfp4(self, module: str) -> bool:
        """Return whether a layer is stored as NVFP4, in either layout."""
        return self._layout(module) is not None

    def is_fp8(self, module: str) -> bool:
        """Return whether a layer is stored as FP8."""
        tensor = self.checkpoint.tensors.get(f"{module}.{WEIGHT}")
        return tensor is not None and (tensor.dtype == FP8_DTYPE or self._is_made_fp8(module))

    def _is_made_fp8(self, module: str) -> bool:
        tensor = self.info(f"{module}.{WEIGHT}")
        return (tensor.dtype, len(tensor.shape)) == ("BF16", 2) and self._becomes_fp8(module)

    def read_linear(self, module: str) -> DenseWeight | Fp8Weight:
        """Return the weight of a linear layer that is not converted to NVFP4; CheckpointError in other forms."""
        if self.is_fp8(module):
            return self.read_fp8(module)
        return DenseWeight(self.read_numbers(f"{module}.{WEIGHT}"))

    def read_fp8(self, module: str) -> Fp8Weight:
        """Return an FP8 weight; CheckpointError if it has not one FP32 scale for each row, or each block of 128 x 128
        (ModelOpt's FP8_PB_WO, scales [R, 1, C, 1]).
        """
        weight = self.info(f"{module}.{WEIGHT}")
        if self._is_made_fp8(module):
            bits = self.read(weight.name).view(torch.uint16).numpy()
            quantized = quantize_fp8(bits, name=f"{weight.shard}: {weight.name}", encode=encode_fp8)
            return Fp8Weight(torch.as_tensor(quantized.codes), torch.as_tensor(quantized.scales))
        scales = self.info(f"{module}.{WEIGHT_SCALE}")
        rows, *columns = weight.shape
        grid = (-(-rows // FP8_BLOCK), 1, *(-(-size // FP8_BLOCK) for size in columns), 1)
        if len(columns) != 1 or scales.dtype != "F32" or scales.shape not in ((rows, 1), grid):
            raise CheckpointError(
                f"{scales.shard}: {scales.name} is {scales.dtype} {list(scales.shape)}. FP8 is computed with one F32 "
                f"scale for each output row, or for each block of {FP8_BLOCK} x {FP8_BLOCK}."
            )
        has_blocks = scales.shape == grid
        values = self.read(scales.name).view(scales.shape[0], -1)
        return Fp8Weight(self.raw(weight.name).view(weight.shape), values, has_blocks)

    def read_converted(self, module: str, *, shape: tuple[int, int] | None = None) -> LinearLayer:
        """Return a layer of a converted checkpoint, NVFP4, FP8 or BF16; CheckpointError if its shape is not `shape`."""
        names = self._layout(module)
        if names:
            layer = self._nvfp4(module, names)
        elif self.is_fp8(module):
            layer = LinearLayer(self.read_fp8(module))
        else:
            layer = LinearLayer(DenseWeight(self.read(f"{module}.{WEIGHT}")))
        if shape is not None and layer.weight.shape != shape:
            raise CheckpointError(
                f"{self.checkpoint.folder}: {module} has shape {list(layer.weight.shape)}, but {list(shape)} in the "
                "source. These are checkpoints of different models."
            )
        return layer

    def _layout(self, module: str) -> CheckpointLayout | None:
        return next((n for n in LAYOUTS.values() if self.has(f"{module}.{n.global_scale}")), None)

    def _nvfp4(self, module: str, names: CheckpointLayout) -> LinearLayer:
        packed = self.read(f"{module}.{names.weight}")
        name = f"{module}.{names.block_scale}"
        scales = self.raw(name).view(self.info(name).shape)
        if packed.ndim != 2 or scales.shape != (packed.shape[0], packed.shape[1] // 8):
            raise CheckpointError(
                f"{self.info(name).shard}: {name}: shape {list(scales.shape)} does not fit codes {list(packed.shape)}."
            )
        has_input_scale = self.has(f"{module}.{names.input_scale}")
        return LinearLayer(
            nvfp4_weight(packed, scales, self._scalar(module, names, names.global_scale)),
            self._scalar(module, names, names.input_scale) if has_input_scale else None,
        )

    def _scalar(self, module: str, names: CheckpointLayout, parameter: str) -> float:
        return names.decode_scalar(self.raw(f"{module}.{parameter}").numpy().tobytes())


def exact_weight(weight: StoredWeight) -> DenseWeight | CodedWeight:
    """Return the source's weight: q * s and v * 2**e, exact in FP32, or bf16 [N, K] unchanged."""
    if isinstance(weight, Tensor):
        return DenseWeight(weight)
    if isinstance(weight, Mxfp4Weight):
        return CodedWeight(
            torch.as_tensor(weight.packed), _E2M1_PAIRS, _E8M0[torch.as_tensor(weight.scale_bytes).int()]
        )
    return CodedWeight(torch.as_tensor(weight.packed), _INT4_PAIRS, torch.as_tensor(weight.scales))


def nvfp4_weight(packed: Tensor, block_scales: Tensor, global_scale: float) -> CodedWeight:
    """Return the weight v * (b * g) from codes uint8 [N, K/2] and E4M3 bytes uint8 [N, K/16]."""
    pairs, values = _nvfp4_tables(str(packed.device))
    steps = values[block_scales.int()] * torch.tensor(global_scale, dtype=torch.float32)
    return CodedWeight(packed, pairs, steps)


@cache
def _nvfp4_tables(device: str) -> tuple[Tensor, Tensor]:
    return _E2M1_PAIRS.to(device), _E4M3.to(device)


ROWS: Final = 16
"""oneDNN keeps 0.6 MB for every new shape. Rounding the number of tokens up to a multiple of this keeps them few."""


def multiply(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x W^T in f32 [T, N] for f32 [T, K] and f32 [N, K]: with oneDNN's kernel on the CPU.

    torch multiplies FP32 with MKL, which is slow on AMD. One core of Zen 5, 170 tokens by [2048, 7168], decoding
    included: 118 GFLOP/s with oneDNN, 58 with MKL. The operator is the one that torch's compiler emits.
    """
    tokens = x_TK.shape[0]
    if x_TK.device.type != "cpu" or tokens == 0 or not torch.backends.mkldnn.is_available():
        return torch.nn.functional.linear(x_TK, weight_NK)
    if missing := -tokens % ROWS:
        x_TK = torch.nn.functional.pad(x_TK, (0, 0, 0, missing))
    onednn: Any = torch.ops.mkldnn
    return onednn._linear_pointwise(x_TK, weight_NK, None, "none", [], "")[:tokens]
