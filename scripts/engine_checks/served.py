"""`compare` against real servers: vLLM over HTTP on a CPU, next to the KL divergence that scripts/eval computes.

The source is served as BF16, and both kinds of result. And the wire formats of the tests' servers (model_server) are
compared with the engines' own classes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch

from k2convert.calibration.text import Windows, read_windows
from scripts.engine_checks.engines import ENGINES
from scripts.engine_checks.environments import python_of
from scripts.engine_checks.model_server import ModelServer, markov
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
    _run(["run", str(TINY), str(source), "--to", "bf16", "--json"])
    windows = read_windows([TINY / "eval.txt"], tokenizer=TINY, vocab_size=2048, tokens=tokens, window=WINDOW, seed=0)
    text = ["--text", str(TINY / "eval.txt"), "--tokenizer", str(TINY)]
    text += ["--window", str(WINDOW), "--tokens", str(tokens)]
    rows: list[Served] = []
    with served(source, work) as reference:
        problems = [*_against_itself(reference, text), *_killed(reference, text, windows)]
        for variant in VARIANTS:
            folder = work / "checkpoints" / variant.name
            truth = true_divergence(folder, windows)
            with served(folder, work) as result:
                for top_k in TOP_KS:
                    found = _compare(reference.url, result.url, *text, "--top-k", str(top_k))
                    mean = found["rows"][0]["figures"]["divergence"]["mean"]
                    rows.append(Served(variant.name, top_k, mean, truth, found.get("noise", 0.0)))
                    say(f"vllm, served, {variant.name}: K {top_k}, {mean:.6f} of {truth:.6f}")
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


@dataclass(frozen=True, slots=True)
class Running:
    """A vLLM server: its address, and the log in which every request is a line."""

    url: str
    log: Path

    @property
    def num_answered(self) -> int:
        """Questions that were answered so far."""
        return self.log.read_text(errors="replace").count('"POST /v1/completions HTTP/1.1" 200')


@contextmanager
def served(checkpoint: Path, work: Path) -> Generator[Running]:
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
            yield Running(f"http://127.0.0.1:{port}/v1", log)
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


def _run(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "k2convert", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment, **options)


def _compare(*words: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(_run(["compare", *words, "--json", "--quiet"], cwd=folder).stdout)


def _against_itself(server: Running, text: list[str]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        shown = _run(["compare", server.url, server.url, *text, "--quiet"], cwd=folder).stdout
    if "no difference" not in shown:
        yield f"vLLM differs from itself: {shown}"


def _killed(server: Running, text: list[str], windows: Windows) -> Iterator[str]:
    """Kill a comparison after its first answer; the same command must ask for the others only, with the same result."""
    words = ["compare", server.url, server.url, *text, "--requests", "1", "--json", "--quiet"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = server.num_answered
        process = subprocess.Popen(
            [sys.executable, "-m", "k2convert", *words], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        while process.poll() is None and not list(folder.glob("compare-*/b/window-000.json")):
            time.sleep(0.02)
        process.kill()
        process.wait()
        resumed = _run(words, cwd=folder).stdout
        asked = server.num_answered - before
        at_once = _run(words, cwd=folder).stdout
    count = len(windows.ids)
    if resumed != at_once:
        yield "the result after a kill differs"
    if asked > 2 * count + min(count, 8) + 1:  # one may have been under way
        yield f"{asked} questions after a kill"


def check_wire(engine: str, work: Path) -> list[str]:
    """Return where the tests' server, or a question of `compare`, is not in the engine's format."""
    with tempfile.TemporaryDirectory() as name, ModelServer(markov(1), engine=engine) as server:
        folder = Path(name)
        np.save(folder / "ids.npy", np.arange(24))
        options = "--save kept --text ids.npy --window 12 --top-k 8 --quiet"
        _run(["compare", server.url, *options.split()], cwd=folder)
        question = server.requests[0]
        answer = server.vllm_answer(question) if engine == "vllm" else server.sglang_answer(question)
        documents = folder / "documents.json"
        documents.write_text(json.dumps({"question": question, "answer": answer, "models": server.listing()}))
        command = [str(python_of(engine, work)), "-m", f"scripts.engine_checks.clients.wire_{engine}", str(documents)]
        done = subprocess.run(command, env=ENGINES[engine].variables(work), capture_output=True, text=True, cwd=folder)
    if done.returncode == 0:
        return []
    return done.stdout.split("\n") if done.stdout.strip() else [done.stderr.strip().splitlines()[-1]]
