"""Words and sizes that several wings share, each defined once."""

from typing import Final, Literal

Rule = Literal["optimal", "plain"]
"""How block scales are chosen: the best E4M3 scale of every block, or the block maximum over 6."""

Layout = Literal["modelopt", "compressed-tensors"]
"""Tensor names and configs of an NVFP4 checkpoint."""

Activations = Literal["w4a4", "w4a16"]
"""4-bit activations, or weight-only."""

QuantizerKind = Literal["native", "reference"]
"""k2convert's own arithmetic, or compressed-tensors followed by ModelOpt."""

Target = Literal["nvfp4", "bf16"]
"""What weights become."""

RoleName = Literal["experts", "shared_experts", "dense_mlp"]
"""The roles whose weights a recipe may convert."""

KvCache = Literal["fp8"]
"""KV cache types that a config may declare."""

Device = Literal["auto", "cpu", "cuda"]
"""Where weights are converted."""

GROUP_SIZE: Final = 32
"""Input columns that share one INT4 scale."""

BLOCK_SIZE: Final = 16
"""Input columns that share one NVFP4 block scale."""
