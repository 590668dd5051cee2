"""MXFP4 weights for tests: chosen nibbles and scale bytes, packed and decoded by compressed-tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from numpy.typing import NDArray

from k2convert.quantize.formats.mxfp4 import Mxfp4Weight

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
