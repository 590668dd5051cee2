"""PTX that triton compiles for GPUs that are not here gives the values of its kernel's definition on the CPU."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from ptx_device import ptx_device
from ptx_machine import Kernel
from toy_kernel import expected, sum_nibbles

TARGETS = [
    pytest.param((90, "1"), id="sm_90"),
    *(pytest.param((number, "1"), id=f"sm_{number}", marks=pytest.mark.slow) for number in (100, 103, 120)),
    pytest.param((90, "0"), id="sm_90, products and sums apart", marks=pytest.mark.slow),
]
"""Architectures, and whether the compiler makes one operation of a product and a sum: triton 3.10 will not."""


@pytest.fixture(params=TARGETS)
def kernels(
    request: pytest.FixtureRequest, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Kernel]]:
    architecture, fuses = request.param
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", fuses)
    with ptx_device(architecture) as launched:
        yield launched


def test_a_kernel_gives_the_values_of_its_definition(kernels: list[Kernel]) -> None:
    """Tiles that are full and one that is not, with negative sums and without."""
    generator = torch.Generator().manual_seed(0)
    for size, lowest in ((1, -8), (128, 0), (1000, -8), (1000, 0)):
        words = torch.randint(-(1 << 31), 1 << 31, (size,), generator=generator).to(torch.int32)
        table = torch.arange(16, dtype=torch.float64) + lowest
        sums, negative = sum_nibbles(words, table)
        assert torch.equal(sums, expected(words, table)[0])
        assert negative == expected(words, table)[1]
    (kernel,) = kernels
    assert all(kernel.executed), "every instruction was reached"
