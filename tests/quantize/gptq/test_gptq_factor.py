"""The damped Hessian and its factor equal float64's inverse, and nothing about H makes them fail."""

import numpy as np
import pytest
import torch
from gptq_direct import correlated, form_of

from k2convert.quantize.gptq.hessian import DampedHessian, damp_hessian, identity_hessian


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
    one = correlated(1, 160).expand(600, -1)
    silent = correlated(600, 160)
    silent[:, 40:60] = 0
    only_one = torch.zeros(10, 160)
    only_one[:, 3] = 1.0
    for inputs in (one, silent, only_one, correlated(3, 160)):
        assert_factors_are_right(damp_hessian(form_of(inputs), 0.0))


def test_nothing_measured_counts_every_column_the_same() -> None:
    for matrix in (torch.zeros(32, 32), torch.full((32, 32), torch.nan)):
        found = damp_hessian(matrix, 0.5)
        even = identity_hessian(32, device="cpu")
        assert torch.equal(found.matrix, torch.eye(32))
        assert torch.equal(found.factor, even.factor)
        assert torch.equal(found.block_factors, even.block_factors)


def test_what_is_no_sum_of_squares_is_damped_or_cut_to_its_diagonal() -> None:
    slightly = torch.full((32, 32), 1.02)
    slightly.fill_diagonal_(1.0)
    far = torch.full((32, 32), 9.0)
    far.fill_diagonal_(1.0)
    assert_factors_are_right(damp_hessian(slightly, 0.0))
    hessian = damp_hessian(far, 0.0)
    assert torch.equal(hessian.matrix, torch.diag(hessian.matrix.diagonal()))
    assert_factors_are_right(hessian)
