"""The Hessian is damped as much as tokens that it has not seen ask for; never at the price of codes without data."""

import numpy as np
import pytest
import torch
from gptq_direct import correlated, form_of, losses, weights

from k2convert.quantize.gptq.device_kernel import kernel_for
from k2convert.quantize.gptq.hessian import DampedHessian, damp_hessian, identity_hessian
from k2convert.quantize.gptq.moments import Moments, WeightedTokens
from k2convert.quantize.gptq.rounding import DAMPINGS, choose_damping, round_gptq

UNIT = 2.0**-13
COLUMNS = 64


def moments_of(inputs: torch.Tensor) -> Moments:
    count = inputs.shape[0]
    return moments_of_halves(inputs, torch.arange(count) % 2)


def moments_of_halves(inputs: torch.Tensor, halves: torch.Tensor) -> Moments:
    moments = Moments.start(COLUMNS, device="cpu")
    moments.add(inputs, WeightedTokens.by_halves(torch.ones(inputs.shape[0]), halves))
    return moments.complete()


def choose(moments: Moments) -> float | None:
    return choose_damping(moments, weights(256, COLUMNS), UNIT, kernel_for("cpu"))


def held_out_loss(inputs: torch.Tensor, damping: float | None) -> float:
    """What 64 rows lose on the other half, directly; `choose_damping` takes every fourth of 256 rows."""
    target = weights(256, COLUMNS)[::4]
    halves = [inputs[half::2].double().numpy() for half in (0, 1)]
    total = 0.0
    for fitted, held_out in (halves, halves[::-1]):
        matrix = torch.as_tensor(fitted.T @ fitted / len(fitted)).float()
        hessian = identity_hessian(COLUMNS, device="cpu") if damping is None else damp_hessian(matrix, damping)
        codes = round_gptq(target, UNIT, hessian, kernel_for("cpu"), sweeps=0).weight()
        total += losses(target, codes, torch.as_tensor(held_out.T @ held_out / len(held_out))).sum()
    return total


@pytest.mark.parametrize(("tokens", "expected"), [(63, None), (0, None), (1024, 0.5), (4000, 0.5)])
def test_few_and_many_tokens_need_no_trial(tokens: int, expected: float | None) -> None:
    assert choose(moments_of(correlated(tokens, COLUMNS))) == expected


@pytest.mark.parametrize("tokens", [64, 200, 1023])
def test_damping_is_the_one_that_loses_least_on_the_other_half(tokens: int) -> None:
    inputs = correlated(tokens, COLUMNS, seed=3)
    by_choice = {choice: held_out_loss(inputs, choice) for choice in (*DAMPINGS, None)}
    damping = choose(moments_of(inputs))
    assert by_choice[damping] <= min(by_choice.values()) * (1 + 1e-4)
    assert damping is not None, "these inputs are easy"


def test_more_tokens_earn_more_trust() -> None:
    few, many = (choose(moments_of(correlated(tokens, COLUMNS))) for tokens in (64, 1023))
    assert few is not None
    assert many is not None
    assert few > many


def test_halves_with_nothing_in_common_or_without_tokens_give_no_gptq() -> None:
    inputs = torch.randn(200, COLUMNS, generator=torch.Generator().manual_seed(0))
    inputs[0::2, 0::2] *= 0.01
    inputs[1::2, 1::2] *= 0.01
    assert choose(moments_of(inputs)) is None
    assert choose(moments_of_halves(correlated(300, COLUMNS), torch.ones(300))) is None
    silent = torch.zeros(100, COLUMNS)
    assert choose(moments_of(silent)) is None, "every choice loses nothing, so none is better than no correction"
    assert np.isfinite(held_out_loss(silent, 0.1))


def assert_factors_are_right(hessian: DampedHessian) -> None:
    matrix = hessian.matrix.double().numpy()
    factor = hessian.factor.double().numpy()
    assert np.array_equal(factor, np.triu(factor))
    inverse = np.linalg.inv(matrix)
    assert np.abs(factor.T @ factor - inverse).max() <= 1e-4 * np.abs(inverse).max()
    for index, block in enumerate(hessian.block_factors.double().numpy()):
        own = slice(16 * index, 16 * index + 16)
        inverse = np.linalg.inv(matrix[own, own])
        assert np.array_equal(block, np.triu(block))
        assert np.abs(block.T @ block - inverse).max() <= 1e-4 * np.abs(inverse).max()


@pytest.mark.parametrize("columns", [16, 128, 144, 336, 640, 1040])
def test_factor_is_that_of_the_inverse(columns: int) -> None:
    matrix = form_of(correlated(2 * columns, columns)) * 1e-5
    hessian = damp_hessian(matrix, 0.3)
    expected = 0.7 * matrix.double() + torch.diag(0.3 * matrix.double().diagonal())
    expected = expected / matrix.double().diagonal().mean() + 0.01 * torch.eye(columns)
    assert torch.allclose(hessian.matrix.double(), expected, rtol=1e-6, atol=1e-7)
    assert_factors_are_right(hessian)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scale_of_the_form_does_not_matter(scale: float) -> None:
    matrix = form_of(correlated(200, 48))
    assert_factors_are_right(damp_hessian(matrix * scale, 0.5))


def test_singular_hessians_have_factors() -> None:
    repeated = correlated(1, 160).expand(600, -1)
    silent = correlated(600, 160)
    silent[:, 40:60] = 0
    only_one = torch.zeros(10, 160)
    only_one[:, 3] = 1.0
    for inputs in (repeated, silent, only_one, correlated(3, 160)):
        assert_factors_are_right(damp_hessian(form_of(inputs), 0.0))


def test_nothing_measured_counts_every_column_the_same() -> None:
    for matrix in (torch.zeros(32, 32), torch.full((32, 32), torch.nan)):
        hessian = damp_hessian(matrix, 0.5)
        even = identity_hessian(32, device="cpu")
        assert torch.equal(hessian.matrix, torch.eye(32))
        assert torch.equal(hessian.factor, even.factor)
        assert torch.equal(hessian.block_factors, even.block_factors)


def test_what_is_no_sum_of_squares_is_damped_or_cut_to_its_diagonal() -> None:
    slightly = torch.full((32, 32), 1.02)
    slightly.fill_diagonal_(1.0)
    far = torch.full((32, 32), 9.0)
    far.fill_diagonal_(1.0)
    assert_factors_are_right(damp_hessian(slightly, 0.0))
    hessian = damp_hessian(far, 0.0)
    assert torch.equal(hessian.matrix, torch.diag(hessian.matrix.diagonal()))
    assert_factors_are_right(hessian)
