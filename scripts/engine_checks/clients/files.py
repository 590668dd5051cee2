"""What a checkpoint's files say, in a few lines of plain torch: no code of the converter and none of the engines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
K3_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class Checkpoint:
    """An NVFP4 checkpoint of either layout. Names of modules are the language model's, without a wrapper's prefix."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole_config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.config: dict[str, Any] = self.whole_config.get("text_config", self.whole_config)
        self.prefix = "language_model." if "text_config" in self.whole_config else ""
        self.is_k3 = self.whole_config.get("model_type") == "kimi_k3"
        self.suffix = ", Kimi K3" if self.is_k3 else ""
        self.tensors: dict[str, Tensor] = {}
        for shard in sorted(folder.glob("*.safetensors")):
            with safe_open(shard, "pt") as file:
                self.tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self.is_modelopt = any(name.endswith(".weight_scale_2") for name in self.tensors)
        self.is_weight_only = not any(name.endswith(("input_scale", "input_global_scale")) for name in self.tensors)

    @property
    def moe_layers(self) -> range:
        return range(self.config["first_k_dense_replace"], self.config["num_hidden_layers"])

    @property
    def num_experts(self) -> int:
        return self.config["num_experts" if self.is_k3 else "n_routed_experts"]

    @property
    def num_matrices(self) -> int:
        return len(self.moe_layers) * self.num_experts * len(PROJECTIONS)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of a projection's parameters: codes, block scales, global scale, and the input scale of W4A4."""
        modelopt = ("weight", "weight_scale", "weight_scale_2", "input_scale")
        packed = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
        names = modelopt if self.is_modelopt else packed
        return names[:3] if self.is_weight_only else names

    def expert(self, layer: int, expert: int, projection: str) -> str:
        name = K3_PROJECTIONS[projection] if self.is_k3 else projection
        return f"{self.bank(layer)}.{expert}.{name}"

    def bank(self, layer: int) -> str:
        """Return the name of a layer's routed experts."""
        return f"model.layers.{layer}.{'block_sparse_moe' if self.is_k3 else 'mlp'}.experts"

    def experts(self) -> Iterator[tuple[int, int, str]]:
        """Yield (layer, expert, projection) of every routed expert's matrix."""
        for layer in self.moe_layers:
            for expert in range(self.num_experts):
                for projection in PROJECTIONS:
                    yield layer, expert, projection

    def get(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]

    def weight(self, module: str) -> Tensor:
        """Return a linear module's weight [rows, columns] in float64, NVFP4 or not."""

        def part(suffix: str) -> Tensor | None:
            return self.tensors.get(f"{self.prefix}{module}.{suffix}")

        scale = part("weight_scale")
        if scale is None:
            return self.get(f"{module}.weight").double()
        divisor = part("weight_global_scale")
        if divisor is not None:
            return decode(self.get(f"{module}.weight_packed"), scale, 1 / divisor.double())
        return decode(self.get(f"{module}.weight"), scale, self.get(f"{module}.weight_scale_2").double())

    def input_scale(self, module: str) -> float | None:
        """Return the global scale of a module's activations; None if they stay as they are."""
        value = self.tensors.get(f"{self.prefix}{module}.input_scale")
        if value is not None:
            return float(value)
        divisor = self.tensors.get(f"{self.prefix}{module}.input_global_scale")
        return None if divisor is None else float(1 / divisor)


def decode(codes: Tensor, block_scales: Tensor, global_scale: Tensor) -> Tensor:
    """Decode U8 [rows, columns / 2] with E4M3 [rows, columns / 16] in float64."""
    values = E2M1.double()[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
    return (values.unflatten(-1, (-1, 16)) * (block_scales.double() * global_scale).unsqueeze(-1)).flatten(-2)


def same_bytes(reference: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bytes, whatever their shapes."""
    left, right = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (reference, other))
    return torch.equal(left, right)


def sqnr_db(reference: Tensor, other: Tensor) -> float:
    """Return the signal to noise ratio in dB."""
    reference = reference.double()
    other = other.double()
    noise = (reference - other).square().sum()
    return float("inf") if noise == 0 else float(10 * torch.log10(reference.square().sum() / noise))
