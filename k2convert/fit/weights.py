"""The bytes of a checkpoint by role and layer, from its headers: as it is, or as it would be converted.

Nothing is planned in detail: the bytes of a converted projection follow from its shape. On the 208,550 tensors of
Kimi-K2.5 (`scripts/fixtures k2.5-headers`) that takes a third of the time of finding its projections.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Protocol

from k2convert.checkpoint.layouts import projection_tensors
from k2convert.errors import PlanError, quoted
from k2convert.models import parse_tensor_name
from k2convert.models.names import WEIGHT, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE, Family, Role
from k2convert.plan.recipe import Recipe

_CODES_PER_WORD: Final = 8  # of INT4, in one I32
_DROPPED: Final = (f".{WEIGHT_SCALE}", f".{WEIGHT_SHAPE}")  # of INT4: the bytes of a projection count for its codes


class Tensor(Protocol):
    """What is weighed: an entry of a header, or a tensor that a plan will write."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one role in one layer (None: outside the layers). `is_split`: tensor parallelism divides them."""

    role: Role
    layer: int | None
    is_split: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model."""

    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def by_role(self) -> dict[Role, int]:
        """Bytes of each role, the largest first."""
        sums: dict[Role, int] = defaultdict(int)
        for part in self.parts:
            sums[part.role] += part.num_bytes
        return dict(sorted(sums.items(), key=lambda entry: -entry[1]))

    def with_experts(self, kept: int, *, of: int) -> "Weights":
        """Return the weights with fewer of each layer's experts. The experts of a layer, and their rows of the router,
        have the same bytes.
        """
        return Weights(tuple(_with_experts(part, kept, of) for part in self.parts))


_SPLIT_ROLES: Final = frozenset(
    (Role.EXPERTS, Role.SHARED_EXPERTS, Role.DENSE_MLP, Role.ATTENTION, Role.EMBEDDINGS, Role.LM_HEAD)
)


def _with_experts(part: Part, kept: int, total: int) -> Part:
    if part.role not in (Role.EXPERTS, Role.ROUTER):
        return part
    return replace(part, num_bytes=part.num_bytes * kept // total)


def weigh(tensors: Iterable[Tensor], *, family: Family, recipe: Recipe | None = None) -> Weights:
    """Add up the bytes of tensors; raises PlanError naming a tensor that no model of the family has.

    With a `recipe`, INT4 projections, and BF16 ones of its roles, count with the bytes that they would have converted.
    """
    places: dict[str, tuple[Role, int | None, bool]] = {}
    sums: dict[tuple[Role, int | None, bool], int] = defaultdict(int)
    for tensor in tensors:
        name = tensor.name
        if recipe is not None and name.endswith(_DROPPED):
            continue
        module, _, parameter = name.rpartition(".")
        if module not in places:
            places[module] = _place(name, module, family)
        place = places[module]
        sums[place] += tensor.num_bytes if recipe is None else _converted_bytes(tensor, parameter, place[0], recipe)
    return Weights(tuple(Part(*place, num_bytes) for place, num_bytes in sums.items()))


def is_int4(tensors: Iterable[Tensor]) -> bool:
    """Tell whether a checkpoint has INT4 projections, which a conversion turns into NVFP4."""
    return any(tensor.dtype == "I32" and tensor.name.endswith(f".{WEIGHT_PACKED}") for tensor in tensors)


def _place(name: str, module: str, family: Family) -> tuple[Role, int | None, bool]:
    """Return role, layer and whether tensor parallelism splits a tensor's module."""
    place = family.classify(module) or parse_tensor_name(name, family=family)  # which raises PlanError
    is_whole = module.rpartition(".")[2] in family.unsplit_attention
    return place.role, place.layer, place.role in _SPLIT_ROLES and not is_whole


def _converted_bytes(tensor: Tensor, parameter: str, role: Role, recipe: Recipe) -> int:
    """Return the bytes that a tensor of an INT4 source becomes."""
    is_packed = parameter == WEIGHT_PACKED
    if not is_packed and not (parameter == WEIGHT and role in recipe.roles):
        return tensor.num_bytes
    if len(tensor.shape) != 2:
        raise PlanError(f"tensor {tensor.name}: shape {quoted(list(tensor.shape))}, expected rows and columns.")
    rows, columns = tensor.shape
    columns *= _CODES_PER_WORD if is_packed else 1
    return _projection_bytes(recipe.layout, rows, columns, recipe.activations)


@lru_cache(maxsize=64)
def _projection_bytes(layout: str, num_rows: int, num_columns: int, activations: str) -> int:
    tensors = projection_tensors(
        layout=layout, num_rows=num_rows, num_columns=num_columns, has_input_scale=activations == "w4a4"
    )
    return sum(tensor[3] for tensor in tensors)
