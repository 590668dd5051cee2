"""What Ray costs on one machine: the same folder converted with and without --ray, in turns, warm.

.venv/bin/python -m scripts.bench.ray --out build/bench [--gigabytes 4] [--runs 3]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from ray.cluster_utils import Cluster

from scripts.bench.__main__ import Bench
from scripts.bench.measure import describe_machine, warm
from scripts.fixture_maker import TINY


def seconds(bench: Bench, source: Path, *options: str) -> float:
    """Convert a folder once; return the wall seconds of the whole command."""
    subprocess.run(["rm", "-rf", bench.out], check=True)
    warm(source)
    begin = time.monotonic()
    subprocess.run([sys.executable, "-m", *map(str, bench.convert(source, *options))], check=True, capture_output=True)
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.out, options.runs, "cpu")
    source = bench.sized(options.gigabytes)
    cores = os.cpu_count() or 1
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cores, "include_dashboard": False})
    on_ray = ("--ray", cluster.address, "--cpus-per-shard", str(cores))
    found: dict[str, list[float]] = {"alone": [], "ray": [], "tiny alone": [], "tiny ray": []}
    try:
        for _ in range(options.runs):
            found["alone"].append(seconds(bench, source))
            found["ray"].append(seconds(bench, source, *on_ray))
            found["tiny alone"].append(seconds(bench, TINY))
            found["tiny ray"].append(seconds(bench, TINY, *on_ray))
    finally:
        cluster.shutdown()
    medians = {name: statistics.median(values) for name, values in found.items()}
    start_up = medians["tiny ray"] - medians["tiny alone"]
    ratio = (medians["ray"] - start_up) / medians["alone"]
    print(describe_machine())
    print(json.dumps({name: [round(value, 2) for value in values] for name, values in found.items()}))
    print(f"Ray's start-up {start_up:.1f} s; without it, {ratio:.2f} of the time of a run without Ray")


if __name__ == "__main__":
    main()
