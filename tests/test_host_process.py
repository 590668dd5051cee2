"""The functions of the package run in a process of somebody else: they leave everything of it as they found it."""

import gc
import json
import locale
import logging
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import python
from structure import TINY

import k2convert
from k2convert.errors import K2ConvertError
from k2convert.machine import BUFFERS

THREADS = 3
CHILD = "import os, json; print(json.dumps(dict(os.environ)))"


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def state() -> dict[str, Any]:
    """Everything of this process that a call could change."""
    return {
        "environment": dict(os.environ),
        "environment of children": json.loads(python(CHILD).stdout),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()),
        "precision": torch.get_float32_matmul_precision(),
        "switch interval": sys.getswitchinterval(),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "warnings": list(warnings.filters),
        "umask": umask(),
        "folder": Path.cwd(),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "path": list(sys.path),
        "locale": locale.setlocale(locale.LC_ALL),
        "random": (random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state())),
        "numpy": (np.geterr(), np.get_printoptions()),
        "limits": [resource.getrlimit(kind) for kind in range(16)],
        "cores": os.sched_getaffinity(0),
        "open files": sorted(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "buffers": len(BUFFERS._arrays),
    }


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has torch with three threads, and its own folder and text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")  # libraries add filters of warnings
    torch.set_num_threads(THREADS)
    BUFFERS.clear()
    Path("text.txt").write_text("".join(f"Sentence {number} of a text. " for number in range(400)))


def convert(out: str = "out") -> object:
    return k2convert.convert(TINY, out)


def convert_with_a_text(out: str = "gptq") -> object:
    return k2convert.convert(TINY, out, text="text.txt", settings={"calibration.tokens": 256, "calibration.window": 64})


def evaluate() -> object:
    return k2convert.evaluate(TINY, "out", "text.txt", tokens=256, window=64, out="figures.json")


def fail_in_the_middle(function: Callable[..., object], **arguments: object) -> None:
    class Failing(k2convert.Events):
        def progress(self, *, bytes_in: int = 0, bytes_out: int = 0, tensors: int = 0) -> None:
            raise RuntimeError("the host's own")

        tokens_computed = progress  # type: ignore[assignment]

    with pytest.raises((RuntimeError, TypeError)):
        function(**arguments, events=Failing())


def leaves_all(call: Callable[[], object]) -> None:
    before = state()
    frozen = gc.get_freeze_count()
    call()
    assert gc.get_freeze_count() <= frozen, "objects that the tests froze may end, but none is added"
    after = state()
    changed = {name: (before[name], value) for name, value in after.items() if value != before[name]}
    for name, (old, new) in changed.items():
        if isinstance(old, dict):
            changed[name] = tuple({key: v for key, v in d.items() if old.get(key) != new.get(key)} for d in (old, new))
    assert changed == {}


@pytest.mark.slow
def test_every_function_leaves_the_process_as_it_was() -> None:
    calls = (convert, evaluate, lambda: k2convert.validate("out", TINY), lambda: k2convert.inspect(TINY))
    for call in (*calls, convert_with_a_text, convert):
        leaves_all(call)


def test_so_does_a_function_that_fails() -> None:
    leaves_all(lambda: fail_in_the_middle(k2convert.convert, source=TINY, destination="out"))
    leaves_all(lambda: fail_in_the_middle(k2convert.convert, source=TINY, destination="gptq", text="text.txt"))
    for call in (lambda: k2convert.validate("missing"), lambda: k2convert.convert(TINY, "x", device="gpu")):  # type: ignore[arg-type]

        def refused(call: Callable[[], object] = call) -> None:
            with pytest.raises(K2ConvertError):
                call()

        leaves_all(refused)


def test_several_threads_at_once_leave_the_process_as_it_was() -> None:
    def in_threads() -> None:
        calls = (lambda: convert("a"), lambda: convert_with_a_text("b"), lambda: convert("c"))
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(call) for call in calls]:
                future.result()
            assert {future.result() for future in [pool.submit(torch.get_num_threads) for _ in range(8)]} == {THREADS}

    leaves_all(in_threads)


@pytest.mark.slow
def test_a_host_that_has_not_loaded_torch_gets_its_own_number_of_threads(cut: Path) -> None:
    code = (
        "import sys, os; before = dict(os.environ); import k2convert; "
        f"k2convert.evaluate({str(cut)!r}, {str(cut)!r}, 'text.txt', tokens=64, window=64, out='figures.json'); "
        "import torch; print(torch.get_num_threads(), os.environ == before, sys.getswitchinterval())"
    )
    number = python("import torch; print(torch.get_num_threads())").stdout.strip()
    done = python(code)
    assert done.stdout.split() == [number, "True", "0.005"], done.stderr
    assert int(number) > 1
    assert done.stderr == ""
