"""The modules of a result, and the form of each: NVFP4, FP8, a copy, or a form of another tool."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.layouts.layout import CheckpointLayout
from k2convert.models.names import WEIGHT, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE, Family, Role, TensorName
from k2convert.models.source_formats import MXFP4
from k2convert.plan.recipe import Recipe

FP8_PARAMETERS: Final = (WEIGHT, WEIGHT_SCALE)
CONVERTED_WHILE_LOADING: Final = {"BF16", "F16", "F32"}
"""Dtypes of which engines make their own."""


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the result: its parameters by name, and its place in the model.

    `is_converted` is set for NVFP4, `is_fp8` for a weight in a result of ours that is FP8, or should be.
    `other_form` is the form or dtype of a weight that another tool quantized, but not to NVFP4; empty for any other.
    """

    name: str
    parts: TensorName
    parameters: Mapping[str, TensorInfo]
    is_converted: bool
    other_form: str = ""
    is_fp8: bool = False

    def has_converted(self, parameter: str) -> bool:
        """Return whether a tensor of the module belongs to its converted weight; others are copies."""
        return self.is_converted or bool(self.other_form) or (self.is_fp8 and parameter in FP8_PARAMETERS)


def read_modules(
    parameters: Mapping[str, Mapping[str, TensorInfo]],
    places: Mapping[str, TensorName],
    *,
    names: CheckpointLayout,
    family: Family,
    int4_modules: frozenset[str],
    recipe: Recipe | None,
) -> dict[str, Module]:
    """Return the modules by name, from the parameters and the place of each.

    The recipe says what is NVFP4 and FP8. Without one, another tool made the result: a weight in a form of its own is
    left to it, and the experts of a layer are if all of them have that form.
    """
    marks = {WEIGHT_PACKED, WEIGHT_SHAPE, names.block_scale, names.global_scale, names.input_scale}
    roles = {Role.EXPERTS, *(recipe.roles if recipe is not None else ())}
    kept_layers = _kept_layers(parameters, places) if recipe is None else set[int | None]()
    modules: dict[str, Module] = {}
    for name, found in parameters.items():
        place = places[name]
        weight = found.get(WEIGHT)
        if recipe is not None:
            is_fp8 = weight is not None and weight.dtype == "F8_E4M3"
            if family.takes_fp8(place, recipe.fp8):
                is_fp8 |= WEIGHT_SCALE in found or (weight is not None and len(weight.shape) > 1)
            if is_fp8:
                modules[name] = Module(name, place, found, is_converted=False, is_fp8=True)
                continue
        is_kept = recipe is None and (place.role is not Role.EXPERTS or place.layer in kept_layers)
        other_form = _other_form(found) if is_kept else ""
        is_plain = is_kept and place.role is Role.EXPERTS
        looks_converted = not marks.isdisjoint(found) or (weight is not None and weight.dtype == "U8")
        is_converted = looks_converted or (not is_plain and (name in int4_modules or place.role in roles))
        modules[name] = Module(name, place, found, is_converted and not other_form, other_form)
    return modules


def _kept_layers(
    parameters: Mapping[str, Mapping[str, TensorInfo]], places: Mapping[str, TensorName]
) -> set[int | None]:
    """Return the layers whose experts are all in one form that is not NVFP4; none if there is no other layer.

    An engine loads the experts of a layer in one form.
    """
    forms: dict[int | None, set[str]] = defaultdict(set)
    for name, found in parameters.items():
        if places[name].role is Role.EXPERTS:
            weight = found.get(WEIGHT)
            is_plain = set(found) == {WEIGHT} and weight is not None and weight.dtype in CONVERTED_WHILE_LOADING
            forms[places[name].layer].add(weight.dtype if is_plain and weight is not None else _other_form(found))
    kept = {layer for layer, found in forms.items() if len(found) == 1 and "" not in found}
    return kept if len(kept) < len(forms) else set()


def _other_form(parameters: Mapping[str, TensorInfo]) -> str:
    """Return the form of a quantized weight that is not NVFP4: MXFP4, or the dtype of FP8 and integers; else empty."""
    weight = parameters.get(WEIGHT) or parameters.get(WEIGHT_PACKED)
    scale = parameters.get(WEIGHT_SCALE)
    if weight is None:
        return ""
    if weight.dtype == MXFP4.packed_dtype and scale is not None and scale.dtype in MXFP4.scale_dtypes:
        return MXFP4.title
    return weight.dtype if weight.dtype in ("F8_E4M3", "F8_E5M2", "I8", "I32") else ""
