"""A job that one version began is continued by another with the same arithmetic, and refused by name without."""

import json
import subprocess
import sys
from pathlib import Path

from command import run_here, said

AS_VERSION = """
import sys, k2convert
k2convert.__version__ = sys.argv[1]
from k2convert.records import fingerprint
fingerprint.ARITHMETIC_VERSION += int(sys.argv[2])
from k2convert.cli.app import main
main(sys.argv[3:])
"""


def run(version: str, *words: str | Path, arithmetic: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", AS_VERSION, version, str(arithmetic), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_only_a_version_with_the_same_arithmetic_continues_a_job(cut: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("0.1.7", "run", cut, out, "--device", "cpu").returncode == 0
    shards = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
    last = max(shards)  # the job was killed before this one
    for path in (out / last, out / "config.json", out / "model.safetensors.index.json", *out.rglob(f"{last}.*")):
        path.unlink()
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert times
    done = run("0.1.7", "run", cut, out, "--device", "cpu", arithmetic=1)
    assert done.returncode == 1
    assert "holds a different job: arithmetic was 1, now 2." in done.stderr
    assert not (out / "config.json").exists()
    done = run("0.1.8", "run", cut, out, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in out.glob("*.safetensors")} == shards
    assert {name: (out / name).stat().st_mtime_ns for name in times} == times, "finished shards stay"
    assert "k2convert 0.1.8" in (out / "hf_quant_config.json").read_text()


def test_a_job_that_a_cuda_device_began_is_continued_on_the_cpu(cut: Path, tmp_path: Path) -> None:
    """Earlier versions converted on a GPU: the same command goes on, and a finished result keeps its ledger."""
    out = tmp_path / "out"
    words = ("run", cut, tmp_path / "out", "--device", "cuda")
    first = run_here(*words, code=0)
    assert "note: --device cuda: the conversion runs on the CPU." in said(first.stderr)
    shards = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
    ledger = json.loads((out / "k2convert.json").read_text())
    assert set(ledger["versions"]) == {"python", "numpy"}
    ledger["versions"] |= {"torch": "2.9.0+cu128", "triton": "3.5.0"}
    written = json.dumps(ledger, indent=2, ensure_ascii=False) + "\n"
    (out / "k2convert.json").write_text(written)
    assert "already complete" in run_here(*words, code=0).stderr
    assert (out / "k2convert.json").read_text() == written
    last = max(shards)
    for path in (out / last, out / "config.json", *out.rglob(f"{last}.*")):
        path.unlink()
    assert "resuming" in run_here(*words, code=0).stderr
    assert {path.name: path.read_bytes() for path in out.glob("*.safetensors")} == shards
    assert run_here("validate", out, "--source", cut).returncode == 0


def test_a_text_on_a_cuda_device_has_no_note_about_it(cut: Path, text: Path, tmp_path: Path) -> None:
    for option in ("--calibrate", "--evaluate"):
        shown = run_here("run", cut, tmp_path / "out", option, text, "--device", "cuda", "--dry-run")
        assert "runs on the CPU" not in said(shown.stderr)
