"""What the panel kernels of rule gptq compute, in NumPy: the same FP32 operations in the same order."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from k2convert.quantize.gptq.device_kernel import PANEL

Lanes = NDArray[Any]
_F = np.float32
_I = np.int32
NUM_SCALES = 8
BELOW = 1


def fma(a: Any, b: Any, c: Any) -> Lanes:
    """a b + c of float32, rounded once: the product is exact in float64, and the sum is rounded to odd there."""
    product, added = np.broadcast_arrays(
        np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
    )
    with np.errstate(invalid="ignore", over="ignore"):
        total = product + added
        rest = total - product
        lost = (product - (total - rest)) + (added - rest)
        bits = total.view(np.int64)
        is_even = np.isfinite(total) & (lost != 0) & (bits & 1 == 0)
        # The neighbor of an even sum towards what is lost is odd.
        towards_zero = (lost < 0) == (total > 0)
        odd = np.where(is_even, bits + np.where(towards_zero, -1, 1), bits)
        return odd.view(np.float64).astype(_F)


def nearest(x: Lanes) -> Lanes:
    size = np.minimum(np.abs(x), _F(6))
    magic = np.where(size < 2, _F(6291456), np.where(size < 4, _F(12582912), _F(25165824)))
    rounded = (size + magic) - magic
    return (rounded.view(_I) | (x.view(_I) & _I(-(1 << 31)))).view(_F)


def step_of(byte: Lanes) -> Lanes:
    return ((byte.astype(_I) + _I(960)) << 20).view(_F)


def first_byte(largest: Lanes) -> Lanes:
    with np.errstate(over="ignore"):
        scale = np.minimum(np.maximum(largest * _F(1 / 6), _F(2**-6)), _F(448))
    bits = scale.view(_I)
    return np.clip(((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960 - BELOW, 8, 0x7F - NUM_SCALES).astype(_I)


def search(weights_nJ: Lanes, factor_JJ: Lanes, inverses_J: Lanes) -> tuple[Lanes, Lanes, Lanes, Lanes]:
    """Byte [n], values and errors [n, 16] and loss [n] of the best scale: the first one of equals."""
    rest = np.repeat(weights_nJ[:, :, None], NUM_SCALES, axis=2)
    byte = first_byte(np.abs(weights_nJ).max(axis=1))[:, None] + np.arange(NUM_SCALES, dtype=_I)
    step = step_of(byte)
    inverse = _F(1) / step
    losses = np.zeros_like(step)
    values = np.empty_like(rest)
    errors = np.empty_like(rest)
    with np.errstate(over="ignore", invalid="ignore"):
        for j in range(16):
            values[:, j] = nearest(rest[:, j] * inverse) * step
            errors[:, j] = (rest[:, j] - values[:, j]) * inverses_J[j]
            losses = fma(errors[:, j], errors[:, j], losses)
            for k in range(j + 1, 16):
                rest[:, k] = fma(-errors[:, j], factor_JJ[j, k], rest[:, k])
    losses = np.where(np.isnan(losses), _F(np.inf), losses)
    best = losses.argmin(axis=1)
    n = np.arange(len(best))
    return byte[n, best], values[n, :, best], errors[n, :, best], losses[n, best]


def chain(own: Lanes, before_nD: Lanes, matrix_DJ: Lanes) -> Lanes:
    """own - before @ matrix, one column after the other."""
    for d in range(before_nD.shape[1]):
        own = fma(-before_nD[:, d, None], matrix_DJ[d], own)
    return own


@contextmanager
def arrays(tensors: Sequence[Tensor]) -> Iterator[list[Lanes]]:
    """The tensors as arrays, whose changes they get."""
    given = [tensor.cpu() for tensor in tensors]
    yield [tensor.numpy() for tensor in given]
    for tensor, changed in zip(tensors, given, strict=True):
        tensor.copy_(changed)


class ReferencePanels:
    """Runs a panel in the place of a kernel."""

    def round(self, *tensors: Tensor, group: int, start: int) -> None:
        with arrays(tensors) as given:
            self._round(*given, group=group, start=start)

    def improve(self, *tensors: Tensor, start: int) -> None:
        with arrays(tensors) as given:
            self._improve(*given, start=start)

    def _round(self, *given: Lanes, group: int, start: int) -> None:
        weights, factors, inverses, values, errors, scale_bytes = given
        for first in range(0, len(weights), group):
            rows = slice(first, first + group)
            factor = factors[first // group]
            for begin in range(start, min(start + PANEL, weights.shape[1]), 16):
                at = slice(begin, begin + 16)
                offset = begin - start
                own = chain(weights[rows, at], errors[rows, :offset], factor[start:begin, at])
                byte, rounded, lost, _ = search(own, factor[at, at], inverses[first // group, at])
                values[rows, at] = rounded
                errors[rows, offset : offset + 16] = lost
                scale_bytes[rows, begin // 16] = byte

    def _improve(self, *given: Lanes, start: int) -> None:
        gradient, form, form_inverses, factors, factor_inverses, block_inverses, values, changes, scale_bytes = given
        for begin in range(start, min(start + PANEL, gradient.shape[1]), 16):
            at = slice(begin, begin + 16)
            offset = begin - start
            index = begin // 16
            own = chain(gradient[:, at], changes[:, :offset], form[start:begin, at])
            before = values[:, at].copy()
            optimum = np.zeros_like(own)
            loss = np.zeros_like(own[:, 0])
            for k in range(16):
                optimum = fma(own[:, k, None], block_inverses[index, k], optimum)
            for j in range(16):
                loss = fma(optimum[:, j], own[:, j], loss)
            tried, rounded, _, least = search(optimum + before, factors[index], factor_inverses[at])
            better = least < loss * _F(0.9999)
            current = np.where(better[:, None], rounded, before)
            own = chain(own, current - before, form[at, at])
            byte = np.where(better, tried, scale_bytes[:, index])
            step = step_of(byte)
            inverse = _F(1) / step
            for j in range(16):
                goal = fma(own[:, j], form_inverses[begin + j], current[:, j])
                value = nearest(goal * inverse) * step
                own = fma(current[:, j, None] - value[:, None], form[begin + j, at], own)
                current[:, j] = value
            values[:, at] = current
            changes[:, offset : offset + 16] = current - before
            scale_bytes[:, index] = byte
