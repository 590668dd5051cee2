"""No table cuts a cell or goes past the edge of the terminal, with the numbers of a whole K2."""

import io
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from evaluation_makers import FORMAT, TEXT, row
from screen import in_terminal

from k2convert.choices import Activations
from k2convert.cli import console
from k2convert.cli.evaluation_view import row_labels, show_evaluation
from k2convert.records.evaluation import EvaluatedModel, Evaluation

K2_WEIGHTS = "1,014,686,023,680"
TEXTS = (
    "pass",
    "experts",
    "model-00001-of-000062.safetensors",
    "a result's experts are in NVFP4, and everything else is byte-identical to the source",
    "this result as served (W4A4), against the whole INT4",
)
NUMBERS = (K2_WEIGHTS, "594,205.90 MB", "22.62 dB", "0.999812", "1 to 1,024", "7", "")


class Table(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[int, ...]


def drawn(seed: int) -> Table:
    """A table of two to eight columns, texts and numbers, as inventories, rules and layers have them."""
    draw = random.Random(seed)
    headings = ("", "rule", "bytes", "non-zero weights", "largest error in steps", "what must hold")
    columns = tuple(draw.choice(headings) for _ in range(draw.randint(2, 8)))
    left = tuple(i for i in range(len(columns)) if i == 0 or draw.random() < 0.2)
    rows = [
        tuple(draw.choice(TEXTS if i in left else NUMBERS) for i in range(len(columns)))
        for _ in range(draw.randint(1, 6))
    ]
    return Table("weight error against the source", columns, tuple(rows), left)


TABLES = [drawn(seed) for seed in range(100)]


class Output(io.StringIO):
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
    console.print_table(*table[:3], left=table.left)
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
def test_no_cell_is_cut_and_no_line_is_too_long(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = 0
    for table in TABLES:
        lines = printed(table, monkeypatch, columns)
        assert max(map(len, lines)) <= columns, table
        tables += check_is_whole(table, lines)
    assert 0 < tables < len(TABLES), "some are tables, some are blocks"


def test_a_pipe_gets_whole_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Table("wide", tuple(f"column {i}" for i in range(20)), ((K2_WEIGHTS,) * 20,), ())
    for table in (*TABLES, wide):
        assert check_is_whole(table, printed(table, monkeypatch, None)), table


def test_headings_are_folded_before_rows_become_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("t", ("", "non-zero weights"), (("a long label of words", "12,345"),), (0,))
    assert printed(table, monkeypatch, 40)[1].split() == ["┃", "non-zero", "weights"]
    folded = printed(table, monkeypatch, 30)
    assert [line.split("┃")[1].strip() for line in folded[1:3]] == ["non-zero", "weights"]
    assert [line.rstrip() for line in printed(table, monkeypatch, 22)] == [
        "t",
        "a long label of words",
        "  non-zero weights:",
        "  12,345",
    ]


def test_three_models_in_two_modes_are_a_table_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("/data/results/Kimi-K2.5-NVFP4", "hf://someone/Kimi-K2.5-max", "gptq")
    modes: tuple[tuple[Activations, float], ...] = (("w4a16", 0.2), ("w4a4", 0.35))
    rows = tuple(row(EvaluatedModel(name, "1" * 64, mode), noise) for name in names for mode, noise in modes)
    reference = EvaluatedModel("/data/Kimi-K2.5", "2" * 64)
    evaluation = Evaluation(format=FORMAT, kind="evaluate", tool_version="0", reference=reference, text=TEXT, rows=rows)
    output = Output(is_terminal=True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", output)
    show_evaluation(evaluation)
    monkeypatch.undo()
    text = re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue()).partition("perplexity of")[0]
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "━╇━" in text, "a table, not blocks of lines"
    for name in ("Kimi-K2.5-NVFP4", "Kimi-K2.5-max", "gptq"):
        assert sum(line.startswith(f"{name} ") and "0.0" in line for line in lines) == len(modes)
    twins = tuple(
        replace(entry, model=replace(entry.model, name=f"{name}/out"))
        for entry, name in zip(rows, names * 2, strict=True)
    )
    assert len({label.split()[0] for label in row_labels(twins)}) == len(names), "full names where short ones are equal"


@pytest.mark.quick(1)
@pytest.mark.parametrize("columns", [80, 40])
def test_recipes_and_states_fit_the_terminal(columns: int, cut: Path, tmp_path: Path) -> None:
    (tmp_path / "source").symlink_to(cut)
    assert in_terminal("run", "source", "out", "--quiet", columns=columns, rows=24, folder=tmp_path).code == 0
    for words in (("recipes",), ("status", "out")):
        shown = in_terminal(*words, columns=columns, rows=24, folder=tmp_path)
        assert shown.code == 0
        assert not [line for line in shown.screen.wrapped if not line.startswith("next:")]
