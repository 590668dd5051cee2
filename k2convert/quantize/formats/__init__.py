"""Number formats as pure NumPy: INT4, MXFP4 and BF16 in, a class each (see bf16.SourceWeight), NVFP4 out.

Nothing here reads a file or knows a model. These functions define the arithmetic: the fast kernels must equal them byte
for byte.

Shape suffixes used throughout the package:

    N  output features (rows)         K  input features (columns)
    G  INT4 groups in a row, K/32     B  NVFP4 blocks in a row, K/16
    M  blocks of a flat list          P  distinct (source scale, block scale) pairs
    E  elements of a block, 16        S  distinct source scales or mantissas
"""
