"""Writes the results of a benchmark run as Markdown: one table for each question of RESULTS.md."""

from collections.abc import Mapping
from typing import Any

Figures = Mapping[str, Any]
Rows = Mapping[str, Figures]


def markdown(results: Mapping[str, Rows]) -> str:
    """Return a table for each question; `results` has the figures of each command by question and label."""
    return "\n".join(f"## {question}\n\n{_table(rows)}" for question, rows in results.items())


def _table(rows: Rows) -> str:
    """Return one table; a column that is empty in every row is left out."""
    lines = [_cells(label, rows) for label in rows]
    titles = [title for title in lines[0] if any(line[title] for line in lines)]
    text = f"| {' | '.join(titles)} |\n|---{'|---:' * (len(titles) - 1)}|\n"
    return text + "".join(f"| {' | '.join(line[title] for title in titles)} |\n" for line in lines)


def _cells(label: str, rows: Rows) -> dict[str, str]:
    """Return the cells of a row by the titles of their columns."""
    row = rows[label]
    cells = dict.fromkeys(("seconds (min..max)", "GB/s in", "times as fast as cp", "peak memory"), "")
    rate = row.get("bytes_per_second")
    if "seconds" in row:
        rate = row["source_bytes"] / row["seconds"]
        cells["seconds (min..max)"] = f"{row['seconds']:.2f} ({row['fastest']:.2f}..{row['slowest']:.2f})"
        cells["peak memory"] = f"{row['peak_rss'] / 1e9:.2f} GB"
        copy = rows.get(f"cp + fsync, {'cold' if row['cold'] else 'warm'}", {})
        if row["source_bytes"] == copy.get("source_bytes"):
            cells["times as fast as cp"] = f"{copy['seconds'] / row['seconds']:.2f}"
    if rate:
        cells["GB/s in"] = f"{rate / 1e9:.2f}"
    return {
        "command": label,
        "input": f"{row['source_bytes'] / 1e9:.2g} GB" if "source_bytes" in row else "",
        **cells,
        "weights a second": f"{row['weights_per_second'] / 1e6:.3g} M" if "weights_per_second" in row else "",
        "SQNR": f"{row['sqnr_db']:.2f} dB" if row.get("sqnr_db") else "",
    }
