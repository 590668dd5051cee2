"""The engines: what runs each one, and which checkpoints it can read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.engine_checks.environments import overlay, python_of
from scripts.engine_checks.variants import K2, K3, MSE, ROOT, WEIGHT_ONLY, Variant


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: its environment, the client that runs in it, and which checkpoints it is given.

    ignores_input_scales   W4A4 is computed with activations as they are
    rounds_weights         weights are decompressed to BF16, which changes those of rule `max`
    is_known_to_be_wrong   a defect of the engine, which is shown and fails nothing
    """

    name: str
    environment: str
    client: str
    reads: Callable[[Variant], bool]
    computes: bool = True
    ignores_input_scales: bool = False
    rounds_weights: bool = False
    is_known_to_be_wrong: bool = False

    def command(self, work: Path, checkpoint: Path, request: Path, out: Path) -> list[str]:
        """Return the command that runs the client."""
        module = f"scripts.engine_checks.clients.{self.client}"
        command = [str(python_of(self.environment, work)), "-m", module, str(checkpoint), str(request), str(out)]
        return [*command, "--as-released"] if self.is_known_to_be_wrong else command

    def variables(self, work: Path) -> dict[str, str]:
        """Return the client's environment variables."""
        path = [str(ROOT)] + ([str(overlay(work))] if self.name == "vllm-0.33" else [])
        fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return {**os.environ, **fixed, "PYTHONPATH": os.pathsep.join(path)}


def _any(_: Variant) -> bool:
    return True


def _k2(variant: Variant) -> bool:
    return variant.form != K3


def _modelopt_k2(variant: Variant) -> bool:
    return not variant.is_compressed_tensors and _k2(variant)


def _compressed_tensors(variant: Variant) -> bool:
    return variant.is_compressed_tensors and _k2(variant)


def _compressed_tensors_k2(variant: Variant) -> bool:
    return variant.is_compressed_tensors and variant.form == K2  # transformers 4 does not know K2.5


def _one(variant: Variant) -> bool:
    return _compressed_tensors_k2(variant) and (variant.activations, variant.rule) == (WEIGHT_ONLY, MSE)


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("vllm", "vllm", "vllm_client", _k2),
        Engine("vllm-0.33", "vllm", "vllm_client", _any),
        Engine("sglang", "sglang", "sglang_client", _any, computes=False),
        Engine("transformers-4", "transformers4", "transformers_client", _compressed_tensors_k2, rounds_weights=True),
        Engine(
            "transformers-5",
            "transformers5",
            "transformers_client",
            _compressed_tensors,
            ignores_input_scales=True,
            rounds_weights=True,
        ),
        Engine("transformers-5-as-released", "transformers5", "transformers_client", _one, is_known_to_be_wrong=True),
        Engine("modelopt", "transformers5", "modelopt_client", _modelopt_k2, computes=False),
    )
}
