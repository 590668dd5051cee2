"""The work folder of a layer pass: what an interrupted one goes on from.

    NAME.work/.k2convert/calibration.json   what the pass depends on, field by field; written before the first layer.
                                            The file of an evaluation is evaluation.json
    NAME.work/.k2convert/done/layer-000.json   layer 0 is done (LayerStep): the blake3 of every file that it wrote, and
                                            what was decided. The head of an evaluation comes after the last layer
    NAME.work/.k2convert/lock               held by the running process, if nothing else locks it (records/work_log.py)
    NAME.work/.k2convert/download           shards of the Hub that the current layer needs
    NAME.work/layer-000.safetensors         the figures of layer 0, in an evaluation (evaluation/streamed.py)
    NAME.work/STREAM-001.safetensors        the hidden states that layer 1 reads, [windows, tokens, hidden]: FP32 in an
                                            evaluation, BF16 (nearest, ties to even) in a calibration

The hidden states that a layer read are removed when it is done. With attention residuals, those that a layer read which
begins a block are kept for all later layers, and the embedding, which layer 0 reads, is here too. A file is compared
with its blake3 whenever it is read.
A run that finds a damaged one begins with the last layer whose files are whole, which is the first one if the hidden
states before it are gone (`resume`). The states of a dropped window are NaN.
"""

import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Final, Literal

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from k2convert.checkpoint.files import discard_file, file_digest, list_folder, write_atomically
from k2convert.checkpoint.folders import check_no_link, make_folder
from k2convert.checkpoint.header import encode_header, read_header
from k2convert.checkpoint.names import (
    CALIBRATION_JOB_NAME,
    DOWNLOADS_FOLDER,
    EVALUATION_NAME,
    SHARD_SUFFIX,
    WORK_FOLDER,
)
from k2convert.checkpoint.reader import ShardReader
from k2convert.checkpoint.writer import ALIGNMENT, ShardWriter
from k2convert.errors import CheckpointError, DestinationError, MalformedFileError
from k2convert.models.names import block_starts
from k2convert.quantize.formats.bf16 import bf16_bits, bf16_values
from k2convert.records.document import Count, Digest, JsonObject, read_sealed, seal
from k2convert.records.events import SILENT, Events, Keep
from k2convert.records.fingerprint import IDENTITY_VERSION, changed_shards, source_error
from k2convert.records.work_log import WorkLog, check_same, lock_destination

HIDDEN_STATES: Final = "hidden_states"
HIDDEN: Final = "hidden"
"""The stream of hidden states of the source's own model."""

HiddenStates = NDArray[np.float32]
"""Hidden states of some windows, f32 [windows, tokens, hidden]."""
ReadStates = Callable[[int, int], HiddenStates]
"""Reads windows [first, stop)."""
WriteStates = Callable[[HiddenStates], None]
"""Appends windows."""


@dataclass(frozen=True, slots=True)
class PassJob:
    """Identity of a layer pass. `identity` has every field that its results depend on; a resumed pass needs the same.

    `chunk` is how many windows are computed at a time. The first run decides it, since sums depend on it. `source` is
    the identity of every source shard (records/fingerprint.py), `version` the IDENTITY_VERSION of the release that
    began it. `files` are of release 0.3 alone.
    """

    identity: JsonObject
    chunk: Count
    source: dict[str, str]
    files: dict[str, str] = field(default_factory=dict[str, str])
    version: Count = 1


@dataclass(frozen=True, slots=True)
class LayerStep:
    """A layer that is done: the blake3 of every file that it wrote, and what was decided."""

    files: dict[str, Digest]
    result: JsonObject = field(default_factory=JsonObject)


Purpose = Literal["calibration", "evaluation"]
"""Purposes of a layer pass."""
_JOBS: Final[dict[Purpose, tuple[str, str]]] = {
    "calibration": (CALIBRATION_JOB_NAME, "Choose a different destination"),
    "evaluation": (EVALUATION_NAME, "Name a different file with --out"),
}
"""The name of a layer pass's description, and how to choose another folder."""
FIGURES: Final = "layer"
"""The kind of file that has the figures of a layer of an evaluation."""
_STATES: Final[dict[Purpose, tuple[str, int]]] = {"calibration": ("BF16", 2), "evaluation": ("F32", 4)}
"""The dtype of hidden states on disk, and its bytes."""


class WorkFolder:
    """The work folder of a layer pass. `streams` are the kinds of hidden states, `others` what else a layer keeps.

    `residual_block` is that of the model's architecture.
    """

    def __init__(
        self,
        folder: Path,
        *,
        streams: tuple[str, ...] = (HIDDEN,),
        others: tuple[str, ...] = (),
        purpose: Purpose = "calibration",
        residual_block: int = 0,
    ) -> None:
        self.folder = folder
        self.downloads = folder / WORK_FOLDER / DOWNLOADS_FOLDER
        self._streams = streams
        self.residual_block = residual_block
        self._outputs = others if purpose == "calibration" else (FIGURES, *others)
        self._log = WorkLog(folder / WORK_FOLDER, LayerStep)
        self._written = dict[str, str]()  # the blake3 of files of the layer in work
        self.purpose: Purpose = purpose
        name, self._elsewhere = _JOBS[purpose]
        self._job_path = folder / WORK_FOLDER / name

    @contextmanager
    def locked(self, *, events: Events = SILENT) -> Generator[Keep]:
        """Create the folder and lock it for this process; raises LockedError while another process has it."""
        if self.folder.is_dir() and not (self.folder / WORK_FOLDER).is_dir() and list_folder(self.folder):
            raise DestinationError(
                f"{self.folder}: is not empty, and its files are not from k2convert. Remove it. Or: {self._elsewhere}."
            )
        for path in (self.folder, self.folder / WORK_FOLDER):
            check_no_link(path)
        make_folder(self.folder / WORK_FOLDER)
        with lock_destination(self.folder, events=events) as keep:
            yield keep

    def job(self) -> PassJob | None:
        """Return the layer pass begun here, or None if there is none or its description is damaged; refuses a link."""
        check_no_link(self._job_path)
        try:
            return read_sealed(PassJob, self._job_path)
        except MalformedFileError:
            return None

    def begin(self, job: PassJob, *, events: Events) -> PassJob:
        """Begin a layer pass, or resume it: returns the job with the chunk of its first run. Raises ResumeError.

        If its description is damaged, no file of the folder is known: all are removed.
        """
        self._written.clear()
        before = self.job()
        if before is not None:
            check_same(
                self.folder,
                before.identity,
                job.identity,
                version=before.version,
                kind=self.purpose,
                elsewhere=self._elsewhere,
            )
            if changed := changed_shards(before.source, job.source):
                raise source_error(changed[0], self.folder)
        make_folder(self._log.folder)
        if before is not None:
            return before
        unknown = [path for path in list_folder(self.folder) if path.is_file()]
        if unknown or self._log.steps():
            events.note(f"{self._job_path}: damaged: the {self.purpose} starts again at the beginning")
        self._forget_steps()
        for path in unknown:
            discard_file(path)
        write_atomically(self._job_path, seal(replace(job, version=IDENTITY_VERSION)))
        return job

    def path(self, kind: str, layer: int) -> Path:
        """Return the file of a kind of a layer. That of a stream is what the layer reads."""
        return self.folder / f"{kind}-{layer:03}{SHARD_SUFFIX}"

    def num_finished(self, job: PassJob | None = None) -> int:
        """Return how many layers are done: they are the first ones. With a `job`, of this job."""
        if job is not None and ((saved := self.job()) is None or saved.identity != job.identity):
            return 0
        layer = 0
        while self._log.path(_step(layer)).is_file():
            layer += 1
        return layer

    def finish(self, layer: int, result: JsonObject | None = None) -> None:
        """Declare a layer done, with what was decided. Its files are there."""
        self._log.declare(_step(layer), LayerStep(dict(self._written), result or {}))
        self._written.clear()

    def result(self, layer: int) -> JsonObject:
        """Return what was decided in a layer that is done; raises CheckpointError if that is damaged."""
        if damage := self._damage(layer, ()):
            raise _damaged(damage)
        return self._log.read(_step(layer)).result

    def _states(self, layer: int) -> list[Path]:
        """Return the files of the hidden states before a layer."""
        return [self.path(stream, layer) for stream in self._streams]

    def _inputs(self, layer: int) -> list[Path]:
        """Return the files that a layer but the first reads."""
        return [path for number in (*block_starts(layer, self.residual_block), layer) for path in self._states(number)]

    def record(self, path: Path, digest: str) -> None:
        """Keep the blake3 of a file that the layer in work writes."""
        self._written[path.name] = digest

    def write(self, path: Path, content: bytes) -> None:
        """Write a small file and keep its blake3; raises DiskFullError, DestinationWriteError."""
        write_atomically(path, content)
        self.record(path, blake3(content).hexdigest())

    def check(self, path: Path) -> None:
        """Raise CheckpointError if a file is not there as it was written."""
        if damage := self._damage(None, (path,)):
            raise _damaged(damage)

    def _damage(self, layer: int | None, paths: Iterable[Path]) -> str | None:
        """Return which file is not there as it was written, that of a layer or one of `paths`; None if all are."""
        digests = dict(self._written)
        for number in range(self.num_finished()):
            try:
                digests |= self._log.read(_step(number)).files
            except MalformedFileError:
                if number == layer:
                    return f"{self._log.path(_step(number))}: damaged"
        for path in paths:
            if not path.is_file():
                return f"{path}: missing"
            if file_digest(path) != digests.get(path.name):
                return f"{path}: damaged"
        return None

    def resume(self, *, num_layers: int, also: Mapping[int, Iterable[Path]], events: Events) -> int:
        """Check what an earlier run left and return how many layers are done; the files of others are removed.

        `also` has the files of a layer that are needed besides its figures. If one is damaged, that is a note.
        """
        done = self.num_finished()
        first = 0
        damage = None
        while first < done and not (damage := self._damage(first, (*self._figures(first), *also.get(first, ())))):
            first += 1
        while 0 < first < num_layers and (input_damage := self._damage(None, self._inputs(first))):
            first = first - 1
            damage = damage or input_damage
        if damage:
            start = f"with layer {first}" if first else "at the beginning"
            events.note(f"{damage}: the {self.purpose} starts again {start}")
            self.forget(first, num_layers=num_layers)
        return first

    def _figures(self, layer: int) -> list[Path]:
        return [self.path(FIGURES, layer)] if self.purpose == "evaluation" else []

    def _forget_steps(self) -> None:
        for step in reversed(self._log.steps()):
            self._log.forget(step)

    def forget(self, first: int, *, num_layers: int) -> None:
        """Forget the layers from `first` on, the last one first, and remove their files, but not what `first` reads."""
        for layer in reversed(range(first, num_layers)):
            self._log.forget(_step(layer))
        for layer in range(first, num_layers):
            for path in (*(self.path(kind, layer) for kind in self._outputs), *self._states(layer + 1)):
                discard_file(path)

    def delete_before(self, first: int) -> None:
        """Remove the hidden states that no layer from `first` on reads."""
        for layer in set(range(first)) - {*block_starts(first, self.residual_block)}:
            for path in self._states(layer):
                discard_file(path)

    def remove(self) -> None:
        """Remove the folder: the layer pass is done. What it is for is removed last."""
        self._forget_steps()
        for path in list_folder(self.folder):
            if path.is_file():
                discard_file(path)
        shutil.rmtree(self.folder, ignore_errors=True)

    def remove_leftovers(self, job: PassJob) -> None:
        """Remove the folder of a job that is done, if a run was killed while it removed it."""
        saved = self.job()
        is_own = (self.folder / WORK_FOLDER).is_dir() and (saved is None or saved.identity == job.identity)
        if is_own or (self.folder.is_dir() and not list_folder(self.folder)):
            self.remove()

    @contextmanager
    def reading(self, stream: str, layer: int, shape: tuple[int, int, int]) -> Generator[ReadStates]:
        """Yield a function that reads windows of the hidden states that a layer reads; raises CheckpointError."""
        path, (dtype, size) = self.path(stream, layer), _STATES[self.purpose]
        self.check(path)
        info = read_header(path).tensors[HIDDEN_STATES]
        window_bytes = prod(shape[1:]) * size
        with ShardReader(lambda _: path) as reader:

            def read(first: int, stop: int) -> HiddenStates:
                states = np.empty((stop - first, *shape[1:]), dtype=np.float32)
                for index, window in enumerate(range(first, stop)):
                    data = reader.read(info, begin=window * window_bytes, end=(window + 1) * window_bytes)
                    values = data.view(np.float32) if dtype == "F32" else bf16_values(data.view(np.uint16))
                    states[index] = values.reshape(shape[1:])
                return states

            yield read

    @contextmanager
    def writing(self, stream: str, layer: int, shape: tuple[int, int, int]) -> Generator[WriteStates]:
        """Yield a function that appends windows to what a layer will read; the file appears at the end of the block.

        Raises DiskFullError, DestinationWriteError.
        """
        path, (dtype, size) = self.path(stream, layer), _STATES[self.purpose]
        num_bytes = prod(shape) * size
        header = encode_header([(HIDDEN_STATES, dtype, shape, num_bytes)], metadata={}, alignment=ALIGNMENT)
        with ShardWriter(path, len(header) + num_bytes) as writer:
            writer.write(header)

            def write(states: HiddenStates) -> None:
                for window in states:
                    values = np.ascontiguousarray(window) if dtype == "F32" else bf16_bits(window)
                    writer.write(values.reshape(-1).view(np.uint8).data)

            yield write
            writer.commit(accept=lambda digest: self.record(path, digest))


def _step(layer: int) -> str:
    return f"layer-{layer:03}"


def _damaged(damage: str) -> CheckpointError:
    return CheckpointError(f"{damage}. Repeat the command: what was in the file is computed again.")
