"""The Hessian is damped as much as tokens that it has not seen ask for; never at the price of codes without data."""

import numpy as np
import pytest
import torch
from gptq_direct import correlated, losses, weights

from k2convert.quantize.gptq.device_kernel import kernel_for
from k2convert.quantize.gptq.hessian import damp_hessian, identity_hessian
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
    for seen, unseen in (halves, halves[::-1]):
        matrix = torch.as_tensor(seen.T @ seen / len(seen)).float()
        hessian = identity_hessian(COLUMNS, device="cpu") if damping is None else damp_hessian(matrix, damping)
        codes = round_gptq(target, UNIT, hessian, kernel_for("cpu"), sweeps=0).weight()
        total += losses(target, codes, torch.as_tensor(unseen.T @ unseen / len(unseen))).sum()
    return total


@pytest.mark.parametrize(("tokens", "expected"), [(63, None), (0, None), (1024, 0.5), (4000, 0.5)])
def test_few_and_many_tokens_need_no_trial(tokens: int, expected: float | None) -> None:
    assert choose(moments_of(correlated(tokens, COLUMNS))) == expected


@pytest.mark.parametrize("tokens", [64, 200, 1023])
def test_damping_is_the_one_that_loses_least_on_the_other_half(tokens: int) -> None:
    inputs = correlated(tokens, COLUMNS, seed=3)
    by_choice = {choice: held_out_loss(inputs, choice) for choice in (*DAMPINGS, None)}
    found = choose(moments_of(inputs))
    assert by_choice[found] <= min(by_choice.values()) * (1 + 1e-4)
    assert found is not None, "these inputs are easy"


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
