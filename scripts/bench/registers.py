"""Registers, spilled bytes and stack of the kernels of rule gptq, as ptxas compiles them for GPUs that are not here.

`python -m scripts.bench.registers [90,100,103,120]`
"""

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
from triton import knobs

from k2convert.quantize.gptq.curvature import even_curvature
from k2convert.quantize.gptq.device_kernel import DeviceKernel, TritonPanels

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "quantize" / "kernels" / "ptx"))
from ptx_target import launching_on

COLUMNS = 256


def usage(architecture: int) -> list[tuple[str, int, int, int]]:
    """Return name, registers, spilled bytes and bytes of stack of each kernel that rounding with two sweeps starts."""
    with (
        redirect_stdout(io.StringIO()) as log,
        launching_on(architecture, lambda _: None),
        knobs.nvidia.scope(),
    ):
        knobs.nvidia.dump_ptxas_log = True
        curvature = even_curvature(COLUMNS, device="cpu")
        DeviceKernel(TritonPanels()).round(torch.ones(16, COLUMNS), curvature, sweeps=2)
    found: list[tuple[str, int, int, int]] = []
    pattern = r"entry function '(\w+)'(.*?)Used (\d+) registers"
    for name, report, registers in re.findall(pattern, log.getvalue(), re.DOTALL):
        stack, *spilled = (int(size) for size in re.findall(r"(\d+) bytes (?:stack frame|spill)", report))
        found.append((name, int(registers), sum(spilled), stack))
    return found


def main() -> None:
    architectures = sys.argv[1] if len(sys.argv) > 1 else "90,100,103,120"
    print("| kernel | architecture | registers | spilled bytes | stack |\n|---|---|---:|---:|---:|")
    for architecture in map(int, architectures.split(",")):
        for name, registers, spilled, stack in usage(architecture):
            print(f"| {name} | sm_{architecture} | {registers} | {spilled} | {stack} |", flush=True)


if __name__ == "__main__":
    main()
