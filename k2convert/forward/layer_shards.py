"""Layers of checkpoints on the Hub: brought to disk one at a time, and dropped after it.

What a layer needs of a checkpoint is fetched before the layer and dropped after it. If the disk allows it, the next
part is fetched while a layer is computed. Each part has a folder of its own, because two layers may need different
parts of one shard.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Final

from k2convert.checkpoint.files import list_folder
from k2convert.checkpoint.folders import make_folder
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.hub.ranges import Ranges, RemoteShards, ranges_of
from k2convert.models import detect_family
from k2convert.models.names import Role
from k2convert.records.events import Events

_FOLDER: Final = "layer-{:03}"


def layer_ranges(source: Checkpoint, num_layers: int) -> tuple[Ranges, ...]:
    """Return the byte ranges that each layer reads. The first one also reads the embedding."""
    family = detect_family(source)
    found: tuple[list[TensorInfo], ...] = tuple([] for _ in range(num_layers))
    for name, tensor in source.tensors.items():
        place = family.classify(name.rpartition(".")[0])
        if place is None:
            continue
        layer = 0 if place.role is Role.EMBEDDINGS else place.layer
        if layer is not None and layer < num_layers:
            found[layer].append(tensor)
    return tuple(map(ranges_of, found))


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Tensors that one layer reads of one checkpoint. `remote` is None for a folder, of which nothing is fetched."""

    checkpoint: Checkpoint
    remote: RemoteShards | None
    ranges: Ranges

    @property
    def num_bytes(self) -> int:
        """The bytes to fetch."""
        if self.remote is None:
            return 0
        return self.remote.bytes_needed(self.ranges)


@dataclass(slots=True)
class LayerShards:
    """The parts that layers read, in their order, in folders below `folder`.

    `space` is how many bytes they may take at once. A set `stop` ends what is being fetched.
    """

    parts: Sequence[LayerPart]
    folder: Path
    space: int
    events: Events
    stop: Event = field(default_factory=Event)
    _fetched: dict[int, Future[None]] = field(default_factory=dict[int, Future[None]], init=False)
    _pool: ThreadPoolExecutor = field(init=False)

    @contextmanager
    def opened(self, first: int) -> Generator[None]:
        """Fetch during the block. Removes earlier downloads, except what arrived of the part `first`.

        Sets `stop` if the block fails, so that nothing more is fetched.
        """
        if all(part.remote is None for part in self.parts):
            yield
            return
        make_folder(self.folder)
        for path in list_folder(self.folder):
            if path.name != _FOLDER.format(first):
                shutil.rmtree(path, ignore_errors=True)
        with ThreadPoolExecutor(1, thread_name_prefix="fetch") as self._pool:
            try:
                yield
            except BaseException:
                self.stop.set()
                raise
            finally:
                for future in self._fetched.values():
                    future.cancel()

    @contextmanager
    def around(self, number: int) -> Generator[Checkpoint]:
        """Bring what a part needs, and drop it after the block; yields the checkpoint to read it from."""
        part = self.parts[number]
        folder = self.folder / _FOLDER.format(number)
        if part.remote is None:
            yield part.checkpoint
            return
        self._submit(number).result()
        following = number + 1
        if following < len(self.parts) and part.num_bytes + self.parts[following].num_bytes <= self.space:
            self._submit(following)
        yield replace(part.checkpoint, folder=folder)
        shutil.rmtree(folder, ignore_errors=True)

    def _submit(self, number: int) -> Future[None]:
        if number not in self._fetched:
            self._fetched[number] = self._pool.submit(self._fetch, number)
        return self._fetched[number]

    def _fetch(self, number: int) -> None:
        part = self.parts[number]
        if part.remote is None:
            return

        def arrived(num_bytes: int, is_new: bool) -> None:
            self.events.transferred(downloaded=num_bytes, is_new=is_new)

        remote = replace(part.remote, folder=self.folder / _FOLDER.format(number))
        remote.fetch(part.ranges, stop=self.stop, arrived=arrived)
