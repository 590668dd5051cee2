"""Builds vLLM's own Kimi K3 on a CPU and loads a checkpoint into it. Nothing is computed: K3's kernels need a GPU.

Replaced: CUDA's streams and events, which are made with the model; the allocator's cache, which is emptied after
loading; and what MLA prepares from kv_b_proj for its kernels. Config parsing, model classes, choice of methods, names
and loading of weights, and what is prepared of the experts for kernels are vLLM's own.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from scripts.engine_checks.clients.no_gpu import replace_streams


def load_k3(folder: Path) -> tuple[Any, Any]:
    """Return vLLM's model with the checkpoint's weights, and vLLM's config of its quantization."""
    os.environ["VLLM_KIMI_K3_GEMM_AR"] = "0"  # a kernel for several GPUs
    replace_streams()
    torch.accelerator.empty_cache = lambda: None
    from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention

    MultiHeadLatentAttention.process_weights_after_loading = lambda self, dtype: None
    options: dict[str, Any] = {"enforce_eager": True, "moe_backend": "emulation", "skip_tokenizer_init": True}
    options |= {"max_model_len": 288, "max_num_batched_tokens": 288, "enable_prefix_caching": False}
    config = EngineArgs(str(folder), dtype="bfloat16", skip_mm_profiling=True, **options).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        return get_model(vllm_config=config), config.quant_config
