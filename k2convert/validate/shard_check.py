"""Comparing a shard with its source while it is converted, for results whose shards leave the disk.

Every byte is compared before it goes to the file, because the source may be freed while it is read:

    converted    the codes, scales and scalars are decoded by the independent decoder and measured against the source's
                 weights as they were loaded; the figures must be those that the conversion measured
    copied       the bytes must be those of a second reading, at the place that the source file's own header states
    header       it is parsed again, and every tensor must lie where it says

The file's hash must be that of the compared bytes, and only bytes with that hash are uploaded. A second reading of a
file in the page cache comes from there: it checks the programs, not the disk.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Final

from blake3 import blake3

from k2convert.checkpoint.header import ShardHeader, TensorInfo, parse_header, read_header
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.reader import Bytes
from k2convert.errors import CheckpointError, InvalidCheckpointError, SourceReadError
from k2convert.models.projections import Projection
from k2convert.models.weights import TensorSource, load_projection
from k2convert.records.shard_record import ProjectionRecord, SourceCheck
from k2convert.validate.decode import is_same_error, measure_decoded

_REMEDY: Final = (
    "The shard was not uploaded. Run the same command again: the shard is made again. If this happens twice, check "
    "the memory, or choose a different --device."
)


class ShardCheck:
    """Compares one shard's bytes with the source, piece by piece. Pieces may come from several threads at once.

    `header` are the bytes that begin the file, `source_digests` the planned digests of the source shards' headers in
    `source_folder`. A difference raises InvalidCheckpointError, a source that changed CheckpointError.
    """

    def __init__(
        self,
        header: bytes,
        *,
        shard: str,
        file_bytes: int,
        layout: str,
        source_folder: Path,
        source_digests: Mapping[str, str],
    ) -> None:
        self._header: ShardHeader = parse_header(header, shard=shard, file_bytes=file_bytes)
        self._names = LAYOUTS[layout]
        self._source_folder, self._source_digests = source_folder, source_digests
        self._source_headers: dict[str, ShardHeader] = {}
        self._lock = Lock()  # guards the headers; a dict's single operations need no lock
        self._expected: dict[tuple[str, int], bytes] = {}
        self._copied: Counter[str] = Counter()
        self._decoded: dict[str, dict[str, float | int | None]] = {}
        self._hash = blake3(header)

    def read_copy(self, tensor: TensorInfo, begin: int, end: int) -> None:
        """Read bytes [begin, end) of a tensor to copy, before the conversion reads them and may free them."""
        place = self._source_header(tensor.shard).tensors[tensor.name]
        path = self._source_folder / tensor.shard
        try:
            with path.open("rb") as file:
                file.seek(place.begin + begin)
                data = file.read(end - begin)
        except OSError as error:
            raise SourceReadError(
                f"{path}: tensor {tensor.name}: reading failed ({error.strerror}). "
                "Check the disk and run the same command again: finished shards are kept."
            ) from error
        self._expected[tensor.name, begin] = blake3(data).digest()

    def check_copy(self, tensor: TensorInfo, begin: int, data: Bytes, *, position: int) -> None:
        """Check bytes of a copied tensor, from its byte `begin` on, that go to `position` in the file."""
        place = self._header.tensors.get(tensor.name)
        found = self._expected.pop((tensor.name, begin))
        if place is None or place.begin + begin != position or blake3(data.data).digest() != found:
            raise self._error(tensor.name, "the bytes to write are not the source's")
        with self._lock:
            self._copied[tensor.name] += len(data)

    def check_projections(
        self,
        projections: Sequence[Projection],
        records: Sequence[ProjectionRecord],
        buffers: Sequence[Bytes],
        *,
        source: TensorSource,
        position: int,
    ) -> None:
        """Decode the `buffers` that go to `position` in the file, and compare them with the source and the records."""
        starts: dict[int, Bytes] = {}
        for buffer in buffers:
            starts[position] = buffer
            position += len(buffer)
        for projection, record in zip(projections, records, strict=True):
            self._check_projection(projection, record, starts, source)

    def _check_projection(
        self, projection: Projection, record: ProjectionRecord, starts: Mapping[int, Bytes], source: TensorSource
    ) -> None:
        names, parts = self._names, dict[str, Bytes]()
        for parameter in (names.weight, names.block_scale, names.global_scale):
            place = self._header.tensors.get(f"{projection.module}.{parameter}")
            data = None if place is None else starts.get(place.begin)
            if place is None or data is None or len(data) != place.num_bytes:
                raise self._error(projection.module, f"its {parameter} is not where the header says")
            parts[parameter] = data
        raw = parts[names.global_scale].tobytes()
        error = measure_decoded(
            load_projection(source, projection),
            packed=parts[names.weight],
            block_scales=parts[names.block_scale],
            global_scale=record.global_scale if names.stores(record.global_scale, raw) else names.decode_scalar(raw),
        )
        if record.metrics is not None and not is_same_error(error, record.metrics):
            raise self._error(
                projection.module,
                f"the bytes to write decode to a squared error of {error.squared_error:.6g}, but "
                f"{record.metrics['squared_error']:.6g} was measured",
            )
        self._decoded[projection.module] = asdict(error)

    def write(self, data: memoryview) -> None:
        """Take the next checked bytes of the file, in order."""
        self._hash.update(data)

    def finish(self, digest: str) -> SourceCheck:
        """Return what was found, if every tensor was compared and the written file has the `digest` of their bytes."""
        converted = {f"{module}.{name}" for module in self._decoded for name in self._names.parameters}
        for name, tensor in self._header.tensors.items():
            if name not in converted and (name not in self._copied or self._copied[name] != tensor.num_bytes):
                raise self._error(name, "was not compared with the source")
        if self._hash.hexdigest() != digest:
            raise self._error("the file", "does not hold the bytes that were compared with the source")
        return SourceCheck(digest, tuple(sorted(self._copied)), dict(sorted(self._decoded.items())))

    def _source_header(self, shard: str) -> ShardHeader:
        with self._lock:
            if shard not in self._source_headers:
                header = read_header(self._source_folder / shard)
                if header.digest != self._source_digests[shard]:
                    raise CheckpointError(
                        f"{self._source_folder / shard}: its header changed since planning. Run the same command again."
                    )
                self._source_headers[shard] = header
            return self._source_headers[shard]

    def _error(self, where: str, problem: str) -> InvalidCheckpointError:
        return InvalidCheckpointError(f"{self._header.shard}: {where}: {problem}. {_REMEDY}")
