"""No table cuts a cell or goes past the edge of the terminal, with the numbers of a whole K2."""

from __future__ import annotations

import ast
import io
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from statistics_makers import HEADER, dense_layer, moe_layer

sys.path.insert(0, str(Path(__file__).parent))
from screen import in_terminal

import k2convert.cli
from k2convert.calibration.statistics import write_statistics
from k2convert.cli import (
    console,
    fit_view,
    guide,
    inspect,
    validation_view,
    views,
)
from k2convert.cli.app import main

VIEWS = (fit_view, guide, inspect, validation_view, views)
K2_WEIGHTS = "1,014,686,023,680"


@dataclass(frozen=True, slots=True)
class Table:
    """The arguments of one call, and the function that made it."""

    maker: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[int, ...]

    def of_k2(self) -> Table:
        """Return the table of a small model with the number of K2's weights in place of its own numbers."""
        rows = tuple(tuple(re.sub(r"^[\d,]*,\d{3}$", K2_WEIGHTS, cell) for cell in row) for row in self.rows)
        return Table(self.maker, self.title, self.columns, rows, self.left)


def command(*words: object, codes: tuple[int, ...] = (0,)) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code in codes


@pytest.fixture(scope="module")
def tables(k2_headers: Path, k2_numbers: Path, cut: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Table]:
    """Every table that real commands print, with K2's numbers. Speeds are published for K2 itself alone."""
    folder, found = tmp_path_factory.mktemp("tables"), list[Table]()

    def record(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], left: tuple[int, ...] = (0,)) -> None:
        maker = sys._getframe(1).f_code.co_name
        found.append(Table(maker, title, tuple(columns), tuple(map(tuple, rows)), tuple(left)))

    statistics = folder / "k2.stats"
    dense = replace(dense_layer(), tokens=np.array([1_048_576]), gate_up_amax=np.array([41.5], np.float32))
    layers = [dense, *(moe_layer(number, experts=384) for number in (1, 60))]
    write_statistics(statistics, layers, HEADER)
    with pytest.MonkeyPatch.context() as patch:
        for view in VIEWS:
            patch.setattr(view, "print_table", record)
        command("guide")
        command("inspect", k2_numbers)
        command("inspect", statistics)
        command("fit", k2_numbers)
        command("fit", k2_headers, "--gpu", "rtx-pro-6000", "--count", "8")
        command("run", k2_numbers, folder / "k2", "--dry-run", codes=(0, 1))  # there may be no room for it
        whole = len(found)
        command("run", cut, folder / "out", "--quiet")
        command("validate", folder / "out", "--source", cut, "--layers", "all", "--against", folder / "out", "--quiet")
    return found[:whole] + [table.of_k2() for table in found[whole:]]


def test_every_call_of_the_commands_is_among_them(tables: list[Table]) -> None:
    makers: set[str] = set()
    for path in Path(k2convert.cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "print_table(" in ast.unparse(node).partition("\n")[2]:
                makers.add(node.name)
    assert {table.maker for table in tables} == makers
    assert sum(K2_WEIGHTS in row for table in tables for row in table.rows) >= 6


class Output(io.StringIO):
    """Standard output of a terminal or of a pipe."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def printed(table: Table, monkeypatch: pytest.MonkeyPatch, columns: int | None) -> list[str]:
    """Return the lines of a table on a terminal of so many columns, or in a pipe."""
    output = Output(is_terminal=columns is not None)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns or 40))
    monkeypatch.setattr(sys, "stdout", output)
    console.print_table(table.title, table.columns, table.rows, left=table.left)
    monkeypatch.undo()
    return re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue()).splitlines()


def squeezed(*texts: str) -> str:
    return "".join("".join(texts).split())


def check_is_whole(table: Table, lines: list[str]) -> bool:
    """Check that title, headings and cells are all there, and numbers in one piece. Return whether it is a table."""
    start = next(n for n in range(1, len(lines) + 1) if squeezed(*lines[:n]) == squeezed(table.title))
    lines = lines[start:]
    rule = next((i for i, line in enumerate(lines) if "╇" in line), None)
    if rule is None:
        pairs = [
            [f"{name}: " * bool(name) + cell for name, cell in zip(table.columns, row, strict=True) if cell]
            for row in table.rows
        ]
        assert squeezed(*lines) == squeezed(*(text for row in pairs for text in row))
        numbers = {cell for row in table.rows for i, cell in enumerate(row) if i not in table.left}
        assert all(any(line.endswith(cell) for line in map(str.rstrip, lines)) for cell in numbers)
        return False
    edges = [-1, *(i for i, c in enumerate(lines[rule]) if c == "╇"), max(map(len, lines))]
    for i, column in enumerate(table.columns):
        pieces = [line[edges[i] + 1 : edges[i + 1]].strip() for line in lines]
        assert squeezed(*pieces[:rule]) == squeezed(column)
        cells = [row[i] for row in table.rows]
        assert squeezed(*pieces[rule + 1 :]) == squeezed(*cells)
        if i not in table.left:
            assert [piece for piece in pieces[rule + 1 :] if piece] == [cell for cell in cells if cell]
    return True


@pytest.mark.parametrize("columns", [200, 100, 80, 40])
def test_no_cell_is_cut_and_no_line_is_too_long(
    columns: int, tables: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    forms: dict[str, bool] = {}
    for table in tables:
        lines = printed(table, monkeypatch, columns)
        assert max(map(len, lines)) <= columns, table.title
        forms[table.maker] = check_is_whole(table, lines)
    assert columns < 80 or (forms["show_holders"] and forms["_show_statistics"] and forms["_show_contract"])


def test_a_pipe_gets_whole_tables(tables: list[Table], monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Table("", "wide", tuple(f"column {i}" for i in range(20)), ((K2_WEIGHTS,) * 20,), ())
    for table in (*tables, wide):
        assert check_is_whole(table, printed(table, monkeypatch, None)), table.title


def test_headings_are_folded_before_rows_become_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("", "t", ("", "non-zero weights"), (("a long label of words", "12,345"),), (0,))
    assert printed(table, monkeypatch, 40)[1].split() == ["┃", "non-zero", "weights"]
    folded = printed(table, monkeypatch, 30)
    assert [line.split("┃")[1].strip() for line in folded[1:3]] == ["non-zero", "weights"]
    assert [line.rstrip() for line in printed(table, monkeypatch, 22)] == [
        "t",
        "a long label of words",
        "  non-zero weights:",
        "  12,345",
    ]


@pytest.mark.parametrize("columns", [80, 40])
def test_recipes_and_states_fit_the_terminal(columns: int, cut: Path, tmp_path: Path) -> None:
    (tmp_path / "source").symlink_to(cut)
    assert in_terminal("run", "source", "out", "--quiet", columns=columns, rows=24, folder=tmp_path).code == 0
    for words in (("recipes",), ("status", "out")):
        shown = in_terminal(*words, columns=columns, rows=24, folder=tmp_path)
        assert shown.code == 0
        assert not [line for line in shown.screen.wrapped if not line.startswith("next:")]
