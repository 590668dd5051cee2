"""`run --part`: parts at once, in any order, killed, repeated and overlapping end in the bytes of a whole run."""

import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import run, run_here
from forked_runs import finish, send, start
from results import contents

from k2convert.checkpoint.names import CONFIG_NAME, INDEX_NAME, LEDGER_NAME

ROOT = Path(__file__).resolve().parents[2]


def unfinished(out: Path) -> bool:
    return not any((out / name).exists() for name in (CONFIG_NAME, INDEX_NAME, LEDGER_NAME))


def test_three_parts_and_a_last_run_give_the_same_bytes(tiny: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    parts = [start("run", tiny, out, "--part", f"{number}/3") for number in (3, 1, 2)]
    for part in parts:
        part.join(60)
    assert [part.exitcode for part in parts] == [0, 0, 0]
    assert unfinished(out)
    shards = {name: data for name, data in whole.items() if name.endswith(".safetensors")}
    assert shards.items() <= contents(out).items()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert run("run", tiny, out) == 0
    assert contents(out) == whole
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")} == before


@pytest.mark.slow
def test_overlapping_parts_and_a_killed_one_do_no_harm(tiny: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed = start("run", tiny, out, "--part", "1/1")
    while killed.is_alive() and not list(out.glob("*.tmp")):
        pass
    send(killed, signal.SIGKILL)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    left = list(out.glob("*.tmp"))
    parts = [start("run", tiny, out, "--part", part) for part in ("1/2", "1/2", "2/3", "1/1")]
    for part in parts:
        part.join(60)
    assert [part.exitcode for part in parts] == [0, 0, 0, 0]
    assert unfinished(out)
    assert set(left) <= set(out.glob("*.tmp")), "a part removes no file that may be another one's"
    assert run("run", tiny, out) == 0
    assert contents(out) == whole


@pytest.mark.slow
def test_what_a_part_killed_at_its_start_leaves_is_removed_by_the_run(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "import os, signal, sys\nfrom k2convert.checkpoint import files\nfrom k2convert.cli.app import main\n"
        "files.place_first = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\nmain(sys.argv[1:])"
    )
    killed = subprocess.run([sys.executable, "-c", code, "run", small, out, "--part", "1/2"], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    work = out / ".k2convert"
    assert len(list(work.glob("job.json.????????????????.tmp"))) == 1
    (work / "job.json.0123456789abcdef.tmp.mine").touch()
    assert run("run", small, out) == 0
    assert [path.name for path in work.glob("*.tmp*")] == ["job.json.0123456789abcdef.tmp.mine"]


def test_a_part_converts_nothing_again_and_parts_of_another_job_are_refused(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("run", small, out, "--part", "1/2") == 0
    first = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert 0 < len(first) < 3
    shown = run_here("run", small, out, "--part", "2/2", "--rule", "max", code=1).stderr
    assert "holds a different job: rule was 'mse', now 'max'" in shown
    assert run("run", small, out, "--part", "1/1") == 0
    assert {path: path.stat().st_mtime_ns for path in first} == first
    assert len(list(out.glob("*.safetensors"))) == 3


@pytest.mark.slow
def test_parts_and_a_whole_run_wait_for_each_other(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("run", small, out, "--part", "1/2") == 0
    for kind, words in ((fcntl.LOCK_SH, ()), (fcntl.LOCK_EX, ("--part", "2/2"))):
        with (out / ".k2convert" / "lock").open("r+") as lock:
            fcntl.flock(lock, kind)
            assert "is working here. Wait for it or stop it" in run_here("run", small, out, *words, code=1).stderr
            assert '"running": true' in run_here("status", out, "--json", code=0).stdout
    assert run("run", small, out) == 0


def test_what_no_part_can_do_is_refused(small: Path, tmp_path: Path) -> None:
    options = ("--part 1/2 --calibrate text.txt", "--part 1/2 --verify", "--part=4/3", "--part=0/3", "--part=auto")
    for words in options:
        refused = run_here("run", small, tmp_path / "out", *words.split())
        assert refused.returncode in (1, 2)
        assert "--part" in refused.stderr
    assert not (tmp_path / "out").exists()
    refused = run_here("run", "hf://moon/tiny", tmp_path / "out", "--part", "1/2", code=2)
    assert "--part needs folders" in refused.stderr


@pytest.mark.slow
def test_an_array_of_tasks_with_the_same_command_does_all_parts(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    paths = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    for task in (1, 2):
        done = subprocess.run(
            [
                "sh",
                "-c",
                f"k2convert run {small} {out} --device cpu --part $SLURM_ARRAY_TASK_ID/2",
            ],  # what sbatch --wrap does
            env={"PATH": paths, "HOME": str(tmp_path), "SLURM_ARRAY_TASK_ID": str(task)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"part {task}/2 is converted: {('2 shards', '1 shard')[task - 1]} of the job's 3\n"
    assert finish("run", small, out) == 0
    assert not list(out.rglob("*.tmp"))
