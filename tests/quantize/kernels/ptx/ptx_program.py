"""PTX text, read into instructions: one kernel of a module, without calls. What is not understood is refused."""

import re
from dataclasses import dataclass


class PtxError(Exception):
    """PTX that this runner cannot execute, or that did what no kernel may do."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """`@!%p1 mad.wide.s32 %rd1, %r2, 8, %rd3;` has opcode mad.wide, types (s32,), four operands, guard %p1, negated."""

    line: int
    opcode: str
    types: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str
    is_negated: bool


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel: names of its parameters, lanes of a program, bits of each kind of register, instructions and labels."""

    parameters: tuple[str, ...]
    num_lanes: int
    register_bits: dict[str, int]
    code: tuple[Instruction, ...]
    labels: dict[str, int]


_ENTRY = re.compile(r"\.visible \.entry \w+\((.*?)\)\s*\.reqntid (\d+)\s*\{(.*?)^\}", re.DOTALL | re.MULTILINE)
_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.]*)\s*(.*);")
_TYPE = re.compile(r"pred|[busf]\d+(?:x2)?")


def read_program(text: str) -> Program:
    """Read the kernel of a PTX module; PtxError at the first line that is neither directive, label nor instruction."""
    entry = _ENTRY.search(text)
    if entry is None:
        raise PtxError("no kernel with a fixed number of lanes")
    parameters = re.findall(r"\.param \.\w+ .*?(\w+)(?:,|\s*$)", entry[1], re.MULTILINE)
    bits = {name: 1 if t == "pred" else int(t[1:]) for t, name in re.findall(r"\.reg \.(\w+)\s+(%\w+)<", entry[3])}
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    first_line = text[: entry.start(3)].count("\n") + 1
    for line, raw in enumerate(entry[3].split("\n"), first_line):
        statement = re.sub(r"//.*", "", raw).strip()
        if label := re.match(r"(\$\w+):", statement):
            labels[label[1]] = len(code)
        elif statement and not statement.startswith("."):
            code.append(_read_instruction(line, statement))
    return Program(tuple(parameters), int(entry[2]), bits, tuple(code), labels)


def _read_instruction(line: int, statement: str) -> Instruction:
    found = _STATEMENT.fullmatch(statement)
    if found is None:
        raise PtxError(f"line {line}: {statement!r} is not an instruction")
    negation, guard, opcode, operands = found.groups()
    parts = opcode.split(".")
    num_types = next((n for n, part in enumerate(reversed(parts)) if not _TYPE.fullmatch(part)), 0)
    names = parts[: len(parts) - num_types]
    types = parts[len(parts) - num_types :]
    values = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", operands)
    return Instruction(line, ".".join(names), tuple(types), tuple(values), guard or "", negation == "!")
