"""A planned evaluation, its file, and what that was computed from.

The document of an evaluation has no times, so that equal evaluations are equal bytes. What it was computed from is kept
beside it, as a digest in a sealed file. A file without that, or of changed inputs, is computed again.

    FOLDER/.NAME.k2convert              beside the document NAME
    RESULT/.k2convert/NAME.k2convert    of a document in the result of `run`
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from blake3 import blake3

from k2convert import __version__
from k2convert.checkpoint.files import (
    file_digest,
    list_folder,
    parse_json_object,
    read_json_file,
    read_text_file,
    write_atomically,
)
from k2convert.checkpoint.names import CONFIG_NAME, EVALUATION_NAME, JOB_NAME, WORK_FOLDER, WORK_SUFFIX
from k2convert.errors import DestinationError, K2ConvertError, MalformedFileError, ResumeError, shortened
from k2convert.evaluation.checkpoints import EvaluatedCheckpoint
from k2convert.evaluation.scores import compare_models
from k2convert.forward.layer_pass import LayerPass
from k2convert.models.config import network_fields
from k2convert.records.document import encode, plain, read_sealed, seal
from k2convert.records.evaluation import (
    FORMAT,
    KIND,
    EvaluatedModel,
    Evaluation,
    EvaluationRow,
    EvaluationText,
    find_evaluation,
)
from k2convert.records.fingerprint import fingerprint_digest

_SUFFIX: Final = ".k2convert"
WORK_NAME: Final = f"evaluation{WORK_SUFFIX}"

TILE_TOKENS: Final = 2048
"""Tokens whose hidden states are scored at once; a longer window is taken as a whole."""


@dataclass(frozen=True, slots=True)
class Output:
    """A file to write: of one checkpoint, by its number in the evaluation, in its own folder; or, with None, of all."""

    path: Path
    checkpoint: int | None

    @property
    def work_folder(self) -> Path:
        """The work folder of an evaluation that writes this file first."""
        if self.checkpoint is None:
            return self.path.with_name(self.path.name + WORK_SUFFIX)
        return self.path.parent / WORK_FOLDER / WORK_NAME


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """A planned evaluation. Nothing has been written yet.

    `checkpoints` and `models` begin with the reference. `inputs` are the files of each checkpoint as they were when
    the evaluation was planned.
    """

    layer_pass: LayerPass
    checkpoints: tuple[EvaluatedCheckpoint, ...]
    models: tuple[EvaluatedModel, ...]
    inputs: tuple[dict[str, str], ...]
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

    def models_of(self, output: Output) -> list[EvaluatedModel]:
        """Return the models whose rows a file gets."""
        models = zip(self.models[1:], self.layer_pass.models[1:], strict=True)
        return [model for model, own in models if output.checkpoint in (None, own.checkpoint)]

    def identity(self, output: Output) -> str:
        """Return the digest of all that the rows of a file are computed from."""
        models = zip(self.models, self.layer_pass.models, strict=True)
        return fingerprint_digest(
            {
                "version": __version__,
                "text": plain(self.layer_pass.text.windows.described()),
                "models": [
                    [model.mode, dict(self.inputs[own.checkpoint])]
                    for model, own in models
                    if own.checkpoint == 0 or output.checkpoint in (None, own.checkpoint)
                ],
            }
        )

    def finished(self) -> Evaluation | None:
        """Return the evaluation if the files that it writes have it already, made from the same files and text.

        Raises DestinationError if one of them is something else, or has rows that would be lost.
        """
        rows: list[EvaluationRow] = []
        text = self.layer_pass.text.windows.described()
        for output in self.outputs:
            check_replaced(output, text, self.models_of(output))
            if (
                is_computed(output.path, self.identity(output))
                and (evaluation := find_evaluation(output.path)) is not None
            ):
                text = evaluation.text
                rows += evaluation.rows
        models = self.models[1:]
        if [(row.model.weights, row.model.config) for row in rows] != [
            (model.weights, model.config) for model in models
        ]:
            return None
        named = tuple(replace(row, model=model) for row, model in zip(rows, self.models[1:], strict=True))
        return Evaluation(
            format=FORMAT,
            kind=KIND,
            tool_version=__version__,
            reference=self.models[0],
            text=text,
            rows=named,
            verdicts=compare_models(named),
        )

    def check_unchanged(self) -> None:
        """Refuse to write the figures of files that changed while they were computed (ResumeError)."""
        for checkpoint, inputs in zip(self.checkpoints, self.inputs, strict=True):
            now = checkpoint.inputs()
            changed = sorted(name for name in {*now, *inputs} if now.get(name) != inputs.get(name))
            if changed:
                raise ResumeError(
                    f"{checkpoint.address}: {changed[0]} changed while the evaluation ran. Delete "
                    f"{self.layer_pass.work.folder} and run the same command again."
                )


def _record_path(path: Path) -> Path:
    folder = path.parent / WORK_FOLDER
    if (folder / JOB_NAME).is_file():
        return folder / f"{path.name}{_SUFFIX}"
    return path.with_name(f".{path.name}{_SUFFIX}")


def is_computed(path: Path, identity: str) -> bool:
    """Return whether a file is there as it was written, and was computed from the inputs that `identity` digests."""
    try:
        record = read_sealed(dict[str, str], _record_path(path))
    except K2ConvertError:
        return False
    return path.is_file() and record == {"identity": identity, "document": file_digest(path)}


def check_replaced(output: Output, text: EvaluationText, models: Sequence[EvaluatedModel]) -> None:
    """Refuse to replace an evaluation on a different text, or one of more than `models`, or any other file.

    Raises DestinationError.

    The row of a file that is a checkpoint's own is known by its mode: the folder may have moved.
    """
    try:
        evaluation = find_evaluation(output.path)
    except MalformedFileError as error:
        raise DestinationError(
            f"{output.path}: is not an evaluation, so it is not replaced ({str(error).rstrip('.')}). Remove it, or "
            "name a different file with --out."
        ) from None
    if evaluation is None:
        return
    lost = evaluation.rows
    if evaluation.kind == KIND and _text_of(evaluation.text) == _text_of(text):
        new = {_key(output, model) for model in models}
        lost = tuple(row for row in evaluation.rows if _key(output, row.model) not in new)
    if lost or evaluation.kind != KIND:
        modes = ", ".join(dict.fromkeys(row.model.mode or shortened(row.model.name) for row in lost))
        texts = ", ".join(shortened(name) for name, _ in evaluation.text.texts)
        if evaluation.text.texts == text.texts and evaluation.text.token_ids != text.token_ids:
            texts += ", other tokens or windows of it"
        raise DestinationError(
            f"{output.path}: holds another evaluation ({texts}: {modes}). Delete it, or name a different file with "
            "--out of `k2convert evaluate`. One command computes several models and modes."
        )


def _key(output: Output, model: EvaluatedModel) -> tuple[str, str]:
    return model.name if output.checkpoint is None else "", model.mode


def _text_of(text: EvaluationText) -> tuple[object, ...]:
    return text.texts, text.token_ids, text.window


def write_evaluation(path: Path, document: Evaluation, identity: str) -> None:
    """Write an evaluation, after the digest of its inputs: a process killed in between leaves one that is unknown.

    Raises DiskFullError, DestinationWriteError.
    """
    data = encode(document)
    write_atomically(_record_path(path), seal({"identity": identity, "document": blake3(data).hexdigest()}))
    write_atomically(path, data)


def keep_evaluation(folder: Path, config: bytes) -> bool:
    """Let a result's evaluation name the config.json that is about to be written, if no figure depends on what differs.

    Else it goes into the work folder: it measures another model. Returns whether it stays.
    """
    path = folder / EVALUATION_NAME
    before = folder / CONFIG_NAME
    if not before.is_file():
        return True
    if network_fields(read_json_file(before)) != network_fields(parse_json_object(config.decode(), where=str(before))):
        path.replace(folder / WORK_FOLDER / EVALUATION_NAME)
        return False
    document = read_text_file(path)
    renamed = document.replace(file_digest(before), blake3(config).hexdigest()).encode()
    with suppress(K2ConvertError):
        record = read_sealed(dict[str, str], _record_path(path))
        if record["document"] == file_digest(path):
            write_atomically(_record_path(path), seal(record | {"document": blake3(renamed).hexdigest()}))
    write_atomically(path, renamed)
    return True
