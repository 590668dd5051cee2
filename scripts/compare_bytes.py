"""Compares the bytes that this checkout converts with those of another revision: `scripts/same_bytes REVISION`.

The revision is exported and built in a folder of its own. Both convert the same sources by the same commands, and every
shard, index and config is compared by its BLAKE3. The table on stdout has a row for each case; the exit status is 1 if
a file differs, or if one of them refused what the other converted. The number of the version, which configs name, does
not count. Ledgers are not compared: they have more of the kind.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from blake3 import blake3

from scripts import fixture_maker
from scripts.fixture_maker import TINY

ROOT = Path(__file__).resolve().parents[1]
TESTS_OF_HUB = ROOT / "tests" / "hub"
COMPARED = ("*.safetensors", "model.safetensors.index.json", "config.json", "hf_quant_config.json")
INT4 = ("tiny", "k25", "split", "reap", "cut", "short", "i64", "minus8", "zeros", "subnormal", "wide", "shaped")
K3 = ("k3-tiny", "k3-edges")
LAYOUTS = ("modelopt", "compressed-tensors")
ACTIVATIONS = ("w4a4", "w4a16")
CALIBRATION = ("--calibrate", "TEXT", "--set", "calibration.tokens=512", "--set", "calibration.window=64")


@dataclass(frozen=True, slots=True)
class Case:
    """One conversion. `source` is the name of a fixture; `repository` says which ends lie on the Hub."""

    source: str
    options: tuple[str, ...]
    from_hub: bool = False
    to_hub: bool = False

    @property
    def name(self) -> str:
        """The row's first column, and, without separators, a folder name."""
        ends = " from the Hub" * self.from_hub + " to the Hub" * self.to_hub
        return " ".join((self.source, *(word.removeprefix("--") for word in self.options))) + ends


@dataclass(frozen=True, slots=True)
class Outcome:
    """The digests of a result by file name; `error` is the last line of a command that failed, otherwise empty."""

    digests: dict[str, str]
    error: str


def cases() -> list[Case]:
    """Return all cases: what data-free rules, casts, copies, the reference libraries and gptq in W4A16 convert."""
    result = [
        Case(source, ("--rule", rule, "--layout", layout, "--activations", activations))
        for source, rule, layout, activations in product(INT4, ("max", "mse"), LAYOUTS, ACTIVATIONS)
    ]
    mlp = ("--set", "roles=[experts,shared_experts,dense_mlp]")
    result += [
        Case(source, (*mlp, "--rule", rule, "--layout", layout))
        for source, rule, layout in product(("tiny", "k25", "cut", "shaped"), ("max", "mse"), LAYOUTS)
    ]
    result += [Case(s, ("--layout", layout, "--activations", a)) for s, layout, a in product(K3, LAYOUTS, ACTIVATIONS)]
    result += [Case(source, ("--set", "target=bf16")) for source in (*INT4, *K3)]
    result += [Case(source, ("--set", "kv_cache=fp8")) for source in ("tiny", "k25", "k3-tiny")]
    result += [
        Case(source, ("--set", "quantizer=reference", "--rule", "max", "--layout", layout))
        for source, layout in product(("tiny", "k25", "cut", "wide"), LAYOUTS)
    ]
    result += [
        Case(source, (*CALIBRATION, "--activations", "w4a16", "--layout", layout))
        for source, layout in product(("tiny", "cut", "short", "k25"), LAYOUTS)
    ]
    result += [Case("tiny", ("--workers", "1")), Case("split", ("--workers", "4"))]
    for source in ("tiny", "split", "k25", "k3-tiny"):
        result += [Case(source, (), from_hub=True), Case(source, ("--yes",), from_hub=True, to_hub=True)]
    return result


def make_sources(folder: Path) -> None:
    """Write every source of `cases`, and the text of the calibrated ones."""
    for name in (*INT4, *K3):
        if name == "shaped":
            fixture_maker.make_k2_shaped(folder / name, shape=fixture_maker.SMALL_SHAPE)
        else:
            getattr(fixture_maker, f"make_{name.replace('-', '_')}")(folder / name)
    (folder / "text.txt").write_text((TINY / "calibration.txt").read_text()[:12_000])


def build(revision: str, folder: Path) -> Path:
    """Export and build a revision, with the libraries that are installed here and those it lacks; return its Python."""
    tree = folder / "tree"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    [site] = (folder / "venv" / "lib").glob("python*/site-packages")
    [libraries] = (Path(p) for p in sys.path if p.endswith("site-packages") and (Path(p) / "torch").is_dir())
    (site / "libraries.pth").write_text(f"{libraries}\n")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", tree], check=True)
    return python


@contextmanager
def hub(folder: Path, sources: Path) -> Iterator[dict[str, str]]:
    """Run the tests' loopback Hub with the sources as moon/NAME; yield the environment in which a command uses it."""
    sys.path.insert(0, str(TESTS_OF_HUB))
    from loopback import TOKEN, LoopbackHub

    with LoopbackHub(folder / "hub") as running:
        running.api.token = TOKEN
        for source in sorted(path for path in sources.iterdir() if path.is_dir()):
            running.store.add_folder(f"moon/{source.name}", source)
        yield {"HF_ENDPOINT": running.url, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}


def convert(case: Case, python: Path, sources: Path, out: Path, environment: dict[str, str]) -> Outcome:
    """Convert a case by the command of one revision, in a process and a folder of its own."""
    out.mkdir(parents=True)
    source = f"hf://moon/{case.source}" if case.from_hub else str(sources / case.source)
    repository = f"hf://me/{out.parent.parent.name}-{case.source}"
    words = [str(sources / "text.txt") if word == "TEXT" else word for word in case.options]
    command = [python, "-m", "k2convert", "run", source, repository if case.to_hub else str(out / "result"), *words]
    variables = os.environ | environment | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--quiet"], cwd=out, env=variables, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        return Outcome({}, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    if case.to_hub:
        fetch = "import sys, huggingface_hub as h; h.snapshot_download(sys.argv[1], local_dir=sys.argv[2])"
        name = repository.removeprefix("hf://")
        subprocess.run(
            [sys.executable, "-c", fetch, name, out / "result"], env=variables, check=True, capture_output=True
        )
    files = sorted(path for pattern in COMPARED for path in (out / "result").glob(pattern))
    command_of_version = [python, "-m", "k2convert", "--version"]
    printed = subprocess.run(command_of_version, cwd=out, env=variables, capture_output=True, check=True).stdout
    version = printed.split()[-1]
    return Outcome({path.name: digest(path, version) for path in files}, "")


def digest(path: Path, version: bytes) -> str:
    """Return the BLAKE3 of a file, a config without the number of the version."""
    data = path.read_bytes()
    return blake3(data.replace(version, b"") if path.suffix == ".json" else data).hexdigest()


def verdict(old: Outcome, new: Outcome) -> str:
    """Say in a few words how two outcomes of a case compare."""
    if old.error and new.error:
        return "both refuse"
    if old.error or new.error:
        return f"only the {'old' if old.error else 'new'} one refuses: {old.error or new.error}"
    differing = [
        name for name in sorted(old.digests.keys() | new.digests) if old.digests.get(name) != new.digests.get(name)
    ]
    return f"DIFFERS: {', '.join(differing)}" if differing else "equal"


def main() -> None:
    """Convert every case by both revisions and print the table."""
    parser = argparse.ArgumentParser(prog="scripts/same_bytes", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision", help="a tag or a commit: v0.3")
    parser.add_argument("--only", metavar="WORD", default="", help="only the cases whose row has this word")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_sources(sources := folder / "sources")
        (folder / "old").mkdir()
        pythons = {"old": build(arguments.revision, folder / "old"), "new": Path(sys.executable)}
        chosen = [case for case in cases() if arguments.only in case.name]
        with hub(folder, sources) as environment, ThreadPoolExecutor(os.cpu_count()) as pool:

            def run(number: int) -> tuple[Outcome, Outcome]:
                outs = {side: folder / side / "results" / str(number) for side in pythons}
                old, new = (convert(chosen[number], pythons[s], sources, outs[s], environment) for s in ("old", "new"))
                for out in outs.values():
                    shutil.rmtree(out)
                return old, new

            print("| case | files | bytes |\n|---|---:|---|")
            for case, (old, new) in zip(chosen, pool.map(run, range(len(chosen))), strict=True):
                result = verdict(old, new)
                counts[result if result in ("equal", "both refuse") else "different"] += 1
                print(f"| {case.name} | {len(new.digests)} | {result} |", flush=True)
    print("\n" + ", ".join(f"{number} {outcome}" for outcome, number in counts.items()) + f", of {len(chosen)}")
    sys.exit(counts["different"] > 0 or not chosen)


if __name__ == "__main__":
    main()
