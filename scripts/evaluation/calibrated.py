"""Rows of calibrated conversions: rules `imatrix` and `gptq`, foreign text, few tokens, published calibrations.

Rule `imatrix` takes statistics of `k2convert calibrate`; rule `gptq` is `k2convert run --calibrate`. The peers see
the same windows of token ids. Nothing is evaluated on the text that it was calibrated on. A finished conversion in the
work folder is kept, and so are the weights of a peer; their names say how many tokens calibrated them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import files
from pathlib import Path

import torch
from torch import Tensor

from k2convert.checkpoint.index import open_checkpoint
from scripts.evaluation.austen import novel
from scripts.evaluation.measure import WINDOW, Score, Variant, compare_in_turn, encode
from scripts.evaluation.models import (
    build_model,
    converted_mlps,
    scaled_tensors,
    source_mlps,
    with_input_scales,
    without_input_scales,
)
from scripts.evaluation.peers import PEERS, mlps_of, peer_weights
from scripts.evaluation.smollm2 import make_smollm2
from scripts.evaluation.table import CalibratedEvaluation, CalibratedRow

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "k2-tiny"
TOKENS_PER_EXPERT = 16
W4A16, W4A4 = "W4A16", "W4A4"


@dataclass(frozen=True, slots=True)
class CalibratedSubject:
    """A model, the text that calibrates it, the text that it is evaluated on, and the number of tokens of each.

    With `second_half`, the text for evaluation begins in its middle.
    """

    name: str
    source: Path
    calibration: Path
    calibration_tokens: int
    text: Path
    tokens: int
    batch: int
    second_half: bool = False

    @property
    def text_name(self) -> str:
        """What the text for evaluation is called."""
        return f"the second half of {self.text.stem}" if self.second_half else self.text.stem

    def read_text(self) -> str:
        """Return the text for evaluation."""
        text = self.text.read_text(encoding="utf-8")
        return text[len(text) // 2 :] if self.second_half else text


def tiny_subject(work: Path) -> CalibratedSubject:
    """The tests' checkpoint with its two texts."""
    del work
    name = "k2-tiny (7 M, DeepSeek-V3 architecture)"
    return CalibratedSubject(name, TINY, TINY / "calibration.txt", 16_384, TINY / "eval.txt", 16_384, 16)


def second_tiny_subject(work: Path) -> CalibratedSubject:
    """The same conversions on the second half of the text."""
    return replace(tiny_subject(work), second_half=True)


def smollm2_subject(work: Path) -> CalibratedSubject:
    """SmolLM2-135M as a K2-named mixture of experts: Emma calibrates, Persuasion evaluates."""
    source = make_smollm2(work)
    for title in ("Emma", "Persuasion"):
        novel(work, title)
    name = "SmolLM2-135M-Instruct as a K2-named MoE"
    return CalibratedSubject(name, source, work / "emma.txt", 16_384, work / "persuasion.txt", 8_192, 4)


CALIBRATED_SUBJECTS: dict[str, Callable[[Path], CalibratedSubject]] = {
    "tiny": tiny_subject,
    "tiny-second": second_tiny_subject,
    "smollm2": smollm2_subject,
}


@dataclass(frozen=True, slots=True)
class Conversion:
    """One way to convert: how the table calls it, the text that calibrates it, and the options of `k2convert run`.

    `walk` says how the text is used: by `run --calibrate`, or by `calibrate` and then `run --statistics`.
    """

    weights: str
    text: str | None
    options: tuple[str, ...]
    modes: tuple[str, ...] = (W4A16, W4A4)
    walk: bool = False


OTHER_COUNTS = (4_096, 65_536)
"""Tokens of rule gptq, besides those of the other rows."""
NORM, NO_NORM = ("--set", "smoothing=true"), ("--set", "smoothing=false")
CONVERSIONS = (
    Conversion("max", None, ("--rule", "max")),
    Conversion("mse", None, ("--rule", "mse")),
    Conversion("mse, smoothing", "text", ("--rule", "mse", *NORM)),
    Conversion("imatrix", "text", NO_NORM),
    Conversion("imatrix, smoothing", "text", NORM),
    Conversion("imatrix, foreign text", "foreign", NO_NORM),
    Conversion("imatrix, smoothing, foreign text", "foreign", NORM, (W4A4,)),
    Conversion(f"imatrix, {TOKENS_PER_EXPERT} tokens per expert", "few", NO_NORM),
    Conversion(f"imatrix, smoothing, {TOKENS_PER_EXPERT} tokens per expert", "few", NORM, (W4A4,)),
    Conversion("gptq", "text", (), walk=True),
    Conversion("gptq, no smoothing", "text", NO_NORM, walk=True),
    *(Conversion(f"gptq, {count:,} tokens", str(count), (), walk=True) for count in OTHER_COUNTS),
    Conversion("gptq, foreign text", "foreign", (), walk=True),
    Conversion("gptq, 64 tokens in all", "64", (), walk=True),
    Conversion("gptq, 512 tokens in all", "512", (), walk=True),
)
INT4 = "INT4"
"""The row of the source's weights with FP4 activations."""


def chosen_rows(patterns: Sequence[str] | None, *, with_peers: bool) -> list[str]:
    """Return the weights of the rows to score: those that match a pattern, or all (peers only if asked for).

    `mse` is always one of them, because the others are given as shares of it. Raises ValueError for a pattern that
    matches nothing.
    """
    names = [*(conversion.weights for conversion in CONVERSIONS), *PEERS, INT4]
    if patterns is None:
        return [name for name in names if with_peers or name not in PEERS]
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

    def options(self, *, text: str) -> list[object]:
        """Return the options of `k2convert`, where a file follows the option `text`."""
        window = min(WINDOW, self.count)
        use: list[object] = ["--tokens", self.count, "--window", window]
        if text == "--calibrate":
            use = ["--set", f"calibration={{tokens: {self.count}, window: {window}}}"]
        return [text, self.path, *use, "--quiet", "--yes"]


def calibration_tokens(subject: CalibratedSubject, work: Path) -> dict[str, Tokens]:
    """Return the tokens of every text by name: the windows of the peers, a foreign text, and fewer and fewer tokens."""
    config = open_checkpoint(subject.source).config
    few = TOKENS_PER_EXPERT * config["n_routed_experts"] // config["num_experts_per_tok"]
    ids = _ids_file(subject, work, subject.calibration_tokens)
    others = {str(count): Tokens(_ids_file(subject, work, count), count) for count in OTHER_COUNTS}
    return others | {
        "text": Tokens(ids, subject.calibration_tokens),
        "foreign": Tokens(foreign_text(work), subject.calibration_tokens),
        "few": Tokens(subject.calibration, few),
        "64": Tokens(ids, 64),
        "512": Tokens(ids, 512),
    }


def _ids_file(subject: CalibratedSubject, work: Path, count: int) -> Path:
    """Write the windows of the first `count` tokens of the calibration text."""
    path = work / f"{subject.source.name}-ids-{count}.jsonl"
    windows = calibration_windows(replace(subject, calibration_tokens=count)).tolist()
    if len(windows) * WINDOW != count:
        raise ValueError(f"{subject.calibration}: has only {len(windows) * WINDOW:,} tokens, not {count:,}")
    path.write_text("".join(f"{window}\n" for window in windows), encoding="utf-8")
    return path


def _k2convert(*arguments: object) -> None:
    command = [sys.executable, "-m", "k2convert", *map(str, arguments)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def calibration_windows(subject: CalibratedSubject) -> Tensor:
    """Return the first windows of the calibration text, ids int64 [W, 256]."""
    text = subject.calibration.read_text(encoding="utf-8")
    return encode(subject.source, text, tokens=subject.calibration_tokens)


Loaders = dict[tuple[str, str], Callable[[], Variant]]
"""How to read the weights of each row, by weights and mode."""


def conversions(subject: CalibratedSubject, work: Path, rows: Sequence[str]) -> Loaders:
    """Convert in every way that is a row."""
    tokens, loaders = calibration_tokens(subject, work), Loaders()
    for conversion in CONVERSIONS:
        if conversion.weights not in rows:
            continue
        text = None if conversion.text is None else tokens[conversion.text]
        folder = conversion_folder(subject, work, conversion.weights, text)
        given: list[object] = []
        if text is not None and conversion.walk:
            given = text.options(text="--calibrate")
        elif conversion.text is not None and text is not None:
            given = ["--statistics", _statistics(subject, work, conversion.text, text)]
        _k2convert("run", subject.source, folder, *given, *conversion.options)
        for mode in conversion.modes:
            loaders[conversion.weights, mode] = partial(_read, folder, mode)
    return loaders


def _statistics(subject: CalibratedSubject, work: Path, name: str, tokens: Tokens) -> Path:
    """Run `k2convert calibrate` on a text, once."""
    made = work / f"{subject.source.name}-{name}-{tokens.count}.safetensors"
    if not made.exists():
        _k2convert("calibrate", subject.source, made, *tokens.options(text="--text"))
    return made


def conversion_folder(subject: CalibratedSubject, work: Path, weights: str, text: Tokens | None = None) -> Path:
    """Return the folder of a row's checkpoint, which serves both modes; `text` is what calibrates it, if anything."""
    name = f"{subject.source.name}-{weights.replace(', ', '-').replace(' ', '-')}"
    return work / (name if text is None else f"{name}-{text.count}")


def _read(folder: Path, mode: str) -> Variant:
    mlps = converted_mlps(folder)
    return Variant(mlps if mode == W4A4 else without_input_scales(mlps), scaled_tensors(folder))


def peers(subject: CalibratedSubject, work: Path, scales: Path, rows: Sequence[str]) -> Loaders:
    """Calibrate with every peer that is a row; W4A4 takes the input scales of the checkpoint in `scales`."""
    windows, loaders = calibration_windows(subject), Loaders()
    for name in (name for name in PEERS if name in rows):
        cached = work / f"{subject.source.name}-{name.replace(' ', '-')}-{subject.calibration_tokens}.pt"
        if not cached.exists():
            note(f"{subject.name}: {name}")
            torch.save(peer_weights(subject.source, name, windows), cached)
        for mode in (W4A16, W4A4):
            loaders[name, mode] = partial(_read_peer, subject.source, cached, scales if mode == W4A4 else None)
    return loaders


def _read_peer(source: Path, cached: Path, scales: Path | None) -> Variant:
    mlps = source_mlps(source) | mlps_of(torch.load(cached))
    return Variant(with_input_scales(mlps, converted_mlps(scales)) if scales else mlps, {})


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def evaluate_calibrated(
    subject: CalibratedSubject, work: Path, *, rows: Sequence[str], tokens: int | None = None
) -> CalibratedEvaluation:
    """Convert or calibrate for every row, and score each of them on the text for evaluation."""
    source, loaders = source_mlps(subject.source), conversions(subject, work, rows)
    scales = conversion_folder(subject, work, "mse")
    loaders |= peers(subject, work, scales, rows)
    if INT4 in rows:
        loaders[INT4, W4A4] = lambda: Variant(with_input_scales(source, converted_mlps(scales)), {})
    windows = encode(subject.source, subject.read_text(), tokens=tokens or subject.tokens)
    reference, scores = compare_in_turn(
        build_model(subject.source),
        source,
        loaders,
        windows,
        batch=subject.batch,
        progress=lambda row, score: note(
            f"{subject.name}, {subject.text_name}: {', '.join(row)}: mean KL {score.kl_mean:.6f}"
        ),
    )
    return CalibratedEvaluation(
        subject.name,
        subject.calibration.stem,
        subject.calibration_tokens,
        subject.text_name,
        windows.numel(),
        reference,
        tuple(_rows(scores)),
    )


def _rows(scores: dict[tuple[str, str], Score]) -> list[CalibratedRow]:
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
