"""compare_servers on real servers: vLLM over HTTP on a CPU, next to the KL divergence that scripts/eval computes.

The source is served as BF16, and both kinds of result.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch

from k2convert.calibration.text import Windows, read_windows
from scripts.compare_servers import Server, compare
from scripts.engine_checks.engines import ENGINES
from scripts.engine_checks.environments import python_of
from scripts.engine_checks.variants import K2, MSE, ROOT, TINY, WEIGHT_ONLY, Variant
from scripts.evaluation import measure
from scripts.evaluation.models import build_model, converted_mlps, source_mlps

WINDOW = 256
TOP_KS = (64, 256)
LEAST_SHARE = 0.8  # of the true KL, at the largest K
STARTUP_SECONDS = 300
VARIANTS = (Variant(K2, "modelopt", "w4a4", MSE), Variant(K2, "modelopt", WEIGHT_ONLY, MSE))


@dataclass(frozen=True, slots=True)
class Served:
    """One result on a server against the BF16 source on another."""

    name: str
    top_k: int
    bound: float
    truth: float
    noise: float


def report(rows: list[Served]) -> str:
    """Return the table of vLLM's figures."""
    lines = [
        "",
        "| result on vLLM, against the BF16 source | K | lower bound | KL | share | noise |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        share = f"{100 * row.bound / row.truth:.1f} %"
        lines.append(f"| {row.name} | {row.top_k} | {row.bound:.6f} | {row.truth:.6f} | {share} | {row.noise:.2g} |")
    return "\n".join(lines) + "\n"


def check_served(work: Path, tokens: int, say: Callable[[str], None]) -> tuple[list[Served], list[str]]:
    """Return the figures of vLLM and what is wrong; the results must be in work/checkpoints."""
    source = work / "checkpoints" / "bf16"
    _convert_to_bf16(source)
    windows = read_windows([TINY / "eval.txt"], tokenizer=TINY, vocab_size=2048, tokens=tokens, window=WINDOW, seed=0)
    ids = windows.ids.astype(np.int64)
    rows: list[Served] = []
    problems: list[str] = []
    with served(source, work) as reference:
        own = compare([reference, reference], ids, min(TOP_KS))
        if own["kl_at_least"] > 2 * own["kl_of_a_from_itself"]:
            problems.append(f"vLLM differs from itself: {own}")
        for variant in VARIANTS:
            folder = work / "checkpoints" / variant.name
            truth = true_divergence(folder, windows)
            with served(folder, work) as result:
                for top_k in TOP_KS:
                    figures = compare([reference, result], ids, top_k)
                    bound = figures["kl_at_least"]
                    rows.append(Served(variant.name, top_k, bound, truth, figures["kl_of_a_from_itself"]))
                    say(f"vllm, served, {variant.name}: K {top_k}, {bound:.6f} of {truth:.6f}")
    problems += [f"{row.name}: the bound {row.bound} is above {row.truth}" for row in rows if row.bound > row.truth]
    problems += [
        f"{row.name}: the bound is {row.bound / row.truth:.3f} of the KL"
        for row in rows
        if row.top_k == max(TOP_KS) and row.bound < LEAST_SHARE * row.truth
    ]
    return rows, problems


def true_divergence(folder: Path, windows: Windows) -> float:
    """Return KL(source || result), from full distributions by transformers' model."""
    model = build_model(TINY)
    ids = torch.from_numpy(windows.ids)
    name = (folder.name, "")
    variants = {name: lambda: measure.Variant(converted_mlps(folder), {})}
    _, scores = measure.compare_in_turn(model, source_mlps(TINY), variants, ids, batch=2)
    found = scores[name].kl_mean
    assert found is not None
    return found


@contextmanager
def served(checkpoint: Path, work: Path) -> Generator[Server]:
    """Serve a checkpoint for the block; raises RuntimeError if vLLM does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = work / "results" / "served" / f"{checkpoint.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    module = "scripts.engine_checks.clients.vllm_server"
    command = [str(python_of("vllm", work)), "-m", module, str(checkpoint), str(port), str(max(TOP_KS))]
    with log.open("w") as file:
        options: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command, env=ENGINES["vllm"].variables(work), cwd=log.parent, **options)
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", process, log)
            yield Server(f"http://127.0.0.1:{port}/v1", "", None)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"vLLM did not start, see {log}")


def _convert_to_bf16(source: Path) -> None:
    command = [sys.executable, "-m", "k2convert", "run", str(TINY), str(source), "--to", "bf16", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
