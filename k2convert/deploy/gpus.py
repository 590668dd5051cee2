"""The GPUs that `fit` knows by name: memory, bandwidth, and what NVFP4 does on them.

Memory and bandwidth are those of the system files of NVIDIA Dynamo's configurator 0.12.0 (Apache-2.0, PyPI), which take
them from nvidia-smi where they had the GPU. It has no DGX Spark: its memory is what an owner of eight reads
(github.com/Avarok-Cybersecurity/atlas, thread 146, 2026-06-10), its bandwidth is NVIDIA's data sheet's. It has no H100
NVL and no H20 of 96 GB either: theirs are those of data sheets.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

from k2convert.errors import ArgumentError, FitError, parse_size, quoted

Nvfp4Kind = Literal["native", "slow", "marlin", "unknown"]
"""Ways in which a GPU computes with NVFP4: in hardware; in hardware, by kernels that INT4's outrun; as weight-only."""

MIB: Final = 1 << 20
GIB: Final = 1 << 30

OVERHEAD_BYTES: Final = 3_000_000_000
"""Activations, CUDA graphs, NCCL and libraries on one GPU: an assumption.

vLLM's published pools on 8 RTX PRO 6000 leave 2.5 to 3.5 GB for it, with 4,096 and 8,192 tokens a batch
(github.com/local-inference-lab/rtx6kpro, models/kimi-k25.md and kimi-k26-v2.md, kimi-k26-v4.md, 2026-05).
"""
H200_OVERHEAD_BYTES: Final = 8_700_000_000
"""What the pool in vLLM's Kimi-K2-Thinking recipe for 8 H200 leaves (2025-11)."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU. `bandwidth` is bytes a second, None if only the memory is known.

    `overhead_bytes` are what an engine is assumed to use of it, beside weights and KV cache.
    `names` is a pattern of the names by nvidia-smi and of the machines of clouds, in letters and digits, with "_"
    between two numbers. A number that it ends with must end there in the name too.
    A machine has `per_machine` of them.
    """

    name: str
    title: str
    memory_bytes: int
    bandwidth: float | None = None
    nvfp4: Nvfp4Kind = "unknown"
    names: str = ""
    per_machine: int = 8
    overhead_bytes: int = OVERHEAD_BYTES


_RTX: Final = "rtxpro6000(?!d)|rtx6000(pro|blackwell)|^g7e|^g4standard"
_H100: Final = "(?<!g)(?<!ads)(?<!adis)h100(?!.*(nvl|9[46]))|^p5(_[0-9]*xlarge)?$|^a3(high|mega|edge)gpu"  # of 80 GB
_H200: Final = "(?<!g)h200|^p5en?(_?[0-9]*xlarge)?$|^a3ultragpu"
_A100: Final = "^(nvidia)?a100$|a100.*80g|^p4de|^a2ultragpu|(amsr|ads)a100"  # not each that a cloud calls A100
_ALL: Final = (
    Gpu("b200", "B200", 180 * GIB, 7.7e12, "native", "(?<!g)b200|^a4highgpu"),
    Gpu("b300", "B300", 275_040 * MIB, 7.75e12, "native", "(?<!g)b300"),
    Gpu("gb200", "GB200", 189_471 * MIB, 8e12, "native", "gb200|^a4xhighgpu", per_machine=4),
    Gpu("gb300", "GB300", 284_208 * MIB, 8e12, "native", "gb300|^a4xmaxgpu", per_machine=4),
    Gpu("rtx-pro-6000", "RTX PRO 6000", 97_887 * MIB, 1.792e12, "slow", _RTX),
    Gpu("dgx-spark", "DGX Spark", int(121.7 * GIB), 273e9, "slow", "spark|gb10(?!0)|gx10", per_machine=1),
    Gpu("h200", "H200", 141 * GIB, 4.8e12, "marlin", _H200, overhead_bytes=H200_OVERHEAD_BYTES),
    Gpu("h100", "H100", 80 * GIB, 3.35e12, "marlin", _H100),
    Gpu("h100-nvl", "H100 NVL", 94_000_000_000, 3.9e12, "marlin", "(?<!g)h100nvl|h100_94g|adi?sh100"),
    Gpu("h20", "H20", 96_000_000_000, 4e12, "marlin", "(?<!g)h20(?!_?3e)"),
    Gpu("a100", "A100 80 GB", 80 * GIB, 2.039e12, "marlin", _A100),
)
GPUS: Final = {gpu.name: gpu for gpu in _ALL}


_SIZE: Final = re.compile("(?:^|[^0-9a-z]|[a-z][0-9]00)([2-9][0-9]|[1-9][0-9][0-9]) ?gi?b?(?![0-9a-z])")
"""A memory in GB that a name states. Fewer than 20 are a number of GPUs."""
_TOLERANCE: Final = 0.15


def find_gpu(name: str) -> Gpu:
    """Return the GPU of this name, as nvidia-smi or a cloud prints it, or one that has the memory that it is, such as
    "96GB". Raises FitError that lists the known names, ArgumentError for a wrong size.
    """
    if several := re.fullmatch("([0-9]+) ?x ?([a-z].*[0-9].*)", name.lower()):
        raise FitError(
            f"{quoted(name)}: a number of GPUs. Pass --gpu {find_gpu(several[2]).name} --count {several[1]}."
        )
    if name[:1].isdigit():
        if (size := parse_size(name)) < MIB:
            raise ArgumentError(f"{quoted(name)}: no memory of a GPU. Write for example 96GB.")
        return Gpu(name, f"GPU of {name}", size)
    stated = name.lower().removeprefix("ml.")  # AWS's machines in SageMaker
    wanted = re.sub("(?<![0-9])_|_(?![0-9])", "", re.sub("[^0-9a-z]+", "_", stated))
    sizes = [int(size) * 1e9 for size in _SIZE.findall(stated)]
    for gpu in _ALL:
        if "mig" not in wanted and re.search(f"({gpu.names})(?!(?<=[0-9])[0-9])", wanted):
            if all(abs(size / gpu.memory_bytes - 1) < _TOLERANCE for size in sizes):
                return gpu
            break
    if "a100" in wanted and not sizes:
        raise FitError(f"{quoted(name)}: an A100 of 40 GB or of 80 GB. Pass a100 for one of 80 GB.")
    if re.search("mi[0-9]{3}", wanted):
        raise FitError(f"{quoted(name)}: a GPU of AMD, which cannot run NVFP4. Known: {', '.join(GPUS)}.")
    raise FitError(f"{quoted(name)}: an unknown GPU. Known: {', '.join(GPUS)}.")
