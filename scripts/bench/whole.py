"""Rehearses a whole job from Hub to Hub at its own size, to its last line; Markdown on stdout.

Run it with `scripts/bench/whole`. The loopback Hub (whole_hub.py) has the headers of Kimi-K2-Thinking or of Kimi-K3,
and makes the bytes as they are asked for. By default the model has ten of its MoE layers: 12 shards of full size;
`--shards 62` is all of K2. The job is killed once, and loses the Hub once. What arrived is checked: its sha256, every
header, and two experts of each shard by the certificate. An ETA is right within a fifth, from the third shard on.
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

from k2convert.checkpoint.names import WORK_FOLDER
from k2convert.job.locations import WORK_ROOT
from scripts.bench.measure import describe_machine
from scripts.bench.whole_hub import TOKEN, SourceShard, WholeHub, make_pools, read_entries, write_shard
from scripts.fixture_maker.config import K2_SIDECARS, k2_config
from scripts.fixture_maker.headers import k2_thinking_parts
from scripts.fixture_maker.inventory import K2_SHAPE, K2Shape
from scripts.fixture_maker.k3 import K3_SHAPE, SIDECARS, K3Shape, k3_config, k3_parts
from scripts.fixture_maker.shards import INDEX_NAME, shard_name

SOURCE = "moonshotai/Kimi"
RESULT = "me/Kimi-NVFP4"
ETA = re.compile(r"ETA (\d+):(\d\d):(\d\d)")
COLUMNS = ("--max-disk", "s/GB", "CPU s/GB", "read", "written", "peak GB in work", "at the end", "planned", "ETA right")


def make_source(shape: K2Shape | K3Shape) -> tuple[dict[str, SourceShard], dict[str, bytes]]:
    """Return the shards and the small files of a model."""
    if isinstance(shape, K3Shape):
        parts, config, texts = k3_parts(shape), k3_config(shape), SIDECARS
    else:
        parts, config, texts = k2_thinking_parts(shape), k2_config(shape), K2_SIDECARS
    places = {spec.name: shard_name(i, len(parts)) for i, specs in enumerate(parts, 1) for spec in specs}
    index = {"metadata": {"total_size": sum(s.num_bytes for p in parts for s in p)}, "weight_map": places}
    texts |= {"config.json": json.dumps(config, indent=2), INDEX_NAME: json.dumps(index, indent=2)}
    pools = make_pools()
    shapes = {kind: b"".join(n.to_bytes(4, "little") for n in of) for kind, of in shape.projections().items()}
    sources = {shard_name(i, len(parts)): SourceShard(specs, pools, shapes) for i, specs in enumerate(parts, 1)}
    return sources, {path: text.encode() for path, text in texts.items()}


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
        began = time.monotonic()
        process = subprocess.Popen(
            self.command(), cwd=self.work, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.etas.clear()
        reader = threading.Thread(target=self._follow, args=(process,))
        reader.start()
        disk: dict[str, int] = {}
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.2)
            disk |= self._sample(Path(f"/proc/{process.pid}"))
            if kill_at is not None and self.num_converted() >= kill_at:
                os.kill(process.pid, signal.SIGKILL)
            if outage_at is not None and self.num_converted() >= outage_at:
                self.outage = time.monotonic(), time.monotonic() + self.outage_seconds
                self.hub.traffic.away_until = self.outage[1]
                outage_at = None
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        reader.join()
        self.ended = time.monotonic()
        self.seconds += self.ended - began
        self.cpu_seconds += usage.ru_utime + usage.ru_stime
        self.disk = {name: self.disk[name] + disk.get(name, 0) for name in self.disk}
        if process.returncode != (0 if kill_at is None else -signal.SIGKILL):
            raise RuntimeError(f"the job ended with {process.returncode}: {''.join(self.lines[-20:])}")

    def _follow(self, process: "subprocess.Popen[str]") -> None:
        for line in process.stderr or ():
            self.lines.append(line)
            if (found := ETA.search(line)) is not None:
                hours, minutes, seconds = map(int, found.groups())
                self.etas.append((time.monotonic(), 3600 * hours + 60 * minutes + seconds, self.num_converted()))

    def _sample(self, process: Path) -> dict[str, int]:
        try:
            memory = 1024 * int((process / "status").read_text().partition("VmRSS:")[2].split()[0])
            counts = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
        except (OSError, IndexError):  # it has just ended
            return {}
        is_end = self.num_converted() == len(self.hub.sources)
        self.peaks[is_end] = max(self.peaks[is_end], memory)
        return {name: int(counts[name]) for name in self.disk}

    def judged(self) -> list[bool]:
        """Return whether each ETA of the last run was right, apart from the outage."""
        begin, end = self.outage
        found = [(at, left) for at, left, shards in self.etas if shards >= self.etas[0][2] + 3 and not begin < at < end]
        truths = [self.ended - at - (end - begin if at < begin else 0.0) for at, _ in found]
        return [abs(left - truth) <= 0.2 * truth + 1 for (_, left), truth in zip(found, truths, strict=True)]


def check(hub: WholeHub) -> str:
    """Check what arrived; return a sentence about it. Raises AssertionError."""
    from k2convert.check.certificate import Certificate, Claim

    claim = Claim(rule="mse", layout="modelopt", input_scales=(1.0, 1.0), roles=("experts",))
    num_rows = 0
    for shard, source in hub.sources.items():
        entry = hub.store.repos[RESULT].files()[shard]
        ours = hub.store.blob(str(entry.sha256))
        written = read_entries(ours.read_bytes())[1]
        modules = {name.rpartition(".")[0] for name in written}
        specs = [spec for spec in source.specs.values() if spec.name.rpartition(".")[0] in modules]
        before = {s.name: ({"dtype": s.dtype, "shape": s.shape}, source.tensor(s.name)) for s in specs}
        with tempfile.TemporaryDirectory() as folder:
            theirs = write_shard(Path(folder) / "theirs", before)
            certificate = Certificate(
                result=lambda name, of=written, path=ours: path if name in of else None,
                source=lambda name, of=before, path=theirs: path if name in of else None,
                claim=claim,
            )
            verdict = certificate.check_shard(ours, seed=str(entry.sha256))
            certificate.release()
        assert not verdict.problems, verdict.problems
        num_rows += sum(verdict.rows.values())
    return f"{hub.num_tensors:,} tensors, each shard with its announced sha256; {num_rows:,} rows certified"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("k2", "k3"), default="k2", help="k3 is whole: 1.56 TB")
    parser.add_argument("--shards", type=int, default=12, help="of K2, which has 62; at least 3")
    parser.add_argument("--max-disk", nargs="+", default=["40GB", "200GB"])
    parser.add_argument("--outage", type=float, default=180.0, help="seconds")
    parser.add_argument("--work", type=Path, default=Path("bench-work/whole"))
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    k2_shape = replace(K2_SHAPE, moe_layers=max(arguments.shards - 2, 1))
    sources, small = make_source(K3_SHAPE if arguments.model == "k3" else k2_shape)
    size = sum(shard.num_bytes for shard in sources.values()) / 1e9
    print(f"{describe_machine()}; {size:.1f} GB, {len(sources)} shards\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for max_disk in arguments.max_disk:
        shutil.rmtree(work, ignore_errors=True)
        with WholeHub(work / "hub", SOURCE, sources, small) as hub:
            os.environ |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
            os.environ["HF_HOME"] = str(work / "home")
            job = Job(hub, work / "job", max_disk, arguments.outage)
            job.work.mkdir()
            plan = subprocess.run(job.command("--dry-run", "--json"), cwd=job.work, stdout=subprocess.PIPE, check=True)
            job.run(kill_at=len(sources) // 3)
            job.run(outage_at=2 * len(sources) // 3)
            per_gb = [job.seconds / size, job.cpu_seconds / size, *(count / size / 1e9 for count in job.disk.values())]
            memory = [job.peaks[False], job.peaks[True], json.loads(plan.stdout)["memory_needed"]]
            cells = [max_disk, *(f"{x:.2f}" for x in (*per_gb, *(peak / 1e9 for peak in memory)))]
            print(f"| {' | '.join(cells)} | {sum(job.judged())} of {len(job.judged())} |", flush=True)
            assert TOKEN not in "".join(job.lines), "a secret in the log"
            print(check(hub), file=sys.stderr)


if __name__ == "__main__":
    main()
