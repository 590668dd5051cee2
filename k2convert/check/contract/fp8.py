"""The rules on FP8 weights: names and forms (1), shapes (3), codes and scales (4, 6), parallelism (10).

A result of ours has the form of its family. Forms of other tools are known by their scales: one for each row, one for
each block of 128 x 128, or one for the tensor. Of these, codes and scales must be numbers.

Blocks must not be cut by tensor parallelism. vLLM 0.33.0 joins g_proj of an MLA layer of Kimi K3 to the layers before
it in the middle of a block (KimiK3MergedQKVGateLinear in model_executor/layers/linear.py), so its rows get scales of
neighbors. Where all blocks of a column have one scale, these are the same.
"""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from k2convert.check.contract.modules import FP8_PARAMETERS, Module, fp8_scales
from k2convert.check.contract.result import Result
from k2convert.check.results import Findings
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.layouts.layout import fp8_tensors
from k2convert.checkpoint.reader import Bytes
from k2convert.choices import FP8_BLOCK
from k2convert.models.names import WEIGHT, WEIGHT_SCALE

_LARGEST_FINITE: Final = 0x7E
_LEAST_LARGEST: Final = 0x76  # 224: the largest weight under a scale of ours is more than that times it
_LARGEST_SCALE: Final = 65504 / 448  # of a weight that F16 can hold; a reciprocal scale is larger
_LEAST_SCALE: Final = 2.0**-126  # of a block of ours
_SPLIT: Final = {"q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1}
"""The dimension by which tensor parallelism cuts linear layers of attention that engines do not pad."""


def check_fp8_names(result: Result, module: Module, findings: Findings) -> None:
    """An FP8 layer of ours has a weight and scales, and is one that the recipe names."""
    weight = module.parameters.get(WEIGHT)
    recipe = result.recipe
    if recipe is None or not result.family.takes_fp8(module.parts, recipe.fp8):
        findings.error(module.name, "is FP8, but the recipe leaves it in BF16")
    elif weight is not None and weight.dtype in ("BF16", "F16", "F32") and WEIGHT_SCALE not in module.parameters:
        findings.error(module.name, f"is {weight.dtype}, but the recipe's fp8 names {module.parts.role}")
    else:
        for parameter in FP8_PARAMETERS:
            if parameter not in module.parameters:
                findings.error(f"{module.name}.{parameter}", "missing")
        if not result.is_in_source(module):
            findings.error(module.name, "a new module, not in the source")


def loads_everywhere(result: Result, module: Module) -> bool:
    """Return whether another tool's FP8 layer has the form that k2convert writes, and is one of those it writes."""
    family = result.family
    is_own = module.fp8 == ("blocks" if family.has_fp8_blocks else "rows")
    return is_own and result.names.name == family.fp8_layout and family.takes_fp8(module.parts, family.fp8_roles)


def fp8_problems(result: Result, module: Module, size: tuple[int, int] | None) -> dict[str, str]:
    """Return what is wrong with shapes and dtypes of an FP8 layer, by parameter. `size` is N and K in the source."""
    weight = module.parameters.get(WEIGHT)
    scales = {WEIGHT_SCALE} & module.parameters.keys()
    if weight is None:
        return dict.fromkeys(scales, "no weight has these scales")
    if len(weight.shape) != 2 or 0 in weight.shape:
        problem = f"{weight.dtype} {list(weight.shape)}, expected rows and columns"
        return dict.fromkeys(scales, "the weight has another shape") | {WEIGHT: problem}
    rows, columns = size or weight.shape
    expected = fp8_tensors(rows, columns, has_blocks=result.family.has_fp8_blocks)
    if module.other_form:
        expected = expected[:1]  # the form of the others is known by their shapes
    problems = dict[str, str]()
    for parameter, dtype, shape, _ in expected:
        tensor = module.parameters.get(parameter)
        if tensor is not None and (tensor.dtype, tensor.shape) != (dtype, shape):
            problems[parameter] = f"{tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}"
    return problems


def count_unusable(
    result: Result, module: Module, tensor: TensorInfo, data: Bytes, *, read: Callable[[TensorInfo], Bytes]
) -> int:
    """Return how many codes are NaN, or scales no positive numbers. In a result of ours: or scales are those of weights
    beyond 65,504, or of blocks and no powers of two, or rows or blocks use less than half of their range, unless their
    scale is the least there is. `read` gives the bytes of a tensor.
    """
    parameter = tensor.name.rpartition(".")[2]
    is_shared = has_partner(result, module)
    rows, columns = module.parameters[WEIGHT].shape
    if parameter == WEIGHT_SCALE:
        scales = fp8_scales(data, tensor, rows)
        is_wrong = ~(np.isfinite(scales) & (scales > 0))
        if not module.other_form:
            is_wrong |= scales > _LARGEST_SCALE
        if not module.other_form and module.fp8 == "blocks":
            is_wrong |= np.frexp(scales)[0] != 0.5
            is_wrong |= is_shared & (scales != scales[:1])
        return int(np.count_nonzero(is_wrong))
    if parameter != WEIGHT:
        return 0
    codes = data.reshape(rows, columns) & np.uint8(_LARGEST_FINITE + 1)
    count = int(np.count_nonzero(codes > _LARGEST_FINITE))
    if module.other_form or is_shared:
        return count
    largest = codes.max(axis=1, keepdims=True, initial=0)
    if module.fp8 == "blocks" and codes.size:
        starts = [range(0, size, FP8_BLOCK) for size in codes.shape]
        largest = np.maximum.reduceat(np.maximum.reduceat(codes, starts[0]), starts[1], axis=1)
    is_small = (largest > 0) & (largest < _LEAST_LARGEST)
    scale = module.parameters.get(WEIGHT_SCALE)
    if is_small.any() and module.fp8 == "blocks" and scale is not None and scale.num_bytes == 4 * is_small.size:
        is_small &= fp8_scales(read(scale), scale, rows) > _LEAST_SCALE
    return count + int(np.count_nonzero(is_small))


def has_partner(result: Result, module: Module) -> bool:
    """Return whether the layer shares its scales of blocks with another one."""
    return module.fp8 == "blocks" and result.family.fp8_partner(module.name) in result.modules


def cut_blocks(result: Result, tensor_parallel: int) -> Iterator[tuple[str, str]]:
    """Yield the kinds of FP8 layers whose blocks do not fit vLLM at a tensor-parallel size, and why."""
    done = set[str]()
    for module in result.fp8:
        last = module.name.rpartition(".")[2]
        weight = module.parameters.get(WEIGHT)
        if module.fp8 != "blocks" or last in done or weight is None or len(weight.shape) != 2:
            continue
        done.add(last)
        name = f"{last} at tensor-parallel size {tensor_parallel}"
        if weight.shape[1] % FP8_BLOCK:
            yield name, f"{weight.shape[1]} input columns are not a multiple of {FP8_BLOCK}: vLLM refuses it"
        elif last in _SPLIT and weight.shape[_SPLIT[last]] % (tensor_parallel * FP8_BLOCK):
            size = weight.shape[_SPLIT[last]]
            yield name, f"{size} / {tensor_parallel} is not a multiple of {FP8_BLOCK}: vLLM refuses it"
