"""Command line: `scripts/engines [ENGINE ...] [--load-only] [--tokens N]`. Exit code 1 if any check fails."""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import load_file

from k2convert.choices import Engine as EngineName
from scripts.engine_checks.agreement import (
    BF16_WEIGHTS,
    BF16_WEIGHTS_FP4_TIES,
    FLOAT32,
    FP4_TIES,
    NEW_TOKENS,
    Agreement,
    Reference,
    Tolerance,
    compare,
)
from scripts.engine_checks.engines import ENGINES, Engine
from scripts.engine_checks.environments import SetupError, ensure
from scripts.engine_checks.fp8 import check_fp8
from scripts.engine_checks.questions import check_questions
from scripts.engine_checks.variants import (
    FOUND_BY,
    K2,
    K3,
    MSE,
    NOT_REACHED,
    ROOT,
    RULES,
    VARIANTS,
    WEIGHT_ONLY,
    Variant,
    convert,
    copy_with_defect,
)

WINDOW = 256
CLIENT_SECONDS = 1200
QUESTIONED: dict[str, EngineName] = {"vllm-0.33": "vllm", "sglang": "sglang"}
KINDS = sorted(VARIANTS, key=lambda v: (v.layout != "modelopt", v.activations != "w4a4", v.form, v.rule))


_HEAD = (
    "| engine | layout | activations | checkpoints | checks "
    "| perplexity | by scripts/eval | KL, mse | KL, max | greedy text |",
    "|---|---|---|" + "---:|" * 7,
)


@dataclass(frozen=True, slots=True)
class Result:
    """One checkpoint in one engine. `title` is the engine with its version; `failed` says which checks failed."""

    title: str
    variant: Variant
    num_checks: int
    failed: tuple[str, ...]
    agreement: Agreement | None
    is_known_to_be_wrong: bool


def markdown(results: Iterable[Result]) -> str:
    """Return the table; lines are in the order in which engines first appear."""
    lines = list(_HEAD)
    for _, group in groupby(results, key=_row):
        lines.append(f"| {' | '.join(_cells(list(group)))} |")
    return "\n".join(lines) + "\n"


def _row(result: Result) -> tuple[str, str, str]:
    return result.title, result.variant.layout, result.variant.activations


def _cells(group: list[Result]) -> tuple[str, ...]:
    first = next((r for r in group if (r.variant.form, r.variant.rule) == (K2, MSE)), group[0])
    agreements = [(result.variant.rule, result.agreement) for result in group if result.agreement is not None]
    failed = sum(len(result.failed) for result in group)
    checks = f"{sum(result.num_checks for result in group):,}"
    figures = ("", "", "", "", "")
    if agreements and first.agreement is not None:
        texts = [agreement.same_text for _, agreement in agreements if agreement.same_text is not None]
        figures = (
            f"{first.agreement.perplexity:.4f}",
            f"{first.agreement.expected_perplexity:.4f}",
            *(_largest([agreement.kl for rule, agreement in agreements if rule == wanted]) for wanted in RULES),
            "" if not texts else "same" if all(texts) else "differs",
        )
    if first.is_known_to_be_wrong:
        checks = "known defect"
    elif failed:
        checks = f"**{failed} of {checks} failed**"
    return *_row(first), str(len(group)), checks, *figures


def _largest(values: list[float]) -> str:
    return f"{max(values):.1e}" if values else ""


@dataclass(frozen=True, slots=True)
class Task:
    """One checkpoint to load with one engine. With a defect, the engine's checks must fail."""

    engine: Engine
    variant: Variant
    defect: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.variant.name, self.defect)))

    @property
    def computes(self) -> bool:
        return self.engine.computes and self.variant.form != K3


def tolerance(task: Task) -> Tolerance:
    """Return how far the engine may be from scripts/eval, by what is rounded."""
    fp4 = task.variant.activations != WEIGHT_ONLY and not task.engine.ignores_input_scales
    if task.engine.rounds_weights and task.variant.rule != MSE:
        return BF16_WEIGHTS_FP4_TIES if fp4 else BF16_WEIGHTS
    return FP4_TIES if fp4 else FLOAT32


def run_client(task: Task, work: Path, request: Path) -> Path:
    """Start the client and wait; return the folder of its outcome, which is missing if it crashed."""
    out = work / "results" / task.engine.name / task.name
    out.mkdir(parents=True, exist_ok=True)
    for name in ("outcome.json", "logits.safetensors"):
        (out / name).unlink(missing_ok=True)
    command = task.engine.command(work, work / "checkpoints" / task.name, request, out)
    with (out / "log.txt").open("w") as log, suppress(subprocess.TimeoutExpired, FileNotFoundError):
        options = {"stdout": log, "stderr": subprocess.STDOUT, "timeout": CLIENT_SECONDS, "check": False}
        subprocess.run(command, env=task.engine.variables(work), cwd=out, **options)
    return out


def read_result(task: Task, out: Path, reference: Reference | None) -> Result:
    """Return what the client found, and how it agrees with scripts/eval."""
    wrong = task.engine.is_known_to_be_wrong
    try:
        outcome = json.loads((out / "outcome.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Result(task.engine.name, task.variant, 1, (f"the client stopped, see {out / 'log.txt'}",), None, wrong)
    failed = list(outcome["failed"])
    num_checks = len(outcome["failed"]) + len(outcome["passed"])
    agreement = None
    if reference is not None and task.computes:
        tensors = load_file(out / "logits.safetensors")
        # K2.5 has the same language model as K2.
        folder = out.parents[2] / "checkpoints" / replace(task.variant, form=K2).name
        agreement = compare(
            tensors["logits"],
            tensors.get("greedy"),
            expected=reference.expected(folder, task.engine.ignores_input_scales),
            source=reference.source,
            windows=reference.windows,
        )
        problems = agreement.problems(tolerance(task))
        num_checks += 3 if agreement.same_text is None else 4
        failed += [] if wrong else problems
    title = outcome["engine"] + (", as released" if wrong else "")
    return Result(title, task.variant, num_checks, tuple(failed), agreement, wrong)


def run_all(
    tasks: list[Task], work: Path, request: Path, reference: Reference | None, jobs: int, say: Callable[[str], None]
) -> Iterator[Result]:
    """Run the clients, `jobs` at a time, and yield results in the order of the tasks."""
    with ThreadPoolExecutor(jobs) as pool:
        folders = [pool.submit(run_client, task, work, request) for task in tasks]
        for number, (task, folder) in enumerate(zip(tasks, folders, strict=True), 1):
            result = read_result(task, folder.result(), reference)
            verdict = "; ".join(result.failed) if result.failed else "ok"
            say(f"{number}/{len(tasks)} {task.engine.name}, {task.name}: {verdict}")
            yield result


def check_defects(engines: list[Engine], work: Path, request: Path, say: Callable[[str], None]) -> list[str]:
    """Load copies of Kimi K3 that have a defect; return a problem for each defect that is not found."""
    variant = Variant(K3, "modelopt", "w4a4", MSE)
    tasks = [Task(ENGINES[name], variant, defect) for name, defect in FOUND_BY if ENGINES[name] in engines]
    for defect in {task.defect for task in tasks}:
        copy_with_defect(work / "checkpoints" / variant.name, defect)
    return [
        f"{task.engine.name}, {task.name}: not found"
        for task, result in zip(tasks, run_all(tasks, work, request, None, 1, say), strict=True)
        if not re.search(FOUND_BY[task.engine.name, task.defect], "; ".join(result.failed))
    ]


def report(results: list[Result], *, tokens: int) -> str:
    """Return the table with a line of text above it."""
    computed = any(result.agreement is not None for result in results)
    text = f"{tokens:,} tokens of eval.txt in windows of {WINDOW}" if computed else "Loaded only"
    unreached = NOT_REACHED if any(result.variant.form == K3 for result in results) else ""
    return f"{text}; perplexity with rule `mse`, KL from scripts/eval in nats.\n\n{markdown(results)}{unreached}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/engines", description=__doc__)
    names = ", ".join(ENGINES)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"default: all of {names}")
    parser.add_argument("--load-only", action="store_true", help="load and compare weights; compute nothing")
    parser.add_argument("--tokens", type=int, default=512, help="tokens to compute, in windows of 256 (default: 512)")
    parser.add_argument("--jobs", type=int, default=2, help="clients at a time, each on one core and in 3 GB")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "engines", help="folder for everything it makes")
    return parser


def main() -> int:
    """Print the tables on stdout and progress on stderr."""
    parser = _parser()
    options = parser.parse_args()
    unknown = [name for name in options.engines if name not in ENGINES]
    if unknown:
        parser.error(f"unknown engine {unknown[0]}; known: {', '.join(ENGINES)}")
    if options.tokens < WINDOW:
        parser.error(f"--tokens: at least {WINDOW}")
    engines = [ENGINES[name] for name in options.engines] or list(ENGINES.values())
    work = options.work.resolve()
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {text}", file=sys.stderr, flush=True)

    work.mkdir(parents=True, exist_ok=True)
    try:
        for name in dict.fromkeys(engine.environment for engine in engines):
            ensure(name, work, say)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    say(f"converting {len(VARIANTS)} checkpoints")
    for variant in VARIANTS:
        convert(variant, work / "checkpoints")
    torch.set_num_threads(options.jobs)
    reference = None if options.load_only else Reference(options.tokens)
    request = work / "request.json"
    windows = reference.windows.tolist() if reference else []
    prompt = reference.prompt if reference else []
    request.write_text(json.dumps({"windows": windows, "prompt": prompt, "new_tokens": NEW_TOKENS}))
    tasks = [Task(engine, variant) for engine in engines for variant in KINDS if engine.reads(variant)]
    results = list(run_all(tasks, work, request, reference, options.jobs, say))
    problems = [f"{r.title}, {r.variant.name}: {problem}" for r in results for problem in r.failed]
    problems += check_defects(engines, work, request, say)
    for engine in engines:
        if engine.name in QUESTIONED:
            wrong = check_questions(engine, QUESTIONED[engine.name], work)
            say(f"{engine.name}, serve commands, exclude lists, formats: {'; '.join(wrong[:5]) or 'ok'}")
            problems += [f"{engine.name}: {problem}" for problem in wrong]
            wrong = check_fp8(engine, QUESTIONED[engine.name], work)
            say(f"{engine.name}, FP8 layers: {'; '.join(wrong[:5]) or 'ok'}")
            problems += [f"{engine.name}: {problem}" for problem in wrong]
    print(report(results, tokens=options.tokens // WINDOW * WINDOW), flush=True)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
