"""The work folder of a pass, NAME.work next to the statistics file NAME: what an interrupted pass goes on from.

    NAME.work/.k2convert/calibration.json   what the pass depends on, field by field; written before the first layer.
                                            And the blake3 of every file below, which is kept before it gets its name
    NAME.work/.k2convert/lock               held by the running process (records/lock.py)
    NAME.work/.k2convert/download           shards of the Hub that the current layer needs
    NAME.work/layer-000.safetensors         the statistics of layer 0: the only claim that the layer is done
    NAME.work/hidden-001.safetensors        the hidden states that layer 1 takes, f32 [windows, tokens, hidden]

A layer's hidden states are complete before its statistics are written, and those that it took are removed after that.
A file is compared with its blake3 whenever it is read. A run that finds a damaged one begins with the last layer whose
files are whole, which is the first one if the hidden states before it are gone (`resume`).
The states of a dropped window are NaN.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from k2convert.calibrate.layer_statistics import LayerStatistics
from k2convert.calibrate.statistics import Statistics, StatisticsHeader, encode_statistics, open_statistics
from k2convert.checkpoint.files import (
    file_digest,
    list_folder,
    mapping_or_empty,
    read_json_file,
    write_atomically,
    writing,
)
from k2convert.checkpoint.folders import check_no_link, make_folder, opened_folder, remove_file, remove_folder
from k2convert.checkpoint.header import encode_header, read_header
from k2convert.checkpoint.names import (
    CALIBRATION_JOB_NAME,
    DOWNLOADS_FOLDER,
    SHARD_SUFFIX,
    WORK_FOLDER,
    WORK_SUFFIX,
)
from k2convert.checkpoint.reader import ShardReader
from k2convert.checkpoint.writer import ALIGNMENT, ShardWriter
from k2convert.errors import CheckpointError, DestinationError, MalformedFileError, ResumeError
from k2convert.records.checksum import seal, unseal
from k2convert.records.command import say_own_command
from k2convert.records.events import SILENT, Events, Keep
from k2convert.records.job_description import changed_shards, describe_changes, source_error
from k2convert.records.lock import lock_destination

HIDDEN_STATES: Final = "hidden_states"

HiddenStates = NDArray[np.float32]
"""Hidden states of some windows, f32 [windows, tokens, hidden]."""


@dataclass(frozen=True, slots=True)
class PassJob:
    """What a pass is. `identity` has every field that its statistics depend on; a resumed pass must have the same.

    `chunk` is how many windows are computed at one time. The first run decides it, since sums depend on it.
    `source` is the identity of every source shard (records/fingerprint.py).
    """

    identity: dict[str, Any]
    chunk: int
    source: dict[str, str]


class WorkFolder:
    """The work folder of one statistics file."""

    def __init__(self, statistics: Path) -> None:
        self.statistics = statistics
        self.folder = statistics.with_name(statistics.name + WORK_SUFFIX)
        self.downloads = self.folder / WORK_FOLDER / DOWNLOADS_FOLDER
        self._job_path = self.folder / WORK_FOLDER / CALIBRATION_JOB_NAME

    @contextmanager
    def locked(self, *, events: Events = SILENT) -> Generator[Keep]:
        """Create the folder and lock it for this process; raises LockedError while another process has it."""
        if self.folder.is_dir() and not (self.folder / WORK_FOLDER).is_dir() and list_folder(self.folder):
            raise DestinationError(
                f"{self.folder}: is not empty, and its files are not from k2convert. Remove it, or choose a different "
                "name for the statistics."
            )
        make_folder(self.folder / WORK_FOLDER, root=self.statistics.parent)
        with lock_destination(self.folder, events=events) as keep:
            yield keep

    def job(self) -> PassJob | None:
        """Return the pass begun here, or None if there is none or its description is damaged; refuses a link."""
        found = self._document()
        try:
            return PassJob(found["identity"], found["chunk"], found["source"])
        except KeyError:
            return None

    def _document(self) -> dict[str, Any]:
        """Return the description of the pass; nothing if there is none or it is damaged."""
        check_no_link(self._job_path)
        try:
            return unseal(read_json_file(self._job_path))
        except (MalformedFileError, ValueError):
            return {}

    def _digests(self) -> dict[str, Any]:
        return mapping_or_empty(self._document().get("files"))

    def begin(self, job: PassJob, *, events: Events) -> PassJob:
        """Begin a pass, or resume it: returns the job with the chunk of its first run. Raises ResumeError.

        If its description is damaged, no file of the folder is known: all are removed.
        """
        found = self.job()
        if found is None:
            unknown = [path for path in list_folder(self.folder) if path.is_file()]
            if unknown:
                events.note(f"{self._job_path}: damaged: the calibration starts again at the beginning")
            for path in unknown:
                self.remove_file(path)
            write_atomically(self._job_path, seal(asdict(job)), root=self.folder)
            return job
        if changes := describe_changes(found.identity, job.identity):
            raise ResumeError(
                f"{self.folder}: holds a different pass: {changes}. {say_own_command(self.folder)}Repeat it with the "
                "same options, choose a different name for the statistics, or delete this folder to start over."
            )
        if changed := changed_shards(found.source, job.source):
            raise source_error(changed[0], self.folder)
        return replace(job, chunk=found.chunk)

    def layer_path(self, layer: int) -> Path:
        """Return the file of a layer's statistics."""
        return self.folder / f"layer-{layer:03}{SHARD_SUFFIX}"

    def hidden_path(self, layer: int) -> Path:
        """Return the file of the hidden states that a layer takes."""
        return self.folder / f"hidden-{layer:03}{SHARD_SUFFIX}"

    def num_finished(self) -> int:
        """Return how many layers are done. They are the first ones."""
        layer = 0
        while self.layer_path(layer).is_file():
            layer += 1
        return layer

    def inputs(self, layer: int) -> tuple[Path, ...]:
        """Return the files that a layer but the first takes."""
        return (self.hidden_path(layer),)

    def outputs(self, layer: int) -> tuple[Path, ...]:
        """Return the files that say what was found in a layer; the claim that it is done comes first."""
        return (self.layer_path(layer),)

    def record(self, path: Path, digest: str) -> None:
        """Keep the blake3 of a file, which is about to get its name."""
        document = self._document()
        document["files"] = mapping_or_empty(document.get("files")) | {path.name: digest}
        write_atomically(self._job_path, seal(document), root=self.folder)

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
        digests = self._digests()
        for path in paths:
            if not path.is_file():
                return f"{path}: missing"
            if file_digest(path) != digests.get(path.name):
                return f"{path}: damaged"
        return None

    def resume(self, *, num_layers: int, also: Mapping[int, Iterable[Path]], events: Events) -> int:
        """Check what an earlier run left and return how many layers are done; the files of others are removed.

        `also` has the files of a layer that are needed besides its statistics. If one is damaged, that is a note.
        """
        done, first, damage = self.num_finished(), 0, None
        while first < done and not (damage := self._damage((self.layer_path(first), *also.get(first, ())))):
            first += 1
        while 0 < first < num_layers and (found := self._damage(self.inputs(first))):
            first, damage = first - 1, damage or found
        if damage:
            place = f"with layer {first}" if first else "at the beginning"
            events.note(f"{damage}: the calibration starts again {place}")
            self.forget(first, num_layers=num_layers)
        return first

    def forget(self, first: int, *, num_layers: int) -> None:
        """Remove the files of the layers from `first` on, but what it takes. Claims go first, the last one first."""
        for layer in reversed(range(first, num_layers)):
            self.remove_file(self.layer_path(layer))
        for layer in range(first, num_layers):
            for path in (*self.outputs(layer), *self.inputs(layer + 1)):
                self.remove_file(path)

    def write_layer(self, layer: LayerStatistics, header: StatisticsHeader) -> None:
        """Declare a layer done, by writing its statistics."""
        self.write(self.layer_path(layer.layer), encode_statistics([layer], header))

    def read_layer(self, layer: int) -> Statistics:
        """Open the statistics of a layer that is done; raises CheckpointError if they are damaged."""
        path = self.layer_path(layer)
        self.check(path)
        return open_statistics(path)

    def sweep(self, first: int) -> None:
        """Remove the hidden states that no layer from `first` on takes."""
        for layer in range(first):
            for path in self.inputs(layer):
                self.remove_file(path)

    def remove(self) -> None:
        """Remove the folder: the pass is done. What it is for is removed last."""
        for layer in range(self.num_finished()):
            self.remove_file(self.layer_path(layer))
        remove_folder(self.folder, root=self.folder.parent)

    def remove_file(self, path: Path) -> None:
        """Remove a file of the folder, if it is there."""
        with writing(path), opened_folder(self.folder) as folder:
            remove_file(path, folder)

    def writing_hidden(
        self, layer: int, shape: tuple[int, int, int]
    ) -> AbstractContextManager[Callable[[HiddenStates], None]]:
        """Yield a function that appends windows to a layer's hidden states; the file appears at the end of the block.

        Raises DiskFullError, DestinationWriteError.
        """
        return self.writing_states(self.hidden_path(layer), shape)

    def reading_hidden(
        self, layer: int, shape: tuple[int, int, int]
    ) -> AbstractContextManager[Callable[[int, int], HiddenStates]]:
        """Yield a function that reads windows [first, stop) of a layer's hidden states; raises CheckpointError."""
        return self.reading_states(self.hidden_path(layer), shape)

    @contextmanager
    def reading_states(self, path: Path, shape: tuple[int, int, int]) -> Generator[Callable[[int, int], HiddenStates]]:
        """Yield a function that reads windows [first, stop) of the hidden states in a file; raises CheckpointError."""
        self.check(path)
        info = read_header(path).tensors[HIDDEN_STATES]
        window_bytes = prod(shape[1:]) * 4
        with ShardReader(lambda _: path) as reader:

            def read(first: int, stop: int) -> HiddenStates:
                data = reader.read(info, begin=first * window_bytes, end=stop * window_bytes)
                return data.view(np.float32).reshape(stop - first, *shape[1:])

            yield read

    @contextmanager
    def writing_states(self, path: Path, shape: tuple[int, int, int]) -> Generator[Callable[[HiddenStates], None]]:
        """Yield a function that appends windows to a file of hidden states, which appears at the end of the block.

        Raises DiskFullError, DestinationWriteError.
        """
        num_bytes = prod(shape) * 4
        header = encode_header([(HIDDEN_STATES, "F32", shape, num_bytes)], metadata={}, alignment=ALIGNMENT)
        with ShardWriter(path, len(header) + num_bytes) as writer:
            writer.write(header)
            yield lambda states: writer.write(np.ascontiguousarray(states).reshape(-1).view(np.uint8).data)
            writer.commit(accept=lambda digest: self.record(path, digest))
