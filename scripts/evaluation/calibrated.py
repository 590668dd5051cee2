"""`scripts/eval calibrated tiny|tiny-end|smollm2|all`: conversions, and those of other tools, on text of another book.

`k2convert.evaluate` scores every checkpoint that `k2convert run` writes. transformers' own model scores what is not
one: weights of peers, and INT4 with FP4 activations.

A finished conversion in the work folder is kept, and so are the weights of a peer. Their names have the number of
tokens that calibrated them.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import files
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from torch import Tensor

import k2convert
from k2convert.choices import RequestedActivations
from k2convert.records.evaluation import Figures
from scripts.evaluation.austen import novel
from scripts.evaluation.measure import WINDOW, compare_in_turn, encode
from scripts.evaluation.models import (
    Mlps,
    build_model,
    converted_mlps,
    source_mlps,
    with_input_scales,
    without_input_scales,
)
from scripts.evaluation.peers import PEERS, QUARK, mlps_of, peer_weights, quark_mlps
from scripts.evaluation.smollm2 import make_smollm2

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "k2-tiny"
CALIBRATION_TOKENS = 16_384
MODES = ("W4A16", "W4A4")
W4A16, W4A4 = MODES
INT4 = "INT4"
"""The row of the source's weights with FP4 activations."""
Scores = dict[tuple[str, str], Figures]
"""The figures of each row by weights and mode."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, the text that calibrates it, and the text that it is evaluated on: its first tokens, or its last ones.

    `batch` is the number of windows that transformers' model computes at once.
    """

    name: str
    source: Path
    calibration: Path
    text: Path
    tokens: int
    batch: int
    at_end: bool = False

    def calibration_windows(self, tokens: int = CALIBRATION_TOKENS) -> Tensor:
        """Return the first windows of the calibration text, ids int64 [W, 256]."""
        return encode(self.source, self.calibration.read_text(encoding="utf-8"), tokens=tokens)

    def evaluated_windows(self, tokens: int) -> Tensor:
        """Return the windows that are scored, ids int64 [W, 256]."""
        text = self.text.read_text(encoding="utf-8")
        if not self.at_end:
            return encode(self.source, text, tokens=tokens)
        return encode(self.source, text, tokens=len(text))[-(tokens // WINDOW) :]


def make_subject(name: str, work: Path) -> Subject:
    """Return one of SUBJECTS; SmolLM2 and Austen's novels are downloaded into `work` when first needed."""
    if name == "smollm2":
        for title in ("Emma", "Persuasion"):
            novel(work, title)
        title = "SmolLM2-135M-Instruct as a K2-named MoE"
        return Subject(title, make_smollm2(work), work / "emma.txt", work / "persuasion.txt", 8_192, 4)
    tiny = Subject(
        "k2-tiny (7 M, DeepSeek-V3 architecture)", TINY, TINY / "calibration.txt", TINY / "eval.txt", 16_384, 16
    )
    if name == "tiny":
        return tiny
    # The end of the text is the Jargon File, where the beginning is the King James Bible.
    return replace(tiny, name=f"{tiny.name}, end of the text", at_end=True)


SUBJECTS = ("tiny", "tiny-end", "smollm2")


@dataclass(frozen=True, slots=True)
class Conversion:
    """One way to convert: how the table calls it, the options of `k2convert run`, and what calibrates it.

    `ids` is the number of ids in the file that calibrates it, 0 for the foreign text; `tokens` of them are used, or
    none for a data-free rule.
    """

    weights: str
    options: tuple[str, ...]
    tokens: int = CALIBRATION_TOKENS
    ids: int = CALIBRATION_TOKENS
    modes: tuple[str, ...] = MODES

    def folder(self, subject: Subject, work: Path) -> Path:
        """Return the folder of the checkpoint, which serves both modes."""
        name = f"{subject.source.name}-{self.weights.replace(', ', '-').replace(' ', '-')}"
        return work / (f"{name}-{CALIBRATION_TOKENS}" if self.tokens else name)

    def text_options(self, subject: Subject, work: Path) -> list[object]:
        """Return the options of `k2convert run` that name the text, which is written if it is missing."""
        if not self.tokens:
            return []
        path = foreign_text(work) if self.ids == 0 else _write_ids(subject, work, self.ids)
        use = f"calibration={{tokens: {self.tokens}, window: {min(WINDOW, self.tokens)}}}"
        return ["--calibrate", path, "--set", use]


MLP = "shared experts and dense MLPs too"
MLP_RECIPE = ("--recipe", "kimi-k2-thinking-nvfp4-mlp")
NO_NORM = ("--set", "smoothing=false")
FP8 = {
    "attention": "attention",
    "shared experts": "shared_experts",
    "dense MLP": "dense_mlp",
    "all three": "attention, shared_experts, dense_mlp",
}
CONVERSIONS = (
    Conversion("max", ("--rule", "max"), tokens=0),
    Conversion("mse", ("--rule", "mse"), tokens=0),
    Conversion("gptq", ()),
    Conversion(f"mse, {MLP}", (*MLP_RECIPE, "--rule", "mse"), tokens=0, modes=(W4A16,)),
    Conversion(f"gptq, {MLP}", (*MLP_RECIPE, *NO_NORM), modes=(W4A16,)),
    Conversion("gptq, no smoothing", NO_NORM),
    Conversion("gptq, foreign text", (), ids=0),
    Conversion("gptq, 64 tokens in all", (), tokens=64),
    Conversion("gptq, 512 tokens in all", (), tokens=512),
    Conversion("gptq, 4,096 tokens", (), tokens=4096, ids=4096),
    Conversion("gptq, 65,536 tokens", (), tokens=65_536, ids=65_536),
    *(
        Conversion(
            f"{rule}, FP8 {label}",
            ("--rule", rule, "--layout", "compressed-tensors", "--set", f"fp8=[{roles}]"),
            tokens=0 if rule == "mse" else CALIBRATION_TOKENS,
            modes=(W4A4,),
        )
        for rule in ("mse", "gptq")
        for label, roles in FP8.items()
    ),
)


def foreign_text(work: Path) -> Path:
    """Return numpy's licence text, 47 kB: nothing like a novel, and on every machine that runs this."""
    licence = next(path for path in files("numpy") or () if path.name == "LICENSE.txt" and len(path.parts) == 3)
    out = work / "licence.txt"
    out.write_text(licence.read_text(encoding="utf-8"), encoding="utf-8")
    return out


def _write_ids(subject: Subject, work: Path, count: int) -> Path:
    """Write the first ids of the calibration text, [windows, WINDOW]."""
    path = work / f"{subject.source.name}-ids-{count}.npy"
    np.save(path, subject.calibration_windows(count).numpy())
    return path


@dataclass(frozen=True, slots=True)
class CalibratedEvaluation:
    """All conversions of one model, calibrated on one text and evaluated on another one."""

    subject: Subject
    tokens: int
    perplexity: float
    """Of the source."""
    scores: Scores

    def share(self, weights: str, mode: str) -> float:
        """Return the mean KL of a row as a share of data-free mse's in the same mode."""
        return self.scores[weights, mode].divergence.mean / self.scores["mse", mode].divergence.mean


def chosen_rows(patterns: Sequence[str] | None, *, with_peers: bool) -> list[str]:
    """Return the weights of the rows to score: those that match a pattern, or all (peers only if asked for).

    `mse` is always one of them, because the others are given as shares of it. Raises ValueError for a pattern that
    matches nothing.
    """
    peers = (*PEERS, QUARK)
    names = [*(conversion.weights for conversion in CONVERSIONS), *peers, INT4]
    if patterns is None:
        return [name for name in names if with_peers or name not in peers]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"no row matches {pattern!r}; the rows are: {'; '.join(names)}")
    return [name for name in names if name == "mse" or any(fnmatchcase(name, pattern) for pattern in patterns)]


def evaluate_calibrated(
    subject: Subject,
    work: Path,
    *,
    rows: Sequence[str],
    tokens: int | None = None,
    activations: RequestedActivations = "both",
) -> CalibratedEvaluation:
    """Convert or calibrate for every row, and score each of them on the text for evaluation."""
    folders = {c: c.folder(subject, work) for c in CONVERSIONS if c.weights in rows}
    for conversion, folder in folders.items():
        words = [subject.source, folder, *conversion.text_options(subject, work), *conversion.options, "--quiet"]
        command = [sys.executable, "-m", "scripts.evaluation.llama_fp8", "run", *map(str, words)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    windows = subject.evaluated_windows(tokens or subject.tokens)
    perplexity, scores = _score_checkpoints(subject, work, folders, windows, activations)
    source = source_mlps(subject.source)
    scales = converted_mlps(next(folder for conversion, folder in folders.items() if conversion.weights == "mse"))
    variants = {
        (name, mode): partial(_variant, read, scales if mode == W4A4 else None)
        for name, read in _peers(subject, work, source, rows).items()
        for mode in MODES
    }
    if INT4 in rows:
        variants[INT4, W4A4] = partial(_variant, lambda: source, scales)
    if variants:
        model = build_model(subject.source)
        for row, figures in compare_in_turn(model, source, variants, windows, batch=subject.batch):
            note(f"{', '.join(row)}: mean KL {figures.divergence.mean:.6f}")
            scores[row] = figures
    return CalibratedEvaluation(subject, windows.numel(), perplexity, scores)


def _score_checkpoints(
    subject: Subject,
    work: Path,
    folders: Mapping[Conversion, Path],
    windows: Tensor,
    activations: RequestedActivations,
) -> tuple[float, Scores]:
    """Score checkpoints by `k2convert.evaluate` on ids [W, 256]; return the source's perplexity first."""
    ids = work / f"{subject.source.name}-evaluated.npy"
    np.save(ids, windows.numpy())
    out = work / f"{subject.source.name}-evaluation.json"
    out.unlink(missing_ok=True)
    evaluation = k2convert.evaluate(
        subject.source,
        list(folders.values()),
        [ids],
        tokens=windows.numel(),
        window=WINDOW,
        activations=activations,
        out=out,
        any_text=True,
    )
    conversions = {folder.name: conversion for conversion, folder in folders.items()}
    scores = Scores()
    for row in evaluation.rows:
        conversion = conversions[row.model.name]
        if row.model.mode in conversion.modes:
            scores[conversion.weights, row.model.mode] = row.figures
    return evaluation.rows[0].figures.reference_perplexity, scores


def _peers(subject: Subject, work: Path, source: Mlps, rows: Sequence[str]) -> dict[str, Callable[[], Mlps]]:
    """Calibrate with every peer that is a row; return how to read their weights."""
    reads: dict[str, Callable[[], Mlps]] = {}
    for name in (name for name in PEERS if name in rows):
        cached = work / f"{subject.source.name}-{name.replace(' ', '-')}-{CALIBRATION_TOKENS}.pt"
        if not cached.exists():
            note(f"{subject.name}: {name}")
            torch.save(peer_weights(subject.source, name, subject.calibration_windows()), cached)
        reads[name] = lambda path=cached: source | mlps_of(torch.load(path))
    if QUARK in rows and subject.source == TINY:
        reads[QUARK] = partial(quark_mlps, subject.source, work / f"{subject.source.name}-quark")
    return reads


def _variant(read: Callable[[], Mlps], scales: Mlps | None) -> Mlps:
    """Return weights with the input scales of another checkpoint, or without any."""
    mlps = read()
    return with_input_scales(mlps, scales) if scales else without_input_scales(mlps)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def calibrated_markdown(evaluation: CalibratedEvaluation) -> str:
    """Return a heading line and one table, with the figures of both modes in the row of the weights."""
    subject = evaluation.subject
    part = "the end of " if subject.at_end else ""
    lines = [
        f"**{subject.name}**, calibrated on {CALIBRATION_TOKENS:,} tokens of {subject.calibration.stem}, evaluated on "
        f"{evaluation.tokens:,} tokens of {part}{subject.text.stem} (perplexity of INT4: {evaluation.perplexity:.2f}); "
        "divergence from the INT4 model in nats.",
        "",
        "| weights |" + "".join(f" {mode}: KL | of mse | 99.9 % | top-1 |" for mode in MODES),
        "|---|" + "---:|" * 4 * len(MODES),
    ]
    for weights in dict.fromkeys(weights for weights, _ in evaluation.scores):
        lines.append(f"| {weights} |" + "".join(_cells(evaluation, weights, mode) for mode in MODES))
    return "\n".join(lines) + "\n"


def _cells(evaluation: CalibratedEvaluation, weights: str, mode: str) -> str:
    figures = evaluation.scores.get((weights, mode))
    if figures is None:
        return "  |" * 4
    kl = figures.divergence
    share = evaluation.share(weights, mode)
    return f" {kl.mean:.5f} | {share:.2f} | {kl.p999:.3f} | {figures.top1_agreement:.3f} |"


def main() -> None:
    """Print Markdown on stdout and progress on stderr."""
    parser = argparse.ArgumentParser(prog="scripts/eval", description=__doc__)
    parser.add_argument("command", choices=["calibrated"])
    parser.add_argument("subject", choices=(*SUBJECTS, "all"))
    parser.add_argument("--peers", action="store_true", help="llm-compressor, ModelOpt and AMD Quark too (slow)")
    parser.add_argument("--rows", nargs="+", metavar="PATTERN", help='score only these rows: "gptq*" "ModelOpt*"')
    parser.add_argument("--activations", choices=get_args(RequestedActivations), default="both")
    parser.add_argument("--tokens", type=int, help="number of tokens to evaluate; default: as many as in RESULTS.md")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "eval", help="folder for models and results")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    try:
        rows = chosen_rows(options.rows, with_peers=options.peers)
    except ValueError as error:
        parser.error(str(error))
    for name in SUBJECTS if options.subject == "all" else (options.subject,):
        result = evaluate_calibrated(
            make_subject(name, work), work, rows=rows, tokens=options.tokens, activations=options.activations
        )
        print(calibrated_markdown(result), flush=True)


if __name__ == "__main__":
    main()
