"""The work folder of a layer pass: what an interrupted one goes on from.

    NAME.work/.k2convert/calibration.json   what the pass depends on, field by field; written before the first layer.
                                            And the blake3 of every file below, which is kept before it gets its name.
                                            The file of an evaluation is evaluation.json
    NAME.work/.k2convert/lock               held by the running process, if nothing else locks it (records/lock.py)
    NAME.work/.k2convert/download           shards of the Hub that the current layer needs
    NAME.work/layer-000.json                what was decided in layer 0: the only claim that the layer is done. That of
                                            an evaluation is layer-000.safetensors
    NAME.work/STREAM-001.safetensors        the hidden states that layer 1 reads, [windows, tokens, hidden]: FP32 in an
                                            evaluation, BF16 (nearest, ties to even) in a calibration

A layer's other files are complete before that claim is written, and the hidden states that it read are removed after
that. A file is compared with its blake3 whenever it is read. A run that finds a damaged one begins with the last layer
whose files are whole, which is the first one if the hidden states before it are gone (`resume`). The states of a
dropped window are NaN.
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

from k2convert.checkpoint.files import file_digest, list_folder, write_atomically, writing
from k2convert.checkpoint.folders import check_no_link, make_folder, remove_file
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
from k2convert.errors import CheckpointError, DestinationError, MalformedFileError, ResumeError
from k2convert.quantize.formats.bf16 import bf16_bits, bf16_values
from k2convert.records.command import say_own_command
from k2convert.records.document import Count, JsonObject, read_sealed, seal
from k2convert.records.events import SILENT, Events, Keep
from k2convert.records.fingerprint import (
    IDENTITY_VERSION,
    changed_shards,
    check_version,
    describe_changes,
    other_instructions,
    source_error,
)
from k2convert.records.lock import lock_destination

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
    the identity of every source shard (records/fingerprint.py), `files` the blake3 of every file by its name, `version`
    the IDENTITY_VERSION of the release that began it.
    """

    identity: JsonObject
    chunk: Count
    source: dict[str, str]
    files: dict[str, str] = field(default_factory=dict[str, str])
    version: Count = 1


Purpose = Literal["calibration", "evaluation"]
"""Purposes of a layer pass."""
_JOBS: Final[dict[Purpose, tuple[str, str]]] = {
    "calibration": (CALIBRATION_JOB_NAME, "choose a different destination"),
    "evaluation": (EVALUATION_NAME, "name a different file with --out"),
}
"""The name of a layer pass's description, and how to choose another folder."""
_CLAIMS: Final[dict[Purpose, str]] = {"calibration": "layer.json", "evaluation": "layer"}
"""The kind of file that says that a layer is done."""
_STATES: Final[dict[Purpose, tuple[str, int]]] = {"calibration": ("BF16", 2), "evaluation": ("F32", 4)}
"""The dtype of hidden states on disk, and its bytes."""


class WorkFolder:
    """The work folder of a layer pass. `streams` are the kinds of hidden states, `others` what else a layer keeps."""

    def __init__(
        self,
        folder: Path,
        *,
        streams: tuple[str, ...] = (HIDDEN,),
        others: tuple[str, ...] = (),
        purpose: Purpose = "calibration",
    ) -> None:
        self.folder = folder
        self.downloads = folder / WORK_FOLDER / DOWNLOADS_FOLDER
        self._streams = streams
        self._claim = _CLAIMS[purpose]
        self._outputs = (self._claim, *others)
        self.purpose: Purpose = purpose
        name, self._elsewhere = _JOBS[purpose]
        self._job_path = folder / WORK_FOLDER / name

    @contextmanager
    def locked(self, *, events: Events = SILENT) -> Generator[Keep]:
        """Create the folder and lock it for this process; raises LockedError while another process has it."""
        if self.folder.is_dir() and not (self.folder / WORK_FOLDER).is_dir() and list_folder(self.folder):
            raise DestinationError(
                f"{self.folder}: is not empty, and its files are not from k2convert. Remove it, or {self._elsewhere}."
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

    def _describe(self, job: PassJob) -> None:
        write_atomically(self._job_path, seal(job))

    def begin(self, job: PassJob, *, events: Events) -> PassJob:
        """Begin a layer pass, or resume it: returns the job with the chunk of its first run. Raises ResumeError.

        If its description is damaged, no file of the folder is known: all are removed.
        """
        found = self.job()
        if found is None:
            unknown = [path for path in list_folder(self.folder) if path.is_file()]
            if unknown:
                events.note(f"{self._job_path}: damaged: the {self.purpose} starts again at the beginning")
            for path in unknown:
                self.remove_file(path)
            self._describe(replace(job, version=IDENTITY_VERSION))
            return job
        check_version(found.version, self.folder)
        if changes := describe_changes(found.identity, job.identity):
            how = other_instructions(found.identity, job.identity)
            again = how or f"{say_own_command(self.folder)}Repeat it with the same options. "
            raise ResumeError(
                f"{self.folder}: holds a different {self.purpose}: {changes}. {again}Otherwise {self._elsewhere}, or "
                "delete this folder to start over."
            )
        if changed := changed_shards(found.source, job.source):
            raise source_error(changed[0], self.folder)
        return found

    def path(self, kind: str, layer: int) -> Path:
        """Return the file of a kind of a layer: tensors unless the kind has a suffix. A stream's is what it reads."""
        stem = Path(kind).stem
        suffix = Path(kind).suffix or SHARD_SUFFIX
        return self.folder / f"{stem}-{layer:03}{suffix}"

    def claim(self, layer: int) -> Path:
        """Return the file that says that a layer is done."""
        return self.path(self._claim, layer)

    def num_finished(self, job: PassJob | None = None) -> int:
        """Return how many layers are done: they are the first ones. With a `job`, of this job."""
        if job is not None and ((found := self.job()) is None or found.identity != job.identity):
            return 0
        layer = 0
        while self.claim(layer).is_file():
            layer += 1
        return layer

    def _inputs(self, layer: int) -> list[Path]:
        """Return the files that a layer but the first reads."""
        return [self.path(stream, layer) for stream in self._streams]

    def record(self, path: Path, digest: str) -> None:
        """Keep the blake3 of a file, which is about to get its name."""
        found = self.job()
        assert found is not None, "a layer pass writes after `begin`"
        self._describe(replace(found, files=found.files | {path.name: digest}))

    def write(self, path: Path, content: bytes) -> None:
        """Write a small file and keep its blake3; raises DiskFullError, DestinationWriteError."""
        self.record(path, blake3(content).hexdigest())
        write_atomically(path, content)

    def check(self, path: Path) -> None:
        """Raise CheckpointError if a file is not there as it was written."""
        if damage := self._damage((path,)):
            raise CheckpointError(f"{damage}. Repeat the command: what was in the file is computed again.")

    def _damage(self, paths: Iterable[Path]) -> str | None:
        """Return which file is not there as it was written, None if all are."""
        found = self.job()
        digests = {} if found is None else found.files
        for path in paths:
            if not path.is_file():
                return f"{path}: missing"
            if file_digest(path) != digests.get(path.name):
                return f"{path}: damaged"
        return None

    def resume(self, *, num_layers: int, also: Mapping[int, Iterable[Path]], events: Events) -> int:
        """Check what an earlier run left and return how many layers are done; the files of others are removed.

        `also` has the files of a layer that are needed besides its claim. If one is damaged, that is a note.
        """
        done = self.num_finished()
        first = 0
        damage = None
        while first < done and not (damage := self._damage((self.claim(first), *also.get(first, ())))):
            first += 1
        while 0 < first < num_layers and (found := self._damage(self._inputs(first))):
            first = first - 1
            damage = damage or found
        if damage:
            place = f"with layer {first}" if first else "at the beginning"
            events.note(f"{damage}: the {self.purpose} starts again {place}")
            self.forget(first, num_layers=num_layers)
        return first

    def forget(self, first: int, *, num_layers: int) -> None:
        """Remove the files of the layers from `first` on, but what it reads. Claims go first, the last one first."""
        for layer in reversed(range(first, num_layers)):
            self.remove_file(self.claim(layer))
        for layer in range(first, num_layers):
            for path in (*(self.path(kind, layer) for kind in self._outputs), *self._inputs(layer + 1)):
                self.remove_file(path)

    def sweep(self, first: int) -> None:
        """Remove the hidden states that no layer from `first` on reads."""
        for layer in range(first):
            for path in self._inputs(layer):
                self.remove_file(path)

    def remove(self) -> None:
        """Remove the folder: the layer pass is done. What it is for is removed last."""
        for layer in range(self.num_finished()):
            self.remove_file(self.claim(layer))
        for path in list_folder(self.folder):
            if path.is_file():
                self.remove_file(path)
        shutil.rmtree(self.folder, ignore_errors=True)

    def remove_leftovers(self, job: PassJob) -> None:
        """Remove the folder of a job that is done, if a run was killed while it removed it."""
        found = self.job()
        is_own = (self.folder / WORK_FOLDER).is_dir() and (found is None or found.identity == job.identity)
        if is_own or (self.folder.is_dir() and not list_folder(self.folder)):
            self.remove()

    def remove_file(self, path: Path) -> None:
        """Remove a file of the folder, if it is there."""
        with writing(path):
            remove_file(path)

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
                for place, window in enumerate(range(first, stop)):
                    data = reader.read(info, begin=window * window_bytes, end=(window + 1) * window_bytes)
                    values = data.view(np.float32) if dtype == "F32" else bf16_values(data.view(np.uint16))
                    states[place] = values.reshape(shape[1:])
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
