"""Bounds for the memory that hf_xet uses while it uploads.

hf_xet assembles objects of 64 MB, holds one per stream, and uses up to 64 streams on a fast line. It also has about a
hundred threads, and each thread's malloc heap keeps part of what it frees. A Hub-to-Hub job of 5 GB took 1.0 GB before
these bounds and smaller buffers, and 0.57 GB with both (`python -m scripts.bench.hub`). One upload of 1 GB to a local
store has few streams: it uses 0.34 GB with or without the bounds.
"""

import ctypes
import os
from contextlib import suppress

MAX_STREAMS = 4
NUM_HEAPS = 4
_M_ARENA_MAX = -8  # glibc's malloc.h


def bound_memory() -> None:
    """Cap streams and heaps. Call it before any thread starts. Variables that the user set stay as they are."""
    os.environ.setdefault("HF_XET_CLIENT_AC_MAX_UPLOAD_CONCURRENCY", str(MAX_STREAMS))
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, AttributeError):  # the C library is not glibc
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, NUM_HEAPS)
