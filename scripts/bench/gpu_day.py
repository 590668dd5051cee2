"""`scripts/gpu_day`: everything that needs a CUDA device, one step after the other, and a report of it in Markdown.

A step that fails does not stop the others. The exit code is 1 if one failed, and 2 if there is no device.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.measure import describe_machine

PYTHON = sys.executable
VERB = (PYTHON, "-m", "k2convert")
LAYER_TOKENS = ("--tokens", "512", "--window", "512")
ONE_LAYER = ("--dense-layers", "1", "--experts")
GPTQ_TOKENS = "196608"
SHOWN_LINES = 60


@dataclass(frozen=True)
class Step:
    """A command, and its heading in the report."""

    title: str
    command: Sequence[str | Path]


def steps(work: Path, *, device: str, experts: int) -> list[Step]:
    """Return what there is to do: tests, figures, and a layer of K2's size."""
    todo = [Step("Tests", [PYTHON, "-m", "pytest", "-m", "gpu"])]
    bench = [PYTHON, "-m", "scripts.bench", "--device", device, "--work", work / "bench"]
    todo.append(Step("Speed", [*bench, "--only", "gptq"]))
    todo.append(Step("FP8 layers", [PYTHON, "-m", "scripts.bench.fp8_gemm"]))
    layer = work / "layer"
    ids = work / "ids.npy"
    many = work / "many-ids.npy"
    gptq = [PYTHON, "-m", "scripts.bench.gptq_device"]
    small = work / "results" / "small"
    result = work / "results" / "checkpoint"
    fixtures = [PYTHON, "-m", "scripts.fixture_maker"]
    text = ["--text", ids, *LAYER_TOKENS, "--device", device]
    if not (layer / "config.json").exists():
        todo.append(Step("A layer of K2's size", [*fixtures, "k2-shaped", layer, *ONE_LAYER, str(experts)]))
    todo += [
        Step("Its token ids", [*fixtures, "token-ids", ids, "--tokens", "512"]),
        Step("More token ids", [*fixtures, "token-ids", many, "--tokens", GPTQ_TOKENS]),
        Step("A layer of 16 experts", [*fixtures, "k2-shaped", small, *ONE_LAYER, "16"]),
        Step("Conversion", [*VERB, "run", layer, result]),
        Step("Validation", [*VERB, "validate", result, "--source", layer]),
        Step("Rule gptq", [*gptq, layer, many, "--tokens", GPTQ_TOKENS, "--plain"]),
        Step("Rule gptq, kernel by kernel", [*gptq, small, many, "--tokens", "8192"]),
        Step("Evaluation", [*VERB, "evaluate", layer, result, *text]),
    ]
    return todo


def run_day(todo: Sequence[Step], report: Path, chip: str) -> bool:
    """Run the steps, write the report after each, and return whether all of them succeeded."""
    rows = ""
    sections = ""
    succeeded = True
    for step in todo:
        print(f"gpu_day: {step.title}", file=sys.stderr, flush=True)
        begin = time.monotonic()
        done = subprocess.run(
            [*map(str, step.command)], text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        succeeded &= done.returncode == 0
        outcome = "succeeded" if done.returncode == 0 else f"failed with code {done.returncode}"
        rows += f"| {step.title} | {outcome} | {time.monotonic() - begin:.1f} |\n"
        shown = "\n".join(done.stdout.splitlines()[-SHOWN_LINES:])
        sections += f"\n## {step.title}\n\n    {' '.join(map(str, step.command))}\n\n```\n{shown}\n```\n"
        report.write_text(f"# {chip}\n\n{describe_machine()}\n\n| step | | seconds |\n|---|---|---:|\n{rows}{sections}")
    return succeeded


def find_chip() -> str:
    """Return the device's name and architecture; exit with one line if there is none."""
    import torch

    if not torch.cuda.is_available():
        missing = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        print(f"gpu_day: {missing}. Use a machine with an NVIDIA GPU, and a CUDA build of torch.", file=sys.stderr)
        raise SystemExit(2)
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, sm_{major}{minor}, CUDA {torch.version.cuda}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("gpu-day"), help="folder for files and report (about 60 GB)")
    parser.add_argument("--experts", type=int, default=384, help="experts of the layer of K2's size")
    arguments = parser.parse_args()
    chip = find_chip()
    work = arguments.work.absolute()
    shutil.rmtree(work / "results", ignore_errors=True)
    (work / "results").mkdir(parents=True)
    succeeded = run_day(steps(work, device="cuda", experts=arguments.experts), work / "report.md", chip)
    print(work / "report.md")
    raise SystemExit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
