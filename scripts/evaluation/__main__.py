"""Command line: `scripts/eval tiny|smollm2|all|calibrated|capture`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from scripts.evaluation.austen import novel
from scripts.evaluation.calibrated import CALIBRATED_SUBJECTS, chosen_rows, evaluate_calibrated
from scripts.evaluation.capture import capture
from scripts.evaluation.measure import compare, encode
from scripts.evaluation.models import (
    Mlps,
    build_model,
    converted_mlps,
    source_mlps,
    weight_sqnr_db,
    with_input_scales,
    without_input_scales,
)
from scripts.evaluation.peers import quark_mlps
from scripts.evaluation.smollm2 import make_smollm2
from scripts.evaluation.table import CalibratedEvaluation, Evaluation, Row, calibrated_markdown, markdown

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "k2-tiny"
RULES = ("max", "mse")
QUARK = "Quark 0.13"
INT4, FP32, FP4 = "INT4 (the source)", "FP32", "FP4"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, the text it reads, the number of tokens, and the number of windows in a batch."""

    name: str
    source: Path
    text_name: str
    text: str
    tokens: int
    batch: int


def tiny_subject(work: Path) -> Subject:
    """The tests' checkpoint and its held-out text."""
    del work
    text = (TINY / "eval.txt").read_text(encoding="utf-8")
    return Subject("k2-tiny (7 M, DeepSeek-V3 architecture)", TINY, "eval.txt", text, 16_384, 16)


def smollm2_subject(work: Path) -> Subject:
    """SmolLM2-135M as a K2-named mixture of experts, and Emma."""
    source = make_smollm2(work)
    return Subject("SmolLM2-135M-Instruct as a K2-named MoE", source, "Austen's Emma", novel(work, "Emma"), 8_192, 4)


SUBJECTS = {"tiny": tiny_subject, "smollm2": smollm2_subject}


def convert(source: Path, destination: Path, rule: str) -> Path:
    """Run `k2convert run`; an unfinished result is resumed and a finished one is kept."""
    command = [sys.executable, "-m", "k2convert", "run", str(source), str(destination), "--rule", rule]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return destination


def evaluate(subject: Subject, work: Path, *, tokens: int | None = None, peers: bool = False) -> Evaluation:
    """Convert with both rules, and with AMD Quark as a peer; score every combination of weights and activations."""
    source = source_mlps(subject.source)
    converted = {
        rule: converted_mlps(convert(subject.source, work / f"{subject.source.name}-{rule}", rule)) for rule in RULES
    }
    if peers:
        theirs = quark_mlps(subject.source, work / f"{subject.source.name}-quark")
        converted[QUARK] = with_input_scales(theirs, converted["mse"])
    sqnr = {rule: weight_sqnr_db(source, mlps, subject.source) for rule, mlps in converted.items()}
    variants: dict[tuple[str, str], Mlps] = {}
    for rule, mlps in converted.items():
        variants[rule, FP32] = without_input_scales(mlps)
    for rule, mlps in converted.items():
        variants[rule, FP4] = mlps
    variants[INT4, FP4] = with_input_scales(source, converted["mse"])
    windows = encode(subject.source, subject.text, tokens=tokens or subject.tokens)
    started = time.monotonic()

    def progress(done: int, total: int) -> None:
        print(f"\r{subject.name}: window {done}/{total}, {time.monotonic() - started:.0f} s", end="", file=sys.stderr)

    reference, scores = compare(
        build_model(subject.source), source, variants, windows, batch=subject.batch, progress=progress
    )
    print(file=sys.stderr)
    rows = [Row(INT4, FP32, None, reference)]
    rows += [Row(weights, inputs, sqnr.get(weights), scores[weights, inputs]) for weights, inputs in variants]
    positions = len(windows) * (windows.shape[1] - 1)
    return Evaluation(subject.name, subject.text_name, windows.numel(), positions, tuple(rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/eval", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in (*SUBJECTS, "all"):
        command = commands.add_parser(name, help="score both rules, W4A16 and W4A4")
        command.add_argument("--json", type=Path, metavar="FILE", help="write the figures in full precision")
        command.add_argument("--tokens", type=int, help="number of tokens to read; default: as many as in RESULTS.md")
        command.add_argument("--peers", action="store_true", help="score AMD Quark too (installs it, 1.8 GB)")
        _common(command)
    command = commands.add_parser("calibrated", help="score calibrated conversions on text that did not calibrate them")
    command.add_argument("subject", choices=[*CALIBRATED_SUBJECTS, "all"])
    command.add_argument("--peers", action="store_true", help="calibrate with llm-compressor and ModelOpt too (slow)")
    command.add_argument("--rows", nargs="+", metavar="PATTERN", help='score only these rows: "gptq*" "ModelOpt*"')
    command.add_argument("--json", type=Path, metavar="FILE", help="write the figures in full precision")
    command.add_argument("--tokens", type=int, help="number of tokens to evaluate; default: as many as in RESULTS.md")
    _common(command)
    command = commands.add_parser("capture", help="write the inputs of the MoE blocks on the same text")
    command.add_argument("subject", choices=sorted(SUBJECTS))
    command.add_argument("out", type=Path, metavar="FILE")
    command.add_argument("--tokens", type=int, default=1024)
    _common(command)
    return parser


def _common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--work", type=Path, default=ROOT / "build" / "eval", help="folder for models and results")
    command.add_argument("--threads", type=int, default=2)


def main() -> None:
    """Print Markdown on stdout and progress on stderr."""
    parser = _parser()
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.command == "capture":
        subject = SUBJECTS[options.subject](options.work)
        windows = encode(subject.source, subject.text, tokens=options.tokens)
        print(capture(subject.source, windows, options.out))
        return
    if options.command == "calibrated":
        try:
            rows = chosen_rows(options.rows, with_peers=options.peers)
        except ValueError as error:
            parser.error(str(error))
        found: list[CalibratedEvaluation] = []
        for name in CALIBRATED_SUBJECTS if options.subject == "all" else [options.subject]:
            subject = CALIBRATED_SUBJECTS[name](options.work)
            found.append(evaluate_calibrated(subject, options.work, rows=rows, tokens=options.tokens))
            print(calibrated_markdown(found[-1]), flush=True)
        _write_json(options.json, [result.to_dict() for result in found])
        return
    names = list(SUBJECTS) if options.command == "all" else [options.command]
    results: list[Evaluation] = []
    for name in names:
        subject = SUBJECTS[name](options.work)
        results.append(evaluate(subject, options.work, tokens=options.tokens, peers=options.peers))
        print(markdown(results[-1]), flush=True)
    _write_json(options.json, [result.to_dict() for result in results])


def _write_json(path: Path | None, document: object) -> None:
    if path:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
