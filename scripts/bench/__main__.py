"""`scripts/bench/run`: k2convert, a copy, peers and growth on K2-shaped shards; Markdown on stdout, JSON in a file.

Commands that are compared take turns, because the speed of a shared machine drifts.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from scripts.bench.kernels import RULES, kernel_figures
from scripts.bench.measure import Run, describe_machine, evict, run_once, summarize, warm
from scripts.bench.peers import quark_python
from scripts.fixture_maker import make_token_ids
from scripts.fixture_maker.__main__ import main as make_fixture

PYTHON = sys.executable
PEERS = "scripts.bench.peers"
COPY = ("sh", "-c", 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +')
GPTQ_TOKENS = 2048
CORE_GB, DISK_GB = 1, 4  # GB: for one core, and for validation and the disk; large enough to measure, quick to finish
COMMAND = "How fast is the whole command?"
CORES = "How fast are one core and validation?"
PIPELINES = "How does it compare with the published pipelines?"
START_UP = "How long is start-up?"
GROWTH = "Do time and memory grow with the checkpoint?"

Rows = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Job:
    """One command to time: its label, the checkpoint it reads, and whether that starts outside the page cache."""

    label: str
    source: Path
    command: Sequence[str | Path]
    cold: bool = False
    one_core: bool = False
    measures_error: bool = False
    program: Sequence[str | Path] = (PYTHON, "-m")


class Bench:
    """One run of the bench: a work folder, the number of runs, and the results so far, by question and label."""

    def __init__(self, work: Path, runs: int) -> None:
        self.work = work
        self.runs = runs
        self.out = work / "out"
        self.results: dict[str, dict[str, dict[str, Any]]] = {}

    def source(self, name: str, *options: object, dense_layers: int = 0) -> Path:
        """Make a K2-shaped checkpoint if it is missing, and return its folder."""
        folder = self.work / name
        if not (folder / "config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            note(f"making {name}")
            with redirect_stdout(sys.stderr):
                make_fixture(["k2-shaped", str(folder), "--dense-layers", str(dense_layers), *map(str, options)])
        return folder

    def sized(self, gigabytes: float) -> Path:
        return self.source(f"main-{gigabytes:g}", "--gigabytes", gigabytes)

    def convert(self, source: Path, *options: str) -> list[str | Path]:
        return ["k2convert", "run", source, self.out, "--json", *options]

    def time(self, question: str, *jobs: Job) -> None:
        """Run all jobs `runs` times, in turns, and add their medians and spreads to the results."""
        runs: dict[str, list[Run]] = {job.label: [] for job in jobs}
        errors: dict[str, float | None] = {}
        for turn in range(self.runs):
            for job in jobs:
                note(f"{job.label} ({turn + 1} of {self.runs})")
                shutil.rmtree(self.out, ignore_errors=True)
                (evict if job.cold else warm)(job.source)
                runs[job.label].append(run_once([*job.program, *job.command], one_core=job.one_core))
                if job.measures_error:
                    errors[job.label] = self._sqnr_db(job.source)
        rows = self.results.setdefault(question, {})
        for job in jobs:
            row = summarize(runs[job.label]) | {"source_bytes": source_bytes(job.source), "cold": job.cold}
            if job.measures_error:
                row["sqnr_db"] = errors[job.label]
            if job.label.startswith("run"):
                row["weights_per_second"] = int4_weights(job.source) / row["seconds"]
            rows[job.label] = row

    def _sqnr_db(self, source: Path) -> float | None:
        """Measure the weight error in the result folder."""
        weights = validate_checkpoint(folder=self.out, source=open_checkpoint(source)).weights
        assert weights is not None
        return weights.totals()["total"].sqnr_db


def note(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def source_bytes(source: Path) -> int:
    return sum(t.num_bytes for t in open_checkpoint(source).tensors.values())


def int4_weights(source: Path) -> int:
    tensors = open_checkpoint(source).tensors
    return sum(t.num_bytes * 2 for name, t in tensors.items() if name.endswith(".weight_packed"))


def whole_command(bench: Bench, gigabytes: float) -> None:
    """Copy and convert the same cold folder; convert and validate smaller ones."""
    source, smaller, smallest = (bench.sized(min(size, gigabytes)) for size in (gigabytes, DISK_GB, CORE_GB))
    validated = bench.work / "validated"
    shutil.rmtree(validated, ignore_errors=True)
    subprocess.run([PYTHON, "-m", "k2convert", "run", smaller, validated, "--json"], check=True, capture_output=True)
    bench.time(COMMAND, *copy_and_runs(bench, source, cold=True))
    bench.time(
        CORES,
        *(Job(f"run {r}, one core", smallest, bench.convert(smallest, "--rule", r), one_core=True) for r in RULES),
        Job("run mse, all cores", smaller, bench.convert(smaller)),
        Job("validate --source, all cores", smaller, ["k2convert", "validate", validated, "--source", smaller]),
    )
    shutil.rmtree(validated)


def copy_and_runs(bench: Bench, source: Path, *, cold: bool) -> list[Job]:
    """Return the jobs that copy a folder and convert it by both rules, in one cache state."""
    state = "cold" if cold else "warm"
    copy = Job(f"cp + fsync, {state}", source, [source, bench.out], cold, program=COPY)
    return [copy, *(Job(f"run {rule}, {state}", source, bench.convert(source, "--rule", rule), cold) for rule in RULES)]


def peers(bench: Bench, gigabytes: float) -> None:
    """Run the published pipelines on slices they can finish, and k2convert on slices and on everything."""
    slice_ = bench.source("slice-8", "--experts", 8)
    short = bench.source("slice-2", "--experts", 2)
    small = bench.source("slice-small", "--experts", 1, "--hidden", 2048, "--intermediate", 256)
    nearly_empty = bench.source("nearly-empty", "--experts", 1, "--hidden", 256, "--intermediate", 64)
    quark = (quark_python(), "-m")
    bench.time(COMMAND, *copy_and_runs(bench, bench.sized(gigabytes), cold=False))

    def pipelines(source: Path) -> dict[str, Job]:
        """Return each pipeline's job on a source."""
        chain = ("--rule", "max", "--set", "quantizer=reference")
        compressor = "llm-compressor NVFP4A16"
        file_to_file = "Quark, file to file"
        jobs = (
            Job("reference chain", source, bench.convert(source, *chain), measures_error=True),
            Job(compressor, source, [PEERS, "chain", source, bench.out], measures_error=True),
            Job(file_to_file, source, [PEERS, "quark", source, bench.out], measures_error=True, program=quark),
        )
        return {job.label: job for job in jobs}

    start_up = [replace(job, measures_error=False) for job in pipelines(nearly_empty).values()]
    bench.time(START_UP, Job("k2convert", nearly_empty, bench.convert(nearly_empty)), *start_up)
    jobs = pipelines(slice_) | {"reference chain": pipelines(short)["reference chain"]}
    expanded = [PEERS, "expanded", small, bench.out]
    bench.time(
        PIPELINES,
        *(Job(f"run {r}", slice_, bench.convert(slice_, "--rule", r), measures_error=True) for r in RULES),
        *jobs.values(),
        Job("llm-compressor, expanded MSE", small, expanded, measures_error=True),
    )
    for label, job in jobs.items():
        # Start-up would dominate the time of a slice, so it is measured and subtracted.
        row = bench.results[PIPELINES][label]
        working = row["seconds"] - bench.results[START_UP][label]["seconds"]
        if working > row["seconds"] / 4:  # otherwise start-up hides the rate
            row["weights_per_second"] = int4_weights(job.source) / working


def growth(bench: Bench, sizes: Sequence[int]) -> None:
    """Time the whole command and take its peak memory on checkpoints of growing size."""
    folders = {f"run mse, {size} GB": bench.sized(size) for size in sizes}
    bench.time(GROWTH, *(Job(label, folder, bench.convert(folder)) for label, folder in folders.items()))


def gptq(bench: Bench, device: str) -> None:
    """Time rule `gptq` on a dense and a MoE layer of K2's size with 16 experts, on one core and on all."""
    ids = bench.work / "gptq-ids.npy"
    make_token_ids(ids, tokens=GPTQ_TOKENS)
    source = bench.source("layer-16", "--experts", 16, dense_layers=1)
    text = ("--calibrate", str(ids), "--set", f"calibration.tokens={GPTQ_TOKENS}", "--device", device)
    command = bench.convert(source, *text)
    label = f"run --calibrate, 16 experts, {GPTQ_TOKENS:,} tokens"
    one_core = Job(f"{label}, one core", source, command, one_core=True)
    bench.time("How long does rule gptq take?", one_core, Job(f"{label}, all cores", source, command))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="computes the text of gptq")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the main shard; K2's shards have 9.8")
    parser.add_argument("--runs", type=int, default=3, help="runs of each command")
    parser.add_argument("--growth", default="1,2,4,8", help="shard sizes in GB for the growth series")
    parser.add_argument("--only", default="kernels,whole,peers,growth", help="parts to run; more: gptq")
    parser.add_argument("--work", type=Path, default=Path("bench-work"), help="folder for the shards (about 30 GB)")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.work.absolute(), arguments.runs)
    for part in arguments.only.split(","):
        match part:
            case "kernels":
                bench.results["How fast are the kernels?"] = kernel_figures()
            case "whole":
                whole_command(bench, arguments.gigabytes)
            case "peers":
                peers(bench, arguments.gigabytes)
            case "growth":
                growth(bench, [int(size) for size in arguments.growth.split(",")])
            case "gptq":
                gptq(bench, arguments.device)
            case _:
                parser.error(f"--only: no part {part}")
    shutil.rmtree(bench.out, ignore_errors=True)
    (bench.work / "results.json").write_text(json.dumps({"machine": describe_machine(), **bench.results}, indent=2))
    print(f"{describe_machine()}\n\n{markdown(bench.results)}")


if __name__ == "__main__":
    main()
