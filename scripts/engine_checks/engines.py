"""The engines: what runs each one, and which checkpoints it can read."""

import os
from dataclasses import dataclass
from pathlib import Path

from scripts.engine_checks.environments import overlay, python_of
from scripts.engine_checks.variants import COMPRESSED_TENSORS, K2, K3, K25, MSE, ROOT, WEIGHT_ONLY, Variant


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: its environment, the client that runs in it, and which checkpoints it is given.

    ignores_input_scales   W4A4 is computed with activations as they are
    rounds_weights         weights are decompressed to BF16, which changes those of rule `max`
    is_known_to_be_wrong   a defect of the engine, which is shown with one checkpoint and fails nothing
    """

    name: str
    environment: str
    client: str
    forms: tuple[str, ...] = (K2, K25)
    layouts: tuple[str, ...] = ("modelopt", COMPRESSED_TENSORS)
    computes: bool = True
    ignores_input_scales: bool = False
    rounds_weights: bool = False
    is_known_to_be_wrong: bool = False

    def reads(self, variant: Variant) -> bool:
        """Return whether the engine is given a checkpoint."""
        if self.is_known_to_be_wrong and (variant.activations, variant.rule) != (WEIGHT_ONLY, MSE):
            return False
        return variant.form in self.forms and variant.layout in self.layouts

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


PACKED = (COMPRESSED_TENSORS,)
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("vllm", "vllm", "vllm_client"),
        Engine("vllm-0.33", "vllm", "vllm_client", (K2, K25, K3)),
        Engine("sglang", "sglang", "sglang_client", (K2, K25, K3), computes=False),
        # transformers 4 does not know K2.5
        Engine("transformers-4", "transformers4", "transformers_client", (K2,), PACKED, rounds_weights=True),
        Engine("transformers-5", "transformers5", "transformers_client", (K2, K25), PACKED, rounds_weights=True,
               ignores_input_scales=True),
        Engine("transformers-5-as-released", "transformers5", "transformers_client", (K2,), PACKED,
               is_known_to_be_wrong=True),
        Engine("modelopt", "transformers5", "modelopt_client", layouts=("modelopt",), computes=False),
    )
}  # fmt: skip
