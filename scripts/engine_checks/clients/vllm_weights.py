"""Compares vLLM's fused experts with the files: the bytes, the numbers, and what vLLM makes of them for its kernels."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend, convert_to_nvfp4_moe_kernel_format
from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

from scripts.engine_checks.clients.files import PROJECTIONS, Checkpoint, same_bytes
from scripts.engine_checks.clients.outcome import Outcome
from scripts.engine_checks.clients.vllm_loading import Loading

KERNEL_BACKENDS = (NvFp4MoeBackend.FLASHINFER_CUTLASS, NvFp4MoeBackend.VLLM_CUTLASS)


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The parameters of a layer's experts as loaded: gate and up in one (13), down in the other (2).

    `stored_*` are scalars as in the files, by parameter; compressed-tensors stores divisors.
    """

    layer: int
    module: Any
    codes13: Tensor
    codes2: Tensor
    scales13: Tensor
    scales2: Tensor
    stored13: dict[str, Tensor]
    stored2: dict[str, Tensor]
    is_divisor: bool

    def scalar(self, stored: Tensor) -> Tensor:
        return 1.0 / stored if self.is_divisor else stored


def fused_experts(loading: Loading, files: Checkpoint) -> Iterator[FusedExperts]:
    """Yield the experts of every layer."""
    codes, scales, *scalars = files.parameters
    for name, parameters in loading.experts.items():
        yield FusedExperts(
            layer=int(name.split("layers.")[1].split(".")[0]),
            module=loading.modules[name],
            codes13=parameters[f"w13_{codes}"],
            codes2=parameters[f"w2_{codes}"],
            scales13=parameters[f"w13_{scales}"],
            scales2=parameters[f"w2_{scales}"],
            stored13={scalar: parameters[f"w13_{scalar}"] for scalar in scalars},
            stored2={scalar: parameters[f"w2_{scalar}"] for scalar in scalars},
            is_divisor=not files.is_modelopt,
        )


def check_weights(experts: FusedExperts, files: Checkpoint, outcome: Outcome) -> None:
    """The files' bytes, decoded by vLLM's own decoder to the files' numbers."""
    wrong_bytes = []
    wrong_numbers = []
    for expert in range(files.num_experts):
        loaded = (*_decoded(experts, expert)[0].chunk(2), _decoded(experts, expert)[1])
        for index, projection in enumerate(PROJECTIONS):
            name = files.expert(experts.layer, expert, projection)
            if not _has_bytes(experts, files, name, expert, index):
                wrong_bytes.append(name)
            # FP32 rounds the product of the scales and the value: exact if the global scale is a power of two.
            if not torch.allclose(loaded[index].double(), files.weight(name), rtol=2**-22, atol=0):
                wrong_numbers.append(name)
    where = f"layer {experts.layer}: "
    count = f"{files.num_experts * len(PROJECTIONS)} matrices"
    bytes_found = f"wrong: {wrong_bytes[:2]}" if wrong_bytes else count
    outcome.check(where + "fused experts hold the files' bytes", not wrong_bytes, bytes_found)
    numbers_found = f"wrong: {wrong_numbers[:2]}" if wrong_numbers else count
    outcome.check(where + "vLLM decodes them to the files' numbers", not wrong_numbers, numbers_found)
    shared = all(same_bytes(stored[:, 0], stored[:, 1]) for stored in experts.stored13.values())
    outcome.check(where + "gate and up share their global and input scales", shared)


def _has_bytes(experts: FusedExperts, files: Checkpoint, name: str, expert: int, index: int) -> bool:
    codes, scales, *scalars = (files.get(f"{name}.{parameter}") for parameter in files.parameters)
    if index == PROJECTIONS.index("down_proj"):
        loaded = (experts.codes2[expert], experts.scales2[expert])
        loaded_scalars = [stored[expert] for stored in experts.stored2.values()]
    else:
        loaded = (experts.codes13[expert].chunk(2)[index], experts.scales13[expert].chunk(2)[index])
        loaded_scalars = [stored[expert, index] for stored in experts.stored13.values()]
    pairs = zip((*loaded, *loaded_scalars), (codes, scales, *scalars), strict=True)
    return all(same_bytes(tensor, other) for tensor, other in pairs)


def _decoded(experts: FusedExperts, expert: int) -> tuple[Tensor, Tensor]:
    own = slice(expert, expert + 1)  # three dimensions as in vLLM, but one expert at a time
    global13 = experts.scalar(next(iter(experts.stored13.values())))[own, 0].contiguous()
    global2 = experts.scalar(next(iter(experts.stored2.values()))).flatten()[own]
    both = dequantize_to_dtype(experts.codes13[own], experts.scales13[own], global13, torch.float32, 16, swizzle=False)
    down = dequantize_to_dtype(experts.codes2[own], experts.scales2[own], global2, torch.float32, 16, swizzle=False)
    return both[0], down[0]


def check_kernel_formats(experts: FusedExperts, files: Checkpoint, outcome: Outcome) -> None:
    """What vLLM prepares for GPUs: Marlin's block scales, and for W4A4 the formats of two CUTLASS kernels."""
    where = f"layer {experts.layer}: "
    keeps_scales = all(_marlin_keeps(scales) for scales in (experts.scales13, experts.scales2))
    outcome.check(where + "Marlin's format keeps every block scale", keeps_scales)
    if files.is_weight_only:
        return
    for backend in KERNEL_BACKENDS:
        worst = max(_kernel_errors(experts, files, backend))
        detail = f"largest relative difference {worst:.2g}"
        outcome.check(where + f"{backend.value}'s format decodes to the files' numbers", worst < 1e-6, detail)


def _kernel_errors(experts: FusedExperts, files: Checkpoint, backend: NvFp4MoeBackend) -> Iterator[float]:
    (global13, input13), (global2, input2) = (
        [experts.scalar(stored) for stored in group.values()] for group in (experts.stored13, experts.stored2)
    )
    moved, torch.Tensor.cuda = torch.Tensor.cuda, lambda self, *a, **k: self  # vLLM copies small tensors to the GPU
    try:
        codes13, scales13, global13, _, codes2, scales2, global2, _ = convert_to_nvfp4_moe_kernel_format(
            backend,
            experts.module,
            experts.codes13.clone(),
            experts.scales13.clone(),
            global13[:, 0].clone(),
            input13,
            experts.codes2,
            experts.scales2,
            global2.flatten(),
            input2,
            is_act_and_mul=True,
        )
    finally:
        torch.Tensor.cuda = moved
    up_first = backend == NvFp4MoeBackend.FLASHINFER_CUTLASS
    for expert in range(files.num_experts):
        gate, up, down = (files.weight(files.expert(experts.layer, expert, p)).float() for p in PROJECTIONS)
        for codes, scales, scale, wanted in (
            (codes13, scales13, global13, torch.cat((up, gate) if up_first else (gate, up))),
            (codes2, scales2, global2, down),
        ):
            decoded = dequantize_to_dtype(codes[expert], scales[expert], scale[expert], torch.float32, 16, swizzle=True)
            yield float((decoded - wanted).abs().max() / wanted.abs().max())


def _marlin_keeps(block_scales: Tensor) -> bool:
    """Return whether Marlin's format (Hopper and older) holds every block scale; it can drop the smallest."""
    factor = marlin._nvfp4_compute_scale_factor(block_scales.half())
    for scales in block_scales:
        marlin_scales, _ = marlin.nvfp4_marlin_process_scales(
            scales.half(), scale_factor=factor, a_dtype=torch.bfloat16
        )
        back = (marlin_scales.view(torch.uint8).to(torch.int16) << 7).view(torch.half).float() / 2**7 / factor
        if not torch.equal(back, scales.float().view(-1, 4)[:, [0, 2, 1, 3]].view(scales.shape)):
            return False
    return True
