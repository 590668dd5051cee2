"""Rounding with error feedback: rule `gptq`. Numbers only; torch, on the CPU or a CUDA device.

    moments     sums over tokens of one input, the correction of a weight for what its input lacks, the curvature
    rounding    codes that follow a target under a curvature, and how far that is trusted; the kernels

The loss of a row w that becomes q is (w - q) H (w - q)^T, where H is the mean of x x^T over weighted tokens.
"""
