"""A job of another version is continued if its arithmetic is the same; that of 0.3 or earlier is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3
from command import messages_of, run_here
from pydantic import JsonValue
from results import contents
from structure import ROOT, TINY

from k2convert.records.fingerprint import describe_changes

AS_VERSION = """
import sys, k2convert
k2convert.__version__ = sys.argv[1]
from k2convert.records.fingerprint import describe_changes
from k2convert.records import fingerprint
fingerprint.ARITHMETIC_VERSION += int(sys.argv[2])
from k2convert.cli.app import main
main(sys.argv[3:])
"""


def run(version: str, *words: str | Path, arithmetic: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", AS_VERSION, version, str(arithmetic), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
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


def test_a_conversion_on_a_cuda_device_is_said_to_run_on_the_cpu(cut: Path, text: Path, tmp_path: Path) -> None:
    for options, is_said in (((), True), (("--calibrate", text), False)):
        shown = run_here("run", cut, tmp_path / "out", *options, "--device", "cuda", "--dry-run")
        assert ("note: --device cuda: the conversion runs on the CPU." in messages_of(shown.stderr)) is is_said


BEGUN = json.loads((ROOT / "tests" / "data" / "begun-by-0.3.json").read_text())
"""job.json of release 0.3 for tests/data/k2-tiny and what describes an evaluation that it did not finish."""


def earlier(result: Path, folder: Path) -> Path:
    """Copy a result, with a job of release 0.3: one without a version."""
    shutil.copytree(result, folder)
    path = folder / ".k2convert" / "job.json"
    job = json.loads(path.read_text())
    del job["version"]
    path.write_text(json.dumps(job))
    return folder


REFUSED = "holds work that was begun by release 0.3 or earlier. Finish it with that release, or start in a new folder."


@pytest.mark.parametrize("unknown", [{}, {"keep_rows": 3}], ids=["", "a field of that release alone"])
@pytest.mark.parametrize("words", [(), ("--dry-run",), ("--part", "1/2")], ids=" ".join)
def test_an_unfinished_conversion_is_refused(words: tuple[str, ...], unknown: dict[str, int], tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".k2convert" / "shards").mkdir(parents=True)
    (out / ".k2convert" / "job.json").write_text(json.dumps(BEGUN["job"] | unknown, indent=2) + "\n")
    (out / "model-00001-of-000005.safetensors").write_bytes(b"finished")
    before = contents(tmp_path)
    done = run_here("run", TINY, out, *words, "--quiet", code=1)
    assert done.stderr == f"error: {out}: {REFUSED}\n"
    assert contents(tmp_path) == before


def test_the_status_of_an_unfinished_job_names_no_refused_command(local_result: Path, tmp_path: Path) -> None:
    out = earlier(local_result, tmp_path / "out")
    (out / "k2convert.json").unlink()
    done = run_here("status", out, code=0)
    assert "begun by release 0.3 or earlier. Finish it with that release" in done.stderr
    assert "next:" not in done.stderr
    assert json.loads(run_here("status", out, "--json", code=0).stdout)["resume"] is None


def test_a_finished_result_is_said_to_be_one(local_result: Path, tmp_path: Path) -> None:
    out = earlier(local_result, tmp_path / "out")
    before = contents(out)
    done = run_here("run", TINY, out, "--quiet", code=1)
    assert f"{out}: holds a finished result of release 0.3 or earlier" in done.stderr
    command = f"k2convert validate {out}"
    assert f"`{command}`" in done.stderr
    assert contents(out) == before
    run_here(*command.split()[1:], code=0)
    shown = run_here("status", out, code=1)
    assert f"{out}: holds a finished result of release 0.3 or earlier" in shown.stderr
    assert "not finished" not in shown.stderr


def test_an_unfinished_evaluation_is_refused(tmp_path: Path) -> None:
    work = tmp_path / "rows.json.work"
    (work / ".k2convert").mkdir(parents=True)
    content = json.dumps(BEGUN["evaluation"], separators=(",", ":"))
    sealed = f'{{"checksum":"{blake3(content.encode()).hexdigest()}",{content[1:]}'
    (work / ".k2convert" / "evaluation.json").write_text(sealed)
    (work / "layer-000.safetensors").write_bytes(b"finished")
    before = contents(tmp_path)
    use = ("--tokens", "1024", "--window", "64", "--device", "cpu", "--out", tmp_path / "rows.json", "--quiet")
    done = run_here("evaluate", TINY, TINY, "--text", TINY / "eval.txt", *use, code=1)
    assert done.stderr == f"error: {work}: {REFUSED}\n"
    assert contents(tmp_path) == before


def test_jobs_that_differ_in_anything_are_never_the_same() -> None:
    """Only if both state a rule is that named alone."""
    fitted: dict[str, JsonValue] = {"rule": "gptq", "seed": 0}
    assert describe_changes(fitted, {"rule": "mse"}) == "rule was 'gptq', now 'mse'"
    assert describe_changes(fitted, {"rule": "gptq"}) == "seed was 0, now not set"
    others: tuple[dict[str, JsonValue], ...] = ({"rule": None}, {}, {"seed": 1})
    for other in others:
        assert describe_changes(fitted, other)
        assert describe_changes(other, fitted)
