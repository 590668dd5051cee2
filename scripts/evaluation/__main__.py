"""Command line: `scripts/eval calibrated|capture`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from scripts.evaluation.calibrated import (
    CALIBRATED_SUBJECTS,
    calibrated_markdown,
    chosen_rows,
    evaluate_calibrated,
    evaluated_windows,
)
from scripts.evaluation.capture import capture

ROOT = Path(__file__).resolve().parents[2]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/eval", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("calibrated", help="score calibrated conversions on text that did not calibrate them")
    command.add_argument("subject", choices=(*CALIBRATED_SUBJECTS, "all"))
    command.add_argument("--peers", action="store_true", help="llm-compressor, ModelOpt and AMD Quark too (slow)")
    command.add_argument("--rows", nargs="+", metavar="PATTERN", help='score only these rows: "gptq*" "ModelOpt*"')
    command.add_argument("--json", type=Path, metavar="FILE", help="write the figures in full precision")
    command.add_argument("--tokens", type=int, help="number of tokens to evaluate; default: as many as in RESULTS.md")
    _common(command)
    command = commands.add_parser("capture", help="write the inputs of the MoE blocks on the same text")
    command.add_argument("subject", choices=sorted(CALIBRATED_SUBJECTS))
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
        subject = CALIBRATED_SUBJECTS[options.subject](options.work)
        print(capture(subject.source, evaluated_windows(subject, options.tokens), options.out))
        return
    try:
        rows = chosen_rows(options.rows, with_peers=options.peers)
    except ValueError as error:
        parser.error(str(error))
    chosen = CALIBRATED_SUBJECTS if options.subject == "all" else (options.subject,)
    documents: list[object] = []
    for name in chosen:
        subject = CALIBRATED_SUBJECTS[name](options.work)
        result = evaluate_calibrated(subject, options.work, rows=rows, tokens=options.tokens)
        print(calibrated_markdown(result), flush=True)
        documents.append(asdict(result))
    if options.json:
        document = documents if options.subject == "all" else documents[0]
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
