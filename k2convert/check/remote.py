"""Shards of the Hub for the pass over a result: brought to disk one result shard at a time, and dropped after it.

What one result shard needs of the source is known from the headers: the tensors of its modules and its copies. The
source shard that has them is fetched, whole or, if only a part of it is needed, in ranges. So the pass needs the disk
of one result shard and of what it reads, about two shards, whatever the size of the model.
"""

import shutil
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k2convert.check.contract.result import Result
from k2convert.checkpoint.header import ShardHeader, TensorInfo, read_header
from k2convert.checkpoint.names import SHARD_SUFFIX
from k2convert.errors import check_disk
from k2convert.hub.ranges import Ranges, RemoteShards, ranges_of
from k2convert.models.names import WEIGHT, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE


@dataclass(frozen=True, slots=True)
class Shards:
    """Where the shards of a result and of its source come from: the Hub, or, if None, folders that have them."""

    result: RemoteShards | None = None
    source: RemoteShards | None = None

    @property
    def is_remote(self) -> bool:
        """Return whether result or source is on the Hub."""
        return self.result is not None or self.source is not None

    @property
    def header_reader(self) -> Callable[[Path], ShardHeader]:
        """The function that reads the header of a result shard."""
        if self.result is None:
            return read_header
        return self.result.header

    def result_bytes(self) -> int:
        """Return the tensor bytes of a remote result's shards."""
        if self.result is None:
            return 0
        return sum(h.file_bytes - h.data_begin for h in self.result.headers.values() if isinstance(h, ShardHeader))

    def plan(self, result: Result) -> "Around":
        """Return what makes the context in which one result shard is read; raises DiskFullError without room.

        The context brings what the pass over the shard reads, and drops it.
        """
        if not self.is_remote:
            return nullcontext
        of_result: dict[str, Ranges] = {shard: {shard: {(0, h.file_bytes)}} for shard, h in result.headers.items()}
        of_result |= {shard: {shard: {(0, 1 << 62)}} for shard in result.unreadable}  # their size is not known
        for module in (*result.converted, *result.fp8):  # what is checked together may lie in different shards
            for shard in {tensor.shard for tensor in module.parameters.values()}:
                for tensor in module.parameters.values():
                    if tensor.shard != shard:
                        of_header = (0, result.headers[tensor.shard].data_begin)
                        of_result[shard].setdefault(tensor.shard, set()).update((of_header, (tensor.begin, tensor.end)))
        of_source = _source_needs(result)
        needs = {shard: self._remote(ranges, of_source.get(shard, {})) for shard, ranges in of_result.items()}
        self._check_room(needs.values())
        return lambda shard: _on_disk(needs.get(shard, []))

    def _remote(self, of_result: Ranges, of_source: Ranges) -> "Needs":
        parts = ((self.result, of_result), (self.source, of_source))
        return [(side, side.present(ranges)) for side, ranges in parts if side is not None]

    def _check_room(self, needs: Iterable["Needs"]) -> None:
        needed = max((sum(side.bytes_needed(ranges) for side, ranges in together) for together in needs), default=0)
        for side in (self.result, self.source):
            if side is not None:
                check_disk(
                    f"{side.folder}: validating from the Hub",
                    needed=needed,
                    allowed=shutil.disk_usage(side.folder).free,
                    remedy="Set TMPDIR to a folder on another disk.",
                )

    def around_tensors(
        self, of_result: Iterable[TensorInfo], of_source: Iterable[TensorInfo]
    ) -> AbstractContextManager[None]:
        """Return a context that brings some tensors of result and source, and drops them at the end."""
        needs = self._remote(ranges_of(of_result), ranges_of(of_source))
        self._check_room([needs])
        return _on_disk(needs)


Needs = list[tuple[RemoteShards, Ranges]]
"""Files to fetch from each side that is on the Hub."""
Around = Callable[[str], AbstractContextManager[object]]
"""Makes the context in which a result shard is read."""


@contextmanager
def _on_disk(needs: Needs) -> Generator[None]:
    for side, ranges in needs:
        side.fetch(ranges)
    yield
    for side, ranges in needs:
        side.free(ranges)


def _source_needs(result: Result) -> dict[str, Ranges]:
    """Return what each result shard needs of the source: copies, and weights that share its global scales."""
    if result.source is None:
        return {}
    tensors = result.source.tensors
    headers = result.source.headers
    shared: dict[str, list[TensorInfo]] = defaultdict(list)
    for name, parts in result.source_names.items():
        if parts.parameter in (WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE, WEIGHT):
            shared[parts.sharing_key].append(tensors[name])
    needed_tensors: dict[str, list[TensorInfo]] = defaultdict(list)
    for name, tensor in result.tensors.items():
        module = result.modules.get(name.rpartition(".")[0])
        if module is not None and module.is_converted:
            needed_tensors[tensor.shard] += shared[module.parts.sharing_key]
        elif module is not None and (partner := result.family.fp8_partner(module.name)) is not None:
            both = (tensors.get(f"{stem}.{WEIGHT}") for stem in (module.name, partner))
            needed_tensors[tensor.shard] += [tensor for tensor in both if tensor is not None]
        elif name in tensors:
            needed_tensors[tensor.shard].append(tensors[name])
    needs = {shard: ranges_of(tensors) for shard, tensors in needed_tensors.items()}
    for ranges in needs.values():
        for shard, of_shard in ranges.items():  # the certificate reads headers too
            of_shard.add((0, headers[shard].data_begin))
    return needs


def folder_bytes(folder: Path) -> int:
    """Return the tensor bytes of the shards in a folder, by the first 8 bytes of each; 0 if there is no such folder.

    A damaged file counts as a whole.
    """
    total = 0
    for shard in folder.glob(f"*{SHARD_SUFFIX}"):
        if not shard.is_file():
            continue
        size = shard.stat().st_size
        data = -1
        with suppress(OSError), shard.open("rb") as file:
            data = size - 8 - int.from_bytes(file.read(8), "little")
        total += data if data >= 0 else size
    return total


LOCAL: Final = Shards()
"""Result and source are folders."""
