"""The modules of a result, and the form of each: NVFP4, FP8, a copy, or a form of another tool."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.layouts.layout import CheckpointLayout
from k2convert.checkpoint.reader import Bytes
from k2convert.choices import FP8_BLOCK
from k2convert.models.names import WEIGHT, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE, Family, Role, TensorName
from k2convert.models.source_formats import MXFP4
from k2convert.plan.recipe import Recipe
from k2convert.quantize.formats.bf16 import bf16_values

FP8_PARAMETERS: Final = (WEIGHT, WEIGHT_SCALE)
CONVERTED_WHILE_LOADING: Final = {"BF16", "F16", "F32"}
"""Dtypes of which engines make their own."""


Fp8Form = Literal["", "tensor", "rows", "blocks"]
_FP8_ROLES: Final = (
    Role.EXPERTS, Role.SHARED_EXPERTS, Role.DENSE_MLP, Role.ATTENTION, Role.LM_HEAD, Role.LATENT,
)  # fmt: skip
"""Roles that engines read in FP8."""


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the result: its parameters by name, and its place in the model.

    `is_converted` is set for NVFP4. `other_form` is the form or dtype of a weight that another tool quantized, but not
    to NVFP4; empty for any other. `fp8` is what has one scale in an FP8 weight. In a result of ours it is set for a
    weight that should be FP8 too; in others, for the forms that can be decoded.
    """

    name: str
    parts: TensorName
    parameters: Mapping[str, TensorInfo]
    is_converted: bool
    other_form: str = ""
    fp8: Fp8Form = ""

    @property
    def is_fp8(self) -> bool:
        return bool(self.fp8)

    def has_converted(self, parameter: str) -> bool:
        """Return whether a tensor of the module belongs to its converted weight; others are copies."""
        return self.is_converted or bool(self.other_form) or (self.is_fp8 and parameter in FP8_PARAMETERS)


def read_modules(
    parameters: Mapping[str, Mapping[str, TensorInfo]],
    parts_by_module: Mapping[str, TensorName],
    *,
    names: CheckpointLayout,
    family: Family,
    int4_modules: frozenset[str],
    recipe: Recipe | None,
) -> dict[str, Module]:
    """Return the modules by name, from the parameters and the place of each.

    The recipe says what is NVFP4 and FP8. Without one, another tool made the result: a weight in a form of its own is
    left to it, and of the experts of a layer those that have the form of most.
    """
    marks = {WEIGHT_PACKED, WEIGHT_SHAPE, names.block_scale, names.global_scale, names.input_scale}
    roles = {Role.EXPERTS, *(recipe.roles if recipe is not None else ())}
    kept_experts = _kept_experts(parameters, parts_by_module) if recipe is None else set[str]()
    modules: dict[str, Module] = {}
    for name, tensors in parameters.items():
        parts = parts_by_module[name]
        weight = tensors.get(WEIGHT)
        if recipe is not None:
            is_fp8 = weight is not None and weight.dtype == "F8_E4M3"
            if family.takes_fp8(parts, recipe.fp8):
                is_fp8 |= WEIGHT_SCALE in tensors or (weight is not None and len(weight.shape) == 2)
            if is_fp8:
                own: Fp8Form = "blocks" if family.has_fp8_blocks else "rows"
                modules[name] = Module(name, parts, tensors, is_converted=False, fp8=own)
                continue
        is_kept = recipe is None and (parts.role is not Role.EXPERTS or name in kept_experts)
        other_form = _other_form(tensors) if is_kept else ""
        is_plain = is_kept and parts.role is Role.EXPERTS
        looks_converted = not marks.isdisjoint(tensors) or (weight is not None and weight.dtype == "U8")
        is_converted = looks_converted or (not is_plain and (name in int4_modules or parts.role in roles))
        form = fp8_form(tensors) if other_form and parts.role in _FP8_ROLES else ""
        modules[name] = Module(name, parts, tensors, is_converted and not other_form, other_form, form)
    return modules


def _kept_experts(
    parameters: Mapping[str, Mapping[str, TensorInfo]], parts_by_module: Mapping[str, TensorName]
) -> set[str]:
    """Return the experts that are in the form of most of their layer, if that is not NVFP4.

    An engine loads the experts of a layer in one form. Where no layer is NVFP4, all should have been.
    """
    forms: dict[int | None, dict[str, str]] = defaultdict(dict)
    for name, tensors in parameters.items():
        parts = parts_by_module[name]
        if parts.role is Role.EXPERTS:
            weight = tensors.get(WEIGHT)
            is_plain = set(tensors) == {WEIGHT} and weight is not None and weight.dtype in CONVERTED_WHILE_LOADING
            forms[parts.layer][name] = weight.dtype if is_plain and weight is not None else _other_form(tensors)
    usual = {layer: Counter(of.values()).most_common(1)[0][0] for layer, of in forms.items()}
    if all(usual.values()):
        return set()
    return {name for layer, of in forms.items() for name, form in of.items() if form and form == usual[layer]}


def _other_form(parameters: Mapping[str, TensorInfo]) -> str:
    """Return the form of a quantized weight that is not NVFP4: MXFP4, or the dtype of FP8 and integers; else empty."""
    weight = parameters.get(WEIGHT) or parameters.get(WEIGHT_PACKED)
    scale = parameters.get(WEIGHT_SCALE)
    if weight is None:
        return ""
    if weight.dtype == MXFP4.packed_dtype and scale is not None and scale.dtype in MXFP4.scale_dtypes:
        return MXFP4.title
    return weight.dtype if weight.dtype in ("F8_E4M3", "F8_E5M2", "I8", "I32") else ""


def fp8_form(parameters: Mapping[str, TensorInfo]) -> Fp8Form:
    """Return what has one scale in an FP8 weight, by its headers; empty for any other weight, or other scales."""
    weight = parameters.get(WEIGHT)
    scale = parameters.get(WEIGHT_SCALE)
    if weight is None or weight.dtype != "F8_E4M3" or len(weight.shape) != 2 or 0 in weight.shape:
        return ""
    if scale is None or scale.dtype not in CONVERTED_WHILE_LOADING:
        return ""
    rows, columns = weight.shape
    grid = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    if scale.shape in ((), (1,)):
        return "tensor"
    if scale.shape in ((rows, 1), (rows,)):
        return "rows"
    return "blocks" if scale.shape in (grid, (grid[0], 1, grid[1], 1)) else ""


def fp8_scales(data: Bytes, scale: TensorInfo, rows: int) -> NDArray[np.float32]:
    """Return the scales of an FP8 weight with some `rows`: float32 [N, 1], or [R, C] of blocks."""
    values = numbers_of(data, scale.dtype)
    if values.size == 1 and len(scale.shape) < 2:
        return np.full((rows, 1), values[0])
    return values.reshape(scale.shape[0], -1)


def numbers_of(data: Bytes, dtype: str) -> NDArray[np.float32]:
    """Return numbers in BF16, F16 or F32 as float32, flat."""
    if dtype == "BF16":
        return bf16_values(data.view(np.uint16))
    return data.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32, copy=False)
