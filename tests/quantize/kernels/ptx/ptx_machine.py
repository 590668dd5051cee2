"""Runs a kernel's PTX on the CPU: lanes are NumPy arrays, and warps of many programs go in lockstep.

Between two barriers the warps of a program run one after the other, in an order that is random for each program. So a
warp that reads what another one has not yet written reads noise, and the result shows it. Besides, an access to shared
memory is refused if another warp's access could come before or after it, unless both read. Refused too: an access
outside the arguments and the shared memory, one that is not aligned, a register that was not set, a branch that lanes
of a warp decide differently, a barrier that a warp never reaches, and a sum that is not exact.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ptx_memory import SHARED_BASE, Arguments, Shared
from ptx_operations import Lanes, bits_of, dtype_of, find_operation, stored
from ptx_program import Instruction, PtxError, read_program

WARP = 32
MOST_STEPS = 1 << 22
"""Warps that take more of them between two barriers do not end."""
NOISE = 0xDEADBEEFDEADBEEF
"""What a lane finds in a register that only other lanes have set."""
SPECIAL = {"%tid.x": 32, "%ctaid.x": 32, "global_smem": 32}
"""Registers that a launch sets, and their bits: lane of the program, program, address of the shared memory."""


@dataclass(slots=True, eq=False)
class Warps:
    """Warps at the same instruction, at most one of each program: programs int64 [W], registers [1] or [32 W].

    `turn` is their place in the order in which the warps of their programs run.
    """

    registers: dict[str, Lanes]
    programs: NDArray[np.int64]
    turn: int
    at: int = 0
    has_ended: bool = False

    def lanes(self, value: Lanes) -> Lanes:
        """Return a value for each lane, also if all of them share one."""
        return value.repeat(WARP * self.programs.size) if value.size == 1 else value

    def split(self, chosen: NDArray[np.bool_], at: int) -> "Warps":
        """Take the chosen warps out, and return them at another instruction."""
        lanes = chosen.repeat(WARP)
        taken = {name: v[lanes] if v.size > 1 else v for name, v in self.registers.items()}
        self.registers = {name: v[~lanes] if v.size > 1 else v for name, v in self.registers.items()}
        gone = self.programs[chosen]
        self.programs = self.programs[~chosen]
        return Warps(taken, gone, self.turn, at)


Step = Callable[[Warps], list[Warps] | None]
"""An instruction: returns warps that went elsewhere, or an empty list if all wait or end."""


class Kernel:
    """The kernel of a PTX module; `executed` has a byte for each instruction, which is 1 once it has run."""

    def __init__(self, text: str) -> None:
        self.program = read_program(text)
        self.executed = bytearray(len(self.program.code))
        self._steps = [self._decode(instruction) for instruction in self.program.code]

    def launch(self, num_programs: int, arguments: Sequence[Any], *, shared_bytes: int, seed: int) -> None:
        """Run programs on arguments: arrays of any dtype, which are changed in place, and integers."""
        rng = np.random.default_rng(seed)
        self._shared = Shared(num_programs, shared_bytes, rng)
        self._arguments = Arguments([a for a in arguments if isinstance(a, np.ndarray)])
        common: dict[str, Lanes] = {"global_smem": np.array([SHARED_BASE], dtype=np.uint32)}
        # triton adds pointers to scratch memory, which these kernels do not use.
        scratch = [0] * (len(self.program.parameters) - len(arguments))
        for name, value in zip(self.program.parameters, [*arguments, *scratch], strict=True):
            number = value.ctypes.data if isinstance(value, np.ndarray) else int(value)
            common[name] = np.array([number], dtype=np.int64).view(np.uint64)
        num_warps = self.program.num_lanes // WARP
        programs = np.arange(num_programs)
        order_PW = rng.permuted(np.tile(np.arange(num_warps), (num_programs, 1)), axis=1)
        waiting: list[Warps] = []
        for turn in range(num_warps):
            lanes = (WARP * order_PW[:, turn, None] + np.arange(WARP)).ravel().astype(np.uint32)
            own = {"%tid.x": lanes, "%ctaid.x": programs.repeat(WARP).astype(np.uint32)}
            waiting.append(Warps(common | own, programs, turn))
        while waiting:
            waiting = [warps for start in waiting for warps in self._run(start)]
            waiting = [warps for warps in waiting if not warps.has_ended]
            arrived = np.bincount(np.concatenate([programs[:0], *(warps.programs for warps in waiting)]))
            if not set(arrived.tolist()) <= {0, num_warps}:
                raise PtxError("a barrier waits for a warp that has ended")
            self._shared.pass_barrier()

    def _run(self, start: Warps) -> list[Warps]:
        """Run warps to their next barrier or their end, which branches may take them to separately."""
        running = [start]
        stopped = []
        while running:
            warps = running.pop()
            for _ in range(MOST_STEPS):
                at = warps.at
                warps.at = at + 1
                self.executed[at] = 1
                try:
                    left = self._steps[at](warps)
                except (PtxError, KeyError) as error:
                    raise _located(self.program.code[at], error) from error
                if left is not None:
                    running += left
                    if not left:
                        stopped.append(warps)
                        break
            else:
                raise PtxError("a loop does not end")
        return stopped

    def _decode(self, instruction: Instruction) -> Step:
        makers: dict[str, Callable[[Instruction], Step]] = {
            "ret": self._stop, "bar": self._stop, "bra": self._branch, "ld": self._load, "st": self._store,
            "red": self._add, "shfl": self._shuffle, "redux": self._reduce,
        }  # fmt: skip
        try:
            return makers.get(instruction.opcode.split(".")[0], self._compute)(instruction)
        except (PtxError, ValueError) as error:
            raise _located(instruction, error) from error

    def _width(self, register: str) -> int:
        found = re.match(r"%[a-z]+", register)
        return SPECIAL.get(register) or (self.program.register_bits.get(found[0], 0) if found else 0)

    def _reader(self, operand: str, type_: str, *, may_be_wider: bool = False) -> Callable[[Warps], Lanes]:
        """Return how warps read a register or a constant as a type."""
        dtype = dtype_of(type_)
        bits = bits_of(type_)
        if width := self._width(operand):
            if width != bits and not (may_be_wider and width > bits):
                raise PtxError(f"{operand} has {width} bits, not {bits}")
            if width != bits:
                return lambda warps: warps.registers[operand].astype(dtype)
            if type_ == "f32x2":
                return lambda warps: warps.lanes(warps.registers[operand]).view(dtype)
            if dtype.kind in "ub":
                return lambda warps: warps.registers[operand]
            return lambda warps: warps.registers[operand].view(dtype)
        number = int(operand[2:], 16) if operand[:2] in ("0f", "0d") else int(operand, 0)
        held = np.array([number & ((1 << bits) - 1)], dtype=np.uint64).astype("?" if bits == 1 else f"u{bits // 8}")
        constant = held.view(dtype)
        return lambda _: constant

    def _writer(self, instruction: Instruction, register: str, bits: int) -> Callable[[Warps, Lanes], None]:
        """Return how warps set a register, in the lanes that the guard lets through; narrower values are extended."""
        if register == "_":
            return lambda warps, value: None
        width = self._width(register)
        guard = self._guard(instruction)
        if width < bits:
            raise PtxError(f"{register} has {width} bits, not {bits}")
        dtype = np.dtype("?" if width == 1 else f"u{width // 8}")
        noise = np.array([NOISE], dtype=np.uint64).astype(dtype)

        def put(warps: Warps, value: Lanes) -> None:
            if width > bits:
                value = value.astype(dtype)
            if guard is not None:
                value = np.where(guard(warps), value, warps.registers.get(register, noise))
            warps.registers[register] = value

        return put

    def _guard(self, instruction: Instruction) -> Callable[[Warps], Lanes] | None:
        if not instruction.guard:
            return None
        name = instruction.guard
        return (lambda w: ~w.registers[name]) if instruction.is_negated else (lambda w: w.registers[name])

    def _stop(self, instruction: Instruction) -> Step:
        """`ret` ends a lane; `bar.sync 0` waits for all lanes of the program."""
        opcode = (instruction.opcode, *instruction.operands)
        ends = instruction.opcode == "ret"
        if instruction.guard or opcode not in (("ret",), ("bar.sync", "0")):
            raise PtxError(f"{' '.join(opcode)} is not known")

        def step(warps: Warps) -> list[Warps]:
            warps.has_ended = ends
            return []

        return step

    def _branch(self, instruction: Instruction) -> Step:
        """`bra` and `bra.uni` go to a label, here whole warps only."""
        target = self.program.labels[instruction.operands[0]]
        guard = self._guard(instruction)

        def step(warps: Warps) -> list[Warps] | None:
            if guard is not None:
                lanes = warps.lanes(guard(warps)).reshape(-1, WARP)
                chosen = lanes[:, 0]
                if (lanes != chosen[:, None]).any():
                    raise PtxError("lanes of a warp decide differently")
                if not chosen.all():
                    return [warps.split(chosen, target)] if chosen.any() else None
            warps.at = target
            return None

        return step

    def _compute(self, instruction: Instruction) -> Step:
        """An operation of ptx_operations, or a `mov` that packs or unpacks a register."""
        target, *given = instruction.operands
        if target.startswith("{") or given[0].startswith("{"):
            return self._pack(instruction)
        # sm_100 has `min` and `max` of three numbers.
        suffix = ".three" if instruction.opcode in ("min", "max") and len(given) == 3 else ""
        operation = find_operation(instruction.opcode + suffix, instruction.types)
        sources = zip(given, operation.sources, strict=True)
        reads = [self._reader(name, type_) for name, type_ in sources]
        function = operation.function
        bits = bits_of(operation.result)
        put = self._writer(instruction, target, bits)
        return lambda warps: put(warps, stored(function(*[read(warps) for read in reads]), bits))

    def _pack(self, instruction: Instruction) -> Step:
        """`mov` between a register and its parts, the lowest bits first; a part named _ is left out."""
        (type_,), (target, source) = instruction.types, instruction.operands
        parts = (source if source.startswith("{") else target).strip("{} ").split(",")
        parts = [part.strip() for part in parts]
        bits = bits_of(type_)
        narrow = f"b{bits // len(parts)}"
        if source.startswith("{"):
            reads = [self._reader(part, narrow) for part in parts]
            put = self._writer(instruction, target, bits)
            return lambda w: put(
                w, np.stack([w.lanes(read(w)) for read in reads], axis=1).view(f"u{bits // 8}").ravel()
            )
        read = self._reader(source, type_)
        puts = [self._writer(instruction, part, bits_of(narrow)) for part in parts]

        def step(warps: Warps) -> None:
            halves = read(warps).view(dtype_of(narrow)).reshape(-1, len(puts))
            for number, put in enumerate(puts):
                put(warps, halves[:, number].copy())

        return step

    def _load(self, instruction: Instruction) -> Step:
        """`ld` reads parameters, arguments or shared memory, `.v2` and `.v4` neighbors at once; it extends by zeros."""
        (type_,), (target, address) = instruction.types, instruction.operands
        targets = [name.strip() for name in target.strip("{} ").split(",")]
        bits = bits_of(type_)
        puts = [self._writer(instruction, name, bits) for name in targets]
        if instruction.opcode == "ld.param":
            name = address.strip("[] ")
            dtype = dtype_of(type_)
            return lambda warps: puts[0](warps, warps.registers[name].astype(dtype))
        locate = self._locator(instruction, address, len(targets), writes=False)

        def step(warps: Warps) -> None:
            if (found := locate(warps)) is not None:
                memory, places, _ = found
                for number, put in enumerate(puts):
                    put(warps, memory[places + number])

        return step

    def _store(self, instruction: Instruction) -> Step:
        """`st` writes the low bits of registers to arguments or shared memory."""
        (type_,), (address, source) = instruction.types, instruction.operands
        names = [name.strip() for name in source.strip("{} ").split(",")]
        reads = [self._reader(name, type_, may_be_wider=True) for name in names]
        locate = self._locator(instruction, address, len(names), writes=True)

        def step(warps: Warps) -> None:
            if (found := locate(warps)) is not None:
                memory, places, active = found
                for number, read in enumerate(reads):
                    memory[places[active] + number] = warps.lanes(read(warps))[active]

        return step

    def _add(self, instruction: Instruction) -> Step:
        """`red.add` adds to an argument, lane by lane."""
        if instruction.opcode != "red.global.gpu.relaxed.add":
            raise PtxError(f"{instruction.opcode} is not known")
        (type_,), (address, source) = instruction.types, instruction.operands
        read = self._reader(source, type_)
        locate = self._locator(instruction, address, 1, writes=True)

        def step(warps: Warps) -> None:
            if (found := locate(warps)) is not None:
                memory, places, active = found
                np.add.at(memory, places[active], warps.lanes(read(warps))[active])

        return step

    def _locator(
        self, instruction: Instruction, operand: str, count: int, *, writes: bool
    ) -> Callable[[Warps], tuple[Lanes, NDArray[np.int64], NDArray[np.bool_]] | None]:
        """Return how warps find memory as unsigned numbers, the place of each lane, and the lanes that use it."""
        parts = instruction.opcode.split(".")
        found = re.fullmatch(r"\[\s*(%\w+)\s*(?:\+\s*(-?\d+)\s*)?\]", operand)
        size = bits_of(instruction.types[0]) // 8
        if found is None or parts[1] not in ("global", "shared") or (parts[2:] != [f"v{count}"] and count > 1):
            raise PtxError(f"{instruction.opcode} {operand} is not known")
        register = found[1]
        offset = int(found[2] or 0)
        is_shared = parts[1] == "shared"
        read = self._reader(register, "b32" if is_shared else "b64")
        guard = self._guard(instruction)

        def locate(warps: Warps) -> tuple[Lanes, NDArray[np.int64], NDArray[np.bool_]] | None:
            addresses = warps.lanes(read(warps)).astype(np.int64) + offset
            active = np.ones(addresses.size, bool) if guard is None else warps.lanes(guard(warps))
            if not active.any():
                return None
            used = addresses[active]
            programs = warps.programs.repeat(WARP)[active]
            if (used % (size * count)).any():
                raise PtxError(f"an address is no multiple of {size * count}")
            memory = self._shared if is_shared else self._arguments
            values, found = memory.find(used, size * count, programs, warps.turn, writes=writes)
            places = np.zeros(addresses.size, dtype=np.int64)
            places[active] = found // size
            return values[: values.size // size * size].view(f"u{size}"), places, active

        return locate

    def _shuffle(self, instruction: Instruction) -> Step:
        """`shfl.sync.bfly` gives every lane the value of the lane whose number differs in the given bits, `.idx` that
        of the lane that it names.
        """
        target, source, chosen, *clamp = instruction.operands
        kind = instruction.opcode.removeprefix("shfl.sync.")
        if kind not in ("bfly", "idx") or (instruction.guard, clamp) != ("", ["31", "-1"]):
            raise PtxError(f"{instruction.opcode} of a part of a warp is not known")
        read = self._reader(source, "b32")
        read_chosen = self._reader(chosen, "b32")
        put = self._writer(instruction, target, 32)

        def step(warps: Warps) -> None:
            values = warps.lanes(read(warps)).reshape(-1, WARP)
            others = warps.lanes(read_chosen(warps)).reshape(-1, WARP).astype(np.int64) & (WARP - 1)
            if kind == "bfly":
                others = np.arange(WARP) ^ others
            put(warps, np.take_along_axis(values, others, axis=1).ravel())

        return step

    def _reduce(self, instruction: Instruction) -> Step:
        """`redux.sync` gives every lane the sum, or the largest or smallest, of the warp; that of floats passes over
        NaN, with which triton fills lanes that take no part.
        """
        target, source, mask = instruction.operands
        (type_,), kind = instruction.types, instruction.opcode.removeprefix("redux.sync.")
        functions = {"add": np.add, "min": np.fmin, "max": np.fmax}
        if kind not in functions or instruction.guard:
            raise PtxError(f"{instruction.opcode} is not known")
        read = self._reader(source, type_)
        read_mask = self._reader(mask, "s32")
        put = self._writer(instruction, target, 32)

        def step(warps: Warps) -> None:
            if (read_mask(warps) != -1).any():
                raise PtxError("only a part of a warp takes part")
            found = functions[kind].reduce(warps.lanes(read(warps)).reshape(-1, WARP), axis=1, dtype=dtype_of(type_))
            put(warps, stored(found.repeat(WARP), 32))

        return step


def _located(instruction: Instruction, error: Exception) -> PtxError:
    reason = f"register {error} is not set" if isinstance(error, KeyError) else str(error)
    return PtxError(f"line {instruction.line}, {instruction.opcode}: {reason}")
