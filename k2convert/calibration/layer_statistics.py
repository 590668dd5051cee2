"""Statistics of one decoder layer. Each array is one tensor of a statistics file.

    K hidden columns, E routed experts, I their width, S the width of the shared experts

    gate_up.mean_square       f32 [K]     of the MLP's input, over all tokens of the layer
    gate_up.amax              f32 [1]     its largest magnitude
    down.mean_square          f32 [E, I]  of each expert's inner activations times the router's weight p, over the
                                          tokens routed to it; 0 without tokens
    down.amax                 f32 [E]     the largest magnitude of the inner activations, without p
    shared_down.mean_square   f32 [S]     of the shared experts' inner activations; only if there are shared experts
    shared_down.amax          f32 [1]
    tokens                    i64 [E]     routed to each expert
    saliency                  f32 [E]     mean of p * ||f(x)|| over the routed tokens, f the expert (REAP); 0 without
    router_weight             f32 [E]     mean of p over all tokens of the layer, 0 for a token that is not routed there
    kv.amax                   f32 [2]     the largest magnitude in a KV cache: MLA's latent and rotary key, or keys and
                                          values; absent in older files, like the next three
    kv.subnormal_share        f32 [2]     of the same values: those that are not 0 but below E4M3's normal range, 2^-6
    kv.saturated_share        f32 [2]     those above E4M3's largest number, 448
    imatrix                   u8 [2]      1 if the mean squares of the input of gate and up, and of down in the routed
                                          experts, gained on tokens that were kept out (imatrix_gain.py); 0 if they are
                                          not to be used
    smoothing_exponents            i8 [K]      a, -4..4: the norm's weight times 2^a, its consumers over 2^a

Mean squares are weighted: a token's weight is 1 / ||h||^2 of the layer's output h, with mean 1 over all tokens of the
layer. Saliency, as REAP defines it, is not. A dense MLP is one expert that gets every token with p = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, IMATRIX_PARTS, ImatrixPart
from k2convert.errors import CalibrationError

MAX_EXPONENT: Final = 4
"""Norm exponents are in -4..4."""

_KV: Final = ("kv.amax", "kv.subnormal_share", "kv.saturated_share")

TENSORS: Final[dict[str, tuple[str, type[np.generic], int]]] = {
    "tokens": ("tokens", np.int64, 1),
    "gate_up_mean_square": ("gate_up.mean_square", np.float32, 1),
    "gate_up_amax": ("gate_up.amax", np.float32, 1),
    "down_mean_square": ("down.mean_square", np.float32, 2),
    "down_amax": ("down.amax", np.float32, 1),
    "shared_down_mean_square": ("shared_down.mean_square", np.float32, 1),
    "shared_down_amax": ("shared_down.amax", np.float32, 1),
    "saliency": ("saliency", np.float32, 1),
    "router_weight": ("router_weight", np.float32, 1),
    "smoothing_exponents": ("smoothing_exponents", np.int8, 1),
    "kv_amax": ("kv.amax", np.float32, 1),
    "kv_subnormal_share": ("kv.subnormal_share", np.float32, 1),
    "kv_saturated_share": ("kv.saturated_share", np.float32, 1),
    "imatrix": ("imatrix", np.uint8, 1),
}
"""Field -> (name in the file, dtype, rank), in the order of the file."""

OPTIONAL: Final = ("shared_down.mean_square", "shared_down.amax", *_KV, "imatrix")
"""Tensors that a layer may lack."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerStatistics:
    """The statistics of one layer. CalibrationError if an array is not what the table above says.

    `norm_digest` is the blake3 of the bytes of the source's post_attention_layernorm.weight.
    """

    layer: int
    norm_digest: str
    gate_up_mean_square: NDArray[np.float32]
    gate_up_amax: NDArray[np.float32]
    down_mean_square: NDArray[np.float32]
    down_amax: NDArray[np.float32]
    tokens: NDArray[np.int64]
    saliency: NDArray[np.float32]
    router_weight: NDArray[np.float32]
    smoothing_exponents: NDArray[np.int8]
    shared_down_mean_square: NDArray[np.float32] | None = None
    shared_down_amax: NDArray[np.float32] | None = None
    kv_amax: NDArray[np.float32] | None = None
    kv_subnormal_share: NDArray[np.float32] | None = None
    kv_saturated_share: NDArray[np.float32] | None = None
    imatrix: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        if problem := _problem(self):
            raise CalibrationError(f"layer {self.layer}: {problem}")

    @property
    def num_experts(self) -> int:
        """E; 1 for a dense MLP."""
        return self.tokens.size

    @property
    def is_dense(self) -> bool:
        """Return whether the MLP is dense: one expert, no shared ones."""
        return self.num_experts == 1 and self.shared_down_mean_square is None

    @property
    def without_imatrix(self) -> tuple[ImatrixPart, ...]:
        """The projections in which the mean squares gained nothing: gate and up, or down of the routed experts."""
        gains = (1, 1) if self.imatrix is None else self.imatrix
        return tuple(part for part, gain in zip(IMATRIX_PARTS, gains, strict=True) if not gain)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by their names in the file (without the layer), in the order of the file."""
        found = {name: getattr(self, field) for field, (name, _, _) in TENSORS.items()}
        return {name: array for name, array in found.items() if array is not None}


def _problem(layer: LayerStatistics) -> str | None:
    for field, (name, dtype, rank) in TENSORS.items():
        array: NDArray[Any] | None = getattr(layer, field)
        if array is None:
            continue
        if array.dtype != dtype or array.ndim != rank:
            return f"{name} is {array.dtype} {list(array.shape)}"
        if not np.isfinite(array).all():
            return f"{name} holds NaN or infinity"
        if field != "smoothing_exponents" and (array < 0).any():
            return f"{name} holds negative numbers"
    if (np.abs(layer.smoothing_exponents.astype(np.int16)) > MAX_EXPONENT).any():
        return f"smoothing_exponents has values outside -{MAX_EXPONENT}..{MAX_EXPONENT}"
    if layer.imatrix is not None and (layer.imatrix > 1).any():
        return "imatrix has values other than 0 and 1"
    return _shape_problem(layer)


def _shape_problem(layer: LayerStatistics) -> str | None:
    experts, width = layer.down_mean_square.shape
    shared = layer.shared_down_mean_square
    shared_amax = layer.shared_down_amax
    if (shared is None) != (shared_amax is None):
        return "has one of shared_down.mean_square and shared_down.amax"
    columns = {"gate_up.mean_square": layer.gate_up_mean_square.size, "down.mean_square": width}
    if shared is not None:
        columns["shared_down.mean_square"] = shared.size
    for name, size in columns.items():
        if size == 0 or size % BLOCK_SIZE:
            return f"{name} has {size} columns, which is not a multiple of {BLOCK_SIZE}"
    sizes = {
        "smoothing_exponents": (layer.smoothing_exponents.size, layer.gate_up_mean_square.size),
        "gate_up.amax": (layer.gate_up_amax.size, 1),
        "down.amax": (layer.down_amax.size, experts),
        "tokens": (layer.tokens.size, experts),
        "saliency": (layer.saliency.size, experts),
        "router_weight": (layer.router_weight.size, experts),
        "shared_down.amax": (1 if shared_amax is None else shared_amax.size, 1),
    }
    pairs = {name: layer.arrays()[name].size for name in (*_KV, "imatrix") if name in layer.arrays()}
    sizes |= {name: (size, 2) for name, size in pairs.items()}
    for name, (size, expected) in sizes.items():
        if size != expected:
            return f"{name} has {size} values, expected {expected}"
    if layer.is_dense and layer.smoothing_exponents.any():
        return "is dense, but smoothing_exponents are not zero"
    return "has no experts" if experts == 0 else None
