"""Conversion alone, in memory: weights per second of one thread and of all, and on CUDA bytes per second too."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from k2convert.formats.int4 import Int4Weight
from k2convert.quantizers import Quantizer, create_quantizer

ROWS, COLUMNS = 2048, 7168
NUM_TENSORS = 12
REPEATS = 3


def make_weights(device: str) -> list[Int4Weight]:
    """K2-shaped projections as quantisation-aware training leaves them: codes -7..7, scale = bf16(amax / 7)."""
    generator = torch.Generator().manual_seed(0)
    weights = []
    for _ in range(NUM_TENSORS):
        latent = torch.randn(ROWS, COLUMNS, generator=generator) * 0.02
        groups = latent.view(ROWS, -1, 32)
        scales = (groups.abs().amax(-1) / 7).bfloat16()
        codes = (groups / scales.float()[..., None]).round().clamp(-7, 7).to(torch.int16).view(ROWS, -1) + 8
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        weights.append(Int4Weight(packed.to(device), scales.to(device)))
    return weights


def convert(quantizer: Quantizer, weight: Int4Weight) -> None:
    """What the loop does with one projection: measure, choose the global scale, quantise, take its metrics."""
    magnitude = quantizer.measure(weight, name="bench")
    scale = quantizer.global_scale(magnitude, is_int4=True)
    quantizer.quantize(weight, name="bench", magnitude=magnitude, global_scale=scale)


def rate(work: Callable[[], None]) -> float:
    """Weights per second, the median of REPEATS passes after a warm-up."""
    work()
    seconds = []
    for _ in range(REPEATS):
        begin = time.monotonic()
        work()
        seconds.append(time.monotonic() - begin)
    return NUM_TENSORS * ROWS * COLUMNS / statistics.median(seconds)


def main(device: str) -> None:
    torch.set_num_threads(1)
    weights, result = make_weights("cpu"), {}
    cores = os.cpu_count() or 1
    for rule in ("plain", "optimal"):
        quantizer = create_quantizer("native", rule=rule, device=device)
        result[f"{rule}, one thread"] = rate(lambda q=quantizer: [convert(q, w) for w in weights] and None)
        if device == "cpu":
            with ThreadPoolExecutor(cores) as pool:
                result[f"{rule}, {cores} threads"] = rate(
                    lambda q=quantizer, p=pool: list(p.map(lambda w: convert(q, w), weights)) and None
                )
    print(json.dumps({"backend": create_quantizer("native", rule="plain", device=device).backend, "rates": result}))


if __name__ == "__main__":
    main(sys.argv[1])
