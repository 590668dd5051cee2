"""What each layer of a walk needs of a source on the Hub: fetched before the layer, dropped after it.

If the disk allows it, the next layer's bytes are fetched while a layer is computed. Each layer has a folder of its own,
because two layers may need different parts of one shard.
"""

from collections import defaultdict
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Final

from k2convert.checkpoint.files import list_folder
from k2convert.checkpoint.folders import make_folder, remove_folder
from k2convert.checkpoint.index import Checkpoint
from k2convert.hub.ranges import Ranges, RemoteShards
from k2convert.models import detect_family
from k2convert.models.names import Role
from k2convert.records.events import Events

_FOLDER: Final = "layer-{:03}"


def layer_ranges(source: Checkpoint, num_layers: int) -> tuple[Ranges, ...]:
    """Return the byte ranges that each layer reads. The first one also reads the embedding."""
    family = detect_family(source)
    found: tuple[Ranges, ...] = tuple(defaultdict(set) for _ in range(num_layers))
    for name, tensor in source.tensors.items():
        place = family.classify(name.rpartition(".")[0])
        layer = None if place is None else 0 if place.role is Role.EMBEDDINGS else place.layer
        if layer is not None and layer < num_layers:
            found[layer][tensor.shard].add((tensor.begin, tensor.end))
    return found


@dataclass(slots=True)
class LayerShards:
    """The parts of a source on the Hub, layer by layer, in folders below `remote.folder`.

    `room` is how many bytes they may take at once. A set `stop` ends what is being fetched.
    """

    source: Checkpoint
    remote: RemoteShards
    ranges: Sequence[Ranges]
    room: int
    events: Events
    stop: Event = field(default_factory=Event)
    _fetched: dict[int, Future[None]] = field(default_factory=dict[int, Future[None]], init=False)
    _pool: ThreadPoolExecutor = field(init=False)

    def takes(self, layer: int) -> int:
        """Return the bytes to fetch for a layer."""
        return self.remote.takes(self.ranges[layer])

    @contextmanager
    def opened(self, first: int) -> Generator[None]:
        """Fetch during the block. Removes earlier downloads, except what arrived of the layer `first`.

        Sets `stop` if the block fails, so that nothing more is fetched.
        """
        root = self.remote.folder
        make_folder(root)
        for path in list_folder(root):
            if path.name != _FOLDER.format(first):
                remove_folder(path, root=root)
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
    def around(self, layer: int) -> Generator[Checkpoint]:
        """Bring what a layer needs, and drop it after the block; yields the checkpoint to read it from."""
        remote = self._remote(layer)
        self._submit(layer).result()
        if layer + 1 < len(self.ranges) and self.takes(layer) + self.takes(layer + 1) <= self.room:
            self._submit(layer + 1)
        yield replace(self.source, folder=remote.folder)
        remove_folder(remote.folder, root=self.remote.folder)

    def _remote(self, layer: int) -> RemoteShards:
        return replace(self.remote, folder=self.remote.folder / _FOLDER.format(layer))

    def _submit(self, layer: int) -> Future[None]:
        if layer not in self._fetched:
            self._fetched[layer] = self._pool.submit(self._fetch, layer)
        return self._fetched[layer]

    def _fetch(self, layer: int) -> None:
        def arrived(num_bytes: int, is_new: bool) -> None:
            self.events.transferred(downloaded=num_bytes, is_new=is_new)

        self._remote(layer).bring(self.ranges[layer], stop=self.stop, arrived=arrived)
