"""The curvature and its factor equal float64's inverse, and nothing about H makes them fail."""

import numpy as np
import pytest
import torch
from gptq_direct import correlated, form_of

from k2convert.quantize.gptq.curvature import Curvature, even_curvature, make_curvature


def assert_factors_are_right(curvature: Curvature) -> None:
    form = curvature.form.double().numpy()
    factor = curvature.factor.double().numpy()
    assert np.array_equal(factor, np.triu(factor))
    inverse = np.linalg.inv(form)
    assert np.abs(factor.T @ factor - inverse).max() <= 1e-4 * np.abs(inverse).max()
    for index, block in enumerate(curvature.block_factors.double().numpy()):
        own = slice(16 * index, 16 * index + 16)
        inverse = np.linalg.inv(form[own, own])
        assert np.array_equal(block, np.triu(block))
        assert np.abs(block.T @ block - inverse).max() <= 1e-4 * np.abs(inverse).max()


@pytest.mark.parametrize("columns", [16, 128, 144, 336, 640, 1040])
def test_factor_is_that_of_the_inverse(columns: int) -> None:
    form = form_of(correlated(2 * columns, columns)) * 1e-5
    curvature = make_curvature(form, 0.3)
    expected = 0.7 * form.double() + torch.diag(0.3 * form.double().diagonal())
    expected = expected / form.double().diagonal().mean() + 0.01 * torch.eye(columns)
    assert torch.allclose(curvature.form.double(), expected, rtol=1e-6, atol=1e-7)
    assert_factors_are_right(curvature)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scale_of_the_form_does_not_matter(scale: float) -> None:
    form = form_of(correlated(200, 48))
    assert_factors_are_right(make_curvature(form * scale, 0.5))


def test_singular_forms_have_factors() -> None:
    one = correlated(1, 160).expand(600, -1)
    silent = correlated(600, 160)
    silent[:, 40:60] = 0
    only_one = torch.zeros(10, 160)
    only_one[:, 3] = 1.0
    for inputs in (one, silent, only_one, correlated(3, 160)):
        assert_factors_are_right(make_curvature(form_of(inputs), 0.0))


def test_nothing_measured_counts_every_column_the_same() -> None:
    for form in (torch.zeros(32, 32), torch.full((32, 32), torch.nan)):
        found = make_curvature(form, 0.5)
        even = even_curvature(32, device="cpu")
        assert torch.equal(found.form, torch.eye(32))
        assert torch.equal(found.factor, even.factor)
        assert torch.equal(found.block_factors, even.block_factors)


def test_what_is_no_sum_of_squares_is_damped_or_cut_to_its_diagonal() -> None:
    slightly = torch.full((32, 32), 1.02)
    slightly.fill_diagonal_(1.0)
    far = torch.full((32, 32), 9.0)
    far.fill_diagonal_(1.0)
    assert_factors_are_right(make_curvature(slightly, 0.0))
    curvature = make_curvature(far, 0.0)
    assert torch.equal(curvature.form, torch.diag(curvature.form.diagonal()))
    assert_factors_are_right(curvature)
