"""Kernels written twice are tested twice."""

from collections.abc import Iterator

import pytest

from k2convert.kernels import _cpu


@pytest.fixture(params=["avx2", "portable"])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything that uses this holds with and without AVX2, where the CPU has it."""
    before = _cpu.instructions()
    if before == "portable" and request.param != before:
        pytest.skip("this CPU has no AVX2")
    _cpu.use_instructions(request.param)
    yield
    _cpu.use_instructions(before)
