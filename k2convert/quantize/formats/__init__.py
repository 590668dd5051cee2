"""Number formats as pure tensor code: INT4 in, NVFP4 out, the two rules between them and what they cost.

Nothing here reads a file or knows a model. Everything is a function of tensors, runs on CPU and CUDA by the same
code, and is the definition the fast kernels are held to, byte for byte. These work on the same weights as NumPy
`arrays`, and torch is imported when a tensor is first made.

Shape suffixes used throughout the package:

    N  output features (rows)         K  input features (columns)
    G  INT4 groups in a row, K/32     B  NVFP4 blocks in a row, K/16
    M  blocks of a flat list          P  distinct (source scale, block scale) pairs
"""
