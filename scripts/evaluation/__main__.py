"""Command line: `scripts/eval calibrated tiny|tiny-end|smollm2|all`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from scripts.evaluation.calibrated import (
    ROOT,
    SUBJECTS,
    calibrated_markdown,
    chosen_rows,
    evaluate_calibrated,
    make_subject,
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/eval", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("calibrated", help="score calibrated conversions on text that did not calibrate them")
    command.add_argument("subject", choices=(*SUBJECTS, "all"))
    command.add_argument("--peers", action="store_true", help="llm-compressor, ModelOpt and AMD Quark too (slow)")
    command.add_argument("--rows", nargs="+", metavar="PATTERN", help='score only these rows: "gptq*" "ModelOpt*"')
    command.add_argument("--json", type=Path, metavar="FILE", help="write the figures in full precision")
    command.add_argument("--tokens", type=int, help="number of tokens to evaluate; default: as many as in RESULTS.md")
    command.add_argument("--work", type=Path, default=ROOT / "build" / "eval", help="folder for models and results")
    command.add_argument("--threads", type=int, default=2)
    return parser


def main() -> None:
    """Print Markdown on stdout and progress on stderr."""
    parser = _parser()
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    try:
        rows = chosen_rows(options.rows, with_peers=options.peers)
    except ValueError as error:
        parser.error(str(error))
    documents: list[object] = []
    for name in SUBJECTS if options.subject == "all" else (options.subject,):
        result = evaluate_calibrated(make_subject(name, work), work, rows=rows, tokens=options.tokens)
        print(calibrated_markdown(result), flush=True)
        documents.append(asdict(result))
    if options.json:
        document = documents if options.subject == "all" else documents[0]
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
