"""Sums over tokens are what they say, and the correction is the one that a direct solve in float64 finds."""

import numpy as np
import pytest
import torch
from gptq_direct import Tokens, correlated, ridge_target, weights
from torch import Tensor

from k2convert.quantize.gptq.moments import MIN_TOKENS, Moments, Ridge


def make_tokens(count: int, columns: int, rows: int, *, noise: float = 1.0) -> Tokens:
    inputs = correlated(count, columns)
    generator = torch.Generator().manual_seed(5)
    missing = inputs @ weights(rows, columns, seed=2).T * 10 + noise * torch.randn(count, rows, generator=generator)
    halves = torch.arange(count) // 100 % 2
    arrays = (inputs, missing, 0.1 + torch.rand(count, generator=generator))
    return Tokens(*(array.double().numpy() for array in arrays), halves=halves.numpy())


def moments_of(tokens: Tokens, step: int = 1 << 20) -> Moments:
    moments = Moments.start(tokens.inputs.shape[1], tokens.missing.shape[1], device="cpu")
    arrays = [torch.as_tensor(a) for a in (tokens.inputs, tokens.missing, tokens.weights, tokens.halves)]
    for inputs, missing, shares, halves in zip(*(array.split(step) for array in arrays), strict=True):
        moments.add(inputs.float(), missing.float(), shares, halves)
    return moments


def assert_close(found: Tensor, expected: np.ndarray, tolerance: float) -> None:
    scale = np.abs(expected).max()
    assert np.abs(found.double().numpy() - expected).max() <= tolerance * scale


def test_forms_are_weighted_means_of_all_tokens_and_of_each_half() -> None:
    tokens = make_tokens(900, 48, 32)
    moments = moments_of(tokens, step=250)
    assert moments.tokens == 900
    assert_close(moments.form(), tokens.form, 1e-5)
    for half, form in enumerate(moments.halves()):
        assert_close(form, tokens.half(half).form, 1e-5)


@pytest.mark.parametrize(("noise", "strength"), [(0.02, 0.3), (5.0, 1.0), (20.0, 30.0)])
def test_correction_equals_a_direct_solve(noise: float, strength: float) -> None:
    tokens = make_tokens(900, 48, 32, noise=noise)
    expected, expected_strength, gain = ridge_target(tokens, np.eye(32))
    correction, found = moments_of(tokens).correction()
    assert found.strength == expected_strength == strength
    assert found.gain == pytest.approx(gain, rel=1e-3)
    assert_close(correction, expected, 1e-3)


def test_what_one_half_says_and_the_other_denies_is_not_corrected() -> None:
    tokens = make_tokens(900, 48, 32, noise=0.5)
    tokens.missing[tokens.halves == 1] *= -1
    assert ridge_target(tokens, np.eye(32))[1] is None
    correction, found = moments_of(tokens).correction()
    assert found == Ridge(None, 0.0)
    assert not correction.any()


def test_gram_weighs_the_rows_of_the_loss() -> None:
    """Rows of which the halves say the opposite get no say when the gram leaves them out."""
    tokens = make_tokens(900, 48, 48, noise=0.5)
    tokens.missing[tokens.halves == 1, 1:] *= -1
    root = np.zeros((3, 48))
    root[0, 0] = 1.0
    expected, strength, gain = ridge_target(tokens, root)
    correction, found = moments_of(tokens).correction(torch.as_tensor(root.T @ root).float())
    assert strength is not None
    assert found.strength == strength
    assert found.gain == pytest.approx(max(0.0, gain), abs=1e-4)
    assert_close(correction, expected, 1e-3)
    assert moments_of(tokens).correction()[1].strength is None, "without the gram the other rows decide"


def test_few_tokens_or_one_half_give_no_correction() -> None:
    few = make_tokens(MIN_TOKENS - 1, 16, 8, noise=0.0)
    one_half = make_tokens(MIN_TOKENS, 16, 8, noise=0.0)
    one_half.halves[:] = 1
    silent = make_tokens(MIN_TOKENS, 16, 8, noise=0.0)
    silent.inputs[:] = 0
    for tokens in (few, one_half, silent):
        correction, found = moments_of(tokens).correction()
        assert found == Ridge(None, 0.0)
        assert not correction.any()
    assert moments_of(make_tokens(MIN_TOKENS, 16, 8, noise=0.0)).correction()[1].strength == 0.3


def test_duplicate_tokens_give_a_finite_correction() -> None:
    tokens = make_tokens(MIN_TOKENS, 16, 8, noise=0.0)
    tokens.inputs[:], tokens.missing[:] = tokens.inputs[0], tokens.missing[0]
    correction, found = moments_of(tokens).correction()
    assert found.strength == 0.3
    assert found.gain > 0.9
    left = tokens.missing[0] - correction.double().numpy() @ tokens.inputs[0]
    assert np.linalg.norm(left) < 0.1 * np.linalg.norm(tokens.missing[0])


def test_scaled_sums_equal_sums_of_scaled_inputs_bit_for_bit() -> None:
    tokens = make_tokens(700, 48, 48)
    tokens.missing[:] = (tokens.missing - tokens.inputs).astype(np.float32)
    exponents = np.random.RandomState(0).randint(-4, 5, 48)
    factors = np.exp2(exponents)
    scaled = Tokens(tokens.inputs * factors, tokens.missing * factors, tokens.weights, tokens.halves)
    found, expected = moments_of(tokens).scaled(torch.as_tensor(exponents)), moments_of(scaled)
    assert torch.equal(found.forms, expected.forms)
    assert torch.equal(found.crosses, expected.crosses)
    assert torch.equal(found.energies, expected.energies)
    assert (found.weights, found.tokens) == (expected.weights, expected.tokens)
