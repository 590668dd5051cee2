"""Which tensors of a MoE layer smoothing changes, by the names of the family.

The weight of the norm before the MLP is multiplied, channel by channel, by 2^a. Everything that reads the norm's output
is divided by 2^a, column by column: the router, and gate and up of routed and shared experts. The model is the same
function. Only the names decide this; the exponents come from the statistics.
"""

from dataclasses import dataclass

from k2convert.models.names import WEIGHT, Family, ModulePlace, Role, TensorName

_READERS = (Role.EXPERTS, Role.SHARED_EXPERTS)


@dataclass(frozen=True, slots=True)
class ColumnScaling:
    """How smoothing changes one tensor: its columns times 2^a, or divided by it, with the exponents of `layer`."""

    layer: int
    is_divided: bool


def reads_norm(place: ModulePlace | TensorName) -> bool:
    """Return whether a module of a MoE layer reads the output of the norm before the MLP."""
    return place.role is Role.ROUTER or (place.role in _READERS and place.projection in ("gate", "up"))


def column_scaling(parts: TensorName, *, family: Family) -> ColumnScaling | None:
    """Return how smoothing changes an unconverted tensor of a MoE layer, None if it does not."""
    if parts.layer is None or parts.parameter != WEIGHT:
        return None
    if parts.module == family.mlp_norm.format(layer=parts.layer):
        return ColumnScaling(parts.layer, is_divided=False)
    return ColumnScaling(parts.layer, is_divided=True) if reads_norm(parts) else None
