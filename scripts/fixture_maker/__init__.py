"""Makes source checkpoints for tests and benchmarks: from the trained tiny one, K2-shaped, or only headers.

Every `make_*` writes a new folder and returns its path. The same arguments give the same bytes. Nothing here imports
k2convert, so a mistake in its readers cannot hide in its inputs. compressed-tensors packs the INT4 codes. Shards are
written by safetensors, or by a writer whose files the tests load with safetensors.
"""

# ruff: noqa: F401 (callers take these names from here)

from scripts.fixture_maker.edges import make_minus8, make_subnormal, make_wide, make_zeros
from scripts.fixture_maker.headers import make_k2_thinking_headers, make_k25_headers
from scripts.fixture_maker.inventory import SMALL_SHAPE, K2Shape
from scripts.fixture_maker.k3 import make_k3_edges, make_k3_headers, make_k3_shaped, make_k3_tiny
from scripts.fixture_maker.layouts import (
    TINY,
    make_cut,
    make_i64,
    make_k25,
    make_reap,
    make_short,
    make_split,
    make_tiny,
)
from scripts.fixture_maker.shaped import make_k2_shaped, make_token_ids
