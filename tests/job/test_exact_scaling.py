"""Smoothing alone changes no logit: with nothing quantized, the scaled model is the unscaled one, bit for bit."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from k2convert.calibration.layer_files import Calibration, conversion_work
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.reader import ShardReader
from k2convert.forward.work import WorkFolder
from k2convert.job.prepare import choose_recipe
from k2convert.models.projections import load_projection
from k2convert.plan.plan import CopyStep, Plan, plan_conversion
from k2convert.quantize.formats.bf16 import Bf16Weight
from scripts.evaluation.measure import encode

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = (1, 2, 3)
TYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def tensor_of(data: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(data.view(np.uint8).copy()).view(TYPES[dtype]).reshape(shape)


def unquantized(tiny: Path, plan: Plan, calibration: Calibration | None) -> dict[str, Tensor]:
    """Every tensor of the result as it is before it is quantized, by the functions of a job."""
    state: dict[str, Tensor] = {}
    with ShardReader(lambda name: tiny / name) as reader:
        for step in (step for shard in plan.jobs for step in shard.steps):
            if isinstance(step, CopyStep):
                info: TensorInfo = step.tensor
                data = reader.read(info)
                if calibration and step.scaling:
                    data = calibration.scaled_copy(data, info, step.scaling)
                state[info.name] = tensor_of(data, info.dtype, info.shape)
                continue
            for projection in step.members:
                weight = load_projection(reader.read, projection)
                if calibration:
                    weight = calibration.scaled_weight(weight, projection)
                weight = Bf16Weight(weight.bits)
                state[f"{projection.module}.weight"] = tensor_of(weight.bits, "BF16", weight.shape)
    return state


def fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in state.items() if ".mlp.experts." not in name}
    for layer in LAYERS:
        stem = f"model.layers.{layer}.mlp.experts"
        experts = [{k: state[f"{stem}.{e}.{k}_proj.weight"] for k in ("gate", "up", "down")} for e in range(16)]
        tensors[f"{stem}.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in experts])
        tensors[f"{stem}.down_proj"] = torch.stack([e["down"] for e in experts])
    return tensors


Forward = Callable[[dict[str, Tensor], torch.dtype], list[Tensor]]


@pytest.fixture(scope="module")
def forward(tiny: Path) -> Forward:
    """Logits and routing of the tiny checkpoint's own network with given weights, on 256 tokens."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = open_checkpoint(tiny).parse_config()
    known = {k: v for k, v in config.items() if k not in ("quantization_config", "model_type", "architectures")}
    tokens = encode(tiny, (tiny / "eval.txt").read_text(), tokens=256)

    def run(state: dict[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
        network = DeepseekV3ForCausalLM(DeepseekV3Config(**known)).to(dtype).eval()
        network.load_state_dict(fused(state), strict=True)
        routing: list[Tensor] = []
        for layer in LAYERS:
            network.model.layers[layer].mlp.gate.register_forward_hook(lambda *call: routing.extend(call[2]))
        with torch.inference_mode():
            logits = network(tokens, use_cache=False).logits
        return [logits, *routing]

    return run


class RandomExponents(Calibration):
    """Exponents -4..4 that no layer pass chose."""

    def __init__(self, work: WorkFolder, columns: int) -> None:
        super().__init__(work)
        self._columns = columns

    def exponents(self, layer: int) -> Any:
        return np.random.default_rng(layer).integers(-4, 5, self._columns).astype(np.int8)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_and_routing_are_equal(dtype: torch.dtype, tiny: Path, tmp_path: Path, forward: Forward) -> None:
    source = open_checkpoint(tiny)
    calibration = RandomExponents(conversion_work(tmp_path), source.config["hidden_size"])
    plan = plan_conversion(source=source, recipe=choose_recipe(source, None, {}), scaled_layers=LAYERS)
    before = unquantized(tiny, plan, None)
    after = unquantized(tiny, plan, calibration)
    scaled = r"model\.layers\.[123]\.(post_attention_layernorm|mlp\.gate|mlp\..*experts\..*(gate|up)_proj)\.weight"
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if re.fullmatch(scaled, name)}
    for actual, expected in zip(forward(after, dtype), forward(before, dtype), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    name = next(name for name in sorted(changed) if name.endswith("experts.3.up_proj.weight"))
    after[name][:, 0] *= 2
    assert not torch.equal(forward(after, dtype)[0], forward(before, dtype)[0])
