"""Times the kernels in memory: weights and bytes of the source a second, on one thread and on all cores."""

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from k2convert.choices import Rule
from k2convert.quantize.formats.bf16 import SourceWeight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.kernels import cpu
from k2convert.quantize.quantizer import Quantizer, create_quantizer
from scripts.fixture_maker.k3 import K3_SHAPE, quantize_mxfp4
from scripts.fixture_maker.shaped import draw_int4

ROWS = 2048
COLUMNS = 7168
NUM_TENSORS = 8
REPEATS = 5
RULES: tuple[Rule, ...] = ("max", "mse")


def int4_weights() -> list[Int4Weight]:
    """Return K2-shaped projections with values like those of quantization-aware training."""
    generator = torch.Generator().manual_seed(0)
    weights: list[Int4Weight] = []
    for _ in range(NUM_TENSORS):
        codes, scales = draw_int4(ROWS, COLUMNS, generator)
        nibbles = (codes + 8).to(torch.uint8)
        packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        weights.append(Int4Weight(packed.numpy(), scales.view(torch.uint16).numpy()))
    return weights


def mxfp4_weights() -> list[Mxfp4Weight]:
    """Return K3-shaped projections as compressed-tensors quantizes them; the spread of a row varies."""
    generator = torch.Generator().manual_seed(0)
    shape = K3_SHAPE.projections()["w1"]
    weights: list[Mxfp4Weight] = []
    for _ in range(NUM_TENSORS):
        spread = 0.02 * torch.exp(0.5 * torch.randn(shape[0], 1, generator=generator))
        tensors = quantize_mxfp4((torch.randn(shape, generator=generator) * spread).bfloat16())
        weights.append(Mxfp4Weight(tensors["weight_packed"].numpy(), tensors["weight_scale"].numpy()))
    return weights


def convert(quantizer: Quantizer, weight: SourceWeight) -> None:
    """Convert one projection as the job does: measure, choose the global scale, quantize, take the metrics."""
    magnitude = quantizer.measure(weight, name="bench")
    scale = quantizer.global_scale(magnitude)
    quantizer.quantize(weight, name="bench", magnitude=magnitude, global_scale=scale)


def median_seconds(work: Callable[[], object]) -> float:
    """Return the median of REPEATS passes after a warm-up."""
    seconds: list[float] = []
    for _ in range(1 + REPEATS):
        begin = time.monotonic()
        work()
        seconds.append(time.monotonic() - begin)
    return statistics.median(seconds[1:])


def kernel_figures() -> dict[str, dict[str, float]]:
    """Time both rules on INT4, alone and with everything that a projection needs, and the cast of MXFP4."""
    torch.set_num_threads(1)
    weights = int4_weights()
    works: dict[str, Callable[[Any], object]] = {}
    for rule in RULES:
        quantizer = create_quantizer("native", rule=rule)
        scale = quantizer.global_scale(quantizer.measure(weights[0], name="bench"))
        works[f"{rule}, convert"] = lambda w, r=rule, s=scale: cpu.convert(w, rule=r, global_scale=s)
        works[f"{rule}, measured and sampled"] = lambda w, q=quantizer: convert(q, w)
    figures: dict[str, dict[str, float]] = {}
    for name, work in works.items():
        figures |= _figures(name, work, weights, group_bytes=18)
    cast = create_quantizer("native", rule="mse")
    # A weight remembers what was counted of it, so each pass has new ones.
    return figures | _figures(
        "cast of MXFP4, measured and sampled",
        lambda w: convert(cast, Mxfp4Weight(w.packed, w.scale_bytes)),
        mxfp4_weights(),
        group_bytes=17,
    )


def _figures(
    name: str, work: Callable[[Any], object], weights: list[Any], *, group_bytes: int
) -> dict[str, dict[str, float]]:
    """Time a work on one thread and on all cores; `group_bytes` is the size of 32 weights and their scale."""
    num_weights = sum(2 * weight.packed.size for weight in weights)
    figures: dict[str, dict[str, float]] = {}
    for threads in dict.fromkeys((1, os.cpu_count() or 1)):
        with ThreadPoolExecutor(threads) as pool:
            seconds = median_seconds(lambda p=pool: list(p.map(work, weights)))
        figures[f"{name}, {threads} threads" if threads > 1 else f"{name}, one thread"] = {
            "weights_per_second": num_weights / seconds,
            "bytes_per_second": num_weights * group_bytes / 32 / seconds,
        }
    return figures
