"""Forms in which sources store the weights that become NVFP4: one row for each format, told apart by dtypes.

compressed-tensors names the tensors of both formats: codes in `weight_packed`, scales in `weight_scale`.
"""

from typing import Final

from k2convert.choices import GROUP_SIZE
from k2convert.models.names import WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE, SourceFormat
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight

NVFP4: Final = "NVFP4"
NVFP4_BITS: Final = 4.5

INT4: Final = SourceFormat(
    title="INT4",
    parameters=(WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE),
    packed_dtype="I32",
    scale_dtypes=("BF16",),
    columns_per_element=8,
    bits=4.5,
    known_config={"quant_method": "compressed-tensors", "format": "pack-quantized"},
    known_group={"format": "pack-quantized"},
    known_weights={"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_SIZE},
    export="export the model with compressed-tensors in the format pack-quantized: only the routed experts, 4-bit "
    "integers, symmetric, groups of 32 columns (group_size 32), no actorder, scales in BF16, with weight_shape.",
    load=Int4Weight.load,
)
MXFP4: Final = SourceFormat(
    title="MXFP4",
    parameters=(WEIGHT_PACKED, WEIGHT_SCALE),
    packed_dtype="U8",
    scale_dtypes=("U8", "F8_E8M0"),
    columns_per_element=2,
    bits=4.25,
    known_config={"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    known_group={"format": "mxfp4-pack-quantized", "input_activations": None},
    known_weights={**INT4.known_weights, "type": "float", "zp_dtype": None},
    export="export the model with compressed-tensors in the format mxfp4-pack-quantized: only the routed experts, "
    "groups of 32 columns, scales in U8.",
    load=Mxfp4Weight.load,
)
SOURCE_FORMATS: Final = (INT4, MXFP4)
"""Every format, by the dtype of its codes."""
