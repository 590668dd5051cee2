"""Rounding with error feedback: rule `gptq`. Numbers only; torch, on the CPU or a CUDA device.

    moments     second moments of one input, and the correction of a weight by the residual of its output
    hessian     the damped Hessian of a row's loss, and its factor, in tiles that threads compute
    rounding    GPTQ under a damped Hessian, the choice of the damping, and the kernel of the CPU
    device_kernel, panel_kernels   the same on a CUDA device, and its self-test

The loss of a row w that becomes q is (w - q) H (w - q)^T, where H is the mean of x x^T over weighted tokens.
"""
