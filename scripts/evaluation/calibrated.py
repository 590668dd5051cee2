"""Rows of calibrated conversions: rule `gptq`, foreign text, few tokens, published calibrations.

Rule `gptq` is `k2convert run --calibrate`. The peers see the same windows of token ids. Nothing is evaluated on the
text that it was calibrated on. `k2convert evaluate` scores the checkpoints; transformers' own model scores what is not
one: weights of peers, and INT4 with FP4 activations.

A finished conversion in the work folder is kept, and so are the weights of a peer. Their names have the number of
tokens that calibrated them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import files
from pathlib import Path

import torch
from torch import Tensor

import k2convert
from scripts.evaluation.austen import novel
from scripts.evaluation.measure import WINDOW, Score, Variant, compare_in_turn, encode
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
TOKEN_COUNTS = (4096, 65_536)
MODES = ("W4A16", "W4A4")
W4A16, W4A4 = MODES
_FIGURES = ("KL", "of mse", "99.9 %", "top-1")


@dataclass(frozen=True, slots=True)
class CalibratedSubject:
    """A model, the text that calibrates it, the text that it is evaluated on, and the number of tokens of each.

    The first tokens of the text, or with `at_end` the last ones.
    """

    name: str
    source: Path
    calibration: Path
    calibration_tokens: int
    text: Path
    tokens: int
    batch: int
    at_end: bool = False


def tiny_subject(work: Path) -> CalibratedSubject:
    """The tests' checkpoint with its two texts."""
    del work
    name = "k2-tiny (7 M, DeepSeek-V3 architecture)"
    return CalibratedSubject(name, TINY, TINY / "calibration.txt", 16_384, TINY / "eval.txt", 16_384, 16)


def tiny_end_subject(work: Path) -> CalibratedSubject:
    """The same on the end of the text, which is the Jargon File, where the beginning is the King James Bible."""
    found = tiny_subject(work)
    return replace(found, name=f"{found.name}, end of the text", at_end=True)


def smollm2_subject(work: Path) -> CalibratedSubject:
    """SmolLM2-135M as a K2-named mixture of experts: Emma calibrates, Persuasion evaluates."""
    source = make_smollm2(work)
    for title in ("Emma", "Persuasion"):
        novel(work, title)
    name = "SmolLM2-135M-Instruct as a K2-named MoE"
    return CalibratedSubject(name, source, work / "emma.txt", 16_384, work / "persuasion.txt", 8_192, 4)


CALIBRATED_SUBJECTS: dict[str, Callable[[Path], CalibratedSubject]] = {
    "tiny": tiny_subject,
    "tiny-end": tiny_end_subject,
    "smollm2": smollm2_subject,
}


@dataclass(frozen=True, slots=True)
class Conversion:
    """One way to convert: how the table calls it, the text that calibrates it, and the options of `k2convert run`."""

    weights: str
    text: str | None
    options: tuple[str, ...]
    modes: tuple[str, ...] = (W4A16, W4A4)


MLP = "shared experts and dense MLPs too"
MLP_RECIPE = "kimi-k2-thinking-nvfp4-mlp"
NO_NORM = ("--set", "smoothing=false")
CONVERSIONS = (
    Conversion("max", None, ("--rule", "max")),
    Conversion("mse", None, ("--rule", "mse")),
    Conversion("gptq", "text", ()),
    Conversion(f"mse, {MLP}", None, ("--recipe", MLP_RECIPE, "--rule", "mse"), (W4A16,)),
    Conversion(f"gptq, {MLP}", "text", ("--recipe", MLP_RECIPE, *NO_NORM), (W4A16,)),
    Conversion("gptq, no smoothing", "text", NO_NORM),
    Conversion("gptq, foreign text", "foreign", ()),
    Conversion("gptq, 64 tokens in all", "64", ()),
    Conversion("gptq, 512 tokens in all", "512", ()),
    *(Conversion(f"gptq, {count:,} tokens", str(count), ()) for count in TOKEN_COUNTS),
)
INT4 = "INT4"
"""The row of the source's weights with FP4 activations."""


@dataclass(frozen=True, slots=True)
class CalibratedRow:
    """One calibrated conversion; `of_mse` is its mean KL as a share of data-free mse's in the same mode."""

    weights: str
    mode: str
    of_mse: float
    score: Score


@dataclass(frozen=True, slots=True)
class CalibratedEvaluation:
    """All calibrated conversions of one model: calibrated on one text and evaluated on another one."""

    model: str
    calibration: str
    calibration_tokens: int
    text: str
    tokens: int
    source: Score
    rows: tuple[CalibratedRow, ...]


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


def foreign_text(work: Path) -> Path:
    """Return numpy's licence text, 47 kB: nothing like a novel, and on every machine that runs this."""
    found = next(path for path in files("numpy") or () if path.name == "LICENSE.txt" and len(path.parts) == 3)
    out = work / "licence.txt"
    out.write_text(found.read_text(encoding="utf-8"), encoding="utf-8")
    return out


@dataclass(frozen=True, slots=True)
class Tokens:
    """What calibrates a conversion: a file of ids or of text, and the number of tokens taken from it."""

    path: Path
    count: int

    def options(self) -> list[object]:
        """Return the options of `k2convert run`."""
        use = f"calibration={{tokens: {self.count}, window: {min(WINDOW, self.count)}}}"
        return ["--calibrate", self.path, "--set", use, "--quiet"]


def calibration_tokens(subject: CalibratedSubject, work: Path) -> dict[str, Tokens]:
    """Return the tokens of every text by name: the windows of the peers, a foreign text, and fewer and more tokens."""
    text = Tokens(_first_ids(subject, work, subject.calibration_tokens), subject.calibration_tokens)
    tokens = {
        "text": text,
        "foreign": Tokens(foreign_text(work), subject.calibration_tokens),
        "64": Tokens(text.path, 64),
        "512": Tokens(text.path, 512),
    }
    return tokens | {str(count): Tokens(_first_ids(subject, work, count), count) for count in TOKEN_COUNTS}


def _first_ids(subject: CalibratedSubject, work: Path, count: int) -> Path:
    """Write the first tokens of the calibration text, a window a line."""
    ids = work / f"{subject.source.name}-ids-{count}.jsonl"
    windows = calibration_windows(replace(subject, calibration_tokens=count))
    ids.write_text("".join(f"{window}\n" for window in windows.tolist()), encoding="utf-8")
    return ids


def _k2convert(*arguments: object) -> None:
    command = [sys.executable, "-m", "k2convert", *map(str, arguments)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def calibration_windows(subject: CalibratedSubject) -> Tensor:
    """Return the first windows of the calibration text, ids int64 [W, 256]."""
    text = subject.calibration.read_text(encoding="utf-8")
    return encode(subject.source, text, tokens=subject.calibration_tokens)


Loaders = dict[tuple[str, str], Callable[[], Variant]]
"""How to read the weights of each row, by weights and mode."""
Scores = dict[tuple[str, str], Score]


def conversions(subject: CalibratedSubject, work: Path, rows: Sequence[str]) -> dict[str, Path]:
    """Convert in every way that is a row; returns the folders by weights."""
    tokens = calibration_tokens(subject, work)
    folders = dict[str, Path]()
    for conversion in CONVERSIONS:
        if conversion.weights not in rows:
            continue
        folder = conversion_folder(subject, work, conversion.weights)
        given: list[object] = []
        if conversion.text is not None:
            given = tokens[conversion.text].options()
        _k2convert("run", subject.source, folder, *given, *conversion.options)
        folders[conversion.weights] = folder
    return folders


def scores_of(
    subject: CalibratedSubject, work: Path, folders: Mapping[str, Path], windows: Tensor
) -> tuple[Score, Scores]:
    """Score checkpoints by `k2convert.evaluate` on ids [W, 256]; returns the source's perplexity too."""
    ids, out = (work / f"{subject.source.name}-evaluat{ending}" for ending in ("ed.jsonl", "ion.json"))
    ids.write_text("".join(f"{window}\n" for window in windows.tolist()), encoding="utf-8")
    out.unlink(missing_ok=True)
    found = k2convert.evaluate(
        subject.source,
        list(folders.values()),
        [ids],
        tokens=windows.numel(),
        window=WINDOW,
        activations="both",
        out=out,
        any_text=True,
    )
    modes = {conversion.weights: conversion.modes for conversion in CONVERSIONS}
    names = {folder.name: weights for weights, folder in folders.items()}
    scores = Scores()
    for row in found.rows:
        weights = names[row.model.name]
        figures = row.figures
        if row.model.mode in modes[weights]:
            score = Score(figures.perplexity, figures.divergence.mean, figures.divergence.p999, figures.top1_agreement)
            scores[weights, row.model.mode] = score
    return Score(found.rows[0].figures.reference_perplexity), scores


def conversion_folder(subject: CalibratedSubject, work: Path, weights: str) -> Path:
    """Return the folder of a row's checkpoint, which serves both modes."""
    name = f"{subject.source.name}-{weights.replace(', ', '-').replace(' ', '-')}"
    uses_text = any(conversion.weights == weights and conversion.text for conversion in CONVERSIONS)
    return work / (f"{name}-{subject.calibration_tokens}" if uses_text else name)


def peers(subject: CalibratedSubject, work: Path, scales: Path, rows: Sequence[str]) -> Loaders:
    """Calibrate with every peer that is a row; W4A4 takes the input scales of the checkpoint in `scales`."""
    windows = calibration_windows(subject)
    reads: dict[str, Callable[[], Mlps]] = {}
    for name in (name for name in PEERS if name in rows):
        cached = work / f"{subject.source.name}-{name.replace(' ', '-')}-{subject.calibration_tokens}.pt"
        if not cached.exists():
            note(f"{subject.name}: {name}")
            torch.save(peer_weights(subject.source, name, windows), cached)
        reads[name] = partial(_read_peer, subject.source, cached)
    if QUARK in rows and subject.source == TINY:
        reads[QUARK] = partial(quark_mlps, subject.source, work / f"{subject.source.name}-quark")
    inputs = {W4A16: None, W4A4: scales}
    return {(name, mode): partial(_variant, read, inputs[mode]) for name, read in reads.items() for mode in MODES}


def _read_peer(source: Path, cached: Path) -> Mlps:
    return source_mlps(source) | mlps_of(torch.load(cached))


def _variant(read: Callable[[], Mlps], scales: Path | None) -> Variant:
    mlps = read()
    return Variant(with_input_scales(mlps, converted_mlps(scales)) if scales else without_input_scales(mlps), {})


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def note_score(row: tuple[str, str], score: Score) -> None:
    note(f"{', '.join(row)}: mean KL {score.kl_mean:.6f}")


def evaluate_calibrated(
    subject: CalibratedSubject, work: Path, *, rows: Sequence[str], tokens: int | None = None
) -> CalibratedEvaluation:
    """Convert or calibrate for every row, and score each of them on the text for evaluation."""
    folders = conversions(subject, work, rows)
    source = source_mlps(subject.source)
    windows = evaluated_windows(subject, tokens or subject.tokens)
    reference, scores = scores_of(subject, work, folders, windows)
    loaders = peers(subject, work, folders["mse"], rows)
    if INT4 in rows:
        loaders[INT4, W4A4] = lambda: Variant(with_input_scales(source, converted_mlps(folders["mse"])), {})
    if loaders:
        model = build_model(subject.source)
        scores |= compare_in_turn(model, source, loaders, windows, batch=subject.batch, progress=note_score)[1]
    return CalibratedEvaluation(
        subject.name,
        subject.calibration.stem,
        subject.calibration_tokens,
        f"the end of {subject.text.stem}" if subject.at_end else subject.text.stem,
        windows.numel(),
        reference,
        tuple(_rows(scores)),
    )


def evaluated_windows(subject: CalibratedSubject, tokens: int) -> Tensor:
    """Return the windows that are scored, ids int64 [W, 256]."""
    text = subject.text.read_text(encoding="utf-8")
    if not subject.at_end:
        return encode(subject.source, text, tokens=tokens)
    return encode(subject.source, text, tokens=len(text))[-(tokens // WINDOW) :]


def _rows(scores: Scores) -> list[CalibratedRow]:
    """Return the rows, W4A16 first, each with its mean KL as a share of mse's in the same mode."""
    rows: list[CalibratedRow] = []
    for mode in (W4A16, W4A4):
        base = scores["mse", mode].kl_mean
        for (weights, found), score in scores.items():
            if found == mode:
                assert score.kl_mean is not None
                assert base is not None
                rows.append(CalibratedRow(weights, mode, score.kl_mean / base, score))
    return rows


def calibrated_markdown(evaluation: CalibratedEvaluation) -> str:
    """Return a heading line and one table, with the figures of both modes in the row of the weights."""
    by_weights: dict[str, dict[str, CalibratedRow]] = {}
    for row in evaluation.rows:
        by_weights.setdefault(row.weights, {})[row.mode] = row
    columns = [f"{mode}: {name}" if name == _FIGURES[0] else name for mode in MODES for name in _FIGURES]
    lines = [
        f"**{evaluation.model}**, calibrated on {evaluation.calibration_tokens:,} tokens of {evaluation.calibration}, "
        f"evaluated on {evaluation.tokens:,} tokens of {evaluation.text} (perplexity of INT4: "
        f"{evaluation.source.perplexity:.2f}); divergence from the INT4 model in nats.",
        "",
        _line(["weights", *columns]),
        _line(["---", *["---:"] * len(columns)]),
    ]
    for weights, modes in by_weights.items():
        lines.append(_line([weights, *(cell for mode in MODES for cell in _cells(modes.get(mode)))]))
    return "\n".join(lines) + "\n"


def _cells(row: CalibratedRow | None) -> list[str]:
    if row is None:
        return [""] * len(_FIGURES)
    score = row.score
    return [f"{score.kl_mean:.5f}", f"{row.of_mse:.2f}", f"{score.kl_p999:.3f}", f"{score.top1_agreement:.3f}"]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
