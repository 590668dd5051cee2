"""Counts the steps of rule `gptq` on a model, measures the rate of each on one core, and says what all layers take.

`python -m scripts.bench.gptq_steps HEADERS --tokens N`: HEADERS is a folder with the headers of the model
(`scripts/fixtures k2-thinking-headers`). Each step runs on the model's own shapes in one thread, once to warm up and
once to be timed in processor seconds. A pass of `calibrate` is timed by one expert, one product and one try of
smoothing exponents.

Reading is not counted. What a GPU takes is measured by gptq_device.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from k2convert.calibration.cost import (
    ModelSizes,
    PassSize,
    made_up_expert,
    made_up_weight,
    other_flops,
    pass_flops,
    read_sizes,
    walk_steps,
)
from k2convert.calibration.smoothing import SAMPLED_ROWS, SAMPLED_TOKENS, STEPS, Proxy
from k2convert.checkpoint.index import open_checkpoint
from k2convert.choices import BLOCK_SIZE
from k2convert.forward.moe import one_torch_thread
from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.gptq.curvature import make_curvature
from k2convert.quantize.gptq.device_kernel import kernel_for
from k2convert.quantize.gptq.moments import Missing, Moments, WeightedTokens, correct
from k2convert.quantize.gptq.rounding import SHRINKAGES, round_gptq

TOKENS = 1024
WINDOW = 2048
COLUMNS = 512
CORES = (16, 64, 192)
ROUNDED_ROWS = 192
FACTORS = 1 + 2 * len(SHRINKAGES)
"""The factors of an input with few tokens, one of which is timed."""


def seconds_of(run: Callable[[], object]) -> float:
    """Return the processor seconds of the second call."""
    begin = 0.0
    for _ in range(2):
        begin = time.process_time()
        run()
    return time.process_time() - begin


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
    return {name: step / seconds[name] if name in seconds else product for name, step in work.items()}


def pass_seconds(model: ModelSizes, size: PassSize, product: float) -> tuple[float, float]:
    """Return the core-seconds of `calibrate` without the search of exponents, and of that search, which few cores do.

    `product` is the operations a second of one core in a matrix product.
    """
    tokens = -(-size.chunk_windows * size.window * model.experts_per_token // model.num_experts)
    expert = seconds_of(made_up_expert(model, tokens, "cpu"))
    experts = model.num_moe(size) * model.num_experts * -(-size.num_windows // size.chunk) * expert
    inputs = torch.ones(SAMPLED_TOKENS, COLUMNS)
    rows = Bf16Weight(made_up_weight(SAMPLED_ROWS, COLUMNS).bits)
    proxy = Proxy(inputs, np.ones(COLUMNS, dtype=np.float32), np.ones(COLUMNS), rows)
    search = seconds_of(lambda: proxy.errors((np.arange(COLUMNS) % 2).astype(np.int8)))
    search *= (1 + BLOCK_SIZE * len(STEPS)) * model.hidden / COLUMNS
    return experts + other_flops(model, size) / product, model.num_moe(size) * search


def duration(seconds: float) -> str:
    """Return a duration in minutes or hours."""
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def show_machines(one: float, search: float, walk: float) -> None:
    """Print what a calibration takes with more cores, from the core-seconds of a pass, its search, and rule gptq."""
    print("\n| machine | `calibrate`, rule `imatrix` | `run --calibrate`, rule `gptq` |\n|---|---:|---:|")
    for cores in CORES:
        seconds = one / cores + search / min(len(STEPS), cores)
        print(f"| {cores} cores that are always busy | {duration(seconds)} | {duration(walk / cores)} |")


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
    print("| step | operations per layer, FP64 twice | GFLOP/s of one core | core-hours, all layers | share |")
    print("|---|---:|---:|---:|---:|")
    hours = {name: model.num_moe(size) * step / rates[name] / 3600 for name, step in steps.items()}
    hours["both streams: attention, experts once"] = streams / product / 3600
    total = sum(hours.values())
    for name, spent in hours.items():
        work = steps[name] if name in steps else streams / model.num_layers
        rate = rates.get(name, product)
        print(f"| {name} | {work / 1e12:,.1f} T | {rate / 1e9:.0f} | {spent:,.1f} | {100 * spent / total:.0f} % |")
    print(f"\n{total:,.0f} core-hours by rule gptq; {(one + search) / 3600:,.0f} of `calibrate`.")
    show_machines(one, search, total * 3600)


if __name__ == "__main__":
    main()
