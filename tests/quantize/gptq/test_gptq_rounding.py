"""Codes with error feedback: each step against a direct computation, on every kernel; equal bytes with any threads."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from gptq_direct import NORMAL, compensated, correlated, form_of, losses, round_block, weights
from panel_reference import BELOW, NUM_SCALES, ReferencePanels

from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, decode_e4m3, dequantize_nvfp4, unpack_nibbles
from k2convert.quantize.gptq.device_kernel import DeviceKernel, kernel_for
from k2convert.quantize.gptq.hessian import DampedHessian, damp_hessian, identity_hessian
from k2convert.quantize.gptq.rounding import RoundingKernel
from k2convert.quantize.gptq.rounding import round_gptq as round_to_codes
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.rules.mse import mse_global_scale, quantize_mse

UNIT = 2.0**-13


def round_gptq(
    target: torch.Tensor, unit: float, hessian: DampedHessian, kernel: RoundingKernel, *, sweeps: int = 2
) -> Nvfp4Weight:
    return round_to_codes(target, unit, hessian, kernel, sweeps=sweeps).weight()


@pytest.fixture(params=["vectors", "portable", "device"])
def kernel(request: pytest.FixtureRequest) -> Iterator[RoundingKernel]:
    if request.param == "device":
        yield DeviceKernel(ReferencePanels())
        return
    before = _cpu.instructions()
    if before == "portable" and request.param != before:
        pytest.skip("this CPU has neither AVX2 nor NEON")
    _cpu.use_instructions(before if request.param == "vectors" else "portable")
    yield kernel_for("cpu")
    _cpu.use_instructions(before)


def bf16_source(rows: int, columns: int) -> tuple[Bf16Weight, torch.Tensor]:
    """A BF16 weight, and its values in FP32."""
    values = weights(rows, columns).bfloat16()
    return Bf16Weight(values.view(torch.uint16).numpy()), values.float()


def hessian_of(columns: int) -> DampedHessian:
    return damp_hessian(form_of(correlated(2 * columns, columns)), 0.2)


def tried_bytes(block: np.ndarray) -> list[int]:
    """The normal scales around the largest weight over 6."""
    nearest = int(NORMAL[np.abs(decode_e4m3(NORMAL.astype(np.uint8)) * UNIT - np.abs(block).max() / 6).argmin()])
    first = min(max(nearest - BELOW, 0x08), 0x7F - NUM_SCALES)
    return list(range(first, first + NUM_SCALES))


@pytest.mark.quick(4)
@pytest.mark.parametrize(("columns", "block"), [(16, 0), (48, 1), (160, 8), (160, 9)])
def test_a_block_answers_errors_and_takes_the_best_scale(columns: int, block: int, kernel: RoundingKernel) -> None:
    """Given the values of the blocks before, the block's own follow directly: within a panel of 128 and beyond."""
    hessian = hessian_of(columns)
    target = weights(3, columns)
    codes = round_gptq(target, UNIT, hessian, kernel, sweeps=0)
    matrix = hessian.matrix.double().numpy()
    values = dequantize_nvfp4(codes)
    start = 16 * block
    for row, rounded, byte in zip(target.double().numpy(), values, codes.block_scales[:, block].tolist(), strict=True):
        own = compensated(row, rounded[:start], matrix)[:16]
        by_byte = {int(other): round_block(own, matrix[start:, start:], int(other), UNIT) for other in NORMAL}
        expected, loss = by_byte[byte]
        assert np.array_equal(rounded[start : start + 16], expected)
        assert loss <= min(by_byte[other][1] for other in tried_bytes(own)) * (1 + 1e-5)
        assert loss <= min(other for _, other in by_byte.values()) * (1 + 1e-5), "no scale further away is better"


@pytest.mark.parametrize("columns", [16, 272])
def test_sweeps_never_raise_the_loss_of_a_row(columns: int, kernel: RoundingKernel) -> None:
    """With 16 columns the row is one block."""
    hessian = hessian_of(columns)
    target = weights(40, columns)
    row_losses = [
        losses(target, round_gptq(target, UNIT, hessian, kernel, sweeps=sweeps), hessian.matrix) for sweeps in range(3)
    ]
    for before, after in pairwise(row_losses):
        assert (after <= before * (1 + 1e-5)).all()
    assert row_losses[1].sum() < 0.99 * row_losses[0].sum()


def test_after_many_sweeps_no_single_code_can_be_improved(kernel: RoundingKernel) -> None:
    hessian = hessian_of(48)
    target = weights(20, 48)
    codes = round_gptq(target, UNIT, hessian, kernel, sweeps=15)
    matrix = hessian.matrix.double().numpy()
    values = dequantize_nvfp4(codes)
    gradient = (target.double().numpy() - values) @ matrix
    steps = (decode_e4m3(codes.block_scales) * UNIT).repeat(16, axis=1)
    for code in (0, 0.5, 1, 1.5, 2, 3, 4, 6):
        for sign in (-1, 1):
            change = sign * code * steps - values
            # The loss changes by change**2 H_jj - 2 change G_j.
            gained = 2 * change * gradient - change**2 * np.diag(matrix)
            assert gained.max() < 1e-6 * (steps**2).max()


def test_loss_is_less_than_that_of_mse(kernel: RoundingKernel) -> None:
    columns = 160
    matrix = form_of(correlated(1000, columns))
    source, target = bf16_source(64, columns)
    global_scale = mse_global_scale(source.magnitude())
    mse = losses(target, quantize_mse(source, global_scale), matrix).sum()
    for damping, share in ((0.1, 0.6), (0.9, 0.95)):
        codes = round_gptq(target, global_scale, damp_hessian(matrix, damping), kernel)
        assert losses(target, codes, matrix).sum() < share * mse


def test_an_even_hessian_is_close_to_mse(kernel: RoundingKernel) -> None:
    source, target = bf16_source(64, 160)
    even = identity_hessian(160, device="cpu")
    gptq = losses(target, round_gptq(target, UNIT, even, kernel, sweeps=0), even.matrix)
    mse = losses(target, quantize_mse(source, UNIT), even.matrix)
    assert (gptq >= mse * (1 - 1e-6)).all(), "every scale was tried there"
    assert gptq.sum() <= 1.01 * mse.sum()


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["zero", "rank 3", "duplicates", "silent columns"])
def test_any_form_gives_codes_as_good_as_those_of_mse(kind: str, kernel: RoundingKernel) -> None:
    columns = 160
    inputs = correlated(600, 160)
    if kind == "zero":
        inputs = torch.zeros_like(inputs)
    elif kind == "rank 3":
        inputs = correlated(3, columns)
    elif kind == "duplicates":
        inputs = inputs[:1].expand(600, -1)
    else:
        inputs[:, 30:50] = 0
    matrix = form_of(inputs)
    even = identity_hessian(columns, device="cpu")
    target = weights(30, columns)
    codes = round_gptq(target, UNIT, damp_hessian(matrix, 0.5), kernel)
    by_max = round_gptq(target, UNIT, even, kernel)
    assert losses(target, codes, matrix).sum() <= losses(target, by_max, matrix).sum()
    assert losses(target, codes, even.matrix).sum() <= 4 * losses(target, by_max, even.matrix).sum()
    assert kind != "zero" or np.array_equal(codes.packed, by_max.packed)


def test_bytes_are_within_the_formats_and_zeros_are_those_of_mse(kernel: RoundingKernel) -> None:
    target = weights(20, 160)
    target[3] = 0
    target[4, 16:32] = 1e-30  # far below the smallest scale
    target[5, 0] = 1e4  # far above the largest
    codes = round_gptq(target, UNIT, identity_hessian(160, device="cpu"), kernel)
    assert not (unpack_nibbles(codes.packed) == 8).any()
    assert codes.block_scales.min() >= 0x08
    assert codes.block_scales.max() <= 0x7E
    for row, block in ((3, slice(0, 10)), (4, slice(1, 2))):
        assert (codes.block_scales[row, block] == 0x38).all()
        assert not codes.packed[row, 8 * block.start : 8 * block.stop].any()
    assert dequantize_nvfp4(codes)[5, 0] == 6 * 448 * UNIT


@pytest.mark.parametrize("rows", [1, 47, 100])
@pytest.mark.usefixtures("instructions")
def test_threads_do_not_change_the_bytes(rows: int) -> None:
    hessian = hessian_of(160)
    target = weights(rows, 160)
    single, double, many = (round_gptq(target, UNIT, hessian, kernel_for("cpu", threads)) for threads in (1, 2, 7))
    alone = round_gptq(target[-1:], UNIT, hessian, kernel_for("cpu"))
    assert_same(single, double)
    assert_same(single, many)
    assert_same(Nvfp4Weight(single.packed[-1:], single.block_scales[-1:], UNIT), alone)


def test_kernels_agree(kernel: RoundingKernel) -> None:
    hessian = hessian_of(272)
    target = weights(200, 272)
    expected = round_gptq(target, UNIT, hessian, kernel_for("cpu"))
    actual = round_gptq(target, UNIT, hessian, kernel)
    assert (unpack_nibbles(actual.packed) == unpack_nibbles(expected.packed)).mean() > 0.999
    both = losses(target, actual, hessian.matrix).sum(), losses(target, expected, hessian.matrix).sum()
    assert both[0] == pytest.approx(both[1], rel=1e-4)


def test_no_rows_give_no_codes(kernel: RoundingKernel) -> None:
    assert round_gptq(torch.zeros(0, 32), UNIT, hessian_of(32), kernel).shape == (0, 32)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="sizes"):
        round_gptq(torch.zeros(3, 48), UNIT, hessian_of(32), kernel_for("cpu"))


def assert_same(first: Nvfp4Weight, second: Nvfp4Weight) -> None:
    assert np.array_equal(first.packed, second.packed)
    assert np.array_equal(first.block_scales, second.block_scales)
