"""torch, imported when something of it is first used: that takes seconds, and converting INT4 on CPUs needs none."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> object:
            import torch

            return getattr(torch, name)

    torch = _Torch()
