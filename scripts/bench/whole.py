"""Rehearses a whole job from Hub to Hub at its own size, to its last line; Markdown on stdout.

Run it with `scripts/bench/whole`. The loopback Hub (whole_hub.py) has the headers of Kimi-K2-Thinking or of Kimi-K3,
and makes the bytes as they are asked for. By default the model has ten of its MoE layers: 12 shards of full size;
`--shards 62` is all of K2. The job is killed once, and loses the Hub once. What arrived is checked: its sha256, every
header, and two experts of each shard by the certificate. An ETA is right within a fifth, from the third shard on after
the start and after the outage.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from k2convert.check.certificate import Certificate, Claim
from k2convert.checkpoint.names import WORK_FOLDER
from k2convert.job.locations import WORK_ROOT
from scripts.bench.measure import describe_machine
from scripts.bench.whole_hub import TOKEN, WholeHub, read_offsets, read_sources
from scripts.fixture_maker.headers import make_k2_thinking_headers
from scripts.fixture_maker.inventory import K2_SHAPE
from scripts.fixture_maker.k3 import make_k3_headers
from scripts.fixture_maker.shards import write_streamed

SOURCE = "moonshotai/Kimi"
RESULT = "me/Kimi-NVFP4"
ETA = re.compile(r"ETA (\d+):(\d\d):(\d\d)")
COLUMNS = ("--max-disk", "s/GB", "CPU s/GB", "read", "written", "peak GB in work", "at the end", "planned", "ETA right")


@dataclass
class Job:
    """One job through its restarts, and what was seen of it: bytes of the disk, seconds, peaks in bytes."""

    hub: WholeHub
    work: Path
    max_disk: str
    outage_seconds: float
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    disk: dict[str, int] = field(default_factory=lambda: {"read_bytes": 0, "write_bytes": 0})
    peaks: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})  # whether all shards are converted
    etas: list[tuple[float, int, int]] = field(default_factory=list)  # time, seconds left, converted shards
    lines: list[str] = field(default_factory=list)
    outage: tuple[float, float] = (0.0, 0.0)
    ended: float = 0.0

    def command(self, *more: str) -> list[str]:
        options = ("--max-disk", self.max_disk, "--yes", *more)
        return [sys.executable, "-m", "k2convert", "run", f"hf://{SOURCE}", f"hf://{RESULT}", *options]

    def num_converted(self) -> int:
        return len(list((self.work / WORK_ROOT / RESULT.replace("/", "--") / WORK_FOLDER / "done").glob("*.json")))

    def run(self, *, kill_at: int | None = None, outage_at: int | None = None) -> None:
        """Run to the end, or to the kill at this number of converted shards; raises RuntimeError if it fails."""
        began, before = time.monotonic(), getrusage(RUSAGE_CHILDREN)
        errors = subprocess.PIPE
        process = subprocess.Popen(self.command(), cwd=self.work, stdout=subprocess.DEVNULL, stderr=errors, text=True)
        self.etas.clear()
        reader = threading.Thread(target=self._follow, args=(process,))
        reader.start()
        disk: dict[str, int] = {}
        while process.poll() is None:
            time.sleep(0.2)
            disk |= self._sample(Path(f"/proc/{process.pid}"))
            if kill_at is not None and self.num_converted() >= kill_at:
                process.kill()
            if outage_at is not None and self.num_converted() >= outage_at:
                self.outage = time.monotonic(), time.monotonic() + self.outage_seconds
                self.hub.traffic.away_until = self.outage[1]
                outage_at = None
        reader.join()
        self.ended, after = time.monotonic(), getrusage(RUSAGE_CHILDREN)
        self.seconds += self.ended - began
        self.cpu_seconds += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.disk = {name: self.disk[name] + disk.get(name, 0) for name in self.disk}
        if process.returncode != (0 if kill_at is None else -signal.SIGKILL):
            raise RuntimeError(f"the job ended with {process.returncode}: {''.join(self.lines[-20:])}")

    def _follow(self, process: "subprocess.Popen[str]") -> None:
        for line in process.stderr or ():
            self.lines.append(line)
            if (match := ETA.search(line)) is not None:
                hours, minutes, seconds = map(int, match.groups())
                self.etas.append((time.monotonic(), 3600 * hours + 60 * minutes + seconds, self.num_converted()))

    def _sample(self, process: Path) -> dict[str, int]:
        try:
            memory = 1024 * int((process / "status").read_text().partition("VmRSS:")[2].split()[0])
            counts = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
        except (OSError, IndexError):  # it has just ended
            return {}
        is_end = self.num_converted() == len(self.hub.shards)
        self.peaks[is_end] = max(self.peaks[is_end], memory)
        return {name: int(counts[name]) for name in self.disk}

    def judged(self) -> list[bool]:
        """Return whether each ETA of the last run was right, from the third shard on after its start and the outage."""
        begin, end = self.outage
        before = [eta for eta in self.etas if eta[0] <= begin]
        after = [eta for eta in self.etas if eta[0] >= end]
        selected = [eta[:2] for etas in (before, after) for eta in etas if eta[2] >= etas[0][2] + 3]
        truths = [self.ended - at - (end - begin if at <= begin else 0.0) for at, _ in selected]
        return [abs(left - truth) <= 0.2 * truth + 1 for (_, left), truth in zip(selected, truths, strict=True)]


def check(hub: WholeHub) -> str:
    """Check what arrived; return a sentence about it. Raises AssertionError."""
    claim = Claim(rule="mse", layout="modelopt", input_scales=(1.0, 1.0), roles=("experts",))
    num_rows = 0
    sources = hub.store.repos[SOURCE].files()
    for name, result in hub.store.repos[RESULT].files().items():
        if not name.endswith(".safetensors"):
            continue
        ours, source = hub.store.blob(str(result.sha256)), hub.shards[str(sources[name].sha256)]
        written = {spec.name for spec in read_offsets(ours.read_bytes())}
        modules = {name.rpartition(".")[0] for name in written}
        before = {spec.name: spec for spec in source.offsets if spec.name.rpartition(".")[0] in modules}
        with tempfile.TemporaryDirectory() as folder:
            theirs = Path(folder) / "theirs"
            write_streamed(theirs, before.values(), lambda spec, of=source: [of.tensor(spec)])
            certificate = Certificate(
                result=lambda name, of=written, path=ours: path if name in of else None,
                source=lambda name, of=before, path=theirs: path if name in of else None,
                claim=claim,
            )
            verdict = certificate.check_shard(ours, seed=ours.name)
            certificate.release()
        assert not verdict.problems, verdict.problems
        num_rows += sum(verdict.rows.values())
    return f"{hub.num_tensors:,} tensors, each shard with its announced sha256; {num_rows:,} rows certified"


def rehearse(job: Job) -> None:
    """Run the job with its kill and its outage, print its row, and check what arrived."""
    shards = job.hub.shards.values()
    size = sum(shard.num_bytes for shard in shards) / 1e9
    os.environ |= {"HF_ENDPOINT": job.hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    os.environ["HF_HOME"] = str(job.work / "home")
    job.work.mkdir()
    plan = subprocess.run(job.command("--dry-run", "--json"), cwd=job.work, stdout=subprocess.PIPE, check=True)
    job.run(kill_at=len(shards) // 6)
    job.run(outage_at=2 * len(shards) // 3)
    per_gb = [job.seconds / size, job.cpu_seconds / size, *(count / size / 1e9 for count in job.disk.values())]
    memory = [job.peaks[False], job.peaks[True], json.loads(plan.stdout)["memory_needed"]]
    figures = (f"{x:.2f}" for x in (*per_gb, *(peak / 1e9 for peak in memory)))
    etas = f"{sum(job.judged())} of {len(job.judged())}"
    print(f"{describe_machine()}; {size:.1f} GB, {len(shards)} shards\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n| {' | '.join((job.max_disk, *figures, etas))} |")
    assert TOKEN not in "".join(job.lines), "a secret in the log"
    print(check(job.hub), flush=True)
    shutil.rmtree(job.work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("k2", "k3"), default="k2", help="k3 is whole: 1.56 TB")
    parser.add_argument("--shards", type=int, default=12, help="of K2, which has 62; at least 3")
    parser.add_argument("--max-disk", nargs="+", default=["40GB", "200GB"])
    parser.add_argument("--outage", type=float, default=180.0, help="seconds")
    parser.add_argument("--work", type=Path, default=Path("bench-work/whole"))
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    shutil.rmtree(work, ignore_errors=True)
    if arguments.model == "k3":
        folder = make_k3_headers(work / "source")
    else:
        shape = replace(K2_SHAPE, moe_layers=max(arguments.shards - 2, 1))
        folder = make_k2_thinking_headers(work / "source", shape=shape)
    sources = read_sources(folder)
    for max_disk in arguments.max_disk:
        with WholeHub(work / f"hub-{max_disk}", SOURCE, sources) as hub:
            rehearse(Job(hub, work / f"job-{max_disk}", max_disk, arguments.outage))


if __name__ == "__main__":
    main()
