"""Writes the results of a benchmark run as Markdown, one table for each question of RESULTS.md."""

from collections.abc import Callable, Mapping
from typing import Any

Results = Mapping[str, Mapping[str, Any]]

QUESTIONS = {
    "How fast are the kernels?": ("kernel ",),
    "How fast is the whole command?": (
        "cp + fsync, cold",
        "run max, cold",
        "run mse, cold",
        "cp + fsync, warm",
        "run max, warm",
        "run mse, warm",
    ),
    "How fast are one core and validation?": (
        "run max, one core",
        "run mse, one core",
        "run mse, smaller",
        "validate --source",
    ),
    "How does it compare with the published pipelines?": (
        "run mse, warm",
        "run max, slice",
        "run mse, slice",
        "llm-compressor NVFP4A16",
        "Quark, file to file",
        "reference chain",
        "llm-compressor expanded MSE",
    ),
    "How long is start-up?": ("start-up",),
    "Do time and memory grow with the checkpoint?": ("growth",),
    "How much memory do all projections of Kimi K3 need?": ("K3's plan",),
    "How long does rule gptq take?": ("run --calibrate",),
}
"""Each heading of RESULTS.md with the labels of its rows, or with what they begin with."""


def markdown(results: Results) -> str:
    """Return one table for each question that has results."""
    lines: list[str] = []
    for question, beginnings in QUESTIONS.items():
        labels = [label for begin in beginnings for label in results if label.startswith(begin)]
        if labels:
            lines += [f"## {question}", "", *_table(labels, results), ""]
    checked = results.get("validate --source, smaller, warm")
    run = results.get("run mse, smaller, warm")
    if checked is not None and run is not None:
        share = run["seconds"] / checked["seconds"]
        lines.append(f"`validate --source` runs at {share:.2f} of `run`'s speed on the same folder.")
    return "\n".join(lines)


def _table(labels: list[str], results: Results) -> list[str]:
    """Return the rows of one table; a column that is empty in every row is left out."""
    cells = {title: [cell(label, results) for label in labels] for title, cell in _COLUMNS.items()}
    columns = [(title, column) for title, column in cells.items() if any(column)]
    rows = zip(*(column for _, column in columns), strict=True)
    return [
        "| " + " | ".join(title for title, _ in columns) + " |",
        "|---" + "|---:" * (len(columns) - 1) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _input(label: str, results: Results) -> str:
    r = results[label]
    return f"{r['source_bytes'] / 1e9:.2g} GB" if "source_bytes" in r else ""


def _seconds(label: str, results: Results) -> str:
    r = results[label]
    return f"{r['seconds']:.2f} ({r['fastest']:.2f}..{r['slowest']:.2f})" if "seconds" in r else ""


def _bandwidth(label: str, results: Results) -> str:
    r = results[label]
    rate = r["source_bytes"] / r["seconds"] if "seconds" in r else r.get("bytes_per_second")
    return f"{rate / 1e9:.2f}" if rate else ""


def _times_as_fast_as_cp(label: str, results: Results) -> str:
    """Return the speed relative to the copy of the same checkpoint in the same cache state."""
    r = results[label]
    copy = results.get(f"cp + fsync, {'cold' if r.get('cold') else 'warm'}", {})
    if "seconds" not in r or r["source_bytes"] != copy.get("source_bytes"):
        return ""
    return f"{copy['seconds'] / r['seconds']:.2f}"


def _peak_memory(label: str, results: Results) -> str:
    r = results[label]
    return f"{r['peak_rss'] / 1e9:.2f} GB" if "peak_rss" in r else ""


def _weights_per_second(label: str, results: Results) -> str:
    """Return the stored rate, or for `run` the rate of the whole command, start-up and disk included."""
    r = results[label]
    rate = r.get("weights_per_second")
    if rate is None and label.startswith("run "):
        rate = r["source_weights"] / r["seconds"]
    return f"{rate / 1e6:.3g} M" if rate else ""


def _sqnr(label: str, results: Results) -> str:
    r = results[label]
    return f"{r['sqnr_db']:.2f} dB" if r.get("sqnr_db") else ""


_COLUMNS: dict[str, Callable[[str, Results], str]] = {
    "command": lambda label, _: label,
    "input": _input,
    "seconds (min..max)": _seconds,
    "GB/s in": _bandwidth,
    "times as fast as cp": _times_as_fast_as_cp,
    "peak memory": _peak_memory,
    "weights a second": _weights_per_second,
    "SQNR": _sqnr,
}
