"""Loads a checkpoint with the real vLLM on a CPU, checks what it holds, and computes logits and text with K2's."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.engine_checks.clients import vllm_on_cpu
from scripts.engine_checks.clients.files import Checkpoint
from scripts.engine_checks.clients.no_gpu import replace_streams
from scripts.engine_checks.clients.outcome import Arguments, Outcome, read_arguments, save_logits

LONGEST = 288  # tokens: a window, its continuation and some room; vLLM warms up with as many


def main() -> int:
    arguments = read_arguments(__doc__)
    files = Checkpoint(arguments.checkpoint)
    vllm_on_cpu.enable(is_weight_only=files.is_weight_only)
    from vllm import LLM, __version__

    from scripts.engine_checks.clients.vllm_loading import check_loading, check_methods, record_loading
    from scripts.engine_checks.clients.vllm_weights import check_kernel_formats, check_weights, fused_experts

    outcome = Outcome(f"vLLM {__version__.removesuffix('+cpu')}{files.suffix}")
    loading = record_loading()
    if files.is_k3:
        try:
            model, config = load_k3(arguments.checkpoint)
        except Exception as error:  # whatever vLLM refuses it with
            return outcome.refused(error, arguments.out)
    else:
        engine = start(LLM, files)
        model = engine.apply_model(lambda model: model)[0]
        config = engine.llm_engine.vllm_config.quant_config
    outcome.note(f"{type(model).__name__}, {type(config).__name__}")
    check_methods(model, files, outcome)
    check_loading(loading, files, outcome)
    for experts in fused_experts(loading, files):
        check_weights(experts, files, outcome)
        check_kernel_formats(experts, files, outcome)
    if arguments.windows and not files.is_k3:
        logits, greedy = compute(engine, model, arguments, files.config["vocab_size"])
        save_logits(arguments.out, logits, greedy)
    return outcome.save(arguments.out)


def start(llm: Any, files: Checkpoint) -> Any:
    """Return vLLM's engine, in this process, which prepares no pictures for a multimodal model."""
    language_only = {"limit_mm_per_prompt": {"vision_chunk": 1}, "skip_mm_profiling": True}
    return llm(
        str(files.folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=LONGEST,
        max_num_batched_tokens=LONGEST,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        moe_backend="emulation",
        **(language_only if files.prefix else {}),
    )


def load_k3(folder: Path) -> tuple[Any, Any]:
    """Return vLLM's own Kimi K3 with the checkpoint's weights, and vLLM's config of its quantization.

    Nothing is computed: K3's kernels need a GPU. Replaced: CUDA's streams and events, which are made with the model;
    the allocator's cache, which is emptied after loading; and what MLA prepares from kv_b_proj for its kernels. The
    rest is vLLM's own.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    os.environ["VLLM_KIMI_K3_GEMM_AR"] = "0"  # a kernel for several GPUs
    replace_streams()
    torch.accelerator.empty_cache = lambda: None
    from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention

    MultiHeadLatentAttention.process_weights_after_loading = lambda self, dtype: None
    options: dict[str, Any] = {"enforce_eager": True, "moe_backend": "emulation", "skip_tokenizer_init": True}
    options |= {"max_model_len": LONGEST, "max_num_batched_tokens": LONGEST, "enable_prefix_caching": False}
    config = EngineArgs(str(folder), dtype="bfloat16", skip_mm_profiling=True, **options).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        return get_model(vllm_config=config), config.quant_config


def compute(engine: Any, model: Any, request: Arguments, vocabulary: int) -> tuple[list[Any], list[int]]:
    """Return the logits f32 [T, vocabulary] of every window, and the ids that continue the prompt greedily."""
    import torch
    from vllm import SamplingParams, TokensPrompt

    captured: list[Any] = []
    plain = model.compute_logits

    def compute_logits(hidden: Any, *args: Any, **options: Any) -> Any:
        logits = plain(hidden, *args, **options)
        captured.append(logits.float().clone())
        return logits

    model.compute_logits = compute_logits
    windows = []
    for ids in request.windows:
        captured.clear()
        options = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        engine.generate([TokensPrompt(prompt_token_ids=ids)], options, use_tqdm=False)
        prompt = next(c for c in captured if len(c) == len(ids) - 1)  # the positions that have a next token
        last = next(c for c in captured if len(c) == 1)
        windows.append(torch.cat([prompt, last])[:, :vocabulary])
    options = SamplingParams(max_tokens=request.new_tokens, temperature=0, detokenize=False, ignore_eos=True)
    output = engine.generate([TokensPrompt(prompt_token_ids=request.prompt)], options, use_tqdm=False)[0]
    return windows, list(output.outputs[0].token_ids)


if __name__ == "__main__":
    sys.exit(main())
