"""What the machine refuses, and what interrupts a command at any moment, ends in one line, or in a note."""

import errno
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command import RunCli, command, messages_of, python, start_cli

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
    errors = [line for line in messages_of(done.stderr).splitlines() if line.startswith("error: ")]
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


@pytest.mark.slow
def test_a_lock_that_cannot_be_written_is_one_line_and_a_note(k2_shaped: Path, tmp_path: Path, call: Call) -> None:
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
def test_without_flock_a_file_is_the_lock(number: int, k2_shaped: Path, tmp_path: Path, call: Call) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_syncs_no_folders_is_used(number: int, k2_shaped: Path, tmp_path: Path, call: Call) -> None:
    fault = {"FAIL_CALL": "fsync", "FAIL_NAME": "", "FAIL_ERRNO": number}
    done = call("run", k2_shaped, tmp_path / "new" / "out", **fault)
    assert done.returncode == 0, done.stderr
    assert_one_line(call("run", k2_shaped, tmp_path / "other", **(fault | {"FAIL_ERRNO": errno.EIO})), "other")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("verb", "number"), [("run", 0), ("run", 3), ("validate", 0), ("validate", 1)])
def test_no_more_threads(verb: str, number: int, k2_shaped: Path, tmp_path: Path, result: Path, call: Call) -> None:
    done = call(*([verb, k2_shaped, tmp_path / "out"] if verb == "run" else [verb, result]), FAIL_THREADS=number)
    if done.returncode:  # a small checkpoint may need no more
        assert_one_line(done, "thread")


def test_no_more_memory_is_one_line(k2_shaped: Path, tmp_path: Path, call: Call) -> None:
    done = call("run", k2_shaped, tmp_path / "out", "--device", "cpu", memory=200 << 20)
    assert_one_line(done, "run the same command again")


@pytest.mark.quick(1)
@pytest.mark.parametrize("words", ["run --help", "--version", "recipes", "inspect SOURCE", "inspect SOURCE --json"])
def test_standard_output_without_room_is_one_line(words: str, k2_shaped: Path) -> None:
    words = f"{shlex.join(command())} {words.replace('SOURCE', shlex.quote(str(k2_shaped)))}"
    line = f"{words} >/dev/full"
    assert_one_line(subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False), "No space")
    line = f"{words} >&-"
    closed = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False)
    assert closed.returncode == 0
    assert not closed.stderr or closed.stderr.startswith("next: ")


def test_any_name_of_a_destination_is_printed_on_any_stream(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / os.fsdecode(b"[/] [bold]caf\xe9 caf\xc3\xa9")
    verbs = [["run", tiny, out], ["validate", out, "--json"], ["validate", out]]
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


CAUGHT = 1 << (signal.SIGTERM - 1)


def catches_signals(process: subprocess.Popen[str]) -> bool:
    """Whether the process has a handler for SIGTERM. Before that the interpreter has not reached our first line."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) & CAUGHT)
    return False


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("seconds", "number"),
    [(seconds, (signal.SIGINT, signal.SIGTERM)[i % 2]) for i, seconds in enumerate((0, 0.02, 0.05, 0.1, 0.2, 0.4))],
)
def test_an_interrupt_during_the_start_is_one_line(seconds: float, number: int, tiny: Path, tmp_path: Path) -> None:
    process = start_cli("run", tiny, tmp_path / "out", "--device", "cpu", stderr=subprocess.PIPE)
    while process.poll() is None and not catches_signals(process):
        time.sleep(0.001)
    time.sleep(seconds)
    process.send_signal(number)
    errors = process.communicate()[1]
    assert "Traceback" not in errors
    assert process.returncode in (128 + number, 0), errors
    if process.returncode:  # before the verb begins, nothing is known of it
        (message,) = (line for line in errors.splitlines() if line.startswith("interrupted"))
        assert message == "interrupted." or message.endswith("The same command resumes")


def test_signals_are_caught_before_the_command_line_is_imported() -> None:
    code = (
        "import sys, k2convert.__main__ as entry\n"
        "slow = {'typing', 'dataclasses', 'typer', 'k2convert.errors', 'k2convert.cli.app'} & set(sys.modules)\n"
        "assert not slow, slow\n"
        "entry.catch_interrupts(); import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (143, "interrupted.\n")


INTERRUPTED_INSIDE_OPEN = """
import os, signal, sys, time
import k2convert.__main__ as entry
from k2convert.checkpoint import folders
real = os.open
def interrupted(path, flags, mode=0o777):
    descriptor = real(path, flags, mode)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)  # the thread that ends the process looks for temporary files now
    return descriptor
os.open = interrupted
entry.catch_interrupts()
folders.create_file(folders.Path(sys.argv[1]))
time.sleep(60)
"""


def test_a_file_that_is_being_created_at_an_interrupt_is_removed(tmp_path: Path) -> None:
    done = python(INTERRUPTED_INSIDE_OPEN, tmp_path / "shard.tmp")
    assert (done.returncode, list(tmp_path.iterdir())) == (130, []), done.stderr
