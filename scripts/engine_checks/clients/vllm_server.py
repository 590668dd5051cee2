"""Serves a checkpoint with the real vLLM on a CPU over HTTP: `vllm_server CHECKPOINT PORT MAX_LOGPROBS`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from scripts.engine_checks.clients import vllm_on_cpu
from scripts.engine_checks.clients.files import Checkpoint

LONGEST = 288  # tokens: a window and some room; vLLM warms up with as many
SERVED = "K2CONVERT_SERVED"


def main() -> None:
    checkpoint, port, max_logprobs = sys.argv[1:]
    os.environ[SERVED] = checkpoint
    files = enable()
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    sys.argv = ["vllm", "--model", checkpoint, "--host", "127.0.0.1", "--port", port, "--max-logprobs", max_logprobs]
    sys.argv += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4"]
    sys.argv += ["--max-model-len", str(LONGEST), "--max-num-batched-tokens", str(LONGEST)]
    sys.argv += ["--moe-backend", "emulation"] if "quantization_config" in files.whole_config else []
    serve()


def enable() -> Checkpoint:
    """Replace what a CPU lacks (see vllm_on_cpu) for the served checkpoint, and return it."""
    files = Checkpoint(Path(os.environ[SERVED]))
    vllm_on_cpu.enable(is_weight_only=files.is_weight_only)
    return files


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # the engine's process, which vLLM spawns
    enable()
