"""What the machine refuses (a look at a file, a thread, memory, a stream) ends in one line, or in a note."""

import errno
import json
import os
import resource
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from command import RunCli, command, said

SHARD = "model-00002-of-000003.safetensors"
INDEX = "model.safetensors.index.json"
Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shim") / "failing_calls.so"
    source = Path(__file__).with_name("failing_calls.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", "-o", path, source, "-ldl"], check=True)
    return path


@pytest.fixture
def call(shim: Path) -> Call:
    """`call("inspect", folder, FAIL_CALL="stat")` runs the command with failing system calls."""

    def run(*words: str | Path, memory: int | None = None, **faults: object) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"LD_PRELOAD": str(shim), "FAIL_AFTER": "0", "HF_HUB_OFFLINE": "1"}
        environment |= {name: str(value) for name, value in faults.items()}
        limit = None if memory is None else lambda: resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        return subprocess.run(
            command(*words), capture_output=True, text=True, env=environment, preexec_fn=limit, check=False
        )

    return run


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    errors = [line for line in said(done.stderr).splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(errors)) == (1, 1), done.stderr
    assert "Traceback" not in done.stderr
    assert "panicked" not in done.stderr
    assert all(word in errors[0] for word in words), errors[0]


FAULTS = [
    ("run SOURCE OUT", "stat", "config.json", errno.EIO),
    ("status RESULT", "stat", "job.json", errno.EIO),
    ("run SOURCE RESULT", "opendir", ".k2convert/done", errno.EACCES),  # no journal is no empty one
    ("run SOURCE OUT", "stat", INDEX, errno.ESTALE),
    ("run SOURCE OUT", "stat", SHARD, errno.EACCES),
    ("run SOURCE OUT", "open", SHARD, errno.EIO),
    ("run SOURCE OUT", "opendir", "source", errno.EACCES),
    ("status RESULT", "opendir", ".k2convert/done", errno.EACCES),
    ("validate RESULT", "stat", "converted", errno.ESTALE),
    ("validate RESULT", "opendir", "converted", errno.EACCES),
    ("report RESULT", "stat", "k2convert.json", errno.EIO),
    ("publish RESULT --repo me/out --yes", "stat", "k2convert.json", errno.EACCES),
]


@pytest.mark.quick(3)
@pytest.mark.parametrize(("words", "fault", "name", "number"), FAULTS)
def test_what_cannot_be_looked_at_is_one_line_and_nothing_changes(
    words: str, fault: str, name: str, number: int, k2_shaped: Path, converted: Path, tmp_path: Path, call: Call
) -> None:
    source = Path(shutil.copytree(k2_shaped, tmp_path / "source"))
    paths = {"SOURCE": source, "OUT": tmp_path / "out", "RESULT": converted}
    before = {path: path.stat().st_mtime_ns for path in converted.glob("*.safetensors")}
    command = (paths.get(word, word) for word in words.split())
    done = call(*command, FAIL_CALL=fault, FAIL_NAME=name, FAIL_ERRNO=number)
    assert_one_line(done, Path(name).name, os.strerror(number))
    assert not paths["OUT"].exists()
    assert {path: path.stat().st_mtime_ns for path in converted.glob("*.safetensors")} == before


def test_a_lock_that_cannot_be_written_is_one_line_and_at_the_end_a_note(
    k2_shaped: Path, tmp_path: Path, call: Call
) -> None:
    out = tmp_path / "out"
    fault = {"FAIL_CALL": "ftruncate", "FAIL_NAME": "/lock", "FAIL_ERRNO": errno.EIO}
    assert_one_line(call("run", k2_shaped, out, **fault), "lock", "Input/output error")
    done = call("run", k2_shaped, out, FAIL_AFTER=1, **fault)
    assert done.returncode == 0, done.stderr
    assert "cannot be emptied (Input/output error)" in done.stderr
    assert (out / "config.json").is_file()
    assert call("run", k2_shaped, out).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, 524])
def test_a_file_system_without_flock_is_locked_by_a_file(
    number: int, k2_shaped: Path, tmp_path: Path, call: Call
) -> None:
    out = tmp_path / "out"
    fault = {"FAIL_CALL": "flock", "FAIL_NAME": "/lock", "FAIL_ERRNO": number}
    done = call("run", k2_shaped, out, **fault)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this file system has no flock") == 1
    assert "complete" in call("status", out, **fault).stdout
    owner = out / ".k2convert" / "owner"
    assert not owner.exists()

    host = os.uname().nodename
    owner.write_text(f"{os.getpid()}\n{host}\n")  # this process is a run there
    assert_one_line(call("run", k2_shaped, out, **fault), f"process {os.getpid()} on {host}")
    assert_one_line(call("run", k2_shaped, out, "--part", "1/2", **fault), f"process {os.getpid()} on {host}")
    assert '"running": true' in call("status", out, "--json", **fault).stdout
    owner.write_text("1\nelsewhere\n")
    assert_one_line(call("run", k2_shaped, out, **fault), "process 1 on elsewhere", f"remove {owner}")
    ended = subprocess.Popen(["true"])
    ended.wait()
    owner.write_text(f"{ended.pid}\n{host}\n")
    assert '"running": false' in call("status", out, "--json", **fault).stdout
    owner.write_text(f"{ended.pid}\n{host}\n")
    assert call("run", k2_shaped, out, **fault).returncode == 0
    part = owner.with_name("owner-0123")
    part.write_text("1\nelsewhere\n")
    assert call("run", k2_shaped, out, "--part", "1/2", **fault).returncode == 0
    assert_one_line(call("run", k2_shaped, out, **fault), "process 1 on elsewhere", f"remove {part}")


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_sync_folders_is_used_as_it_is(
    number: int, k2_shaped: Path, tmp_path: Path, call: Call
) -> None:
    fault = {"FAIL_CALL": "fsync", "FAIL_NAME": "", "FAIL_ERRNO": number}
    done = call("run", k2_shaped, tmp_path / "new" / "out", **fault)
    assert done.returncode == 0, done.stderr
    assert_one_line(call("run", k2_shaped, tmp_path / "other", **(fault | {"FAIL_ERRNO": errno.EIO})), "other")


@pytest.mark.quick(2)
@pytest.mark.parametrize(("verb", "number"), [("run", 0), ("run", 3), ("validate", 0), ("validate", 1)])
def test_no_more_threads_is_one_line(
    verb: str, number: int, k2_shaped: Path, tmp_path: Path, result: Path, call: Call
) -> None:
    done = call(*([verb, k2_shaped, tmp_path / "out"] if verb == "run" else [verb, result]), FAIL_THREADS=number)
    if done.returncode:  # a small checkpoint may need no more
        assert_one_line(done, "thread")


def test_no_more_memory_is_one_line(k2_shaped: Path, tmp_path: Path, call: Call) -> None:
    done = call("run", k2_shaped, tmp_path / "out", "--device", "cpu", memory=200 << 20)
    assert_one_line(done, "run the same command again")


@pytest.mark.quick(2)
@pytest.mark.parametrize("words", ["run --help", "--version", "recipes", "inspect SOURCE", "inspect SOURCE --json"])
def test_standard_output_without_room_is_one_line(words: str, k2_shaped: Path) -> None:
    words = f"{shlex.join(command())} {words.replace('SOURCE', shlex.quote(str(k2_shaped)))}"
    line = f"{words} >/dev/full"
    assert_one_line(subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False), "No space")
    line = f"{words} >&-"
    closed = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False)
    assert closed.returncode == 0
    assert not closed.stderr or closed.stderr.startswith("next: ")


def test_any_name_of_a_destination_is_printed_on_any_stream(k2_shaped: Path, tmp_path: Path) -> None:
    out = tmp_path / os.fsdecode(b"[/] [bold]caf\xe9 caf\xc3\xa9")
    verbs = [["run", k2_shaped, out], ["validate", out, "--json"], ["validate", out]]
    for words in verbs:
        environment = os.environ | {"PYTHONIOENCODING": "ascii"}
        done = subprocess.run(command(*words), capture_output=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        if "--json" in words:
            assert json.loads(done.stdout)["folder"] == str(out)
    assert b"[/] [bold]caf\\udce9 caf\\xe9" in done.stdout


LONG = "n" * 300
LONG_NAMES = [
    ["inspect", LONG],
    ["run", "SOURCE", LONG],
    ["run", "SOURCE", LONG, "--dry-run"],
    ["run", "SOURCE", "out", "--recipe", LONG],
    ["status", LONG],
    ["validate", LONG],
    ["validate", "SOURCE", "--source", LONG],
    ["report", LONG],
    ["publish", LONG, "--repo", "me/out", "--yes"],
]


@pytest.mark.parametrize("words", LONG_NAMES, ids=lambda words: " ".join(words)[:40])
def test_a_name_too_long_for_any_file_is_one_line(words: list[str], k2_shaped: Path, run_cli: RunCli) -> None:
    done = run_cli(*(k2_shaped if word == "SOURCE" else word for word in words), HF_HUB_OFFLINE="1")
    assert_one_line(done, "ame too long")
