"""Where in the source a result's tensors come from, by the source's own headers, without the plan or its view.

The headers are parsed again. With a list of kept experts, the source's name of an expert and the rows of a router are
derived from the list here, so a view that is wrong is found.
"""

from collections.abc import Mapping
from pathlib import Path
from threading import Lock

from k2convert.checkpoint.header import ShardHeader, TensorInfo, read_header
from k2convert.errors import CheckpointError, SourceReadError
from k2convert.models import FAMILIES
from k2convert.models.names import Family, ModulePlace, Role
from k2convert.plan.pruning import KeptExperts


class SourcePlaces:
    """Finds and reads tensors of the shards in `folder`, whose headers must have the `digests`.

    `kept` are the experts that the result has; None for all. Several threads may use it at once.
    """

    def __init__(self, folder: Path, *, digests: Mapping[str, str], kept: KeptExperts | None) -> None:
        self._folder, self._digests, self._kept = folder, digests, kept
        self._headers: dict[str, ShardHeader] = {}
        self._lock = Lock()

    def find(self, name: str, *, shard: str) -> TensorInfo | None:
        """Return the place of a result's tensor in a source shard, under the result's name; None if it is not there.

        Its `shape` is that of the whole tensor in the file. CheckpointError if the shard's header changed.
        """
        source_name, rows = _in_source(name, self._kept)
        found = self._header(shard).tensors.get(source_name)
        return None if found is None else found._replace(name=name, rows=rows)

    def read(self, place: TensorInfo, begin: int, end: int) -> bytes:
        """Return bytes [begin, end) of a tensor that `find` returned; raises SourceReadError."""
        path = self._folder / place.shard
        try:
            with path.open("rb") as file:
                if place.rows is None:
                    file.seek(place.begin + begin)
                    return file.read(end - begin)
                file.seek(place.begin)
                whole = file.read(place.end - place.begin)
        except OSError as error:
            raise SourceReadError(
                f"{path}: tensor {place.name}: reading failed ({error.strerror}). "
                "Check the disk and run the same command again: finished shards are kept."
            ) from error
        width = len(whole) // place.shape[0]
        return b"".join(whole[row * width : (row + 1) * width] for row in place.rows)[begin:end]

    def _header(self, shard: str) -> ShardHeader:
        with self._lock:
            if shard not in self._headers:
                header = read_header(self._folder / shard)
                if header.digest != self._digests[shard]:
                    raise CheckpointError(
                        f"{self._folder / shard}: its header changed since planning. Run the same command again."
                    )
                self._headers[shard] = header
            return self._headers[shard]


def _in_source(name: str, kept: KeptExperts | None) -> tuple[str, tuple[int, ...] | None]:
    """Return the source's name of a result's tensor, and the rows that the result has; None for all rows."""
    family, place = _classify(name.rpartition(".")[0])
    layer = None if place is None else place.layer
    if family is None or place is None or kept is None or layer is None or layer not in kept.layers:
        return name, None
    experts = kept.layers[layer]
    if place.role is Role.ROUTER:
        return name, experts
    if place.expert is None or place.expert >= len(experts):
        return name, None
    stem = family.experts.format(layer=layer)
    return f"{stem}.{experts[place.expert]}" + name.removeprefix(f"{stem}.{place.expert}"), None


def _classify(module: str) -> tuple[Family | None, ModulePlace | None]:
    for family in FAMILIES:
        if (place := family.classify(module)) is not None:
            return family, place
    return None, None
