"""Runs rule `gptq` on a layer of K2's size on a CUDA device: seconds of every phase, kernels, idle share, peak memory.

`python -m scripts.bench.gptq_device LAYER IDS --tokens N`: LAYER is a checkpoint that `scripts.fixture_maker k2-shaped`
made, IDS a file of token ids. The run is one of `k2convert run LAYER --calibrate IDS`, in this process; the profiler of
torch counts its kernels. With `--plain` nothing is profiled, so that the seconds are those of a
user.
"""

import argparse
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import k2convert
from k2convert.calibration import accumulate, gptq_layer, gptq_walk
from k2convert.calibration.gptq_layer import MlpWeights
from k2convert.quantize.gptq.device_kernel import check_device
from k2convert.quantize.gptq.rounding import Codes

KINDS = (
    ("panels of rule gptq", r"round_kernel|improve_kernel"),
    ("factors and solves", r"potr|trsm|trsv|potf|syrk|herk|trtri|cusolver|laset|magma"),
    ("products, TF32", r"tf32|tensorop|s1688|s16816"),
    ("products, FP64", r"dgemm|f64|d884"),
    ("products, FP32", r"gemm|gemv|splitK|cutlass|sgemm|simt"),
    ("sorting and scattering", r"sort|index|scatter|gather|radix|scan|unique|bincount|histogram"),
    ("copies to or from the host", r"Memcpy (HtoD|DtoH)"),
    ("copies on the device, and sets", r"Memcpy|Memset"),
    ("elementwise and sums", r"."),
)


class Phases:
    """Seconds between marks, with the device's work done."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._name = "start"
        self._since = time.perf_counter()

    def enter(self, name: str) -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self._name] += now - self._since
        print(f"{self._name}: {now - self._since:.2f} s", file=sys.stderr, flush=True)
        self._name = name
        self._since = now


def marked(phases: Phases, owner: Any, method: str, name: str, after: str | None = None) -> None:
    """Let a method of a class begin a phase, and end it."""
    original: Callable[..., Any] = getattr(owner, method)

    def replaced(*arguments: Any, **options: Any) -> Any:
        phases.enter(name)
        try:
            return original(*arguments, **options)
        finally:
            if after is not None:
                phases.enter(after)

    setattr(owner, method, replaced)


TIMED = (
    (MlpWeights, "read"),
    (gptq_layer, "shared_scale"),
    (gptq_layer, "round_together"),
    (gptq_layer, "choose_shrinkage"),
    (gptq_layer, "make_curvature"),
    (gptq_layer, "correct"),
    (gptq_layer, "round_gptq"),
    (gptq_layer.LayerConverter, "_compute"),
    (gptq_layer.LayerConverter, "_convert_group"),
    (gptq_layer.LayerConverter, "_prepare_down"),
    (gptq_layer.LayerConverter, "_convert_down"),
    (Codes, "weight"),
    (accumulate.LayerAccumulator, "add"),
    (accumulate.LayerAccumulator, "find_exponents"),
)
"""What is timed by its caller: the launch of kernels, and waiting for them where a number is needed."""


def timed(owner: Any, name: str, spent: dict[str, list[float]]) -> None:
    """Add the seconds that each call of a function takes in its thread."""
    original: Callable[..., Any] = getattr(owner, name)

    def replaced(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return original(*arguments, **options)
        finally:
            spent[name.lstrip("_")].append(time.perf_counter() - begin)

    setattr(owner, name, replaced)


def kind_of(kernel: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE))


def show_kernels(profile: Any, seconds: float) -> None:
    """Print the device's seconds and launches by kind, and the share of the time in which it did nothing."""
    spent: dict[str, float] = defaultdict(float)
    launched: dict[str, int] = defaultdict(int)
    spans: list[tuple[float, float]] = []
    longest: dict[str, float] = defaultdict(float)
    for event in profile.events():
        if str(event.device_type) != "DeviceType.CUDA":
            continue
        begin = event.time_range.start
        end = event.time_range.end
        kind = kind_of(event.name)
        spent[kind] += (end - begin) / 1e6
        launched[kind] += 1
        longest[event.name[:70]] += (end - begin) / 1e6
        spans.append((begin, end))
    busy = 0.0
    until = 0.0
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    print("| kernels | seconds | launches |\n|---|---:|---:|")
    for kind in sorted(spent, key=lambda name: -spent[name]):
        print(f"| {kind} | {spent[kind]:.2f} | {launched[kind]:,} |")
    print(f"| all | {sum(spent.values()):.2f} | {sum(launched.values()):,} |")
    print(f"\nThe device was busy for {busy / 1e6:.2f} of {seconds:.2f} s.\n")
    for name in sorted(longest, key=lambda name: -longest[name])[:12]:
        print(f"    {longest[name]:8.3f} s  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layer", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--plain", action="store_true", help="do not profile")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    check_device("cuda:0")
    print(f"{torch.cuda.get_device_name()}: the self-test took {time.perf_counter() - begin:.1f} s")
    begin = time.perf_counter()
    check_device.__wrapped__("cuda:0")
    print(f"and {time.perf_counter() - begin:.2f} s with compiled kernels\n")
    spent: dict[str, list[float]] = defaultdict(list)
    for owner, name in TIMED:
        timed(owner, name, spent)
    phases = Phases()
    converter = gptq_layer.LayerConverter
    marked(phases, gptq_walk._LayerConversion, "run", "streams", "write and check")
    marked(phases, converter, "_prepare_gate_up", "curvature of gate and up", "gate and up, and experts")
    convert_down = converter._convert_down
    first: list[bool] = []

    def down(*given: Any) -> Any:
        if not first:
            phases.enter("down")
            first.append(True)
        return convert_down(*given)

    converter._convert_down = down
    settings = {"calibration.tokens": arguments.tokens, "calibration.window": min(2048, arguments.tokens)}
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory(dir=arguments.layer.parent) as folder:

        def convert() -> None:
            k2convert.convert(
                arguments.layer, Path(folder) / "out", text=arguments.ids, device="cuda", settings=settings
            )

        begin = time.perf_counter()
        if arguments.plain:
            convert()
        else:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                convert()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    phases.enter("end")
    print("| phase | seconds |\n|---|---:|")
    for name, passed in phases.seconds.items():
        print(f"| {name} | {passed:.2f} |")
    print("\n| function | calls | seconds in its threads |\n|---|---:|---:|")
    for name, calls in spent.items():
        print(f"| {name} | {len(calls):,} | {sum(calls):.2f} |")
    print(f"\nIn all {seconds:.1f} s; {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at the peak.\n")
    if not arguments.plain:
        show_kernels(profile, seconds)


if __name__ == "__main__":
    main()
