"""Counts the steps of rule `gptq` on a model, measures the rate of each on one core, and says what all layers take.

`python -m scripts.bench.gptq_steps HEADERS --tokens N`: HEADERS is a folder with the headers of the model
(`scripts/fixtures k2-thinking-headers`). Each step runs on the model's own shapes in one thread, once to warm up and
once to be timed in processor seconds. A pass of `calibrate` is timed by one expert, one product and one try of
smoothing exponents.

A GPU is not measured: its time is computed from its data sheet. FLOP/s of H200 are dense, as
glennklockwood.com/garden/processors quotes NVIDIA's table. The products that round gate and up, and the experts, are in
TF32; what is summed, factored or solved is in FP32 and FP64. A product of a panel moves more bytes than it computes
numbers. Reading is counted for GPUs only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from k2convert.calibration.cost import (
    ModelSizes,
    PassSize,
    Time,
    Work,
    made_up_expert,
    made_up_weight,
    other_flops,
    pass_flops,
    read_sizes,
    shrinkage_tries,
    walk_steps,
)
from k2convert.calibration.gptq_layer import GROUPED_EXPERTS
from k2convert.calibration.imatrix_gain import SAMPLED_TOKENS
from k2convert.calibration.smoothing import SAMPLED_ROWS, STEPS, GateUpRows, Proxy
from k2convert.checkpoint.index import open_checkpoint
from k2convert.choices import BLOCK_SIZE
from k2convert.fit.gpus import Gpu, find_gpu
from k2convert.forward.moe import one_torch_thread
from k2convert.job.resources import THREADS_PER_GPU
from k2convert.quantize.gptq.curvature import make_curvature
from k2convert.quantize.gptq.device_kernel import PANEL, kernel_for
from k2convert.quantize.gptq.moments import Missing, Moments, WeightedTokens, correct
from k2convert.quantize.gptq.rounding import SHRINKAGES, round_gptq

TOKENS = 1024
WINDOW = 2048
COLUMNS = 512
CORES = (16, 64, 192)
NUM_GPUS = (1, 8)
ROUNDED_ROWS = 192
FACTORS = 1 + 2 * len(SHRINKAGES)
"""The factors of an input with few tokens, one of which is timed."""

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


H200: Final = Flops(494.7e12, 67e12, 34e12)


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


def seconds_of(run: Callable[[], object]) -> float:
    """Return the processor seconds of the second call."""
    begin = 0.0
    for _ in range(2):
        begin = time.process_time()
        run()
    return time.process_time() - begin


def operations(work: Work) -> float:
    return work.fp32 + work.fp64


def input_seconds(kind: str, columns: int, outputs: int) -> dict[str, float]:
    """Time the steps of one input: `outputs` are the rows of weights that read it."""
    inputs = torch.randn(TOKENS, columns)
    halves = WeightedTokens.by_halves(torch.ones(TOKENS), torch.arange(TOKENS) % 2)
    moments = Moments.start(columns, device="cpu")
    found = {f"moments of {kind}": seconds_of(lambda: moments.add(inputs, halves))}
    if kind == "down":
        missing = torch.randn(TOKENS, outputs)
        sums = Missing.start(columns, outputs, device="cpu")
        found[f"moments of {kind}"] += seconds_of(lambda: sums.add(inputs, missing, halves))
        moments.complete()
        found[f"correction of {kind}"] = seconds_of(lambda: correct(moments, sums))
    moments.complete()
    form = moments.form()
    found[f"shrinkage and factor of {kind}"] = seconds_of(lambda: make_curvature(form, 0.5)) * FACTORS
    curvature = make_curvature(form, 0.5)
    targets = torch.randn(ROUNDED_ROWS, columns)
    rounding = seconds_of(lambda: round_gptq(targets, 1.0, curvature, kernel_for("cpu")))
    return found | {f"codes of {kind}": rounding * outputs / ROUNDED_ROWS}


def measured_rates(model: ModelSizes) -> dict[str, float]:
    """Return the operations a second of one core in each step, of a layer with one expert that gets every token."""
    small = replace(model, num_experts=1, experts_per_token=1)
    work = walk_steps(small, PassSize(1, TOKENS, 1, ("cpu",), 1, 1))
    seconds = input_seconds("gate and up", model.hidden, 2 * model.width)
    seconds |= input_seconds("down", model.width, model.hidden)
    left = torch.randn(TOKENS, model.hidden)
    right = torch.randn(model.hidden, model.width)
    product = 2 * TOKENS * model.hidden * model.width / seconds_of(lambda: left @ right)
    return {name: operations(step) / seconds[name] if name in seconds else product for name, step in work.items()}


def pass_seconds(model: ModelSizes, size: PassSize, product: float) -> tuple[float, float]:
    """Return the core-seconds of `calibrate` without the search of exponents, and of that search, which few cores do.

    `product` is the operations a second of one core in a matrix product.
    """
    tokens = -(-size.chunk_windows * size.window * model.experts_per_token // model.num_experts)
    expert = seconds_of(made_up_expert(model, tokens, "cpu"))
    experts = model.num_moe(size) * model.num_experts * -(-size.num_windows // size.chunk) * expert
    rows = GateUpRows(np.ones(COLUMNS), (made_up_weight(SAMPLED_ROWS, COLUMNS),))
    proxy = Proxy(torch.ones(SAMPLED_TOKENS, COLUMNS), np.ones(COLUMNS, dtype=np.float32), rows)
    search = seconds_of(lambda: proxy.errors((np.arange(COLUMNS) % 2).astype(np.int8)))
    search *= (1 + BLOCK_SIZE * len(STEPS)) * model.hidden / COLUMNS
    return experts + other_flops(model, size) / product, model.num_moe(size) * search


def duration(seconds: float) -> str:
    """Return a duration in minutes or hours."""
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def show_machines(model: ModelSizes, size: PassSize, one: float, search: float, walk: float) -> None:
    """Print what a calibration takes on other machines. The core-seconds are of a pass, its search, and rule gptq."""
    print("\n| machine | `calibrate`, rule `imatrix` | `run --calibrate`, rule `gptq` |\n|---|---:|---:|")
    for cores in CORES:
        seconds = one / cores + search / min(len(STEPS), cores)
        print(f"| {cores} cores that are always busy | {duration(seconds)} | {duration(walk / cores)} |")
    gpu = find_gpu("h200")
    for number in NUM_GPUS:
        spans: list[str] = []
        on_gpus = replace(size, devices=("cuda:0",), chunk=size.num_windows)
        searching = search / min(len(STEPS), THREADS_PER_GPU * number)
        for work in (pass_work(model, on_gpus).dealt(number), walk_work(model, on_gpus, gpus=number)):
            time = gpu_time(work, gpu, H200, search=searching)
            spans.append(f"{duration(time.least)} to {duration(time.most)}")
        print(f"| {number} {gpu.title}, from its data sheet | {' | '.join(spans)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("headers", type=Path)
    parser.add_argument("--tokens", type=int, default=196_608)
    arguments = parser.parse_args()
    model = read_sizes(open_checkpoint(arguments.headers))
    windows = arguments.tokens // WINDOW
    size = PassSize(windows, WINDOW, 2, ("cpu",), 1, model.num_layers)
    with torch.no_grad(), one_torch_thread():
        rates = measured_rates(model)
        one, search = pass_seconds(model, size, rates["experts, converted"])
    steps = walk_steps(model, size)
    product = rates["experts, converted"]
    streams = pass_flops(model, size) + other_flops(model, size)
    print("| step | operations per layer | GFLOP/s of one core | core-hours, all layers | share |")
    print("|---|---:|---:|---:|---:|")
    hours = {name: model.num_moe(size) * operations(step) / rates[name] / 3600 for name, step in steps.items()}
    hours["both streams: attention, experts once"] = streams / product / 3600
    total = sum(hours.values())
    for name, spent in hours.items():
        work = operations(steps[name]) if name in steps else streams / model.num_layers
        rate = rates.get(name, product)
        print(f"| {name} | {work / 1e12:,.1f} T | {rate / 1e9:.0f} | {spent:,.1f} | {100 * spent / total:.0f} % |")
    print(f"\n{total:,.0f} core-hours by rule gptq; {(one + search) / 3600:,.0f} of `calibrate`.")
    show_machines(model, size, one, search, total * 3600)


if __name__ == "__main__":
    main()
