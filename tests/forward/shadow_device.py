"""A device `shadow` for tests: it computes on the CPU, but is as strict about where tensors are as a GPU.

Its tensors cannot be taken by numpy, and cannot be mixed with tensors of the CPU or of another shadow device. So code
that runs on shadow:0 and shadow:1 has every tensor where a GPU needs it. Importing this module adds the device to torch
in this process, for good.
"""

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_MOVES: Final = {"aten::copy_", "aten::_to_copy"}
_TAKE_CPU_INDICES: Final = {"aten::index", "aten::index_put_"}

calls: dict[str, int] = {}
"""How many operators ran on each device."""


class _ShadowTensor(Tensor):
    """A tensor that says it is on a shadow device; its values are those of `inner`, which is on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> "_ShadowTensor":
        shadow: Any = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        shadow.inner = inner
        return shadow

    @classmethod
    def __torch_dispatch__(cls, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(operator, *args, **(kwargs or {}))


def _compute(operator: Any, *args: Any, **kwargs: Any) -> Any:
    name = operator._schema.name
    tensors = [value for value in tree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    shadows = [tensor for tensor in tensors if isinstance(tensor, _ShadowTensor)]
    device = shadows[0].device if shadows else None
    if name not in _MOVES:
        for tensor in tensors:
            is_index = tensor.device.type == "cpu" and name in _TAKE_CPU_INDICES and not tensor.is_floating_point()
            if tensor.device != device and tensor.ndim > 0 and not is_index and device is not None:
                raise RuntimeError(f"{name}: tensors on {device} and {tensor.device}")
    requested = kwargs.get("device")
    if requested is not None:
        device = torch.device(requested)
        kwargs = kwargs | {"device": torch.device("cpu")}
    if name == "aten::_fused_sdp_choice":
        return 0  # the one of torch that is made of other operators
    calls[str(device)] = calls.get(str(device), 0) + 1
    inner_args, inner_kwargs = tree.tree_map_only(_ShadowTensor, lambda shadow: shadow.inner, (args, kwargs))
    result = operator(*inner_args, **inner_kwargs)
    if device is None or device.type == "cpu":
        return result

    def wrapped(tensor: Tensor) -> Tensor:
        same = [shadow for shadow in shadows if shadow.inner is tensor]
        return same[0] if same else _ShadowTensor(tensor, device)

    return tree.tree_map_only(Tensor, wrapped, result)


_setup_privateuseone_for_python_backend("shadow")
_library: Final = torch.library.Library("_", "IMPL")
_library.fallback(_compute, "PrivateUse1")
_aten: Final = torch.library.Library("aten", "IMPL")
for _overload in ("default", "start", "start_step"):
    # torch makes these by resizing a tensor, which a wrapper does not notice.
    _operator = getattr(torch.ops.aten.arange, _overload)
    _aten.impl(_operator, partial(_compute, _operator), "PrivateUse1")
