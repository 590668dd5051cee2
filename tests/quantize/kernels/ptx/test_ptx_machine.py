"""The runner of PTX follows the PTX ISA, runs warps in random order, and refuses what no kernel may do."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton")

from ptx_device import run_launch
from ptx_machine import Kernel
from ptx_operations import bits_of, dtype_of, find_operation
from ptx_program import PtxError
from ptx_target import Launch, launching_on
from toy_kernel import sum_nibbles

MODULE = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 128
{{
	.reg .pred 	%p<9>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<9>;
	ld.param.b64 	%rd1, [kernel_param_0];
	mov.u32 	%r1, %tid.x;
	mad.wide.u32 	%rd2, %r1, 4, %rd1;
	add.s32 	%r2, %r1, 32;
	and.b32 	%r3, %r2, 127;
	mad.wide.u32 	%rd3, %r3, 4, %rd1;
	mov.b32 	%r4, global_smem;
	mad.lo.s32 	%r5, %r1, 4, %r4;
	mad.lo.s32 	%r6, %r3, 4, %r4;
{body}
	ret;
}}
"""
"""rd2 is the place of a lane in the argument, rd3 that of the lane in the next warp; r5 and r6 are in shared memory."""
STORE = "st.global.b32 [%rd2], %r7"
NEXT_WARP = (np.arange(128, dtype=np.uint32) + 32) % 128


def run(body: str, *, size: int = 128, shared_bytes: int = 512, seed: int = 0) -> NDArray[np.uint32]:
    numbers = np.full(size, 77, dtype=np.uint32)
    lines = [line.strip() for line in body.split(";") if line.strip()]
    text = "\n".join(line if line.endswith(":") else f"\t{line};" for line in lines)
    Kernel(MODULE.format(body=text)).launch(1, [numbers], shared_bytes=shared_bytes, seed=seed)
    return numbers


def test_warps_run_in_a_random_order_between_barriers() -> None:
    """What a warp reads of the next one depends on the order, unless a barrier comes between."""
    body = "st.global.b32 [%rd2], %r1; {} ld.global.b32 %r7, [%rd3]; bar.sync 0; st.global.b32 [%rd2], %r7"
    unordered = [run(body.format(""), seed=seed).tobytes() for seed in (0, 1, 2, 3, 0, 1, 2, 3)]
    assert unordered[:4] == unordered[4:]
    assert len(set(unordered)) > 1
    assert all((run(body.format("bar.sync 0;"), seed=seed) == NEXT_WARP).all() for seed in range(4))


def test_shared_memory_is_exchanged_over_barriers_only() -> None:
    body = "st.shared.b32 [%r5], %r1; {} ld.shared.b32 %r7, [%r6]; {} st.shared.b32 [%r5], %r7;" + STORE
    barrier = "bar.sync 0;"
    assert (run(body.format(barrier, barrier)) == NEXT_WARP).all()
    for barriers in (("", barrier), (barrier, "")):
        with pytest.raises(PtxError, match="shared memory races with another warp"):
            run(body.format(*barriers))
    unwritten = {run("ld.shared.b32 %r7, [%r6];" + STORE, seed=seed).tobytes() for seed in (0, 1)}
    assert len(unwritten) == 2, "shared memory is noise until it is written"


@pytest.mark.parametrize(
    ("body", "size", "reason"),
    [
        ("st.global.b32 [%rd2], %r1", 127, "line 19, st.global: bytes 384 to 512 are not in an argument of 508"),
        ("ld.global.b32 %r7, [%rd2+-4]", 128, "ld.global: an address lies before every argument"),
        ("ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%rd2]", 256, "an address is no multiple of 16"),
        ("st.shared.b32 [%r5+4], %r1", 128, "are not in the 512 bytes of shared memory"),
        ("add.s32 %r7, %r1, %r8", 128, "register '%r8' is not set"),
        ("add.s64 %rd4, %rd1, %r1", 128, "%r1 has 32 bits, not 64"),
        ("mul.hi.s32 %r7, %r1, %r1", 128, "line 19, mul.hi: mul.hi is not known"),
        ("bar.sync 1", 128, "bar.sync 1 is not known"),
    ],
)
def test_what_no_kernel_may_do_is_refused_with_its_line(body: str, size: int, reason: str) -> None:
    with pytest.raises(PtxError, match=reason):
        run(body, size=size)


def branching(condition: str, skipped: str) -> str:
    return f"{condition}; @%p1 bra $end; {skipped}; $end:; st.global.b32 [%rd2], %r1"


def test_warps_may_part_but_not_their_lanes() -> None:
    """Warp 0 skips the addition; its lanes cannot, and it cannot skip a barrier."""
    by_warp = "setp.lt.u32 %p1, %r1, 32"
    by_lane = "setp.lt.u32 %p1, %r1, 33"
    lanes = np.arange(128)
    assert (run(branching(by_warp, "add.s32 %r1, %r1, 500")) == np.where(lanes < 32, lanes, lanes + 500)).all()
    with pytest.raises(PtxError, match="bra: lanes of a warp decide differently"):
        run(branching(by_lane, "add.s32 %r1, %r1, 500"))
    with pytest.raises(PtxError, match="a barrier waits for a warp that has ended"):
        run(branching(by_warp, "bar.sync 0"))


def test_lanes_of_a_warp_exchange_values() -> None:
    lanes = np.arange(128)
    assert (run("shfl.sync.bfly.b32 %r7, %r1, 5, 31, -1;" + STORE) == lanes ^ 5).all()
    sums = lanes.reshape(4, 32).sum(axis=1).repeat(32)
    assert (run("mov.b32 %r8, -1; redux.sync.add.s32 %r7, %r1, %r8;" + STORE) == sums).all()
    assert (run("mov.b64 %rd4, {%r1, %r2}; mov.b64 {_, %r7}, %rd4;" + STORE) == lanes + 32).all()


def signed(value: int, bits: int) -> int:
    return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


ORACLES: dict[tuple[str, str], Callable[..., int]] = {
    ("add", "s32"): lambda a, b: signed(a + b, 32),
    ("sub", "s64"): lambda a, b: signed(a - b, 64),
    ("mul.lo", "s32"): lambda a, b: signed(a * b, 32),
    ("mul.wide", "u32"): lambda a, b: a * b,
    ("mad.lo", "s32"): lambda a, b, c: signed(a * b + c, 32),
    ("mad.wide", "s32"): lambda a, b, c: signed(a * b + c, 64),
    ("mad.wide", "u16"): lambda a, b, c: (a * b + c) % (1 << 32),
    ("rem", "s32"): lambda a, b: int(math.fmod(a, b)),
    ("min", "s32"): min,
    ("max", "u32"): max,
    ("not", "b32"): lambda a: a ^ 0xFFFFFFFF,
    ("shl", "b32"): lambda a, b: (a << b) % (1 << 32) if b < 64 else 0,
    ("shr", "s32"): lambda a, b: a >> min(b, 31),
    ("shr", "u64"): lambda a, b: a >> b if b < 64 else 0,
    ("bfe", "u32"): lambda a, b, c: (a >> b) % (1 << min(c, 64)),
    ("cvt", "s64.s32"): lambda a: a,
    ("cvt", "u16.u32"): lambda a: a % (1 << 16),
    ("setp.ne", "b64"): lambda a, b: a != b,
    ("setp.le", "s32"): lambda a, b: a <= b,
    ("selp", "b32"): lambda a, b, c: a if c else b,
}


@pytest.mark.parametrize(("opcode", "types"), ORACLES)
def test_operations_of_integers_are_those_of_python(opcode: str, types: str) -> None:
    operation = find_operation(opcode, tuple(types.split(".")))
    rng = np.random.default_rng(1)
    sources: list[NDArray[np.generic]] = []
    for number, type_ in enumerate(operation.sources):
        bits = bits_of(type_)
        dtype = dtype_of(type_)
        numbers = rng.integers(0, 1 << 63, 500, dtype=np.uint64) >> rng.integers(0, 64, 500, dtype=np.uint64)
        numbers = np.where(rng.random(500) < 0.5, numbers, ~numbers).astype(f"u{max(bits, 8) // 8}")
        if number and opcode in ("shl", "shr", "bfe"):
            numbers = rng.integers(0, 70 if opcode != "bfe" else 33, 500).astype(np.uint32)
        sources.append(numbers.astype(bool) if bits == 1 else numbers.view(dtype) | (opcode == "rem" and number))
    found = operation.function(*sources)
    expected = [ORACLES[opcode, types](*map(int, lane)) for lane in zip(*sources, strict=True)]
    assert found.tolist() == expected


def nearest_float32(value: Fraction) -> float:
    """The float32 that is nearest to a number, ties to even."""
    guess = np.float32(float(value))
    near = (np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf)))
    return float(min(near, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.uint32)) & 1)))


def test_operations_of_floats_round_once_or_not_at_all() -> None:
    fma = find_operation("fma.rn", ("f64",)).function
    truncate = find_operation("cvt.rzi", ("s32", "f32")).function
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(-(1 << 26), 1 << 26, 500) * 2.0**-9 for _ in range(3))
    a = np.rint(a / 2**10)
    exact = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)]
    assert fma(a, b, c).tolist() == exact
    for sources in ((1 + 2.0**-30, 1 + 2.0**-30, 0.0), (1.0, 1.0, 2.0**-60)):
        with pytest.raises(PtxError, match="a sum is not exact"):
            fma(*(np.array([source]) for source in sources))
    numbers = rng.standard_normal((3, 2000)).astype(np.float32)
    numbers[2] *= 1e-4
    numbers[2, ::3] = -(numbers[0] * numbers[1])[::3]  # cancels all but what the product lost
    once = find_operation("fma.rn", ("f32",)).function(*numbers)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in numbers.T]
    assert once.tolist() == [nearest_float32(value) for value in exact]
    values = np.array([1.9, -1.9, 3e9, -3e9, np.nan, np.inf], dtype=np.float32)
    assert truncate(values).tolist() == [1, -1, 2**31 - 1, -(2**31), 0, 2**31 - 1]


@pytest.fixture(scope="module")
def toy_launch() -> Launch:
    """A launch of the toy kernel for sm_90, on two tiles, in which every branch is taken."""
    made: list[Launch] = []
    words = torch.randint(-(1 << 31), 1 << 31, (200,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    with launching_on(90, made.append):
        sum_nibbles(words, torch.arange(-8, 8, dtype=torch.float64))
    return made[0]


def results(launch: Launch, old: str = "", new: str = "", seed: int = 0) -> list[bytes]:
    """The bytes of all arguments after a launch, with the text of its kernel changed."""
    arguments = [value.clone() if hasattr(value, "clone") else value for value in launch.arguments]
    changed = Launch(launch.ptx.replace(old, new), launch.shared_bytes, launch.programs, arguments)
    run_launch(Kernel(changed.ptx), changed, seed)
    return [value.numpy().tobytes() for value in arguments if hasattr(value, "numpy")]


def test_a_missing_barrier_is_caught(toy_launch: Launch) -> None:
    pieces = toy_launch.ptx.split("bar.sync")
    assert len(pieces) > 3
    for number in range(1, len(pieces)):
        text = "bar.sync".join(pieces[:number]) + "// bar.sync" + "bar.sync".join(pieces[number:])
        with pytest.raises(PtxError, match="races with another warp"):
            results(toy_launch, toy_launch.ptx, text)


def test_a_changed_constant_is_caught(toy_launch: Launch) -> None:
    expected = results(toy_launch)
    assert all(results(toy_launch, seed=seed) == expected for seed in range(1, 4))
    for constant in (15, 127):
        assert f", {constant};" in toy_launch.ptx
        assert results(toy_launch, f", {constant};", f", {constant - 1};") != expected, constant


def test_an_access_outside_an_argument_is_caught(toy_launch: Launch) -> None:
    for number, size in ((0, 199), (1, 15), (2, 199)):
        arguments = list(toy_launch.arguments)
        arguments[number] = arguments[number].flatten()[:size].clone()
        with pytest.raises(PtxError, match="are not in an argument of"):
            results(Launch(toy_launch.ptx, toy_launch.shared_bytes, toy_launch.programs, arguments))
