"""The layouts of NVFP4 checkpoints, in one table: adding a layout is a word in `choices.Layout`, a file and a row here.

Both layouts hold the same codes and block scales. compressed-tensors stores both scalars as divisors (1/g): if g is a
power of two both hold the same numbers, any other 1/g is rounded to FP32.
"""

from typing import Final

from k2convert.checkpoint.layouts.compressed_tensors import COMPRESSED_TENSORS
from k2convert.checkpoint.layouts.layout import CheckpointLayout
from k2convert.checkpoint.layouts.modelopt import MODELOPT

LAYOUTS: Final[dict[str, CheckpointLayout]] = {
    "modelopt": MODELOPT,
    "compressed-tensors": COMPRESSED_TENSORS,
}
"""One row for each word of `choices.Layout`; the first is the default."""
