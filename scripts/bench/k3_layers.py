"""`python -m scripts.bench.k3_layers WORK`: what layers of Kimi K3's size cost in `evaluate`, in Markdown.

A checkpoint of three layers, which takes 10 GB of disk, is evaluated against itself. Its experts are holes in files, so
the bytes that are read cost no disk.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import k2convert
from k2convert.evaluation.streamed import LayerComparison
from scripts.bench.measure import describe_machine
from scripts.fixture_maker import make_token_ids

TOKENS = 512
LAYERS = ("dense layer with KDA", "KDA layer with 896 experts", "MLA layer with 896 experts")


class Costs:
    """CPU seconds and bytes read between marks of this process."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float]] = []
        self._last = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        read = Path("/proc/self/io").read_text().partition("rchar: ")[2].split()[0]
        return time.process_time(), float(read)

    def mark(self, name: str) -> None:
        now = self._now()
        self.rows.append((name, now[0] - self._last[0], now[1] - self._last[1]))
        self._last = now
        print(f"bench: {self.rows[-1]}", file=sys.stderr, flush=True)

    def marking(self, method: Callable[..., None], model: str) -> Callable[..., None]:
        """Let a method mark the end of the layer that is its last argument."""

        def run(*arguments: Any) -> None:
            method(*arguments)
            self.mark(f"{LAYERS[arguments[-1].number]}, {model}")

        return run


def main() -> None:
    work = Path(sys.argv[1])
    work.mkdir(exist_ok=True)
    folder = work / "k3-shaped"
    if not folder.exists():  # in a process of its own, whose memory does not count
        subprocess.run([sys.executable, "-m", "scripts.fixture_maker", "k3-shaped", folder], check=True)
    ids = make_token_ids(work / "ids.npy", tokens=TOKENS)
    costs = Costs()
    LayerComparison.run_reference = costs.marking(LayerComparison.run_reference, "reference")
    LayerComparison.run = costs.marking(LayerComparison.run, "model")
    out = work / "evaluation.json"
    out.unlink(missing_ok=True)
    k2convert.evaluate(folder, [folder], [ids], tokens=TOKENS, window=TOKENS, device="cpu", out=out)
    costs.mark("output matrix of both models")
    print(f"{describe_machine()}\n\n| | CPU seconds | GB read |\n|---|---:|---:|")
    for name, seconds, read in costs.rows:
        print(f"| {name} | {seconds:.0f} | {read / 1e9:.1f} |")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(f"| all | {usage.ru_utime + usage.ru_stime:.0f}, peak memory {usage.ru_maxrss / 1e6:.2f} GB | |")


if __name__ == "__main__":
    main()
