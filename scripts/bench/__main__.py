"""`scripts/bench/run`: k2convert, a copy, peers and growth on K2-shaped shards; Markdown on stdout, JSON in a file.

Commands that are compared take turns, because the speed of a shared machine drifts.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from scripts.bench.measure import Run, describe_machine, evict, run_once, summarize, warm
from scripts.bench.peers import quark_python
from scripts.bench.table import markdown
from scripts.fixture_maker import make_token_ids
from scripts.fixture_maker.__main__ import main as make_fixture

PYTHON = sys.executable
PEERS = "scripts.bench.peers"
COPY = ("sh", "-c", 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +')
RULES = ("max", "mse")
GPTQ_TOKENS = 2048
ONE, FOUR = 1, 4  # GB: for one core, and for validation and the disk; large enough to measure, quick to finish


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
    """One run of the bench: a work folder, the number of runs, and the results so far."""

    def __init__(self, work: Path, runs: int, device: str) -> None:
        self.work = work
        self.runs = runs
        self.device = device
        self.out = work / "out"
        self.results: dict[str, dict[str, Any]] = {}

    def source(self, name: str, *options: object) -> Path:
        """Make a K2-shaped checkpoint if it is missing, and return its folder."""
        folder = self.work / name
        if not (folder / "config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            note(f"making {name}")
            with redirect_stdout(sys.stderr):
                make_fixture(["k2-shaped", str(folder), "--dense-layers", "0", *map(str, options)])
        return folder

    def sized(self, gigabytes: float) -> Path:
        return self.source(f"main-{gigabytes:g}", "--gigabytes", gigabytes)

    def time(self, *jobs: Job) -> None:
        """Run all jobs `runs` times, in turns, and add their medians and spreads to the results."""
        runs: dict[str, list[Run]] = {job.label: [] for job in jobs}
        for turn in range(self.runs):
            for job in jobs:
                note(f"{job.label} ({turn + 1} of {self.runs})")
                shutil.rmtree(self.out, ignore_errors=True)
                (evict if job.cold else warm)(job.source)
                runs[job.label].append(run_once([*job.program, *job.command], one_core=job.one_core))
                if job.measures_error and turn == 0:
                    self.results[job.label] = self._error(job.source)
        for job in jobs:
            sample = summarize(runs[job.label])
            size = source_bytes(job.source)
            weights = int4_weights(job.source)
            self.results[job.label] = asdict(sample) | self.results.get(job.label, {})
            self.results[job.label] |= {"source_bytes": size, "source_weights": weights, "cold": job.cold}

    def convert(self, source: Path, *options: str) -> list[str | Path]:
        return ["k2convert", "run", source, self.out, "--json", *options]

    def _error(self, source: Path) -> dict[str, Any]:
        """Measure the weight error in the result folder with the independent decoder."""
        weights = validate_checkpoint(folder=self.out, source=open_checkpoint(source)).weights
        assert weights is not None
        total = weights.totals()["total"]
        return {"sqnr_db": total.sqnr_db, "relative_mse": total.relative_mse}


def note(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def source_bytes(source: Path) -> int:
    return sum(t.num_bytes for t in open_checkpoint(source).tensors.values())


def int4_weights(source: Path) -> int:
    tensors = open_checkpoint(source).tensors
    return sum(t.num_bytes * 2 for name, t in tensors.items() if name.endswith(".weight_packed"))


def whole_command(bench: Bench, gigabytes: float) -> None:
    """Copy and convert the same cold folder; convert and validate smaller ones."""
    source, smaller, smallest = (bench.sized(min(size, gigabytes)) for size in (gigabytes, FOUR, ONE))
    # A conversion to validate below.
    validated = bench.work / "validated"
    shutil.rmtree(validated, ignore_errors=True)
    subprocess.run([PYTHON, "-m", "k2convert", "run", smaller, validated, "--json"], check=True, capture_output=True)
    bench.time(*copy_and_runs(bench, source, cold=True))
    bench.time(
        *(
            Job(f"run {r}, one core, warm", smallest, bench.convert(smallest, "--rule", r), one_core=True)
            for r in RULES
        ),
        Job("run mse, smaller, warm", smaller, bench.convert(smaller)),
        Job("validate --source, smaller, warm", smaller, ["k2convert", "validate", validated, "--source", smaller]),
    )
    bench.results["run mse, smaller, warm"]["gigabytes"] = min(FOUR, gigabytes)
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
    chain = ["--rule", "max", "--set", "quantizer=reference"]
    python = quark_python()
    bench.time(
        *copy_and_runs(bench, bench.sized(gigabytes), cold=False),
        Job("start-up, k2convert", nearly_empty, bench.convert(nearly_empty)),
        Job("start-up, reference chain", nearly_empty, bench.convert(nearly_empty, *chain)),
        Job("start-up, llm-compressor", nearly_empty, [PEERS, "chain", nearly_empty, bench.out]),
        Job("start-up, Quark", nearly_empty, [PEERS, "quark", nearly_empty, bench.out], program=(python, "-m")),
        Job("reference chain", short, bench.convert(short, *chain), measures_error=True),
        Job("llm-compressor NVFP4A16", slice_, [PEERS, "chain", slice_, bench.out], measures_error=True),
        Job(
            "Quark, file to file",
            slice_,
            [PEERS, "quark", slice_, bench.out],
            measures_error=True,
            program=(python, "-m"),
        ),
        Job("llm-compressor expanded MSE", small, [PEERS, "expanded", small, bench.out], measures_error=True),
        Job("run max, slice", slice_, bench.convert(slice_, "--rule", "max"), measures_error=True),
        Job("run mse, slice", slice_, bench.convert(slice_), measures_error=True),
    )
    bench.results["run mse, warm"]["gigabytes"] = gigabytes
    for label, start_up in (
        ("reference chain", "start-up, reference chain"),
        ("llm-compressor NVFP4A16", "start-up, llm-compressor"),
        ("Quark, file to file", "start-up, Quark"),
        ("llm-compressor expanded MSE", "start-up, llm-compressor"),
    ):
        # Start-up would dominate the time of a slice, so it is measured and subtracted.
        result = bench.results[label]
        working = result["seconds"] - bench.results[start_up]["seconds"]
        if working > result["seconds"] / 4:  # otherwise start-up hides the rate
            result["weights_per_second"] = result["source_weights"] / working


def growth(bench: Bench, sizes: Sequence[int]) -> None:
    """Time the whole command and take its peak memory on checkpoints of growing size."""
    labels = {size: f"growth {size} GB, mse, warm" for size in sizes}
    measured = {r["gigabytes"]: r for r in bench.results.values() if "gigabytes" in r}
    folders = [(label, bench.sized(size)) for size, label in labels.items() if size not in measured]
    bench.time(*(Job(label, folder, bench.convert(folder)) for label, folder in folders))
    for size in [size for size in sizes if size in measured]:
        bench.results[labels[size]] = measured[size]


def gptq(bench: Bench) -> None:
    """Time rule `gptq` on a dense and a MoE layer of K2's size with 16 experts, on one core and on all."""
    ids = bench.work / "gptq-ids.jsonl"
    make_token_ids(ids, tokens=GPTQ_TOKENS)
    source = bench.source("layer-16", "--experts", 16, "--dense-layers", 1)
    text = ("--calibrate", str(ids), "--set", f"calibration.tokens={GPTQ_TOKENS}", "--device", bench.device)
    command = bench.convert(source, *text)
    label = f"run --calibrate, 16 experts, {GPTQ_TOKENS:,} tokens"
    bench.time(Job(f"{label}, one core", source, command, one_core=True), Job(f"{label}, all cores", source, command))


def whole_k3(bench: Bench) -> None:
    """Take the peak memory of commands on a checkpoint with all of K3's 247,296 projections, narrow ones."""
    source = bench.work / "k3-narrow"
    result = bench.work / "k3-narrow-nvfp4"
    if not (source / "config.json").exists():
        shutil.rmtree(source, ignore_errors=True)
        with redirect_stdout(sys.stderr):
            make_fixture(["k3-narrow", str(source)])
    shutil.rmtree(result, ignore_errors=True)
    convert = ["run", source, result]
    checks = {"inspect": ["inspect", source], "report": ["report", result]}
    checks |= {"validate --source": ["validate", result, "--source", source]}
    for label, command in {"run": convert, "run again": convert, **checks}.items():
        note(f"K3's plan: {label}")
        found = summarize([run_once([PYTHON, "-m", "k2convert", *command], one_core=False)])
        bench.results[f"K3's plan: {label}"] = asdict(found) | {"source_bytes": source_bytes(source)}


def kernels(bench: Bench) -> None:
    """Time the kernels, in memory."""
    note("kernels")
    done = subprocess.run([PYTHON, "-m", "scripts.bench.kernels"], check=True, stdout=subprocess.PIPE, text=True)
    for label, figures in json.loads(done.stdout).items():
        bench.results[f"kernel {label}"] = figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="computes the text of gptq")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the main shard; K2's shards have 9.8")
    parser.add_argument("--runs", type=int, default=3, help="runs of each command")
    parser.add_argument("--growth", default="1,2,4,8", help="shard sizes in GB for the growth series; empty for none")
    parser.add_argument("--only", default="kernels,whole,peers,growth", help="parts to run; more: gptq, k3")
    parser.add_argument("--work", type=Path, default=Path("bench-work"), help="folder for the shards (about 30 GB)")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.work.absolute(), arguments.runs, arguments.device)
    sizes = [int(size) for size in arguments.growth.split(",") if size]
    parts: dict[str, Callable[[], None]] = {
        "kernels": lambda: kernels(bench),
        "whole": lambda: whole_command(bench, arguments.gigabytes),
        "peers": lambda: peers(bench, arguments.gigabytes),
        "growth": lambda: growth(bench, sizes),
        "gptq": lambda: gptq(bench),
        "k3": lambda: whole_k3(bench),
    }
    for name in arguments.only.split(","):
        parts[name]()
    shutil.rmtree(bench.out, ignore_errors=True)
    (bench.work / "results.json").write_text(json.dumps({"machine": describe_machine(), **bench.results}, indent=2))
    print(f"{describe_machine()}\n\n{markdown(bench.results)}")


if __name__ == "__main__":
    main()
