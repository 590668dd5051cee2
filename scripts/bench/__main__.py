"""`scripts/bench/run`: limits, k2convert, peers and growth on K2-shaped shards; Markdown on stdout, JSON in a file."""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from k2convert.checkpoint.index import open_checkpoint
from k2convert.validate import measure_folder
from scripts.bench.measure import Sample, describe_machine, evict, sample, warm

PYTHON = sys.executable
K2_WEIGHTS = 1_014_686_023_680
K2_BYTES = 594_205_904_896


class Bench:
    """One session: a work folder, the number of runs, and the results so far."""

    def __init__(self, work: Path, runs: int, device: str) -> None:
        self.work, self.runs, self.device = work, runs, device
        self.out = work / "out"
        self.results: dict[str, dict[str, object]] = {}

    def source(self, name: str, *options: object) -> Path:
        """A K2-shaped checkpoint, made once."""
        folder = self.work / name
        if not (folder / "config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            note(f"making {name}")
            shape = [folder, "--dense-layers", 0, "--layers", 1, *options]
            subprocess.run([PYTHON, "-m", "scripts.fixture_maker", "k2-shaped", *map(str, shape)], check=True)
        return folder

    def time(
        self,
        label: str,
        source: Path,
        command: Sequence[str | Path],
        *,
        cold: bool,
        runs: int = 0,
        cores: int | None = None,
    ) -> Sample:
        """Time one command on one source, result folder removed before each run; keeps and returns the sample."""

        def before() -> None:
            shutil.rmtree(self.out, ignore_errors=True)
            (evict if cold else warm)(source)

        note(label)
        result = sample([PYTHON, "-m", *command], runs=runs or self.runs, before=before, cores=cores)
        size = sum(t.num_bytes for t in open_checkpoint(source).tensors.values())
        self.results[label] = {
            **asdict(result),
            "source_bytes": size,
            "gigabytes_per_second": size / result.seconds / 1e9,
        }
        return result

    def convert(self, source: Path, *options: str) -> list[str | Path]:
        device = ["--device", self.device]
        return ["k2convert", "run", source, self.out, "--json", *device, *options]

    def error(self, source: Path) -> dict[str, float | None]:
        """Weight error of what stands in the result folder, by the independent decoder."""
        _, weights = measure_folder(folder=self.out, source=open_checkpoint(source), reference=False, progress=None)
        assert weights is not None
        total = weights.totals()["total"]
        return {"sqnr_db": total.sqnr_db, "relative_mse": total.relative_mse}


def note(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def whole_command(bench: Bench, gigabytes: float) -> None:
    """Copying, reading, writing and converting the same folder, cold and warm."""
    source = bench.source(f"main-{gigabytes:g}", "--gigabytes", gigabytes)
    limits = "scripts.bench.limits"
    # The first run compiles what is compiled once a machine; it is not counted.
    bench.time("warm-up", source, bench.convert(source), cold=False, runs=1)
    bench.results.pop("warm-up")
    for cold in (True, False):
        state = "cold" if cold else "warm"
        bench.time(f"cp + fsync, {state}", source, [limits, "copy", source, bench.out], cold=cold)
        for rule in ("plain", "optimal"):
            bench.time(f"run {rule}, {state}", source, bench.convert(source, "--rule", rule), cold=cold)
    bench.time("read alone, cold", source, [limits, "read", source], cold=True)
    bench.time("durable write alone", source, [limits, "write", source, bench.out], cold=False)
    for rule in ("plain", "optimal"):
        label = f"run {rule}, one core, warm"
        bench.time(label, source, bench.convert(source, "--rule", rule), cold=False, cores=1)
    bench.time("validate against the source, warm", source, validate_command(bench, source), cold=False, runs=1)


def validate_command(bench: Bench, source: Path) -> list[str | Path]:
    """`validate` of a fresh conversion that is kept apart from the result folder."""
    kept = bench.work / "validated"
    shutil.rmtree(kept, ignore_errors=True)
    subprocess.run([PYTHON, "-m", "k2convert", "run", source, kept, "--json"], check=True, stdout=subprocess.DEVNULL)
    return ["k2convert", "validate", kept, "--source", source, "--json"]


def peers(bench: Bench) -> None:
    """The published pipelines on slices they can finish, each beside k2convert on the same slice."""
    slice_ = bench.source("slice", "--experts", 2)
    small = bench.source("slice-small", "--experts", 1, "--hidden", 1024, "--intermediate", 1024)
    module = "scripts.bench.peers"
    jobs: list[tuple[str, Path, Sequence[str | Path]]] = [
        ("reference chain", slice_, bench.convert(slice_, "--quantizer", "reference")),
        ("llm-compressor NVFP4A16", slice_, [module, "chain", slice_, bench.out]),
        ("llm-compressor expanded MSE", small, [module, "expanded", small, bench.out]),
        ("run plain, slice", slice_, bench.convert(slice_, "--rule", "plain")),
        ("run optimal, slice", slice_, bench.convert(slice_)),
    ]
    empty = start_up_seconds(bench)
    for label, source, command in jobs:
        result = bench.time(label, source, command, cold=False)
        weights = int4_weights(source)
        peer = "llm-compressor" if label.startswith("llm") else "k2convert"
        # What a process needs before its first weight would drown a slice; it is measured and taken off.
        working = result.seconds - empty[peer]
        bench.results[label] |= bench.error(source)
        if working > result.seconds / 4:  # else the slice is too small to tell a rate from it
            bench.results[label]["weights_per_second"] = weights / working


def start_up_seconds(bench: Bench) -> dict[str, float]:
    """Wall time of a run on a checkpoint with almost nothing to convert."""
    nearly_empty = bench.source("nearly-empty", "--experts", 1, "--hidden", 256, "--intermediate", 64)
    commands = {
        "llm-compressor": ["scripts.bench.peers", "chain", nearly_empty, bench.out],
        "k2convert": bench.convert(nearly_empty),
    }
    return {name: bench.time(f"start-up, {name}", nearly_empty, c, cold=False).seconds for name, c in commands.items()}


def int4_weights(source: Path) -> int:
    tensors = open_checkpoint(source).tensors
    return sum(t.num_bytes * 2 for name, t in tensors.items() if name.endswith(".weight_packed"))


def growth(bench: Bench, sizes: Sequence[int]) -> None:
    """Whole-command time and memory as the shard grows."""
    for gigabytes in sizes:
        source = bench.source(f"main-{gigabytes:g}", "--gigabytes", gigabytes)
        bench.time(f"growth {gigabytes} GB, optimal, warm", source, bench.convert(source), cold=False, runs=1)


def kernels(bench: Bench) -> None:
    """Conversion alone, in memory."""
    note("kernels")
    done = subprocess.run(
        [PYTHON, "-m", "scripts.bench.kernels", bench.device], check=True, capture_output=True, text=True
    )
    document = json.loads(done.stdout)
    for label, rate in document["rates"].items():
        bench.results[f"kernel {label}"] = {"weights_per_second": rate, "backend": document["backend"]}


def markdown(bench: Bench) -> str:
    """The results as a table; ratios against the copy in the same cache state."""
    lines = [describe_machine(), "", "| what | seconds (min..max) | GB/s in | of cp | weights/s | peak RSS | SQNR |"]
    lines.append("|---|---|---|---|---|---|---|")
    for label, r in bench.results.items():
        state = "cold" if "cold" in label else "warm"
        copy = bench.results.get(f"cp + fsync, {state}")
        timed = isinstance(r.get("seconds"), float)
        same = copy is not None and timed and r["source_bytes"] == copy["source_bytes"]
        cells = (
            label,
            f"{r['seconds']:.2f} ({r['fastest']:.2f}..{r['slowest']:.2f})" if timed else "",
            f"{r['gigabytes_per_second']:.2f}" if timed else "",
            f"{copy['seconds'] / r['seconds']:.2f}" if same and copy else "",  # type: ignore[operator]
            f"{r['weights_per_second'] / 1e6:.3g} M" if "weights_per_second" in r else "",  # type: ignore[operator]
            f"{r['peak_rss'] / 1e9:.2f} GB" if timed else "",  # type: ignore[operator]
            f"{r['sqnr_db']:.2f} dB" if r.get("sqnr_db") else "",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the main shard")
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each command")
    parser.add_argument("--growth", default="1,2,4,8", help="shard sizes in GB for the growth series; empty for none")
    parser.add_argument("--only", default="kernels,whole,peers,growth", help="parts to run")
    parser.add_argument("--work", type=Path, default=Path("bench-work"), help="where shards are made (about 25 GB)")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.work.absolute(), arguments.runs, arguments.device)
    sizes = [int(size) for size in arguments.growth.split(",") if size]
    parts: dict[str, Callable[[], None]] = {
        "kernels": lambda: kernels(bench),
        "whole": lambda: whole_command(bench, arguments.gigabytes),
        "peers": lambda: peers(bench),
        "growth": lambda: growth(bench, sizes),
    }
    for name in arguments.only.split(","):
        parts[name]()
    shutil.rmtree(bench.out, ignore_errors=True)
    (bench.work / "results.json").write_text(json.dumps({"machine": describe_machine(), **bench.results}, indent=2))
    print(markdown(bench))


if __name__ == "__main__":
    main()
