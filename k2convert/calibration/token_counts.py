"""Number of tokens that a calibration uses: what experts need, what they got, and the disk that tokens take."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import Final

from k2convert.checkpoint.index import Checkpoint
from k2convert.models import read_architecture
from k2convert.models.config import text_config
from k2convert.models.names import Architecture

TOKENS_PER_INPUT: Final = 2
"""Tokens that an expert needs for each input of its down projection."""

_LEAST_TOKENS: Final = 131_072
_MOST_TOKENS: Final = 1 << 20  # no config asks for more by default

_FLOAT_BYTES: Final = 4
_TOKEN_TENSORS: Final = 3  # f32 [tokens, hidden] of a layer
_OUTPUTS: Final = 1  # f32 [tokens of an expert, hidden]
_UNEVEN: Final = 4  # the busiest experts have so many times the even share


def experts_per_token(source: Checkpoint) -> int:
    """Return how many experts a token chooses, 1 if the config does not say."""
    value = text_config(source.config).get("num_experts_per_tok")
    return value if isinstance(value, int) and value > 0 else 1


def default_tokens(source: Checkpoint, *, window: int) -> int:
    """Return the tokens with which the median expert has TOKENS_PER_INPUT for each input if all experts get the same.

    They fill whole windows, and are never few. Raises PlanError if the config has no counts.
    """
    architecture = read_architecture(source)
    chosen = experts_per_token(source)
    needed = -(-TOKENS_PER_INPUT * architecture.moe_intermediate_size * architecture.num_experts // chosen)
    tokens = min(max(needed, _LEAST_TOKENS), _MOST_TOKENS)
    return -(-tokens // window) * window


def median_tokens(counts: Iterable[int]) -> int:
    """Return the tokens of the median expert; of two in the middle, the fewer."""
    return median_low(counts)


def fewest_tokens(layers: Mapping[int, Sequence[int]]) -> tuple[int, int]:
    """Return the layer in which the median expert got the fewest tokens, and how many; `layers` has those of each."""
    layer, counts = min(layers.items(), key=lambda item: median_tokens(item[1]))
    return layer, median_tokens(counts)


def tokens_for(architecture: Architecture, *, used: int, got: int, window: int) -> int:
    """Return with how many tokens the median expert gets enough, if it `got` so many of those `used`."""
    needed = -(-used * TOKENS_PER_INPUT * architecture.moe_intermediate_size // max(got, 1))
    return -(-needed // window) * window


def scratch_bytes(source: Checkpoint, *, tokens: int, workers: int) -> int:
    """Return the disk that layer_tokens.py uses for a layer next to a CPU; an estimate for very uneven experts."""
    architecture = read_architecture(source)
    chosen = experts_per_token(source)
    at_once = (workers + 1) * _UNEVEN * tokens * chosen // max(architecture.num_experts, 1)
    outputs = _OUTPUTS * min(at_once, tokens * chosen) * architecture.hidden_size
    inner = tokens * chosen * architecture.moe_intermediate_size
    return _FLOAT_BYTES * (_TOKEN_TENSORS * tokens * architecture.hidden_size + inner + outputs)
