"""Lets an unmodified SGLang load NVFP4 models on a CPU. It has no NVFP4 emulation, so nothing is computed with them.

Replaced: the gate "is this a Blackwell GPU" of the NVFP4 methods; torchvision's operators and the compiled rotary
embedding, which are never called; the rotary embedding of SGLang's CPU path, which knows yarn alone; the streams of
Kimi K3, whose cache of prefixes needs a GPU and is off. Config parsing, model classes, methods, weight loading and
processing after loading are SGLang's own.
"""

import socket
import sys
import types
from pathlib import Path
from typing import Any

import torch

from scripts.engine_checks.clients.no_gpu import replace_streams


def enable() -> None:
    """Replace what the head of this file lists. Call it before SGLang is imported."""
    register = torch.library.register_fake

    def register_fake(operator: Any, *args: Any, **options: Any) -> Any:
        if str(operator).startswith("torchvision::"):
            return lambda function: function
        return register(operator, *args, **options)

    torch.library.register_fake = register_fake
    import torchvision  # noqa: F401

    package = types.ModuleType("vllm")
    operators = types.ModuleType("vllm._custom_ops")
    package.__path__, operators.rotary_embedding = [], None  # type: ignore[attr-defined]
    sys.modules.update({"vllm": package, "vllm._custom_ops": operators})
    _pass_for_blackwell()
    replace_streams()


class _Blackwell:
    """A platform that says it is a Blackwell GPU, and answers everything else itself."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return True if name == "is_blackwell" else getattr(self._platform, name)


def _pass_for_blackwell() -> None:
    import sglang.srt.models.deepseek_v2 as deepseek
    from sglang.srt.layers.quantization import modelopt_quant
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4_moe
    from sglang.srt.layers.rotary_embedding import factory

    for module in (modelopt_quant, compressed_tensors_w4a4_nvfp4_moe):
        module.get_platform = lambda plain=module.get_platform: _Blackwell(plain())
    torch.cuda.get_device_capability = lambda *a: (10, 0)
    deepseek.get_rope_wrapper = lambda *a, device=None, **k: factory.get_rope(*a, **k)


def start(folder: Path, *, backend: str) -> Any:
    """Prepare SGLang's global state for one process on the CPU; return its config of the model."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    options = {"disable_cuda_graph": True, "disable_radix_cache": True}
    server = ServerArgs(model_path=str(folder), device="cpu", moe_runner_backend=backend, **options)
    publish(server, role="weight_cache_daemon", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    config = ModelConfig(model_path=str(folder), dtype="bfloat16")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    init_distributed_environment(world_size=1, rank=0, distributed_init_method=address, local_rank=0, backend="gloo")
    initialize_model_parallel()
    initialize_dp_attention(server)
    init_dp_gathered_buffer(config)
    return config
