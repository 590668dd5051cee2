"""Kimi Delta Attention (KDA): linear attention whose state forgets channel by channel.

For every head, with q and k of length 1, q times D^-0.5, and log decays g <= 0 of the D channels of a token:

    S_t = diag(exp g_t) S_(t-1);   S_t += k_t (beta_t (v_t - S_t' k_t))';   o_t = S_t' q_t

This is computed in chunks of CHUNK tokens. Within a chunk with the sums G_i = g_1 + .. + g_i, what token i changes is
u_i = beta_i (v_i - (k_i exp G_i)' S) - sum_j<i A_ij u_j, where A_ij = beta_i sum_d k_id k_jd exp(G_i - G_j)_d: a
triangular system. No exponent is above zero, so nothing overflows however fast a channel forgets.

Authorities: Moonshot's modelling code (KimiDeltaAttention), fla's naive KDA, transformers' kimi_linear.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from k2convert.forward.weights import RmsNorm, WeightReader
from k2convert.models.names import WEIGHT

CHUNK: Final = 16
DECAY_FLOATS: Final = 1 << 24
"""Numbers of the decays of all pairs of tokens in a chunk: as many heads are computed at once as need these."""
_NORM_EPSILON: Final = 1e-6

_LINEARS: Final = ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_proj", "o_proj")


class DeltaAttention:
    """The KDA of one layer, on one device. The tensors have the shapes that config.json describes."""

    def __init__(self, reader: WeightReader, stem: str, linear: dict[str, Any], *, device: str) -> None:
        """Read the attention `stem` (`...self_attn`); `linear` is linear_attn_config of config.json."""
        self._heads: int = linear["num_heads"]
        self._bound: float | None = linear.get("gate_lower_bound")
        self._linears = {name: reader.read_linear(f"{stem}.{name}").to(device) for name in _LINEARS}

        def numbers(name: str) -> Tensor:
            return reader.read_numbers(f"{stem}.{name}").float().to(device)

        self._kernels = [numbers(f"{name}_conv1d.{WEIGHT}") for name in "qkv"]
        self._rates = numbers("A_log")[: self._heads].exp()[:, None, None]  # padded with zeros
        self._bias = numbers("dt_bias").view(self._heads, 1, -1)
        self._norm: RmsNorm = reader.read_norm(f"{stem}.o_norm.{WEIGHT}", device)

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Map the normed hidden states f32 [T, K] of one window to f32 [T, K]."""
        linears = self._linears
        q, k, v = (
            self._by_head(_convolve(linears[f"{name}_proj"].linear(x_TK), kernel))
            for name, kernel in zip("qkv", self._kernels, strict=True)
        )
        decays = self._log_decays(linears["f_b_proj"].linear(linears["f_a_proj"].linear(x_TK)))
        beta = linears["b_proj"].linear(x_TK).sigmoid().T
        size = q.shape[-1]
        at_once = max(1, DECAY_FLOATS // (x_TK.shape[0] * CHUNK * size))
        parts = [
            delta_rule(unit(q[heads]) * size**-0.5, unit(k[heads]), v[heads], decays[heads], beta[heads].contiguous())
            for heads in (slice(start, start + at_once) for start in range(0, self._heads, at_once))
        ]
        attended = self._norm(torch.cat(parts)).transpose(0, 1).flatten(1)
        return linears["o_proj"].linear(attended * linears["g_proj"].linear(x_TK).sigmoid())

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self._heads, -1).transpose(0, 1)

    def _log_decays(self, f: Tensor) -> Tensor:
        biased = self._by_head(f) + self._bias
        if self._bound is None:
            return -self._rates * torch.nn.functional.softplus(biased)
        return self._bound * (self._rates * biased).sigmoid()


def _convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """Return silu of the causal convolution of each channel: f32 [T, N] with f32 [N, 1, size], whose last is t's."""
    padded = torch.nn.functional.pad(x.T, (kernel.shape[-1] - 1, 0))
    return torch.nn.functional.silu(torch.nn.functional.conv1d(padded[None], kernel, groups=x.shape[1])[0].T)


def unit(x: Tensor) -> Tensor:
    """Return f32 [.., D] at length 1."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _NORM_EPSILON)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decays: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs f32 [H, T, D] of heads with q, k, v and log decays f32 [H, T, D], and beta f32 [H, T]."""
    heads, tokens, size = k.shape
    missing = -tokens % CHUNK

    def chunked(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, missing)).view(heads, -1, CHUNK, x.shape[-1])

    q, k, v, log_decays, beta = map(chunked, (q, k, v, log_decays, beta[..., None]))
    sums = log_decays.cumsum(dim=2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).triu(1)[:, :, None]
    keys = (sums[:, :, :, None] - sums[:, :, None]).masked_fill_(later, -torch.inf).exp_().mul_(k[:, :, None])
    within = (keys @ q[..., None])[..., 0]
    system = (keys @ (beta * k)[..., None])[..., 0].tril(-1)
    del keys
    change = torch.cat([beta * v, beta * k * sums.exp()], dim=-1)
    linalg: Any = torch.linalg
    solved: Tensor = linalg.solve_triangular(system, change, upper=False, unitriangular=True)
    values = solved[..., :size]
    read = solved[..., size:]
    left = (sums[:, :, -1:] - sums).exp() * k
    forgotten = sums[:, :, -1, :, None].exp()
    q = q * sums.exp()
    state = torch.zeros(heads, size, size, device=k.device)
    outputs = torch.empty_like(values)
    for number in range(k.shape[1]):
        changed = values[:, number] - read[:, number] @ state
        outputs[:, number] = q[:, number] @ state + within[:, number] @ changed
        state = state * forgotten[:, number] + left[:, number].transpose(1, 2) @ changed
    return outputs.flatten(1, 2)[:, :tokens]
