"""One mixture-of-experts block in plain torch: the other side of every comparison of outputs."""

import torch
from torch import Tensor

from scripts.engine_checks.clients.files import E2M1, PROJECTIONS, Checkpoint


def fp4_activations(values: Tensor, scale: float) -> Tensor:
    """Round f32 [..., K] to NVFP4 and back: blocks of 16, E4M3 scales of amax / 6, nearest E2M1, ties to even."""
    blocks = values.float().unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True)
    scales = (amax / (6 * scale)).clamp(max=448).to(torch.float8_e4m3fn).float() * scale
    steps = torch.where(scales > 0, blocks / scales, 0).abs()
    grid = E2M1[:8]
    middles = (E2M1[:7] + E2M1[1:8]) / 2
    upper = torch.bucketize(steps.contiguous(), middles)  # at or below a middle: the lower neighbour
    tie = (steps == middles[upper.clamp(max=6)]) & (upper % 2 == 1) & (upper < 7)
    return (grid[upper + tie.long()] * blocks.sign() * scales).flatten(-2)


def moe(checkpoint: Checkpoint, layer: int, hidden: Tensor) -> Tensor:
    """Return the output f32 [T, H] of a layer's mixture-of-experts block for hidden f32 [T, H]."""
    config = checkpoint.config
    name = f"model.layers.{layer}.mlp"

    def weight(module: str) -> Tensor:
        return checkpoint.weight(f"{name}.{module}").float()

    def quantized(rows: Tensor, module: str) -> Tensor:
        scale = checkpoint.input_scale(f"{name}.{module}")
        return rows if scale is None else fp4_activations(rows, scale)

    def mlp(rows: Tensor, module: str) -> Tensor:
        gate, up, down = (weight(f"{module}.{projection}") for projection in PROJECTIONS)
        rows = quantized(rows, f"{module}.gate_proj")
        inner = torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)
        return quantized(inner, f"{module}.down_proj") @ down.T

    scores = (hidden @ weight("gate").T).sigmoid()
    biased = scores + checkpoint.get(f"{name}.gate.e_score_correction_bias").float()
    chosen = biased.topk(config["num_experts_per_tok"], -1).indices
    weights = scores.gather(-1, chosen)
    if config["norm_topk_prob"]:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * config["routed_scaling_factor"]
    output = mlp(hidden, "shared_experts")
    for expert in range(checkpoint.num_experts):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        if len(token):
            output.index_add_(0, token, mlp(hidden[token], f"experts.{expert}") * weights[token, slot, None])
    return output
