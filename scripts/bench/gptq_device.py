"""Runs rule `gptq` on a layer of K2's size on a CUDA device: seconds of each layer, peak memory, the longest kernels.

`python -m scripts.bench.gptq_device LAYER IDS --tokens N`: LAYER is a checkpoint that `scripts/fixtures k2-shaped`
wrote, IDS a file of token ids. The run is `k2convert run LAYER --calibrate IDS`, in this process. torch's profiler
counts its kernels. With `--plain` nothing is profiled, so that the seconds are those of a user.
"""

import argparse
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import k2convert
from k2convert.quantize.gptq.device_kernel import check_device
from k2convert.records.events import Extent, Keep


class LayerTimes(k2convert.Events):
    """Prints the seconds of each layer when its last tokens are computed."""

    def __init__(self) -> None:
        self._layer_tokens = 0
        self._tokens = 0
        self._begin = time.perf_counter()

    def begun(self, extent: Extent, *, keep: Keep | None = None) -> None:  # noqa: ARG002
        self._layer_tokens = extent.layer_tokens

    def tokens_computed(self, tokens: int) -> None:
        self._tokens += tokens
        if self._tokens % self._layer_tokens == 0:
            now = time.perf_counter()
            print(f"| layer {self._tokens // self._layer_tokens - 1} | {now - self._begin:.2f} |")
            self._begin = now


def check_kernels() -> None:
    """Print how long the self-test of the kernels takes, on a new machine and with compiled kernels."""
    for compiled in ("", ", with compiled kernels"):
        begin = time.perf_counter()
        check_device.__wrapped__("cuda:0")
        print(f"{torch.cuda.get_device_name()}: the self-test took {time.perf_counter() - begin:.1f} s{compiled}")


def show_kernels(profile: Any, seconds: float) -> None:
    """Print the kernels that took longest, and how long the device worked."""
    kernels = profile.key_averages()
    print(kernels.table(sort_by="self_device_time_total", row_limit=20, max_name_column_width=70))
    busy = sum(kernel.self_device_time_total for kernel in kernels) / 1e6
    print(f"\n{sum(kernel.count for kernel in kernels):,} calls took {busy:.2f} s of the device, of {seconds:.2f} s.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layer", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--plain", action="store_true", help="do not profile")
    arguments = parser.parse_args()
    check_kernels()
    settings = {"calibration.tokens": arguments.tokens, "calibration.window": min(2048, arguments.tokens)}
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    torch.cuda.reset_peak_memory_stats()
    print("\n| | seconds |\n|---|---:|")
    begin = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(dir=arguments.layer.parent) as folder,
        nullcontext() if arguments.plain else profiler as profile,
    ):
        k2convert.convert(
            arguments.layer,
            Path(folder) / "out",
            text=arguments.ids,
            device="cuda",
            settings=settings,
            events=LayerTimes(),
        )
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    print(f"| in all | {seconds:.2f} |\n\n{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at the peak.\n")
    if profile is not None:
        show_kernels(profile, seconds)


if __name__ == "__main__":
    main()
