"""The memory of a launch: its arguments, and the shared memory of its programs. No access leaves them or races."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ptx_program import PtxError

SHARED_BASE = 1 << 10
"""The address of the first byte of shared memory in every program."""


class Arguments:
    """Arrays that a kernel may use, each from its address on."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        found = sorted((array.ctypes.data, array.reshape(-1).view(np.uint8)) for array in arrays if array.size)
        self._bases = [base for base, _ in found]
        self._bytes = [values for _, values in found]

    def find(
        self, addresses: NDArray[np.int64], num_bytes: int, programs: NDArray[np.int64], turn: int, *, writes: bool
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the array that all addresses are in, as bytes, and their places in it."""
        low = int(addresses.min())
        high = int(addresses.max()) + num_bytes
        number = bisect_right(self._bases, low) - 1
        if number < 0:
            raise PtxError("an address lies before every argument")
        base = self._bases[number]
        values = self._bytes[number]
        if high > base + values.size:
            raise PtxError(f"bytes {low - base} to {high - base} are not in an argument of {values.size} bytes")
        return values, addresses - base


class Shared:
    """The shared memory of all programs, full of noise at first, and who used which byte since the last barrier."""

    def __init__(self, num_programs: int, size: int, rng: np.random.Generator) -> None:
        self.size = size
        self.room = -(-size // 16) * 16
        self.bytes = rng.integers(0, 256, num_programs * self.room, dtype=np.uint8)
        self.readers = np.zeros(self.bytes.size, dtype=np.uint32)
        self.writers = np.zeros(self.bytes.size, dtype=np.uint32)

    def find(
        self, addresses: NDArray[np.int64], num_bytes: int, programs: NDArray[np.int64], turn: int, *, writes: bool
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the bytes of all programs and the places of addresses there; `turn` is the bit of a program's warp."""
        low = int(addresses.min()) - SHARED_BASE
        high = int(addresses.max()) - SHARED_BASE + num_bytes
        if low < 0 or high > self.size:
            raise PtxError(f"bytes {low} to {high} are not in the {self.size} bytes of shared memory")
        places = programs * self.room + (addresses - SHARED_BASE)
        touched = (places[:, None] + np.arange(num_bytes)).ravel()
        own = np.uint32(1 << turn)
        others = self.writers[touched] | (self.readers[touched] if writes else np.uint32(0))
        if (others & ~own).any():
            raise PtxError(f"a {'write' if writes else 'read'} of shared memory races with another warp")
        (self.writers if writes else self.readers)[touched] |= own
        return self.bytes, places

    def pass_barrier(self) -> None:
        """Let every warp use every byte again."""
        self.readers[:] = 0
        self.writers[:] = 0
