"""GPUs, and what NVFP4 does on them."""

from dataclasses import dataclass
from typing import Final, Literal

Nvfp4Kind = Literal["native", "slow", "marlin"]
"""How a GPU computes with NVFP4: in hardware; in hardware, but with kernels that are slow today; as weight-only."""

NVFP4_NOTES: Final[dict[Nvfp4Kind, str]] = {
    "native": "NVFP4 runs in hardware: 4-bit weights and activations.",
    "slow": "NVFP4 runs in hardware, but INT4 may be faster today.",
    "marlin": "NVFP4 runs as weight-only, by Marlin kernels. The INT4 source serves as well here.",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    name: str
    title: str
    nvfp4: Nvfp4Kind
