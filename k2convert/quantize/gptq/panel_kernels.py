"""Rule gptq on a CUDA device: a panel of 128 columns in one launch, written in triton.

A lane is one of a row's scales. While a row meets the errors of earlier columns, it is one of the 16 columns of a
block. A program has ROWS rows, and nothing of one row reaches another.

Every product and sum that a compiler could fuse is an explicit `fma`, in the order of cpp/gptq_tile.hpp. So the numbers
do not depend on the compiler. In the first pass they are those of a CPU with fused multiply-adds, as long as the
products between panels are.
"""

# ruff: noqa: RUF005 - triton's tuples know no unpacking
# triton's language has no types.
# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportMissingTypeStubs=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

BLOCK = tl.constexpr(16)
PANEL = tl.constexpr(128)
NUM_SCALES = tl.constexpr(8)
BELOW = tl.constexpr(1)
FIRST_BYTE = tl.constexpr(0x08)
LAST_FIRST = tl.constexpr(0x7E + 1 - 8)
BIAS = tl.constexpr(120 << 3)
WORTHWHILE = tl.constexpr(0.9999)


@triton.jit
def _nearest(x):
    """E2M1's nearest value, ties to the even code, saturating: adding 1.5 * 2**23 steps rounds to a step."""
    size = tl.minimum(tl.abs(x), 6.0)
    magic = tl.where(size < 2.0, 6291456.0, tl.where(size < 4.0, 12582912.0, 25165824.0))
    rounded = (size + magic) - magic
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _step_of(byte):
    """Value of a normal E4M3 byte."""
    return ((byte + BIAS) << 20).to(tl.float32, bitcast=True)


@triton.jit
def _first_byte(largest):
    """First of the bytes to try: E4M3's nearest to the largest weight over 6, minus BELOW, within the range."""
    scale = tl.minimum(tl.maximum(largest * (1.0 / 6.0), 0.015625), 448.0)
    bits = scale.to(tl.int32, bitcast=True)
    byte = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (BIAS + BELOW)
    return tl.minimum(tl.maximum(byte, FIRST_BYTE), LAST_FIRST)


@triton.jit
def _from(own, lane):
    """Value of a lane of the row, in all lanes of the row; `lane` is a number for all rows or [rows, 1]."""
    return tl.gather(own, tl.zeros(own.shape, tl.int32) + lane, axis=1)


@triton.jit
def _columns(own):
    """The 16 columns of a block, each in all lanes of its row."""
    columns = ()
    for j in tl.static_range(16):
        columns = columns + (_from(own, j),)
    return columns


@triton.jit
def _search(weights, lane, factor, stride, inverses):
    """Scale bytes, values, errors over U_jj, and their sums of squares: [rows, 16] each; lanes past the last scale
    repeat it.
    """
    largest = tl.abs(weights[0])
    for j in tl.static_range(1, 16):
        largest = tl.maximum(largest, tl.abs(weights[j]))
    byte = _first_byte(largest) + tl.minimum(lane, NUM_SCALES - 1)
    step = _step_of(byte)
    inverse = tl.math.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    rest = weights
    values = ()
    errors = ()
    losses = step * 0
    for j in tl.static_range(16):
        value = _nearest(rest[0] * inverse) * step
        error = (rest[0] - value) * tl.load(inverses + j)
        losses = tl.math.fma(error, error, losses)
        values = values + (value,)
        errors = errors + (error,)
        behind = ()
        for k in tl.static_range(j + 1, 16):
            behind = behind + (tl.math.fma(-error, tl.load(factor + j * stride + k), rest[k - j]),)
        rest = behind
    return byte, values, errors, tl.where(losses == losses, losses, float("inf"))


@triton.jit
def _least(losses, lane):
    """The least loss, and the first scale that has it."""
    least = tl.min(losses, axis=1)[:, None]
    return least, tl.min(tl.where(losses == least, lane, 15), axis=1)[:, None]


@triton.jit
def _after(own, before, row, valid, lane, matrix, start, begin, columns, earlier):
    """own - before @ matrix[start : start + 16 * earlier, block], summed one column after the other."""
    factors = matrix + start.to(tl.int64) * columns + begin + lane
    for block in range(earlier):
        for i in tl.static_range(16):
            depth = block * BLOCK + i
            change = tl.load(before + row * PANEL + depth, mask=valid, other=0.0)
            own = tl.math.fma(-change, tl.load(factors + depth * columns), own)
    return own


@triton.jit(do_not_specialize=["rows", "group", "start", "blocks"])
def round_kernel(
    weights, factors, inverses, values, errors, scale_bytes, rows, columns, group, start, blocks, ROWS: tl.constexpr
):
    """Round the columns of a panel; errors f32 [rows, 128] get the errors over U_jj.

    Every `group` rows, a multiple of ROWS, have a factor [columns, columns] and its inverses [columns] of their own.
    """
    first = tl.program_id(0) * ROWS
    row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    number = (first // group).to(tl.int64)
    factor = factors + number * columns * columns
    inverse = inverses + number * columns
    valid = row < rows
    lane = tl.arange(0, 16)[None, :]
    for block in range(blocks):
        begin = start + block * BLOCK
        own = tl.load(weights + row * columns + begin + lane, mask=valid, other=0.0)
        own = _after(own, errors, row, valid, lane, factor, start, begin, columns, block)
        diagonal = factor + begin.to(tl.int64) * columns + begin
        byte, rounded, lost, losses = _search(_columns(own), lane, diagonal, columns, inverse + begin)
        _, best = _least(losses, lane)
        chosen = valid & (lane == best)
        for j in tl.static_range(16):
            tl.store(values + row * columns + begin + j + lane * 0, rounded[j], mask=chosen)
            tl.store(errors + row * PANEL + block * BLOCK + j + lane * 0, lost[j], mask=chosen)
        tl.store(scale_bytes + row * (columns // BLOCK) + begin // BLOCK + lane * 0, byte.to(tl.uint8), mask=chosen)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["rows", "start", "blocks"])
def improve_kernel(
    gradient, matrix, form_inverses, block_factors, factor_inverses, block_inverses, values, changes, scale_bytes,
    rows, columns, start, blocks, ROWS: tl.constexpr
):  # fmt: skip
    """Improve the blocks of a panel; changes f32 [rows, 128] get what is added to the values. Reads the gradient."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    valid = row < rows
    lane = tl.arange(0, 16)[None, :]
    for block in range(blocks):
        begin = start + block * BLOCK
        own = tl.load(gradient + row * columns + begin + lane, mask=valid, other=0.0)
        own = _after(own, changes, row, valid, lane, matrix, start, begin, columns, block)
        before = ()
        for j in tl.static_range(16):
            before = before + (tl.load(values + row * columns + begin + j + lane * 0, mask=valid, other=0.0),)
        diagonal = matrix + begin.to(tl.int64) * columns + begin
        pointer = scale_bytes + row * (columns // BLOCK) + begin // BLOCK + lane * 0
        byte = tl.load(pointer, mask=valid, other=0x38).to(tl.int32)
        slopes = _columns(own)
        optimum = own * 0
        for k in tl.static_range(16):
            optimum = tl.math.fma(slopes[k], tl.load(block_inverses + begin * BLOCK + k * BLOCK + lane), optimum)
        moves = _columns(optimum)
        loss = own * 0
        wanted = ()
        for j in tl.static_range(16):
            loss = tl.math.fma(moves[j], slopes[j], loss)
            wanted = wanted + (moves[j] + before[j],)
        tried, rounded, _, losses = _search(wanted, lane, block_factors + begin * BLOCK, BLOCK, factor_inverses + begin)
        least, best = _least(losses, lane)
        better = least < loss * WORTHWHILE
        current = ()
        for j in tl.static_range(16):
            value = tl.where(better, _from(rounded[j], best), before[j])
            own = tl.math.fma(before[j] - value, tl.load(diagonal + j * columns + lane), own)
            current = current + (value,)
        byte = tl.where(better, _from(tried, best), byte)
        tl.debug_barrier()
        tl.store(pointer, byte.to(tl.uint8), mask=valid & (lane == 0))
        step = _step_of(byte)
        inverse = tl.math.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
        tl.debug_barrier()
        for j in tl.static_range(16):
            slope = _from(own, j)
            goal = tl.math.fma(slope, tl.load(form_inverses + begin + j), current[j])
            value = _nearest(goal * inverse) * step
            own = tl.math.fma(current[j] - value, tl.load(diagonal + j * columns + lane), own)
            mine = valid & (lane == j)
            tl.store(values + row * columns + begin + j + lane * 0, value, mask=mine)
            tl.store(changes + row * PANEL + block * BLOCK + j + lane * 0, value - before[j], mask=mine)
        tl.debug_barrier()
