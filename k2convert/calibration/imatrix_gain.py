"""Gain of rule `imatrix` in a layer: against rule `mse`, on tokens that are kept out of the mean squares.

    sum over held-out tokens t of w_t * |(W - nvfp4(W)) x_t|^2        w_t the token's weight, in down times p^2

is computed with the scales of either rule, for some rows of gate and up and of down of some experts. `imatrix` has the
mean squares of the other tokens. The answer of gate and up and that of down are kept in the statistics; where one is
no, a conversion uses an even importance. The mean squares in the statistics are then those of all tokens.

Fewer than MIN_HELD_OUT of them decide nothing, and the answer is no. Held-out tokens are of the same text: they do not
show that the model will be asked something else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.calibration.channels import MIN_LAYER_TOKENS, MIN_TOKENS, drawn_to_even
from k2convert.calibration.smoothing import quantize_by_imatrix
from k2convert.forward.moe import PROJECTIONS, one_torch_thread
from k2convert.forward.weights import WeightReader
from k2convert.models.names import WEIGHT, WEIGHT_PACKED
from k2convert.quantize.formats.bf16 import Bf16Weight, SourceWeight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import dequantize_nvfp4
from k2convert.quantize.rules.search_bf16 import block_importance
from k2convert.quantize.rules.search_int4 import MAX_IMPORTANCE

SAMPLED_TOKENS: Final = 256
"""Tokens that a choice is made by: this one, and smoothing."""

_CHUNK_ROWS: Final = 64  # in FP64 they fit into a core's cache
_CUDA_CHUNK_ROWS: Final = 1 << 15

SAMPLED_EXPERTS: Final = 16
SAMPLED_ROWS: Final = 64
"""Rows of a projection that are compared, of so many experts of a layer."""


MIN_HELD_OUT: Final = 64
"""With 16 of them on k2-tiny, chance decided."""


def sampled_experts(num_experts: int) -> frozenset[int]:
    """Return the experts whose projections are compared, evenly spread."""
    chosen = np.linspace(0, num_experts - 1, min(num_experts, SAMPLED_EXPERTS)).round().astype(int)
    return frozenset(chosen.tolist())


class TokenSample:
    """SAMPLED_TOKENS of the tokens that come: those with the smallest of random numbers, which `name` draws."""

    def __init__(self, name: str) -> None:
        self._generator = np.random.RandomState(zlib.crc32(name.encode()))
        self._numbers = np.empty(0)
        self._inputs = torch.empty(0)
        self._weights = torch.empty(0, dtype=torch.float64)

    def add(self, x_TK: Tensor, weights: Tensor) -> None:
        """Take from inputs f32 [T, K] with token weights f64 [T]."""
        before = self._numbers.size
        numbers = np.concatenate([self._numbers, self._generator.random_sample(x_TK.shape[0])])
        kept = np.sort(np.argsort(numbers, kind="stable")[:SAMPLED_TOKENS])
        old = torch.as_tensor(kept[kept < before])
        new = torch.as_tensor(kept[kept >= before] - before).to(x_TK.device)
        inputs = x_TK[new].cpu()
        self._numbers = numbers[kept]
        self._inputs = torch.cat([self._inputs[old], inputs]) if before else inputs
        self._weights = torch.cat([self._weights[old], weights[new].cpu()])

    def weighted(self, mean_weight: float) -> Tensor:
        """Return the inputs times the roots of their weights over `mean_weight`, f32 [n, K]."""
        return self._inputs * (self._weights / mean_weight).sqrt().float()[:, None]


def chunks(values: Tensor) -> Iterator[slice]:
    """Yield rows of f32 [t, I] that are summed in FP64 at once: few on a CPU, many on a GPU."""
    step = _CHUNK_ROWS if values.device.type == "cpu" else _CUDA_CHUNK_ROWS
    for start in range(0, values.shape[0], step):
        yield slice(start, start + step)


def weighted_squares(values: Tensor, weights: Tensor) -> Tensor:
    """Return sum_t weights[t] * values[t]^2 as f64 [I], for f32 [t, I] and f64 [t]."""
    total = torch.zeros(values.shape[1], dtype=torch.float64, device=values.device)
    for rows in chunks(values):
        total += values[rows].double().square_().mul_(weights[rows, None]).sum(dim=0)
    return total


@dataclass(slots=True)
class HeldOut:
    """The held-out tokens at one input [K]: how many, their weighted squares f64 [K], and a sample of them."""

    sample: TokenSample
    tokens: int = 0
    squares: Tensor | float = 0.0

    def add(self, values: Tensor, weights: Tensor) -> None:
        """Add values f32 [t, K] with weights f64 [t]."""
        self.tokens += values.shape[0]
        self.squares = self.squares + weighted_squares(values, weights)
        self.sample.add(values, weights)


@dataclass(frozen=True, slots=True)
class InputTokens:
    """All tokens at an input [K]: how many, their weighted squares f64 [K], and those that are held out."""

    tokens: int
    squares: Tensor
    held_out: HeldOut

    def importance(self, *, few: int) -> NDArray[np.uint8]:
        """Return the importance uint8 [K] by the tokens that are not held out, as for fewer than `few` tokens."""
        tokens = self.tokens - self.held_out.tokens
        squares = (self.squares - self.held_out.squares).clamp_(min=0)  # a difference of sums may be a little below
        mean_square = (squares / max(1, tokens)).float().cpu().numpy()
        return block_importance(drawn_to_even(mean_square, tokens) if tokens < few else mean_square)


def imatrix_gains(
    reader: WeightReader, mlp: str, *, block: InputTokens, inner: Mapping[int, InputTokens], is_dense: bool
) -> NDArray[np.uint8]:
    """Return whether `imatrix` has less error than `mse` in gate and up, and in down: uint8 [2], 1 for yes.

    `block` is the input of gate and up of the MLP block `mlp`, `inner` that of down of experts. Raises what reading the
    source raises.
    """
    errors = np.zeros((2, 2))
    if block.held_out.tokens < MIN_HELD_OUT:
        return np.zeros(2, dtype=np.uint8)
    of_block = block.importance(few=MIN_LAYER_TOKENS)
    with one_torch_thread():
        for expert, tokens in sorted(inner.items()):
            module = mlp if is_dense else f"{mlp}.experts.{expert}"
            of_inner = tokens.importance(few=MIN_LAYER_TOKENS if is_dense else MIN_TOKENS)
            for place, name in enumerate(PROJECTIONS):
                is_down = place == len(PROJECTIONS) - 1
                seen, importance = (tokens, of_inner) if is_down else (block, of_block)
                if seen.held_out.tokens:
                    inputs = seen.held_out.sample.weighted(1.0)
                    errors[int(is_down)] += _errors(_read_rows(reader, f"{module}.{name}"), importance, inputs)
    return (errors[:, 1] < errors[:, 0]).astype(np.uint8)


def _errors(weight: SourceWeight, importance: NDArray[np.uint8], inputs: Tensor) -> tuple[float, float]:
    """Return the squared errors of outputs by rule `mse` and by `imatrix`, for weighted inputs f32 [n, K]."""
    values = weight.values()
    found = list[float]()
    for used in (np.full_like(importance, MAX_IMPORTANCE), importance):
        error = torch.as_tensor(dequantize_nvfp4(quantize_by_imatrix(weight, used)) - values).float()
        found.append(float((inputs @ error.T).double().square_().sum()))
    return found[0], found[1]


def _read_rows(reader: WeightReader, module: str) -> SourceWeight:
    """Read SAMPLED_ROWS rows of a projection, evenly spread."""
    if not reader.has(f"{module}.{WEIGHT_PACKED}"):
        count = reader.info(f"{module}.{WEIGHT}").shape[0]
        rows = reader.read_rows(f"{module}.{WEIGHT}", range(0, count, -(-count // SAMPLED_ROWS)))
        return Bf16Weight(rows.to(torch.bfloat16).view(torch.uint16).numpy())
    whole = reader.read_source(module)
    assert isinstance(whole, Int4Weight)
    step = -(-whole.shape[0] // SAMPLED_ROWS)
    return Int4Weight(np.ascontiguousarray(whole.packed[::step]), np.ascontiguousarray(whole.scale_bits[::step]))
