"""Rounding with error feedback: rule `gptq`. Numbers only; torch, on the CPU or a CUDA device.

    tiles       large matrices cut into tiles that threads compute: the same bytes with any number of threads
    moments     sums over tokens of one input, the correction of a weight for what its outputs lack
    curvature   of the loss of a row, and its factor
    rounding    codes that follow a target under a curvature, and how far that is trusted; the kernel of the CPU
    device_kernel, panel_kernels   the same on a CUDA device, and its self-test

The loss of a row w that becomes q is (w - q) H (w - q)^T, where H is the mean of x x^T over weighted tokens.
"""
