"""The few vector operations the CPU kernels are made of, written in LLVM's IR because numba has no vector types.

Each works on a group: 32 INT4 codes in 16 bytes, that is two NVFP4 blocks of 8 bytes. Where the CPU has AVX2 the byte
shuffles `vpshufb` (a 16-entry table lookup on 32 bytes at once) and `vpsadbw` (byte sums) do the work; elsewhere the
same functions are plain numba loops over tables, with equal results. Arithmetic is on integers throughout; those in
float32 stay below 2**24, where every sum and product is exact and fused or not makes no difference.

numba's cache on disk knows the time stamp of a kernel's own file alone: after editing this one, touch its users.
"""

# numba and llvmlite ship no types: builder, context and signature are theirs, and the tests check what is generated.
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false
# An intrinsic's parameters are those of its callers; the code it generates finds them by their place.
# ruff: noqa: ARG001

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic


def _has_avx2() -> bool:
    """Whether the CPU that numba compiles for has AVX2: the host's own, unless its environment names another."""
    named = cast(Any, config)
    if named.CPU_NAME or named.CPU_FEATURES:
        return "+avx2" in (named.CPU_FEATURES or "")
    return bool(binding.get_host_cpu_features().get("avx2", False))


HAS_AVX2: Final = _has_avx2()

LANES: Final = 16
"""Candidates compared at once."""
NUM_COUNTED: Final = 8
"""|q| = 1..8 are counted, one byte each in a word; zeros are the rest."""
LANE_BITS: Final = 4

compiled = cast(
    Callable[[Callable[..., Any]], Callable[..., Any]],
    cast(Any, numba.njit)(nogil=True, cache=True, error_model="numpy", boundscheck=False, _nrt=False),
)
"""Decorator of every kernel: no floating-point shortcuts, no lock, kept on disk for the next process.

`_nrt` switches numba's reference counting off: kernels allocate nothing and their callers hold every array, while the
atomic increments for some twenty arrays a batch would cost a fifth of the time.
"""

_operation = cast(Callable[[Callable[..., Any]], Callable[..., Any]], intrinsic)

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()


def _vector(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def _constants(element: Any, values: list[int]) -> Any:
    return ir.Constant(_vector(element, len(values)), [ir.Constant(element, value) for value in values])


def _splat(element: Any, lanes: int, value: int) -> Any:
    return _constants(element, [value] * lanes)


def _shuffle(builder, first, second, lanes: list[int]) -> Any:
    return builder.shuffle_vector(first, second, _constants(_I32, lanes))


def _call(builder, name: str, result: Any, *arguments) -> Any:
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def _pointer(context, builder, signature, arguments, index: int, offset, element: Any) -> Any:
    """Address of element `offset` of array argument `index`, as a pointer to `element`."""
    array_type = signature.args[index]
    array = context.make_array(array_type)(context, builder, arguments[index])
    size = context.get_abi_sizeof(context.get_data_type(array_type.dtype))
    start = builder.bitcast(array.data, _I8.as_pointer())
    return builder.bitcast(builder.gep(start, [builder.mul(offset, ir.Constant(_I64, size))]), element.as_pointer())


def _load(builder, pointer, align: int) -> Any:
    value = builder.load(pointer)
    value.align = align
    return value


def _store(builder, value, pointer, align: int) -> None:
    builder.store(value, pointer).align = align


def _nibbles(builder, group) -> Any:
    """Spread 16 bytes to 32 nibbles: low 8 and high 8 of the first block, then of the second."""
    low = builder.and_(group, _splat(_I8, 16, 15))
    high = builder.lshr(group, _splat(_I8, 16, 4))
    return _shuffle(builder, low, high, [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)])


def _lookup(builder, table, indices) -> Any:
    return _call(builder, "llvm.x86.avx2.pshuf.b", _vector(_I8, 32), table, indices)


def _byte_sums(builder, values) -> Any:
    return _call(builder, "llvm.x86.avx2.psad.bw", _vector(_I64, 4), values, _splat(_I8, 32, 0))


@_operation
def _count_avx2(typing_context, packed, group_start):
    """See `count_magnitudes`: two magnitudes per lookup, as 1 and 32, so that byte sums keep them apart."""
    signature = types.UniTuple(types.uint64, 3)(packed, types.uint64)

    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature, arguments, 0, arguments[1], _vector(_I8, 16))
        nibbles = _nibbles(builder, _load(builder, pointer, 1))
        total = None
        for pair in range(NUM_COUNTED // 2):
            weights = {2 * pair + 1: 1, 2 * pair + 2: 32}
            table = [weights.get(abs(nibble - 8), 0) for nibble in range(16)]
            sums = _byte_sums(builder, _lookup(builder, _constants(_I8, table * 2), nibbles))
            sums = builder.shl(sums, _splat(_I64, 4, 16 * pair))
            total = sums if total is None else builder.or_(total, sums)
        both = builder.add(_shuffle(builder, total, total, [0, 2]), _shuffle(builder, total, total, [1, 3]))
        odd = builder.and_(both, _splat(_I64, 2, 0x001F001F001F001F))
        even = builder.and_(builder.shl(both, _splat(_I64, 2, 3)), _splat(_I64, 2, 0x1F001F001F001F00))
        words = builder.or_(odd, even)
        present = builder.icmp_unsigned("!=", builder.bitcast(words, _vector(_I8, 16)), _splat(_I8, 16, 0))
        masks = builder.zext(builder.bitcast(present, _I16), _I64)
        lanes = [builder.extract_element(words, ir.Constant(_I32, lane)) for lane in range(2)]
        return context.make_tuple(builder, signature.return_type, [*lanes, masks])

    return signature, generate


@_operation
def _encode_avx2(typing_context, packed, group_start, maps, first, second, out):
    """See `encode_group`: one lookup, each half of the vector with its own table."""
    signature = types.void(packed, types.uint64, maps, types.uint64, types.uint64, out)

    def generate(context, builder, signature, arguments):
        half = _vector(_I8, 16)
        pointer = _pointer(context, builder, signature, arguments, 0, arguments[1], half)
        nibbles = _nibbles(builder, _load(builder, pointer, 1))
        tables = [
            _load(builder, _pointer(context, builder, signature, arguments, 2, arguments[index], half), 1)
            for index in (3, 4)
        ]
        codes = _lookup(builder, _shuffle(builder, tables[0], tables[1], list(range(32))), nibbles)
        low = _shuffle(builder, codes, codes, [*range(8), *range(16, 24)])
        high = _shuffle(builder, codes, codes, [*range(8, 16), *range(24, 32)])
        # Codes are below 16, so shifting pairs of bytes by four moves nothing across a byte.
        high = builder.shl(builder.bitcast(high, _vector(_I16, 8)), _splat(_I16, 8, 4))
        target = _pointer(context, builder, signature, arguments, 5, arguments[1], half)
        _store(builder, builder.or_(low, builder.bitcast(high, half)), target, 1)
        return context.get_dummy_value()

    return signature, generate


@compiled
def _count_portable(packed: Any, group_start: Any) -> Any:
    first, second, mask = np.uint64(0), np.uint64(0), np.uint64(0)
    for place in range(32):
        value = packed[group_start + np.uint64(place >> 1)]
        magnitude = abs(np.int64((value >> (4 * (place & 1))) & 15) - 8)
        if magnitude > 0:
            one = np.uint64(1) << np.uint64(8 * (magnitude - 1))
            mask |= np.uint64(1) << np.uint64(8 * (place >> 4) + magnitude - 1)
            if place < 16:
                first += one
            else:
                second += one
    return first, second, mask


@compiled
def _encode_portable(packed: Any, group_start: Any, maps: Any, first: Any, second: Any, out: Any) -> None:
    for byte in range(16):
        start = first if byte < 8 else second
        value = packed[group_start + np.uint64(byte)]
        low = maps[start + np.uint64(value & 15)]
        out[group_start + np.uint64(byte)] = low | (maps[start + np.uint64(value >> 4)] << 4)


count_magnitudes: Final = _count_avx2 if HAS_AVX2 else _count_portable
"""(packed uint8, first byte of a group) -> (word, word, masks): how often |q| = k + 1 occurs, in byte k of each block's
word; bit k of the masks' low byte (first block) and high byte (second) is set where it occurs at all."""

encode_group: Final = _encode_avx2 if HAS_AVX2 else _encode_portable
"""(packed, first byte of a group, maps uint8, start of the first block's map, of the second's, out): replace every
nibble u by maps[start + u]; writes the group's 16 bytes at the same place of `out`."""


@_operation
def add_counts(typing_context, rows, row_start, word):
    """Add a histogram word's eight bytes to rows[row_start : row_start + 8], uint32."""
    signature = types.void(rows, types.uint64, types.uint64)

    def generate(context, builder, signature, arguments):
        lanes = _vector(_I32, NUM_COUNTED)
        pointer = _pointer(context, builder, signature, arguments, 0, arguments[1], lanes)
        counts = builder.zext(builder.bitcast(arguments[2], _vector(_I8, NUM_COUNTED)), lanes)
        _store(builder, builder.add(_load(builder, pointer, 4), counts), pointer, 4)
        return context.get_dummy_value()

    return signature, generate


@_operation
def store_floats(typing_context, out, start, word):
    """Write a histogram word's eight bytes as float32 to out[start : start + 8]."""
    signature = types.void(out, types.uint64, types.uint64)

    def generate(context, builder, signature, arguments):
        counts = builder.zext(builder.bitcast(arguments[2], _vector(_I8, NUM_COUNTED)), _vector(_I32, NUM_COUNTED))
        floats = builder.uitofp(counts, _vector(_F32, NUM_COUNTED))
        pointer = _pointer(context, builder, signature, arguments, 0, arguments[1], _vector(_F32, NUM_COUNTED))
        _store(builder, floats, pointer, 4)
        return context.get_dummy_value()

    return signature, generate


def _contract(terms: int, context, builder, signature, arguments):
    floats, integers = _vector(_F32, LANES), _vector(_I32, LANES)
    sums: list[Any] = [None, None]
    for k in range(terms):
        offset = builder.add(arguments[3], ir.Constant(_I64, k))
        count = _load(builder, _pointer(context, builder, signature, arguments, 2, offset, _F32), 4)
        one = builder.insert_element(ir.Constant(floats, ir.Undefined), count, ir.Constant(_I32, 0))
        count = _shuffle(builder, one, one, [0] * LANES)
        offset = builder.add(arguments[1], ir.Constant(_I64, k * LANES))
        error = _load(builder, _pointer(context, builder, signature, arguments, 0, offset, floats), 4)
        before = sums[k % 2]
        if before is None:
            sums[k % 2] = builder.fmul(count, error)
        else:
            sums[k % 2] = _call(builder, f"llvm.fmuladd.v{LANES}f32", floats, count, error, before)
    total = builder.fptosi(builder.fadd(*sums), integers)
    lanes = _constants(_I32, [LANES - 1 - lane for lane in range(LANES)])
    keys = builder.or_(builder.shl(total, _splat(_I32, LANES, LANE_BITS)), lanes)
    width = LANES
    while width > 1:
        width //= 2
        other = _shuffle(builder, keys, keys, list(range(width, 2 * width)))
        keys = _shuffle(builder, keys, keys, list(range(width)))
        keys = builder.select(builder.icmp_signed("<", keys, other), keys, other)
    return builder.zext(builder.extract_element(keys, ir.Constant(_I32, 0)), _I64)


@_operation
def least_of_sixteen(typing_context, errors, table_start, counts, counts_start):
    """Contract 8 counts with a float32 table [8, 16]; return (least sum) << 4 | (15 - its lane), the last lane on ties.

    All sums must be integers below 2**24. Two accumulators halve the chain of dependent additions.
    """
    return types.uint64(errors, types.uint64, counts, types.uint64), partial(_contract, NUM_COUNTED)


@_operation
def least_of_sixteen_without_eight(typing_context, errors, table_start, counts, counts_start):
    """The same where the count of |q| = 8 is zero."""
    return types.uint64(errors, types.uint64, counts, types.uint64), partial(_contract, NUM_COUNTED - 1)
