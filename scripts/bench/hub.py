"""Compares a Hub to Hub job with its single stages, over loopback; Markdown on stdout.

Run it with `.venv/bin/python -m scripts.bench.hub`. A loopback Hub (from tests/hub, in a separate process) holds a
K2-shaped set of shards. The script times fetching them, converting them from a folder, publishing the result
(`k2convert publish`, which validates first), and two whole jobs in one command each: from a folder to the Hub, and from
Hub to Hub. The time of the last one over the slowest stage's shows how well the stages overlap. Client, server and
conversion share the cores.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from scripts.bench.measure import Run, describe_machine, run_once

TESTS = Path(__file__).resolve().parents[2] / "tests" / "hub"
PYTHON = sys.executable
REPO = "moon/set"
NUM_LAYERS = 10


def serve(root: Path, source: Path, *, line: float | None) -> None:
    """Run the loopback Hub until killed, limited to `line` MB/s each way; print its address and its token."""
    sys.path.insert(0, str(TESTS))
    from faults import Line
    from loopback import TOKEN, LoopbackHub

    with LoopbackHub(root) as hub:
        if line is not None:
            hub.traffic.down = Line(line * 1e6)
            hub.traffic.up = Line(line * 1e6)
        hub.api.token = TOKEN
        hub.store.add_folder(REPO, source)
        print(hub.url, TOKEN, flush=True)
        sys.stdin.read()


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
    converted = work / "converted"
    out = work / "job"
    sent = work / "sent"
    if not (source / "config.json").exists():
        shape = ["--dense-layers", "0", "--layers", str(NUM_LAYERS), "--gigabytes", str(gigabytes / NUM_LAYERS)]
        spread = ["--shards", str(shards)]
        subprocess.run([PYTHON, "-m", "scripts.fixture_maker", "k2-shaped", str(source), *shape, *spread], check=True)
    for folder in (converted, out, sent):
        shutil.rmtree(folder, ignore_errors=True)
    os.environ |= {"HF_HUB_DISABLE_XET": "0" if xet else "1", "HF_HOME": str(work / "home")}
    run = [PYTHON, "-m", "k2convert", "run"]
    commands: dict[str, list[str | Path]] = {
        "fetch": [PYTHON, "-m", "scripts.bench.hub", "--fetch", work / "fetched"],
        "convert": [*run, source, converted, "--json"],
        "publish": [PYTHON, "-m", "k2convert", "publish", converted, "--repo", "me/published", "--yes", "--json"],
        "folder to Hub": [*run, source, "hf://me/upload", "--work-dir", sent, "--yes", "--json"],
        "Hub to Hub": [*run, f"hf://{REPO}", "hf://me/whole", "--work-dir", out, "--yes", "--json"],
    }
    results: dict[str, Run] = {}
    for label, command in commands.items():
        print(f"bench: {label}", file=sys.stderr, flush=True)
        for folder in (work / "home", work / "hub"):  # so that no stage finds the uploads of a previous one
            shutil.rmtree(folder, ignore_errors=True)
        with serving(work / "hub", source, *(["--line", str(line)] if line else [])):
            results[label] = run_once(command, one_core=False)
    return results


@contextmanager
def serving(root: Path, source: Path, *options: str) -> Generator[None]:
    """Start a server that holds only the source, and name it to the commands that follow."""
    command = [PYTHON, "-m", "scripts.bench.hub", "--serve", root, source, *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url, token = server.stdout.readline().split()
        os.environ |= {"HF_ENDPOINT": url, "HF_TOKEN": token}
        try:
            yield
        finally:
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--shards", type=int, default=40, help="number of shards for the layers; K2 has 62")
    parser.add_argument("--no-xet", action="store_true", help="upload with plain LFS")
    parser.add_argument("--line", type=float, help="limit in MB/s each way; needs --no-xet")
    parser.add_argument("--work", type=Path, default=Path("bench-work"))
    parser.add_argument("--serve", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--fetch", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(*arguments.serve, line=arguments.line)
    if arguments.fetch:
        return fetch(arguments.fetch)
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.line and not arguments.no_xet:
        parser.error(
            "--line needs --no-xet: Xet's local storage is a folder, so nothing passes the line. Add --no-xet."
        )
    xet = not arguments.no_xet
    line = arguments.line
    work = arguments.work.absolute()
    shards = arguments.shards
    results = measure(work, gigabytes=arguments.gigabytes, shards=shards, xet=xet, line=line)
    slowest = max(run.seconds for label, run in results.items() if not label.endswith("to Hub"))
    print(
        f"{describe_machine()}; {arguments.gigabytes:g} GB in {shards} shards, Xet {'on' if xet else 'off'}"
        f"{f', {line:g} MB/s each way' if line else ''}\n"
    )
    print("| stage | seconds | CPU seconds | peak RSS | of the slowest stage |\n|---|---|---|---|---|")
    for label, run in results.items():
        share = f"{run.seconds / slowest:.2f}"
        print(f"| {label} | {run.seconds:.1f} | {run.cpu_seconds:.1f} | {run.peak_rss / 1e9:.2f} GB | {share} |")
    return None


if __name__ == "__main__":
    main()
