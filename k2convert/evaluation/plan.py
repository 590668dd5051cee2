"""A planned evaluation, the origins of its rows, and which rows of an earlier one stay.

The document of an evaluation has no times, so that equal evaluations are equal bytes. What a row was made from is
kept beside it, in a sealed file, by the row's digest. An answer without that, or of changed files, is computed again.

    FOLDER/.NAME.k2convert              beside the document NAME
    RESULT/.k2convert/NAME.k2convert    of a document in the result of `run`
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from blake3 import blake3

from k2convert import __version__
from k2convert.checkpoint.files import list_folder, write_atomically
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.names import JOB_NAME, WORK_FOLDER
from k2convert.errors import DestinationError, K2ConvertError, MalformedFileError, ResumeError, shortened
from k2convert.evaluation.checkpoints import EvaluatedCheckpoint, Inputs, inputs_of
from k2convert.evaluation.scores import compare_models
from k2convert.forward.layer_pass import LayerPass
from k2convert.records.document import Digest, encode, read_sealed, seal
from k2convert.records.evaluation import (
    FORMAT,
    KIND,
    MAX_ROWS,
    EvaluatedModel,
    Evaluation,
    EvaluationRow,
    EvaluationText,
    find_evaluation,
)

_SUFFIX: Final = ".k2convert"

TILE_TOKENS: Final = 2048
"""Tokens whose hidden states are scored at once; a longer window is taken as a whole."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a row: the place of its checkpoint, and the digest of all files of it and of its reference."""

    place: str
    inputs: Digest


def origin_of(place: str, reference: Inputs, model: Inputs) -> Origin:
    """Return the origin of the rows of a checkpoint; `place` is its folder or its address."""
    digest = blake3()
    for inputs in (reference, model):
        for name, identity in sorted(inputs.items()):
            digest.update(f"{name}\0{identity}\n".encode())
        digest.update(b"\0")
    return Origin(place, digest.hexdigest())


def _row_digest(document: Evaluation, row: EvaluationRow) -> str:
    """Return the digest of a row with the reference and the text that it was computed on."""
    return blake3(encode(replace(document, rows=(row,), verdicts=()))).hexdigest()


def _origins_path(path: Path) -> Path:
    folder = path.parent / WORK_FOLDER
    if (folder / JOB_NAME).is_file():
        return folder / f"{path.name}{_SUFFIX}"
    return path.with_name(f".{path.name}{_SUFFIX}")


def _read_origins(path: Path) -> dict[str, Origin]:
    """Return the origins of a document's rows by the digests of the rows; none if their file is missing or damaged."""
    try:
        return read_sealed(dict[str, dict[str, Origin]], _origins_path(path)).get("rows", {})
    except K2ConvertError:
        return {}


@dataclass(frozen=True, slots=True)
class Output:
    """A file to write, and the checkpoints whose rows it gets, by their numbers in the evaluation.

    `is_own` is set for the file in the folder of its one checkpoint.
    """

    path: Path
    checkpoints: tuple[int, ...]
    is_own: bool


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """A planned evaluation. Nothing has been written yet.

    `checkpoints` and `models` begin with the reference. `inputs` are the files of each checkpoint as they were when
    the evaluation was planned.
    """

    layer_pass: LayerPass
    checkpoints: tuple[EvaluatedCheckpoint, ...]
    models: tuple[EvaluatedModel, ...]
    inputs: tuple[Inputs, ...]
    outputs: tuple[Output, ...]

    @property
    def bytes_read(self) -> int:
        """The bytes of all checkpoints that are read, if every expert is chosen. The head is read once per tile."""
        heads = len(self.checkpoints)
        parts = self.layer_pass.shards.parts
        sizes = [sum(end - begin for of in part.ranges.values() for begin, end in of) for part in parts]
        modes = [sum(model.checkpoint == number for model in self.layer_pass.models) for number in range(heads)]
        windows, length = self.layer_pass.text.windows.ids.shape
        tiles = -(-windows // max(1, TILE_TOKENS // length))
        layers = sum(size * modes[number % heads] for number, size in enumerate(sizes[:-heads]))
        return layers * -(-windows // self.layer_pass.text.chunk) + sum(sizes[-heads:]) * tiles

    def remove_work(self) -> None:
        """Remove the work folder, and the folder around it in a checkpoint that `run` did not write."""
        work = self.layer_pass.work
        work.remove_leftovers(self.layer_pass.job)
        around = work.folder.parent
        if around.name == WORK_FOLDER and around.is_dir() and not list_folder(around):
            shutil.rmtree(around, ignore_errors=True)

    @property
    def document(self) -> Evaluation:
        """The document without rows."""
        text = self.layer_pass.text.windows.described()
        return Evaluation(FORMAT, "evaluate", __version__, self.models[0], text, ())

    @property
    def origins(self) -> dict[str, Origin]:
        """The origins of the rows of each checkpoint, by its name."""
        found: dict[str, Origin] = {}
        for one, inputs in zip(self.checkpoints[1:], self.inputs[1:], strict=True):
            place = one.place if one.source.local is None else str(one.source.local.resolve())
            found[one.name] = origin_of(place, self.inputs[0], inputs)
        return found

    def finished(self) -> Evaluation | None:
        """Return the evaluation if the files that it writes have it already, made from the same files and text.

        Raises DestinationError if one of them is something else, or has rows that would be lost.
        """
        rows: dict[tuple[str, str], EvaluationRow] = {}
        is_whole = True
        for output in self.outputs:
            holding, _ = read_earlier(output, self)
            found = {row_key(row.model): row for row in holding}
            models = zip(self.models, self.layer_pass.models, strict=True)
            wanted = [model for model, own in models if own.checkpoint in output.checkpoints and own.checkpoint]
            is_whole = is_whole and all(row_key(model) in found for model in wanted)
            rows |= found
        wanted = [row_key(model) for model in self.models[1:]]
        if not is_whole or any(key not in rows for key in wanted):
            return None
        text = next(find_evaluation(output.path) for output in self.outputs)
        assert text is not None
        chosen = tuple(rows[key] for key in wanted)
        return replace(self.document, text=text.text, rows=chosen, verdicts=compare_models(chosen))

    def check_unchanged(self) -> None:
        """Refuse to write the figures of files that changed while they were computed (ResumeError)."""
        for one, inputs in zip(self.checkpoints, self.inputs, strict=True):
            now = one.inputs()
            changed = sorted(name for name in {*now, *inputs} if now.get(name) != inputs.get(name))
            if changed:
                raise ResumeError(
                    f"{one.place}: {changed[0]} changed while the evaluation ran. Delete "
                    f"{self.layer_pass.work.folder} and run the same command again."
                )


def _check_lost(path: Path, document: Evaluation, lost: Sequence[EvaluationRow]) -> None:
    """Refuse to lose rows (DestinationError)."""
    if lost or document.kind != KIND:
        modes = ", ".join(dict.fromkeys(row.model.mode or shortened(row.model.name) for row in lost))
        texts = ", ".join(shortened(name) for name, _ in document.text.texts)
        raise DestinationError(
            f"{path}: holds another evaluation ({modes} on {texts}). Delete it, or name a different file with --out of "
            "`k2convert evaluate`."
        )


def read_replaced(path: Path) -> Evaluation | None:
    """Return the evaluation that a file holds, None if there is no file; raises DestinationError for anything else."""
    try:
        return find_evaluation(path)
    except MalformedFileError as error:
        raise DestinationError(
            f"{path}: is not an evaluation, so it is not replaced ({str(error).rstrip('.')}). Remove it, or name a "
            "different file with --out."
        ) from None


def check_text(path: Path, text: EvaluationText) -> None:
    """Refuse to write an evaluation on a text into a file that holds one on a different text (DestinationError)."""
    found = read_replaced(path)
    if found is not None and not (found.kind == KIND and _text_of(found.text) == _text_of(text)):
        _check_lost(path, found, found.rows)


def read_earlier(output: Output, plan: EvaluationPlan) -> tuple[dict[EvaluationRow, Origin], list[EvaluationRow]]:
    """Return the rows that still hold of a file that is about to be written, and those of changed files.

    Raises DestinationError if it is no evaluation, or if rows would be lost.
    """
    found = read_replaced(output.path)
    holding: dict[EvaluationRow, Origin] = {}
    changed: list[EvaluationRow] = []
    lost: list[EvaluationRow] = []
    origins = _read_origins(output.path)
    if found is None:
        return holding, changed
    new = plan.document
    is_same_text = found.kind == new.kind and _text_of(found.text) == _text_of(new.text)
    is_same = is_same_text and found.tool_version == new.tool_version and found.reference == new.reference
    for row in found.rows:
        origin = origins.get(_row_digest(found, row))
        named, now = _present(output, plan, row, origin)
        is_computed = is_same_text and row_key(named.model) in map(row_key, plan.models[1:])
        if is_same and origin is not None and now is not None:
            if origin.inputs == now.inputs:
                holding[named] = now
            else:
                changed.append(named)
        elif now is None or not is_computed:
            lost.append(named)
    _check_lost(output.path, found, lost)
    return holding, changed


def _text_of(text: EvaluationText) -> tuple[object, ...]:
    return text.texts, text.token_ids, text.window


def row_key(model: EvaluatedModel) -> tuple[str, str]:
    """Return the name and the mode of a model: a file has one row of each."""
    return model.name, model.mode


def _present(
    output: Output, plan: EvaluationPlan, row: EvaluationRow, origin: Origin | None
) -> tuple[EvaluationRow, Origin | None]:
    """Return a row under its checkpoint's name of today, and the origin that it would have today.

    None if that is not known: a different checkpoint has its name, or it is on the Hub, or cannot be read.
    """
    if output.is_own:
        name, now = list(plan.origins.items())[output.checkpoints[0] - 1]
        return replace(row, model=replace(row.model, name=name)), now
    now = plan.origins.get(row.model.name)
    if now is not None:
        is_known = (
            origin.place == now.place if origin else row.model.weights in {one.weights for one in plan.models[1:]}
        )
        return row, now if is_known else None
    if origin is None or not Path(origin.place).is_dir():
        return row, None
    try:
        return row, origin_of(origin.place, plan.inputs[0], inputs_of(open_checkpoint(Path(origin.place)), None))
    except K2ConvertError:
        return row, None


def write_evaluation(output: Output, plan: EvaluationPlan, found: Evaluation) -> list[EvaluationRow]:
    """Write the rows of one file, after those of an earlier evaluation that still hold; returns those of changed files.

    What rows were made from is written first: a process killed in between leaves an evaluation that is known.
    Raises DestinationError, DiskFullError, DestinationWriteError.
    """
    holding, changed = read_earlier(output, plan)
    origins = plan.origins
    names = {list(origins)[number - 1] for number in output.checkpoints if number}
    new = {row: origins[row.model.name] for row in found.rows if row.model.name in names}
    computed = {row_key(row.model) for row in new}
    rows = {row: origin for row, origin in holding.items() if row_key(row.model) not in computed} | new
    if len(rows) > MAX_ROWS:
        raise DestinationError(f"{output.path}: has no room for more than {MAX_ROWS} rows. Name a file with --out.")
    own = {row_key(row.model) for row in rows}
    verdicts = compare_models((*rows, *(row for row in found.rows if row not in rows)))
    of_own = tuple(one for one in verdicts if own & {row_key(one.nearer), row_key(one.farther)})
    document = replace(found, rows=tuple(rows), verdicts=of_own)
    kept = {_row_digest(document, row): origin for row, origin in rows.items()}
    write_atomically(_origins_path(output.path), seal({"rows": _read_origins(output.path) | kept}))
    write_atomically(output.path, encode(document))
    return changed
