"""Run by test_cuda_interpreted.py: compile the triton kernel for sm_90, which needs no device."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from k2convert.quantize.kernels import cuda, cuda_kernel

BUFFERS = ["*i64", "*i16", "*i64", "*u8", "*i64", "*i32"]
TYPES = [*BUFFERS, *["*i32"] * 5, "*fp64", "*i32", "*fp64", "*u8", "*i32", *["i32"] * 3]
kernel = cuda_kernel.channels_kernel
signature = dict(zip(kernel.arg_names, [*TYPES, "constexpr"], strict=True))
source = ASTSource(fn=kernel, signature=signature, constexprs={"TILE": cuda.TILE})
built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
sys.stdout.write(f"{kernel.__name__} {len(built.asm['cubin'])}\n")
