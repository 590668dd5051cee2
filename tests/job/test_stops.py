"""Ctrl-C and SIGTERM at work: over in time, 130 or 143, a true sentence, and resumed to the same bytes."""

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from command import cli_environment, run_here, start_cli
from results import contents

from k2convert.cli.interrupts import GRACE_SECONDS
from scripts.fixture_maker.__main__ import main as make

pytestmark = pytest.mark.usefixtures("one_thread")

TICK = 0.05
MOST_TICKS = 10 / TICK * 3
"""10 s, in ticks of this process, which a busy machine stretches too; three times as many, as it may favor one."""

SHARDS = r"interrupted: \d of \d shards are converted"
LAYERS = r"interrupted: \d of \d layers are done\. The same command resumes"
BEFORE = (
    r"interrupted\.|interrupted: finished work is kept\. The same command resumes"
    r"|interrupted: no conversion has begun\. The same command starts it"
)
SENTENCES = {
    "run": rf"{SHARDS}\. The same command resumes",
    "run --calibrate": rf"{SHARDS}(, \d of \d layers are calibrated)?\. The same command resumes",
    "evaluate": LAYERS,
    "validate": r"interrupted: nothing is kept\. The same command starts again",
}
DONE = ".k2convert/done/layer-000.json"
AT_WORK = {
    "run": "out/.k2convert/job.json",
    "run --calibrate": f"out/.k2convert/calibration.work/{DONE}",
    "evaluate": f"out/.k2convert/evaluation.work/{DONE}",
}


@dataclass(frozen=True)
class Case:
    """A command in a folder of its own, and a file whose appearance shows that it works."""

    words: tuple[object, ...]
    folder: Path
    at_work: str = ""

    def is_at_work(self) -> bool:
        return (self.folder / self.at_work).exists()


@dataclass(frozen=True)
class Ended:
    code: int
    errors: str
    ticks: int


def interrupt(case: Case, number: signal.Signals, is_due: Callable[[], bool]) -> Ended:
    process = start_cli(*case.words, stderr=subprocess.PIPE, env=cli_environment() | {"OMP_NUM_THREADS": "1"})
    while process.poll() is None and not is_due():
        time.sleep(TICK / 10)
    process.send_signal(number)
    ticks = 0
    while process.poll() is None and ticks < 4 * MOST_TICKS:
        time.sleep(TICK)
        ticks += 1
    process.kill()
    return Ended(process.returncode or process.wait(), process.communicate()[1], ticks)


def check(ended: Ended, number: signal.Signals, verb: str) -> None:
    """One that had ended before the signal came has code 0."""
    if ended.code == 0:
        return
    assert ended.code == 128 + number, ended.errors
    assert "Traceback" not in ended.errors
    assert "terminate called" not in ended.errors
    (sentence,) = (line for line in ended.errors.splitlines() if line.startswith("interrupted"))
    assert re.fullmatch(f"{SENTENCES[verb]}|{BEFORE}", sentence), ended.errors
    assert ended.ticks < MOST_TICKS, ended.errors


def check_count(ended: Ended, records: Path) -> None:
    """The sentence counts the shards that have a record. One more may get its own before the process ends."""
    match = re.search(r"interrupted: (\d) of \d shards are converted", ended.errors)
    if match is not None and records.exists():  # it goes when a result is complete
        assert len(list(records.glob("*.json"))) - int(match[1]) in (0, 1), ended.errors


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 2048, (16, 64)))
    return path


@pytest.fixture(scope="module")
def result(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "out"
    run_here("run", short, out, "--device", "cpu", code=0)
    return out


def case_of(verb: str, folder: Path, short: Path, text: Path, result: Path) -> Case:
    folder.mkdir(exist_ok=True)
    out = folder / "out"
    cpu = ("--device", "cpu")
    use = ("--tokens", "1024", "--window", "64")
    keys = "calibration={tokens: 1024, window: 64}"
    if verb in ("evaluate", "validate") and not out.exists():
        shutil.copytree(result, out)
    words: dict[str, tuple[object, ...]] = {
        "run": ("run", short, out, *cpu),
        "run --calibrate": ("run", short, out, "--calibrate", text, "--set", keys, *cpu),
        "evaluate": ("evaluate", short, out, "--text", text, *use, *cpu),
        "validate": ("validate", out, "--source", short),
    }
    return Case(words[verb], folder, AT_WORK.get(verb, ""))


def finish(case: Case) -> dict[str, bytes]:
    run_here(*case.words, code=0)
    assert not list(case.folder.rglob("*.tmp"))
    assert not list(case.folder.rglob("*.work"))
    return contents(case.folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "number"),
    [
        ("run --calibrate", signal.SIGTERM),
        ("evaluate", signal.SIGINT),
        ("run", signal.SIGINT),
    ],
)
def test_a_verb_interrupted_at_work_says_what_is_kept_and_resumes(
    verb: str, number: signal.Signals, short: Path, text: Path, result: Path, tmp_path: Path
) -> None:
    case = case_of(verb, tmp_path / "a", short, text, result)
    ended = interrupt(case, number, case.is_at_work)
    check(ended, number, verb)
    check_count(ended, case.folder / "out" / ".k2convert" / "done")
    assert not list(case.folder.rglob("*.safetensors.tmp"))
    whole = finish(case_of(verb, tmp_path / "b", short, text, result))
    assert finish(case) == whole


@pytest.mark.slow
def test_forty_random_moments(short: Path, text: Path, result: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    verbs = list(SENTENCES)
    wholes: dict[str, dict[str, bytes]] = {}
    seconds: dict[str, float] = {}
    for verb in verbs:
        begin = time.monotonic()
        wholes[verb] = finish(case_of(verb, tmp_path / f"whole {verb}", short, text, result))
        seconds[verb] = time.monotonic() - begin
    interrupted = 0
    for attempt in range(40):
        verb = verbs[attempt % len(verbs)]
        number = draw.choice((signal.SIGINT, signal.SIGTERM))
        case = case_of(verb, tmp_path / f"{attempt}", short, text, result)
        due = time.monotonic() + draw.uniform(0.1, 1) * seconds[verb]
        ended = interrupt(case, number, lambda due=due: time.monotonic() > due)
        interrupted += ended.code != 0
        if ended.code != -number:  # the interpreter had not begun
            check(ended, number, verb)
            check_count(ended, case.folder / "out" / ".k2convert" / "done")
        assert finish(case) == wholes[verb]
        shutil.rmtree(case.folder)
    assert interrupted >= 25


@pytest.mark.slow
def test_a_layer_of_rule_gptq_is_left_in_time_wherever_it_is(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ids = tmp_path / "ids.npy"
    out = tmp_path / "out"
    words = ("--experts", "16", "--hidden", "2048", "--intermediate", "1024", "--dense-layers", "1")
    make(["k2-shaped", str(source), *words])
    make(["token-ids", str(ids), "--tokens", "4096"])
    use = ("--set", "calibration.tokens=2048", "--set", "smoothing=false", "--device", "cpu")
    case = Case(("run", source, out, "--calibrate", ids, *use), tmp_path)
    claim = out / ".k2convert" / "calibration.work" / DONE
    codes: list[int] = []
    for attempt in range(10):
        due: list[float] = []

        def is_due(due: list[float] = due, seconds: float = 3.0 * attempt) -> bool:
            if not due and claim.exists():
                due.append(time.monotonic() + 5 + seconds)
            return bool(due) and time.monotonic() > due[0]

        number = (signal.SIGINT, signal.SIGTERM)[attempt % 2]
        ended = interrupt(case, number, is_due)
        check(ended, number, "run --calibrate")
        codes.append(ended.code)
        assert not list(out.rglob("*.tmp"))
    assert codes == [130, 143] * 5


_BUSY = """
import hashlib, sys
from pathlib import Path
from k2convert.checkpoint.writer import ShardWriter
from k2convert.cli.interrupts import catch_interrupts, say_when_interrupted

catch_interrupts()
def state():
    print("asked", flush=True)
    if len(sys.argv) > 2:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # as if it waited for a disk that does not answer
    return "1 of 2 shards are converted"
say_when_interrupted(state, "k2convert run a b")
writer = ShardWriter(Path(sys.argv[1]) / "model.safetensors", 1 << 16)
print("begun", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # compiled code that nothing interrupts
"""


def busy(folder: Path, *words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _BUSY, str(folder), *words], text=True, stdout=-1, stderr=-1, env=cli_environment()
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    assert list(folder.glob("*.tmp"))
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_compiled_code_that_does_not_stop_is_left(number: signal.Signals, tmp_path: Path) -> None:
    process = busy(tmp_path)
    process.send_signal(number)
    errors = process.communicate()[1]
    assert errors == "interrupted: 1 of 2 shards are converted\nnext: k2convert run a b\n"
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_a_sentence_that_does_not_come_is_not_waited_for(times: int, tmp_path: Path) -> None:
    process = busy(tmp_path, "waits")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "asked\n"
    begin = time.monotonic()
    if times == 2:
        process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "interrupted.\n"
    assert process.returncode == (130 if times == 2 else 143)
    assert times == 2 or time.monotonic() - begin > GRACE_SECONDS / 2, "it was waited for"


_FAILING = """
import sys, threading
sys.argv = ["k2convert", "status", "nowhere"]
import k2convert.cli.status_view as status_view
from k2convert.__main__ import main

def fail(_place):
    import hashlib
    from k2convert.errors import PlanError
    threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", 2**31 - 1)).start()
    raise PlanError("no room.")

status_view.show_status_of = fail
main()
"""


def test_a_command_that_fails_does_not_wait_for_its_threads(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _FAILING]
    done = subprocess.run(words, text=True, capture_output=True, env=cli_environment(), timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, "error: no room.\n")


_IMPORTING = """
import os, signal, sys, time, types
from k2convert.cli.interrupts import catch_interrupts

catch_interrupts()
sys.modules["k2convert.checkpoint.folders"] = types.ModuleType("k2convert.checkpoint.folders")  # its lines have not run
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_an_interrupt_while_modules_are_imported_is_one_line() -> None:
    words = [sys.executable, "-c", _IMPORTING]
    done = subprocess.run(words, text=True, capture_output=True, env=cli_environment(), timeout=50, check=False)
    assert (done.returncode, done.stderr) == (143, "interrupted.\n")
