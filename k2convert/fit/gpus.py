"""The GPUs that `fit` knows by name: memory, bandwidth, and what NVFP4 does on them.

Memory and bandwidth are those of the system files of NVIDIA Dynamo's configurator 0.12.0 (Apache-2.0, PyPI), which take
them from nvidia-smi where they had the GPU. It has no DGX Spark: its memory is what an owner of eight reads
(github.com/Avarok-Cybersecurity/atlas, thread 146, 2026-06-10), its bandwidth is NVIDIA's data sheet's.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

from k2convert.errors import FitError, quoted

Nvfp4Kind = Literal["native", "slow", "marlin", "unknown"]
"""Ways in which a GPU computes with NVFP4: in hardware; in hardware, by kernels that are slow today; as weight-only."""

MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU. `bandwidth` is bytes a second, None if only the memory is known.

    `counts` are usual numbers of GPUs, smallest first; a machine has `per_machine`.
    """

    name: str
    title: str
    memory_bytes: int
    bandwidth: float | None = None
    nvfp4: Nvfp4Kind = "unknown"
    counts: tuple[int, ...] = (1, 2, 4, 8, 16)
    per_machine: int = 8


_ALL: Final = (
    Gpu("b200", "B200", 180 * GIB, 7.7e12, "native"),
    Gpu("b300", "B300", 275_040 * MIB, 7.75e12, "native"),
    Gpu("gb200", "GB200", 189_471 * MIB, 8e12, "native", per_machine=4),
    Gpu("gb300", "GB300", 284_208 * MIB, 8e12, "native", per_machine=4),
    Gpu("rtx-pro-6000", "RTX PRO 6000", 97_887 * MIB, 1.792e12, "slow"),
    Gpu("dgx-spark", "DGX Spark", int(121.7 * GIB), 273e9, "slow", per_machine=1),
    Gpu("h200", "H200", 141 * GIB, 4.8e12, "marlin"),
    Gpu("h100", "H100", 80 * GIB, 3.35e12, "marlin"),
    Gpu("a100", "A100 80 GB", 80 * GIB, 2.039e12, "marlin"),
)
GPUS: Final = {gpu.name: gpu for gpu in _ALL}


def find_gpu(name: str) -> Gpu:
    """Return the GPU of this name, however it is spelled; raises FitError that lists the known names."""
    wanted = "".join(c for c in name.lower() if c.isalnum())
    for gpu in _ALL:
        if wanted in {gpu.name.replace("-", ""), "".join(c for c in gpu.title.lower() if c.isalnum())}:
            return gpu
    if re.fullmatch("(amd|instinct)?mi[0-9]{3}[a-z]?", wanted):
        raise FitError(f"{quoted(name)}: a GPU of AMD, which cannot run NVFP4. Known: {', '.join(GPUS)}.")
    raise FitError(f"{quoted(name)}: an unknown GPU. Known: {', '.join(GPUS)}.")
