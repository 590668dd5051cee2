"""A loopback Hub whose source shards have their full size and only a header on disk, and which keeps samples of what
it gets.

The bytes of a tensor are a window of a pool of random bytes, at an offset that follows from its name. A shard that
arrives is hashed as a whole, and two of its experts are kept.
"""

import bisect
import hashlib
import json
import os
import random
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from scripts.fixture_maker.inventory import TensorSpec
from scripts.fixture_maker.shards import write_streamed

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "hub"))

from faults import Fault, Request, Traffic
from loopback import TOKEN, Api, LoopbackHub, Reply, _Handler, refused
from loopback_store import Entry

PART_BYTES = 1 << 30
CHUNK_BYTES = 8 << 20  # more than a header has
NUM_SAMPLES = 2  # experts of a shard
POOL_BYTES = 1 << 26

Piece = tuple[int, int, int]
"""A descriptor, where the piece begins there, and its length."""


def make_pools() -> dict[str, int]:
    """Return descriptors of the pools, which are in memory."""
    draw = np.random.default_rng(0)
    normal = draw.standard_normal(POOL_BYTES // 4, np.float32)
    values = {
        "codes": draw.integers(1, 16, POOL_BYTES, np.uint8) | draw.integers(1, 16, POOL_BYTES, np.uint8) << 4,
        "scales": np.tile((np.exp(0.3 * normal - 6.2).view(np.uint32) >> 16).astype(np.uint16), 2),
        "exponents": draw.integers(116, 124, POOL_BYTES, np.uint8),
        "BF16": np.tile(((0.02 * normal).view(np.uint32) >> 16).astype(np.uint16), 2),
        "F32": 0.5 + 0.1 * normal,
    }
    pools = {name: os.memfd_create(name) for name in values}
    for name, descriptor in pools.items():
        os.write(descriptor, values[name].tobytes())
    return pools


def read_offsets(data: bytes) -> dict[TensorSpec, tuple[int, int]]:
    """Return the tensors of a shard that begins like this, and where each begins and ends in the file."""
    length = 8 + int.from_bytes(data[:8], "little")
    offsets = dict[TensorSpec, tuple[int, int]]()
    for name, entry in json.loads(data[8:length]).items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            offsets[TensorSpec(name, entry["dtype"], tuple(entry["shape"]))] = length + low, length + high
    return offsets


class SourceShard:
    """A shard of a folder of headers (scripts/fixtures): its file has header and shapes; the rest are windows."""

    def __init__(self, file: Path, pools: dict[str, int]) -> None:
        opened = os.open(file, os.O_RDONLY)
        self.offsets = read_offsets(os.pread(opened, CHUNK_BYTES, 0))
        drawn = {spec: low for spec, (low, _) in self.offsets.items() if not spec.name.endswith("weight_shape")}
        first = min(drawn.values())
        self._parts: list[Piece] = [(opened, 0, first)]
        self._parts += (window for spec in sorted(drawn, key=drawn.__getitem__) for window in _windows(spec, pools))
        self._begins = list(accumulate((size for _, _, size in self._parts), initial=0))
        self.num_bytes = self._begins[-1]
        digest = hashlib.sha256()
        for descriptor, offset, size in self._parts:
            digest.update(os.pread(descriptor, size, offset))
        self.sha256 = digest.hexdigest()

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield the pieces of a range."""
        number = bisect.bisect_right(self._begins, begin) - 1
        while begin < end:
            descriptor, offset, size = self._parts[number]
            skipped = begin - self._begins[number]
            size = min(size - skipped, end - begin)
            yield descriptor, offset + skipped, size
            begin += size
            number += 1

    def tensor(self, spec: TensorSpec) -> bytes:
        return b"".join(os.pread(opened, size, offset) for opened, offset, size in self.pieces(*self.offsets[spec]))


def _windows(spec: TensorSpec, pools: dict[str, int]) -> Iterator[Piece]:
    pool = spec.dtype if spec.dtype in pools else "codes"
    if spec.name.endswith("weight_scale"):
        pool = "scales" if spec.dtype == "BF16" else "exponents"
    left = spec.num_bytes
    offset = zlib.crc32(spec.name.encode()) % (POOL_BYTES // 64) * 64
    while left:
        size = min(left, POOL_BYTES - offset)
        yield pools[pool], offset, size
        left -= size
        offset = 0


def sampled(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return the tensors of a result's shard that are kept: norms, and two experts."""
    names = [spec.name for spec in specs]
    experts = sorted({name.rpartition(".")[0].rpartition(".")[0] for name in names if ".experts." in name})
    drawn = random.Random(len(names)).sample(experts, min(NUM_SAMPLES, len(experts)))
    begins = tuple(f"{name}." for name in drawn)
    return [spec for spec in specs if spec.name.startswith(begins) or spec.name.endswith("norm.weight")]


@dataclass(slots=True)
class Incoming:
    """One result shard on its way in: its parts come in order, each once."""

    digest: Any = field(default_factory=hashlib.sha256)
    num_bytes: int = 0
    num_tensors: int = 0
    samples: dict[TensorSpec, tuple[int, bytearray]] = field(default_factory=dict)  # with its place in the file

    def take(self, data: bytes) -> None:
        """Take the next bytes; the first have the whole header."""
        self.digest.update(data)
        begin = self.num_bytes
        self.num_bytes += len(data)
        if begin == 0:
            offsets = read_offsets(data)
            ordered = sorted(offsets.values())
            assert [low for low, _ in ordered[1:]] == [high for _, high in ordered[:-1]], "gaps or overlaps"
            self.num_tensors = len(offsets)
            self.samples = {spec: (offsets[spec][0], bytearray(spec.num_bytes)) for spec in sampled(offsets)}
        for low, sample in self.samples.values():
            first, last = max(low, begin), min(low + len(sample), self.num_bytes)
            if first < last:
                sample[first - low : last - low] = data[first - begin : last - begin]


class _Whole(_Handler):
    hub: "WholeHub"

    def _send_bytes(self, entry: Entry, begin: int, end: int) -> None:
        shard = self.hub.shards.get(entry.sha256 or "")
        if shard is None:
            return super()._send_bytes(entry, begin, end)
        for descriptor, offset, size in shard.pieces(begin, end):
            stop = offset + size
            while offset < stop:
                offset += os.sendfile(self.connection.fileno(), descriptor, offset, stop - offset)
        return None

    def _take_upload(self, sha256: str, query: dict[str, str]) -> None:
        if "part" not in query:
            return super()._take_upload(sha256, query)
        if query["part"] == "1":
            self.hub.incoming[sha256] = Incoming()
        shard = self.hub.incoming[sha256]
        left = int(self.headers["Content-Length"])
        while left:
            data = self.rfile.read(min(left, CHUNK_BYTES))
            if not data:
                self.close_connection = True
                return None
            shard.take(data)
            left -= len(data)
        return self._reply(Reply({}, headers={"ETag": f'"{sha256}"'}))

    def _join_parts(self, request: dict[str, Any]) -> None:
        shard = self.hub.incoming.pop(request["oid"])
        if shard.digest.hexdigest() != request["oid"]:
            return self._reply(refused(400, "BadRequest", "The parts do not have the announced sha256"))
        self.hub.num_tensors += shard.num_tensors
        write_streamed(self.hub.store.blob(request["oid"]), shard.samples, lambda spec: [shard.samples[spec][1]])
        return self._reply(Reply({}))


class _Outage(Traffic):
    away_until = 0.0

    def take(self, request: Request) -> Fault | None:
        return Fault(request.method, "") if time.monotonic() < self.away_until else None


def read_sources(folder: Path) -> dict[str, SourceShard | bytes]:
    """Return the files of a folder of headers: its shards, hashed, and the bytes of the others."""
    pools = make_pools()

    def read(path: Path) -> SourceShard | bytes:
        return SourceShard(path, pools) if path.suffix == ".safetensors" else path.read_bytes()

    with ThreadPoolExecutor() as threads:
        paths = sorted(folder.iterdir())
        return dict(zip((path.name for path in paths), threads.map(read, paths), strict=True))


class WholeHub(LoopbackHub):
    """The Hub, with these source files as the repository `name`."""

    def __init__(self, root: Path, name: str, sources: dict[str, SourceShard | bytes]) -> None:
        super().__init__(root)
        self.traffic = _Outage()
        self.api = Api(self.store, self.url, part_bytes=PART_BYTES, token=TOKEN)
        self._server.RequestHandlerClass = _Whole
        self.incoming: dict[str, Incoming] = {}
        self.num_tensors = 0
        self.shards = {source.sha256: source for source in sources.values() if isinstance(source, SourceShard)}
        files = self.store.create(name).files() | {
            path: Entry(len(source), source)
            if isinstance(source, bytes)
            else Entry(source.num_bytes, sha256=source.sha256)
            for path, source in sources.items()
        }
        self.store.repos[name].commit("main", files)
