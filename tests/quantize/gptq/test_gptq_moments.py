"""Sums over tokens are what they say, and the correction is the one that a direct solve in float64 finds."""

import numpy as np
import pytest
import torch
from gptq_direct import Tokens, correlated, ridge_target, weights
from torch import Tensor

from k2convert.quantize.gptq.hessian import Team, damp_hessian
from k2convert.quantize.gptq.moments import MIN_TOKENS, CrossMoments, Moments, WeightedTokens, correct

pytestmark = pytest.mark.usefixtures("one_thread")  # as in a layer pass: torch's threads change the sums of a product


def make_tokens(count: int, columns: int, rows: int, *, noise: float = 1.0) -> Tokens:
    inputs = correlated(count, columns)
    generator = torch.Generator().manual_seed(5)
    residual = inputs @ weights(rows, columns, seed=2).T * 10 + noise * torch.randn(count, rows, generator=generator)
    halves = torch.arange(count) // 100 % 2
    arrays = (inputs, residual, 0.1 + torch.rand(count, generator=generator))
    return Tokens(*(array.double().numpy() for array in arrays), halves=halves.numpy())


def moments_of(tokens: Tokens, step: int = 1 << 20, workers: int = 1) -> tuple[Moments, CrossMoments]:
    columns = tokens.inputs.shape[1]
    rows = tokens.residual.shape[1]
    moments = Moments.start(columns, device="cpu")
    sums = CrossMoments.start(columns, rows, device="cpu")
    arrays = [torch.as_tensor(a) for a in (tokens.inputs, tokens.residual, tokens.weights, tokens.halves)]
    with Team(workers) as team:
        for inputs, residual, shares, halves in zip(*(array.split(step) for array in arrays), strict=True):
            dealt = WeightedTokens.by_halves(shares, halves)
            moments.add(inputs.float(), dealt, team)
            sums.add(inputs.float(), residual.float(), dealt, team)
        return moments.complete(team), sums


def correction_of(tokens: Tokens) -> tuple[Tensor | None, float | None]:
    return correct(*moments_of(tokens))


def assert_close(actual: Tensor, expected: np.ndarray, tolerance: float) -> None:
    scale = np.abs(expected).max()
    assert np.abs(actual.double().numpy() - expected).max() <= tolerance * scale


def test_second_moments_are_weighted_means_of_all_tokens_and_of_each_half() -> None:
    tokens = make_tokens(900, 48, 32)
    moments, residual = moments_of(tokens, step=250)
    assert moments.tokens == 900
    assert_close(moments.hessian(), tokens.hessian, 1e-5)
    for half in (0, 1):
        own = tokens.half(half)
        assert_close(moments.half(half), own.hessian, 1e-5)
        assert_close(residual.crosses[half] / moments.weights[half], own.cross, 1e-5)


@pytest.mark.parametrize(("noise", "strength"), [(0.02, 0.3), (5.0, 1.0), (20.0, 30.0)])
def test_correction_equals_a_direct_solve(noise: float, strength: float) -> None:
    tokens = make_tokens(900, 48, 32, noise=noise)
    expected, expected_strength = ridge_target(tokens)
    correction, chosen_strength = correction_of(tokens)
    assert chosen_strength == expected_strength == strength
    assert correction is not None
    assert_close(correction, expected, 1e-3)


def test_what_one_half_says_and_the_other_denies_is_not_corrected() -> None:
    tokens = make_tokens(900, 48, 32, noise=0.5)
    tokens.residual[tokens.halves == 1] *= -1
    assert ridge_target(tokens)[1] is None
    assert correction_of(tokens) == (None, None)


def test_few_tokens_or_one_half_give_no_correction() -> None:
    few = make_tokens(MIN_TOKENS - 1, 16, 8, noise=0.0)
    one_half = make_tokens(MIN_TOKENS, 16, 8, noise=0.0)
    one_half.halves[:] = 1
    silent = make_tokens(MIN_TOKENS, 16, 8, noise=0.0)
    silent.inputs[:] = 0
    for tokens in (few, one_half, silent):
        assert correction_of(tokens) == (None, None)
    assert correction_of(make_tokens(MIN_TOKENS, 16, 8, noise=0.0))[1] == 0.3


def test_duplicate_tokens_give_a_finite_correction() -> None:
    tokens = make_tokens(MIN_TOKENS, 16, 8, noise=0.0)
    tokens.inputs[:], tokens.residual[:] = tokens.inputs[0], tokens.residual[0]
    correction, strength = correction_of(tokens)
    assert strength == 0.3
    assert correction is not None
    left = tokens.residual[0] - correction.double().numpy() @ tokens.inputs[0]
    assert np.linalg.norm(left) < 0.1 * np.linalg.norm(tokens.residual[0])


def test_scaled_sums_equal_sums_of_scaled_inputs_bit_for_bit() -> None:
    tokens = make_tokens(700, 48, 48)
    exponents = np.random.RandomState(0).randint(-4, 5, 48)
    factors = np.exp2(exponents)
    scaled = Tokens(tokens.inputs * factors, tokens.residual, tokens.weights, tokens.halves)
    moments, _ = moments_of(tokens)
    expected, _ = moments_of(scaled)
    moments.scale(torch.as_tensor(exponents))
    assert torch.equal(moments.sums, expected.sums)


def test_sums_of_many_outputs_with_random_signs_choose_the_strength_that_all_outputs_choose() -> None:
    """Of 2,000 outputs, 512 sums are judged; the correction itself is made for every output."""
    tokens = make_tokens(700, 48, 2000, noise=5.0)
    expected, strength = ridge_target(tokens)
    correction, chosen_strength = correction_of(tokens)
    assert correction is not None
    assert chosen_strength == strength
    assert_close(correction, expected, 1e-3)


@pytest.mark.slow
def test_workers_change_no_byte_of_matrices_with_many_tiles() -> None:
    """1,300 columns are six tiles in a row when they are factored, and three when they are multiplied."""
    tokens = make_tokens(MIN_TOKENS + 100, 1296, 1040)
    results: list[list[Tensor]] = []
    for workers in (1, 2, 4):
        moments, residual = moments_of(tokens, workers=workers)
        with Team(workers) as team:
            correction, strength = correct(moments, residual, team)
            hessian = damp_hessian(moments.hessian(), 0.5, team)
        assert correction is not None
        assert strength is not None
        results.append([moments.sums, residual.crosses, correction, torch.tensor(strength), hessian.factor])
    assert all(
        torch.equal(first, other) for tensors in results[1:] for first, other in zip(results[0], tensors, strict=True)
    )
    assert_close(results[0][0][0] / moments.weights[0], tokens.half(0).hessian, 1e-5)
