"""Bounds for the memory that hf_xet takes while it uploads.

It puts objects of 64 MB together, holds one for every stream, and goes up to 64 streams on a good line. And its hundred
threads, each with a heap of its own, keep a good part of what they free.
"""

import ctypes
import os
from contextlib import suppress

MAX_STREAMS = 4
NUM_HEAPS = 4
_M_ARENA_MAX = -8  # glibc's malloc.h


def bound_memory() -> None:
    """Cap streams and heaps; to be called before threads begin. What the user set in the environment stays."""
    os.environ.setdefault("HF_XET_CLIENT_AC_MAX_UPLOAD_CONCURRENCY", str(MAX_STREAMS))
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, NUM_HEAPS)
