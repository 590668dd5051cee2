"""Run by test_cuda_interpreted.py: compile the triton kernels for sm_90, which needs no device, and report the size."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from k2convert.quantize.kernels import cuda, cuda_kernel

SHARED = ["*i64", "*i16", "*i64", "*u8", "*i64", "*i32"]
SIGNATURES = {
    cuda_kernel.max_kernel: [*SHARED, "*u8", "*i32", "*i32", "i32"],
    cuda_kernel.mse_kernel: [
        *SHARED, "*i32", "*i32", "*i32", "*i32", "*fp32", "*u8", "*i32", "*fp64", "*u8", "*i32", "i32"
    ],
    cuda_kernel.channels_kernel: [
        *SHARED, *["*i32"] * 5, "*fp64", "*i32", "*fp64", "*u8", "*i32", *["i32"] * 3
    ],
}  # fmt: skip

for kernel, types in SIGNATURES.items():
    signature = dict(zip(kernel.arg_names, [*types, "constexpr"], strict=True))
    source = ASTSource(fn=kernel, signature=signature, constexprs={"TILE": cuda.TILE})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    instructions = sum(line.rstrip().endswith(";") for line in built.asm["ptx"].splitlines())
    sys.stdout.write(f"{kernel.__name__} {instructions} {len(built.asm['cubin'])}\n")
