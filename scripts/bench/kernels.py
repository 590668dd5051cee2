"""Times the kernels in memory: weights a second on one thread and on all cores."""

import json
import os
import statistics
import sys
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

ROWS = 2048
COLUMNS = 7168
NUM_TENSORS = 8
NUM_WEIGHTS = NUM_TENSORS * ROWS * COLUMNS
REPEATS = 5

Figures = dict[str, dict[str, Any]]


def make_weights(count: int = NUM_TENSORS) -> list[Int4Weight]:
    """Make K2-shaped projections like those of quantization-aware training: codes -7..7, scale = bf16(amax / 7)."""
    generator = torch.Generator().manual_seed(0)
    weights = []
    for _ in range(count):
        latent = torch.randn(ROWS, COLUMNS, generator=generator) * 0.02
        groups = latent.view(ROWS, -1, 32)
        scales = (groups.abs().amax(-1) / 7).bfloat16()
        codes = (groups / scales.float()[..., None]).round().clamp(-7, 7).to(torch.int16).view(ROWS, -1) + 8
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        weights.append(Int4Weight(packed.numpy(), scales.view(torch.uint16).numpy()))
    return weights


def make_mxfp4_weights() -> list[Mxfp4Weight]:
    """Make K3-shaped projections as compressed-tensors quantizes them; the spread of a row varies."""
    generator = torch.Generator().manual_seed(0)
    shape = K3_SHAPE.projections()["w1"]
    weights = []
    for _ in range(NUM_TENSORS // 2):
        spread = 0.02 * torch.exp(0.5 * torch.randn(shape[0], 1, generator=generator))
        found = quantize_mxfp4((torch.randn(shape, generator=generator) * spread).bfloat16())
        weights.append(Mxfp4Weight(found["weight_packed"].numpy(), found["weight_scale"].numpy()))
    return weights


def convert(quantizer: Quantizer, weight: SourceWeight) -> None:
    """Convert one projection as the job does: measure, choose the global scale, quantize, take the metrics."""
    magnitude = quantizer.measure(weight, name="bench")
    scale = quantizer.global_scale(magnitude)
    quantizer.quantize(weight, name="bench", magnitude=magnitude, global_scale=scale)


def median_seconds(work: Callable[[], object]) -> float:
    """Return the median of REPEATS passes after a warm-up."""
    work()
    seconds = []
    for _ in range(REPEATS):
        begin = time.monotonic()
        work()
        seconds.append(time.monotonic() - begin)
    return statistics.median(seconds)


def cpu_figures(weights: list[Int4Weight]) -> Figures:
    """Time both rules on one thread and on all cores: converting with counts, and everything a projection needs."""
    cores = os.cpu_count() or 1
    figures = Figures()
    rules: tuple[Rule, ...] = ("max", "mse")
    for rule in rules:
        quantizer = create_quantizer("native", rule=rule)
        scale = quantizer.global_scale(quantizer.measure(weights[0], name="bench"))
        works: dict[str, Callable[[Int4Weight], object]] = {
            rule: lambda w, r=rule, s=scale: cpu.convert(w, rule=r, global_scale=s),
            f"{rule}, measured and sampled": lambda w, q=quantizer: convert(q, w),
        }
        for label, work in works.items():
            one = median_seconds(lambda f=work: list(map(f, weights)))
            with ThreadPoolExecutor(cores) as pool:
                every = median_seconds(lambda p=pool, f=work: list(p.map(f, weights)))
            for threads, seconds in (("one thread", one), (f"{cores} threads", every)):
                rate = NUM_WEIGHTS / seconds
                figures[f"{label}, {threads}"] = {"weights_per_second": rate}
    return figures | cast_figures(weights)


def cast_figures(weights: list[Int4Weight]) -> Figures:
    """Time everything that a projection needs, on one thread: the cast of MXFP4, and `max` on INT4, in turns."""
    casts = make_mxfp4_weights()
    seconds = dict[str, list[float]]()
    works: dict[str, tuple[Quantizer, Callable[[], list[Any]]]] = {
        "max on INT4": (create_quantizer("native", rule="max"), lambda: weights),
        # A weight keeps what was counted of it, so each pass has new ones.
        "cast of MXFP4": (
            create_quantizer("native", rule="mse"),
            lambda: [Mxfp4Weight(weight.packed, weight.scale_bytes) for weight in casts],
        ),
    }
    for turn in range(REPEATS + 1):  # the first warms up
        for label, (quantizer, made) in works.items():
            sources = made()
            begin = time.thread_time()
            for weight in sources:
                convert(quantizer, weight)
            if turn:
                seconds.setdefault(label, []).append(time.thread_time() - begin)
    packed = {"max on INT4": sum(w.packed.nbytes + w.scale_bits.nbytes for w in weights)}
    packed["cast of MXFP4"] = sum(w.packed.nbytes + w.scale_bytes.nbytes for w in casts)
    numbers = {"max on INT4": NUM_WEIGHTS, "cast of MXFP4": 2 * sum(w.packed.size for w in casts)}
    return {
        f"{label}, measured and sampled, one thread": {
            "weights_per_second": numbers[label] / statistics.median(found),
            "bytes_per_second": packed[label] / statistics.median(found),
        }
        for label, found in seconds.items()
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    figures = cast_figures if sys.argv[1:] == ["cast"] else cpu_figures
    print(json.dumps(figures(make_weights())))
