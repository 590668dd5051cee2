"""Compares a Hub to Hub job with its single stages, over loopback; Markdown on stdout.

Run it with `.venv/bin/python -m scripts.bench.hub`. The loopback Hub of tests/hub, in this process, holds a K2-shaped
set of shards. The script times fetching them, converting them from a folder, publishing the result (`k2convert
publish`, which validates first), and two whole jobs in one command each: from a folder to the Hub, and from Hub to Hub.
The time of the last one over the slowest stage's shows how well the stages overlap. Client, server and conversion share
the cores.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from scripts.bench.measure import Run, describe_machine, run_once

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "hub"))

PYTHON = sys.executable
REPO = "moon/set"
NUM_LAYERS = 10


def fetch(target: Path) -> None:
    """Fetch every shard of the set as a job does, one after another."""
    from k2convert.hub.client import Hub, RepoRef
    from k2convert.hub.download import download_shard
    from k2convert.hub.source import open_remote, resolve_source

    hub = Hub()
    remote = resolve_source(hub, RepoRef(REPO))
    with tempfile.TemporaryDirectory() as folder:
        for shard in open_remote(hub, remote, folder=Path(folder)).headers:
            download_shard(hub, remote, shard, target=target / shard, stop=threading.Event())
            (target / shard).unlink()


def measure(work: Path, *, gigabytes: float, shards: int, xet: bool, line: float | None) -> dict[str, Run]:
    """Run each stage and the whole jobs once."""
    source = work / f"layers-{gigabytes:g}-{shards}"
    if not (source / "config.json").exists():
        shape = ["--dense-layers", "0", "--layers", str(NUM_LAYERS), "--gigabytes", str(gigabytes / NUM_LAYERS)]
        command = [PYTHON, "-m", "scripts.fixture_maker", "k2-shaped", source, *shape, "--shards", str(shards)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    for folder in (work / "converted", Path("k2convert-work/me--upload"), Path("k2convert-work/me--whole")):
        shutil.rmtree(folder, ignore_errors=True)
    k2convert = [PYTHON, "-m", "k2convert"]
    commands: dict[str, list[str | Path]] = {
        "fetch": [PYTHON, "-m", "scripts.bench.hub", "--fetch", work / "fetched"],
        "convert": [*k2convert, "run", source, work / "converted", "--json"],
        "publish": [*k2convert, "publish", work / "converted", "--repo", "me/published", "--yes", "--json"],
        "folder to Hub": [*k2convert, "run", source, "hf://me/upload", "--yes", "--json"],
        "Hub to Hub": [*k2convert, "run", f"hf://{REPO}", "hf://me/whole", "--yes", "--json"],
    }
    os.environ |= {"HF_HUB_DISABLE_XET": "0" if xet else "1", "HF_HOME": str(work / "home")}
    return {label: run_on_hub(command, work, source, line) for label, command in commands.items()}


def run_on_hub(command: list[str | Path], work: Path, source: Path, line: float | None) -> Run:
    """Run a command with a Hub that holds only the source, limited to `line` MB/s each way."""
    from faults import Line
    from loopback import TOKEN, LoopbackHub

    print(f"bench: {' '.join(map(str, command[2:]))}", file=sys.stderr, flush=True)
    for folder in (work / "home", work / "hub"):  # so that no stage finds the uploads of a previous one
        shutil.rmtree(folder, ignore_errors=True)
    with LoopbackHub(work / "hub") as hub:
        if line is not None:
            hub.traffic.down = Line(line * 1e6)
            hub.traffic.up = Line(line * 1e6)
        hub.api.token = TOKEN
        hub.store.add_folder(REPO, source)
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        return run_once(command, one_core=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--shards", type=int, default=40, help="number of shards for the layers; K2 has 62")
    parser.add_argument("--no-xet", action="store_true", help="upload with plain LFS")
    parser.add_argument("--line", type=float, help="limit in MB/s each way; needs --no-xet")
    parser.add_argument("--work", type=Path, default=Path("bench-work"))
    parser.add_argument("--fetch", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fetch:
        fetch(arguments.fetch)
        return
    line = arguments.line
    if line and not arguments.no_xet:
        parser.error("--line needs --no-xet: Xet's local storage is a folder, so nothing passes the line.")
    work = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    xet = not arguments.no_xet
    results = measure(work, gigabytes=arguments.gigabytes, shards=arguments.shards, xet=xet, line=line)
    slowest = max(run.seconds for label, run in results.items() if not label.endswith("to Hub"))
    limit = f", {line:g} MB/s each way" if line else ""
    print(f"{describe_machine()}; {arguments.gigabytes:g} GB, {arguments.shards} shards, Xet {xet}{limit}\n")
    print("| stage | seconds | CPU seconds | peak RSS | of the slowest stage |\n|---|---|---|---|---|")
    for label, run in results.items():
        share = f"{run.seconds / slowest:.2f}"
        print(f"| {label} | {run.seconds:.1f} | {run.cpu_seconds:.1f} | {run.peak_rss / 1e9:.2f} GB | {share} |")


if __name__ == "__main__":
    main()
