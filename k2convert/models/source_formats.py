"""Forms in which sources store the weights that become NVFP4: one row for each format, told apart by dtypes.

compressed-tensors names the tensors of both formats: codes in `weight_packed`, scales in `weight_scale`.
"""

from typing import Final

import numpy as np

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.reader import Bytes
from k2convert.choices import BLOCK_SIZE, GROUP_SIZE
from k2convert.models.names import WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE, SourceFormat
from k2convert.quantize.formats.int4 import FIRST_UNUSABLE_BITS, Int4Weight, check_int4_scales
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.rules.cast import check_mxfp4_scales

NVFP4: Final = "NVFP4"
NVFP4_BITS: Final = 4.5


def _load_int4(packed: Bytes, scale: Bytes, rows: int, name: str) -> Int4Weight:
    scale_bits = scale.view(np.uint16).reshape(rows, -1)
    if scale_bits.max(initial=0) >= FIRST_UNUSABLE_BITS:
        check_int4_scales(scale_bits, name=name)
    return Int4Weight(packed=packed.reshape(rows, -1), scale_bits=scale_bits)


def _load_mxfp4(packed: Bytes, scale: Bytes, rows: int, name: str) -> Mxfp4Weight:
    check_mxfp4_scales(scale.reshape(rows, -1), name=name)
    return Mxfp4Weight(packed.reshape(rows, -1), scale.reshape(rows, -1))


INT4: Final = SourceFormat(
    title="INT4",
    parameters=(WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE),
    packed_dtype="I32",
    scale_dtypes=("BF16",),
    columns_per_element=8,
    bits=4.5,
    usual_scale=b"\x00\x3c",  # 2**-7
    known_config={"quant_method": "compressed-tensors", "format": "pack-quantized"},
    known_group={"format": "pack-quantized"},
    known_weights={"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_SIZE},
    export="export the model with compressed-tensors in the format pack-quantized: only the routed experts, 4-bit "
    "integers, symmetric, groups of 32 columns (group_size 32), no actorder, scales in BF16, with weight_shape.",
    load=_load_int4,
)
MXFP4: Final = SourceFormat(
    title="MXFP4",
    parameters=(WEIGHT_PACKED, WEIGHT_SCALE),
    packed_dtype="U8",
    scale_dtypes=("U8", "F8_E8M0"),
    columns_per_element=2,
    bits=4.25,
    usual_scale=b"\x78",
    known_config={"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    known_group={"format": "mxfp4-pack-quantized", "input_activations": None},
    known_weights={**INT4.known_weights, "type": "float", "zp_dtype": None},
    export="export the model with compressed-tensors in the format mxfp4-pack-quantized: only the routed experts, "
    "groups of 32 columns, scales in U8.",
    load=_load_mxfp4,
)
SOURCE_FORMATS: Final = (INT4, MXFP4)
"""Every format, by the dtype of its codes."""


def format_of(packed: TensorInfo) -> SourceFormat:
    """Return the format of a projection by its codes; INT4 for a dtype that none has."""
    return next((row for row in SOURCE_FORMATS if row.packed_dtype == packed.dtype), INT4)


def packed_form(packed: TensorInfo, scale: TensorInfo | None) -> str:
    """Return how `weight_packed` is stored: the title of a format, or NVFP4; empty if its scales tell of neither."""
    if packed.dtype != MXFP4.packed_dtype:
        return format_of(packed).title
    if scale is None or len(packed.shape) != 2:
        return ""
    if scale.dtype == "F8_E4M3" and scale.shape == (packed.shape[0], 2 * packed.shape[1] // BLOCK_SIZE):
        return NVFP4
    return MXFP4.title if scale.dtype in MXFP4.scale_dtypes else ""
