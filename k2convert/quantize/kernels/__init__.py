"""Fast versions of formats/, rules/ and metrics/: one pass over the bytes of a checkpoint, equal to them byte for byte.

    cpu    weights on the CPU: measure, convert; one thread a call, any number of callers
    _cpu   the extension module behind them, built from cpp/; uses AVX2 or NEON if the CPU has it

INT4 weights go from packed bytes and BF16 scale bits to packed bytes and E4M3 bytes, with the counts from which all
metrics are computed. Nothing is unpacked, and the only state is each thread's buffers.
"""

from importlib.util import find_spec

from k2convert.errors import MissingDependencyError

if find_spec(f"{__name__}._cpu") is None:
    raise MissingDependencyError(
        f"{__path__[0]}: the kernels are not built here. Python found the sources of k2convert before the package that "
        "is installed: run it in a different folder, or install with `pip install -e .`."
    )
