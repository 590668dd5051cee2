"""Work of a pass and of a walk of rule `gptq` on a GPU that is not here, and its time from the GPU's data sheet.

FLOP/s are dense, as pages that quote NVIDIA's tables give them: glennklockwood.com/garden/processors for H100, H200,
B200 and GB200, hmc-tech.com for B200 and GB200, itkb.uw.cz (2026-06-22) for B300. The other ones are NVIDIA's published
figures, not looked up again. NVIDIA names only FP4 for DGX Spark.

The products that round gate and up, and the experts, are in TF32; what is summed, factored or solved is in FP32 and
FP64. A product of a panel moves more bytes than it computes numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final

from k2convert.calibration.cost import ModelSizes, PassSize, Time, other_flops, pass_flops, shrinkage_tries, walk_steps
from k2convert.calibration.gptq_layer import GROUPED_EXPERTS
from k2convert.fit.gpus import Gpu
from k2convert.quantize.gptq.device_kernel import PANEL

DECODED_BYTES: Final = 20  # moved for a weight that is decoded
PANEL_FLOPS: Final = 10_000  # FP32 operations as long as the panel kernels take for a weight: .22 ns on an H200
CALL_KERNELS: Final = 24  # started to round some rows, and for each panel of theirs
PANEL_KERNELS: Final = 6
TRY_KERNELS: Final = 45  # started to try one shrinkage
CORRECTION_KERNELS: Final = 185
EXPERT_KERNELS: Final = 60
INT4_BYTES: Final = 0.5625  # of a weight, with its part of the scales

BEST: Final = (0.7, 4e-6, 5e9)  # share of the peak rates, seconds to start a kernel, bytes a second of the disk
WORST: Final = (0.2, 12e-6, 0.5e9)

ROUNDED_GATE_UP: Final = "codes of gate and up"
"""The step of a walk that is dealt out to all GPUs, as the two streams are."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations a second: TF32 on tensor cores, dense; FP32 and FP64 on ordinary cores."""

    tf32: float
    fp32: float
    fp64: float


FLOPS: Final = {
    "b200": Flops(1100e12, 75e12, 37e12),
    "b300": Flops(1125e12, 75e12, 1.25e12),
    "gb200": Flops(1250e12, 80e12, 40e12),
    "gb300": Flops(1250e12, 80e12, 1.3e12),
    "rtx-pro-6000": Flops(251.9e12, 125e12, 1.97e12),
    "h200": Flops(494.7e12, 67e12, 34e12),
    "h100": Flops(494.7e12, 67e12, 34e12),
    "a100": Flops(156e12, 19.5e12, 9.7e12),
}


@dataclass(frozen=True, slots=True)
class GpuWork:
    """Floating-point operations by kind, bytes that a GPU moves in its memory, kernels started, bytes of the source."""

    tf32: float = 0.0
    fp32: float = 0.0
    fp64: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0
    read: float = 0.0

    def __add__(self, other: GpuWork) -> GpuWork:
        return GpuWork(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def times(self, count: float) -> GpuWork:
        """Return this work so many times."""
        return GpuWork(*(getattr(self, field.name) * count for field in fields(self)))

    def dealt(self, gpus: int) -> GpuWork:
        """Return the part of each of several GPUs; one process reads for all of them."""
        return replace(self.times(1 / gpus), read=self.read)


def pass_work(model: ModelSizes, size: PassSize) -> GpuWork:
    """Return the work of a pass."""
    num_moe = model.num_moe(size)
    num_chunks = -(-size.num_windows // size.chunk)
    weights = 3 * model.num_experts * model.hidden * model.width
    others = 2.0 * sum(model.other_weights[layer] for layer in model.layers(size))
    return GpuWork(
        tf32=pass_flops(model, size),
        moved=num_moe * num_chunks * weights * DECODED_BYTES,
        kernels=num_moe * num_chunks * model.num_experts * EXPERT_KERNELS,
        read=num_moe * num_chunks * weights * INT4_BYTES + others,
    )


def gpu_steps(model: ModelSizes, size: PassSize) -> dict[str, GpuWork]:
    """Return the work of each step that a walk does in a MoE layer beyond the two streams."""
    hidden = model.hidden
    width = model.width
    experts = model.num_experts
    weights = 3 * experts * hidden * width
    groups = -(-experts // GROUPED_EXPERTS)
    routed = size.num_tokens * model.experts_per_token // max(experts, 1)
    moves = {
        "experts, converted": GpuWork(
            moved=3 * weights * DECODED_BYTES, kernels=3 * experts * EXPERT_KERNELS, read=weights * INT4_BYTES
        ),
        "shrinkage and factor of gate and up": GpuWork(kernels=shrinkage_tries(hidden, size.num_tokens) * TRY_KERNELS),
        ROUNDED_GATE_UP: _rounded(hidden, 2 * width * experts, calls=groups),
        "shrinkage and factor of down": GpuWork(kernels=experts * shrinkage_tries(width, routed) * TRY_KERNELS),
        "correction of down": GpuWork(kernels=experts * CORRECTION_KERNELS),
        "codes of down": _rounded(width, hidden, calls=1).times(experts),
    }
    steps = walk_steps(model, size)
    assert moves.keys() <= steps.keys()
    found = {name: GpuWork(fp32=step.fp32, fp64=step.fp64) + moves.get(name, GpuWork()) for name, step in steps.items()}
    for name in ("experts, converted", ROUNDED_GATE_UP):
        found[name] = replace(found[name], tf32=steps[name].fp32, fp32=found[name].fp32 - steps[name].fp32)
    return found


def _rounded(columns: int, rows: int, *, calls: int) -> GpuWork:
    weights = float(rows) * columns
    return GpuWork(
        fp32=PANEL_FLOPS * weights,
        moved=weights * columns / 8,  # a panel changes what is behind it, and in the first sweep everything
        kernels=calls * (CALL_KERNELS + PANEL_KERNELS * columns / PANEL),
    )


def walk_work(model: ModelSizes, size: PassSize, *, gpus: int = 1) -> GpuWork:
    """Return the work of a walk of rule gptq on the first of several GPUs. It does what is not dealt out."""
    layer = gpu_steps(model, size)
    dealt = layer.pop(ROUNDED_GATE_UP).times(model.num_moe(size)) + GpuWork(tf32=other_flops(model, size))
    own = sum(layer.values(), GpuWork()).times(model.num_moe(size))
    return (pass_work(model, size) + dealt).dealt(gpus) + own


def gpu_time(work: GpuWork, gpu: Gpu, flops: Flops, *, search: float) -> Time:
    """Return the least and the most seconds that a GPU takes; `search` seconds of it are the CPU's."""
    assert gpu.bandwidth is not None
    found: list[float] = []
    for share, start, disk in (BEST, WORST):
        compute = work.tf32 / flops.tf32 + work.fp32 / flops.fp32 + work.fp64 / flops.fp64
        moving = max(work.moved / gpu.bandwidth / share, work.kernels * start)
        found.append(compute / share + moving + work.read / disk + search)
    return Time(*found)
