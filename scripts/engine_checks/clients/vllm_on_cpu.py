"""Lets an unmodified vLLM run NVFP4 models on a CPU.

vLLM has no NVFP4 kernel for CPUs, and reserves its emulation (a Triton kernel) for GPUs. Here the emulation is let
through, and Triton's interpreter executes it. This file replaces, and nothing else:

1. The gate: `Nvfp4QuantizationEmulationTritonExperts._supports_current_device` says yes. ModelOptNvFp4Config admits
   float32, for exact comparisons.
2. Three compiled helpers that the CPU build lacks, none of which touches a weight: moe_align_block_size (sorts tokens
   by expert), moe_sum (adds up a token's experts), mla_decode_kvcache (attention of one token; the compiled one takes
   a latent of 576 only, the tiny checkpoint's has 80). And the compiled rotary_embedding gets one row for each token:
   given [tokens, heads, size], vLLM 0.32's CPU build takes heads for tokens.
3. The emulated linear kernel is registered for the CPU, for recipes that convert shared experts.
4. W4A16: vLLM serves it by Marlin, which needs a GPU. The same emulation is let through, without rounding activations.
5. Triton's interpreter is taught bfloat16: it truncates where it should round, and multiplies bit patterns.
6. MLA heads of small test models are let through.

Config parsing, model classes, weight loading, processing after loading, routing, the dequantizing GEMM kernel,
scheduling, KV cache and sampling are vLLM's own.
"""

import os
import types
from typing import Any

import torch
from torch import Tensor

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, so that its weights can be looked at
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
TILE = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 256, "GROUP_SIZE_M": 1, "SPLIT_K": 1}
COMPILED_LATENT = 576


def enable(*, is_weight_only: bool) -> None:
    """Replace what the head of this file lists. Call it before vLLM is imported."""
    os.environ.update(ENVIRONMENT)
    import triton
    import triton.language as tl
    import vllm.triton_utils as triton_utils

    # vLLM replaces triton by a placeholder on a CPU, so its kernels are plain functions. HAS_TRITON stays false, and
    # vLLM takes its CPU paths everywhere else.
    triton_utils.triton = triton
    triton_utils.tl = tl
    _quiet_dispatcher()
    _admit_emulation(is_weight_only=is_weight_only)
    _admit_small_heads()
    _replace_helpers()
    _teach_bfloat16()


def _quiet_dispatcher() -> None:
    """vLLM looks through loaded modules for kernels to replace, and stops at objects with an odd __dict__."""
    from vllm.triton_utils import dispatcher

    def own_attributes(value: Any) -> Any:
        attributes = value.__dict__
        return attributes if isinstance(attributes, (dict, types.MappingProxyType)) else {}

    dispatcher.vars = own_attributes


def _admit_emulation(*, is_weight_only: bool) -> None:
    from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel, register_linear_kernel
    from vllm.model_executor.layers.fused_moe.experts import nvfp4_emulation_moe as emulation
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static
    from vllm.platforms import PlatformEnum

    emulation.try_get_optimal_moe_config = lambda *a, **k: dict(TILE)  # fewer, larger programs for the interpreter
    experts = emulation.Nvfp4QuantizationEmulationTritonExperts
    experts._supports_current_device = staticmethod(lambda: True)
    ModelOptNvFp4Config.get_supported_act_dtypes = lambda self: [torch.bfloat16, torch.half, torch.float32]
    if is_weight_only:
        schemes = [(kNvfp4Static, None)]
        experts._supports_quant_scheme = staticmethod(lambda weight, activation: (weight, activation) in schemes)
        emulation.moe_kernel_quantize_input = lambda A, **rest: (A, None)
    register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")


def _admit_small_heads() -> None:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend

    sizes = [*MLACommonBackend.get_supported_head_sizes(), 80]
    MLACommonBackend.get_supported_head_sizes = classmethod(lambda cls: sizes)


def _replace_helpers() -> None:
    from vllm import _custom_ops as ops

    compiled_decode = ops.mla_decode_kvcache_cpu
    compiled_rotary = ops.rotary_embedding

    def mla_decode_either(
        out: Tensor, query: Tensor, cache: Tensor, scale: float, tables: Tensor, lengths: Tensor
    ) -> None:
        decode = compiled_decode if cache.shape[-1] == COMPILED_LATENT else mla_decode
        decode(out, query, cache, scale, tables, lengths)

    def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor | None, *rest: Any) -> None:
        flat = [None if t is None else t.reshape(positions.numel(), -1).clone() for t in (query, key)]
        compiled_rotary(positions.flatten(), *flat, *rest)
        for target, value in zip((query, key), flat, strict=True):
            if target is not None and value is not None:
                target.copy_(value.view(target.shape))

    ops.moe_align_block_size = moe_align_block_size
    ops.moe_sum = moe_sum
    ops.mla_decode_kvcache_cpu = mla_decode_either
    ops.rotary_embedding = rotary_embedding


def moe_align_block_size(
    topk_ids: Tensor,
    num_experts: int,
    block: int,
    sorted_ids: Tensor,
    expert_ids: Tensor,
    total: Tensor,
    expert_map: None = None,
    scatter: None = None,
) -> None:
    """Sort (token, choice) pairs by expert, each expert's share padded to whole blocks."""
    assert expert_map is None
    assert scatter is None
    flat = topk_ids.flatten().long()
    sorted_ids.fill_(flat.numel())
    expert_ids.zero_()
    at = 0
    for expert in range(num_experts):
        rows = (flat == expert).nonzero().flatten()
        blocks = -(-rows.numel() // block)
        sorted_ids[at : at + rows.numel()] = rows.int()
        expert_ids[at // block : at // block + blocks] = expert
        at += blocks * block
    total.fill_(at)


def moe_sum(values: Tensor, output: Tensor, topk_ids: None = None, expert_map: None = None) -> None:
    """Add up the outputs [T, choices, H] of a token's experts."""
    assert expert_map is None
    output.copy_(values.float().sum(1).to(output.dtype))


def mla_decode(out: Tensor, query: Tensor, cache: Tensor, scale: float, tables: Tensor, lengths: Tensor) -> None:
    """Attention of one token for each sequence over the latent cache [pages, page size, rank + rotary]."""
    rank = out.shape[-1]
    page = cache.shape[1]
    for i in range(query.shape[0]):
        length = int(lengths[i])
        pages = tables[i, : -(-length // page)].long()
        latent = cache[pages].reshape(-1, cache.shape[-1])[:length].float()
        weights = torch.softmax(query[i].float() @ latent.T * scale, -1)
        out[i] = (weights @ latent[:, :rank]).to(out.dtype)


def _teach_bfloat16() -> None:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    handle = interpreter.TensorHandle
    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl
    dot = builder.create_dot

    def widen(value: Any) -> Any:
        if value.dtype.scalar != tl.bfloat16:
            return value
        return handle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16).numpy()
            return handle(rounded, tl.bfloat16)
        return cast(self, source, target)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return dot(self, widen(a), widen(b), d, *rest)

    builder.cast_impl = cast_impl
    builder.create_dot = create_dot
