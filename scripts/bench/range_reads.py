"""One download with and without reads from the connection's socket: `.venv/bin/python -m scripts.bench.range_reads`.

A loopback Hub in its own process serves one file of random bytes, over HTTP and over TLS. The two ways take turns. The
table goes to stdout. Client and server share this machine's cores, so the client's CPU seconds say more than the time.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
from pathlib import Path

from scripts.bench.hub import REPO, TESTS, serving
from scripts.bench.measure import Run, describe_machine, run_once

MODULE = [sys.executable, "-m", "scripts.bench.range_reads"]
NAME = "model.safetensors"


def fetch(folder: Path, reads: str) -> None:
    """Download the file, with every byte through the HTTP library if `reads` is "library"."""
    from k2convert.hub import client
    from k2convert.hub.download import download_shard
    from k2convert.hub.source import resolve_source

    if reads == "library":
        client.body_socket = lambda *_: None
    hub = client.Hub()
    remote = resolve_source(hub, client.RepoRef(REPO))
    download_shard(hub, remote, NAME, target=folder / NAME, stop=threading.Event())
    (folder / NAME).unlink()


def measure(folder: Path, kind: str, *, turns: int) -> dict[str, list[Run]]:
    """The runs of each way, taken in turns."""
    runs: dict[str, list[Run]] = {"socket": [], "library": []}
    with serving(folder / f"hub-{kind}", folder / "set", *(["--tls"] if kind == "TLS" else [])):
        for _ in range(turns):
            for reads, found in runs.items():
                found.append(run_once([*MODULE, "--fetch", folder, reads], one_core=False))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--fetch", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fetch:
        return fetch(Path(arguments.fetch[0]), arguments.fetch[1])
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        (folder / "set").mkdir()
        with (folder / "set" / NAME).open("wb") as file:
            for _ in range(int(arguments.gigabytes * 100)):
                file.write(os.urandom(10_000_000))
        os.environ |= {"HF_HOME": str(folder / "home"), "SSL_CERT_FILE": str(TESTS / "loopback.pem")}
        print(f"{describe_machine()}; {arguments.gigabytes:g} GB, median of {arguments.turns}\n")
        print("| connection | reads | seconds | client's CPU seconds |\n|---|---|---|---|")
        for kind in ("HTTP", "TLS"):
            for reads, runs in measure(folder, kind, turns=arguments.turns).items():
                seconds = statistics.median(run.seconds for run in runs)
                cpu_seconds = statistics.median(run.cpu_seconds for run in runs)
                print(f"| {kind} | {reads} | {seconds:.1f} | {cpu_seconds:.1f} |", flush=True)
    return None


if __name__ == "__main__":
    main()
