"""Identity of this machine's floating-point arithmetic: the same sums in another order are other bytes.

torch and its libraries choose their instructions by the processor, and by variables of the environment. Their names do
not say all of it, so a few results are computed and hashed.
"""

from __future__ import annotations

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from k2convert.forward.moe import one_torch_thread
from k2convert.quantize.gptq.device_kernel import kernel_for
from k2convert.quantize.gptq.hessian import TILE, damp_hessian
from k2convert.quantize.gptq.rounding import round_gptq

_TOKENS = 96
_COLUMNS = TILE + 128
_ROWS = 48
_HEADS = 4


@torch.no_grad()
def arithmetic() -> str:
    """Return the instructions that torch uses on the CPU, and a digest of what it computes with one thread."""
    with one_torch_thread():
        digest = blake3()
        for values in _results():
            digest.update(values.contiguous().numpy().tobytes())
    return f"{torch.backends.cpu.get_cpu_capability()} {digest.hexdigest()[:16]}"


def _results() -> list[Tensor]:
    """Return a product, a factor, codes, and the functions of a layer, of fixed numbers."""
    random = np.random.RandomState(0)
    x, weight = (torch.as_tensor(random.standard_normal((n, _COLUMNS))).float() for n in (_TOKENS, _ROWS))
    hessian = damp_hessian(x.T @ x, 0.5)
    codes = round_gptq(weight, 1.0, hessian, kernel_for("cpu"))
    heads = x[:, : _HEADS * 64].view(_TOKENS, _HEADS, 64).transpose(0, 1)
    attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    functions = (torch.nn.functional.silu(x), x.sigmoid(), x.square().mean(dim=1).rsqrt(), x.cos(), attended)
    return [x @ weight.T, hessian.factor, torch.as_tensor(codes.packed), *functions]
