"""A loopback Hub whose source shards have their full size and no file, and which keeps samples of what it gets.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from scripts.fixture_maker.inventory import TensorSpec
from scripts.fixture_maker.shards import header_bytes, library_order

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "hub"))

from faults import Fault, Request, Traffic
from loopback import TOKEN, Api, LoopbackHub, Reply, _Handler, refused
from loopback_store import Entry

PART_BYTES = 1 << 30
CHUNK_BYTES = 8 << 20  # more than a header has
NUM_SAMPLES = 2  # experts of a shard
POOL_BYTES = 1 << 26


def make_pools() -> dict[str, int]:
    """Return descriptors of the pools, which are in memory."""
    draw = np.random.default_rng(0)
    normal = draw.standard_normal(POOL_BYTES // 4, np.float32)
    pools = {
        "codes": draw.integers(1, 16, POOL_BYTES, np.uint8) | draw.integers(1, 16, POOL_BYTES, np.uint8) << 4,
        "scales": np.tile((np.exp(0.3 * normal - 6.2).view(np.uint32) >> 16).astype(np.uint16), 2),
        "exponents": draw.integers(116, 124, POOL_BYTES, np.uint8),
        "BF16": np.tile(((0.02 * normal).view(np.uint32) >> 16).astype(np.uint16), 2),
        "F32": 0.5 + 0.1 * normal,
    }
    return {name: _in_memory(name, values.tobytes()) for name, values in pools.items()}


def _in_memory(name: str, data: bytes) -> int:
    descriptor = os.memfd_create(name)
    os.write(descriptor, data)
    return descriptor


class SourceShard:
    """A shard whose bytes are a header, true shapes, and windows of pools."""

    def __init__(self, specs: Sequence[TensorSpec], pools: dict[str, int], shapes: dict[str, bytes]) -> None:
        ordered = library_order(specs)
        self.specs = {spec.name: spec for spec in ordered}
        self.pools = pools
        self.shapes = shapes
        self._parts: list[tuple[str | bytes, int, int]] = [(data := header_bytes(ordered), 0, len(data))]
        self._parts += (part for spec in ordered for part in self._windows(spec))
        self._begins = list(accumulate((size for _, _, size in self._parts), initial=0))
        self.num_bytes = self._begins[-1]

    def _windows(self, spec: TensorSpec) -> Iterator[tuple[str | bytes, int, int]]:
        *_, projection, leaf = spec.name.split(".")
        pool: str | bytes = spec.dtype if spec.dtype in self.pools else "codes"
        if leaf == "weight_shape":
            pool = self.shapes[projection]
        elif leaf == "weight_scale":
            pool = "scales" if spec.dtype == "BF16" else "exponents"
        left = spec.num_bytes
        offset = 0 if isinstance(pool, bytes) else zlib.crc32(spec.name.encode()) % (POOL_BYTES // 64) * 64
        while left:
            size = min(left, POOL_BYTES - offset)
            yield pool, offset, size
            left -= size
            offset = 0

    def pieces(self, begin: int, end: int) -> Iterator[tuple[str | bytes, int, int]]:
        """Yield (pool or bytes, offset, length) of a range."""
        number = bisect.bisect_right(self._begins, begin) - 1
        while begin < end:
            pool, offset, size = self._parts[number]
            skipped = begin - self._begins[number]
            size = min(size - skipped, end - begin)
            yield pool, offset + skipped, size
            begin += size
            number += 1

    def _read(self, pool: str | bytes, offset: int, size: int) -> bytes:
        return pool[offset : offset + size] if isinstance(pool, bytes) else os.pread(self.pools[pool], size, offset)

    def tensor(self, name: str) -> bytes:
        return b"".join(self._read(*part) for part in self._windows(self.specs[name]))

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for piece in self.pieces(0, self.num_bytes):
            digest.update(self._read(*piece))
        return digest.hexdigest()


def read_entries(data: bytes) -> tuple[int, dict[str, Any]]:
    """Return where the data of a shard begins, and the entries of its header."""
    length = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:length])
    entries.pop("__metadata__", None)
    return length, entries


def write_shard(path: Path, tensors: dict[str, tuple[dict[str, Any], bytes | bytearray]]) -> Path:
    """Write a shard of these entries and bytes."""
    header: dict[str, Any] = {}
    position = 0
    for name, (entry, data) in tensors.items():
        header[name] = entry | {"data_offsets": [position, position := position + len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *(data for _, data in tensors.values())]))
    return path


def sampled(entries: dict[str, Any]) -> list[str]:
    """Return the tensors of a result's shard that are kept: norms, and two experts."""
    experts = sorted({name.rpartition(".")[0].rpartition(".")[0] for name in entries if ".experts." in name})
    chosen = tuple(f"{name}." for name in random.Random(len(entries)).sample(experts, min(NUM_SAMPLES, len(experts))))
    return [name for name in entries if name.startswith(chosen) or name.endswith("norm.weight")]


@dataclass(slots=True)
class Incoming:
    """One result shard on its way in: parts come in order. `ends` are digest and length after each of them."""

    digest: Any = field(default_factory=hashlib.sha256)
    num_bytes: int = 0
    num_tensors: int = 0
    ends: dict[int, tuple[Any, int]] = field(default_factory=dict)
    kept: list[tuple[int, str, dict[str, Any], bytearray]] = field(default_factory=list)  # with its place in the file

    def take(self, data: bytes) -> None:
        """Take the next bytes; the first have the whole header."""
        self.digest.update(data)
        begin = self.num_bytes
        self.num_bytes += len(data)
        if begin == 0:
            length, entries = read_entries(data)
            places = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
            assert [low for low, _ in places] == [0, *(high for _, high in places[:-1])], "gaps or overlaps"
            self.num_tensors = len(entries)
            kept = ((name, entries[name], entries[name]["data_offsets"]) for name in sampled(entries))
            self.kept = [(length + low, name, entry, bytearray(high - low)) for name, entry, (low, high) in kept]
        for low, _, _, kept_data in self.kept:
            first, last = max(low, begin), min(low + len(kept_data), self.num_bytes)
            if first < last:
                kept_data[first - low : last - low] = data[first - begin : last - begin]


class _Whole(_Handler):
    hub: "WholeHub"

    def _send_bytes(self, entry: Entry, begin: int, end: int) -> None:
        shard = self.hub.shards.get(entry.sha256 or "")
        if shard is None:
            return super()._send_bytes(entry, begin, end)
        for pool, offset, size in shard.pieces(begin, end):
            if isinstance(pool, bytes):
                self.wfile.write(pool[offset : offset + size])
                continue
            stop = offset + size
            while offset < stop:
                offset += os.sendfile(self.connection.fileno(), shard.pools[pool], offset, stop - offset)
        return None

    def _take_upload(self, sha256: str, query: dict[str, str]) -> None:
        if "part" not in query:
            return super()._take_upload(sha256, query)
        number = int(query["part"])
        if number == 1:
            self.hub.incoming[sha256] = Incoming()
        shard = self.hub.incoming[sha256]
        if number > 1:  # it may come a second time
            digest, shard.num_bytes = shard.ends[number - 1]
            shard.digest = digest.copy()
        left = int(self.headers["Content-Length"])
        while left:
            data = self.rfile.read(min(left, CHUNK_BYTES))
            if not data:
                self.close_connection = True
                return None
            shard.take(data)
            left -= len(data)
        shard.ends[number] = shard.digest.copy(), shard.num_bytes
        return self._reply(Reply({}, headers={"ETag": f'"{sha256}"'}))

    def _join_parts(self, request: dict[str, Any]) -> None:
        shard = self.hub.incoming.pop(request["oid"])
        if shard.digest.hexdigest() != request["oid"]:
            return self._reply(refused(400, "BadRequest", "The parts do not have the announced sha256"))
        self.hub.num_tensors += shard.num_tensors
        write_shard(self.hub.store.blob(request["oid"]), {name: (entry, data) for _, name, entry, data in shard.kept})
        return self._reply(Reply({}))


class _Outage(Traffic):
    away_until = 0.0

    def take(self, request: Request) -> Fault | None:
        return Fault(request.method, "") if time.monotonic() < self.away_until else None


class WholeHub(LoopbackHub):
    """The Hub, with a source of these shards and small files as the repository `name`."""

    def __init__(self, root: Path, name: str, sources: dict[str, SourceShard], small: dict[str, bytes]) -> None:
        super().__init__(root)
        self.traffic = _Outage()
        self.api = Api(self.store, self.url, part_bytes=PART_BYTES, token=TOKEN)
        self._server.RequestHandlerClass = _Whole
        self.incoming: dict[str, Incoming] = {}
        self.num_tensors = 0
        self.sources = sources
        self.shards: dict[str, SourceShard] = {}
        files = self.store.create(name).files() | {path: Entry(len(data), data) for path, data in small.items()}
        for path, shard in sources.items():
            self.shards[shard.sha256] = shard
            files[path] = Entry(shard.num_bytes, sha256=shard.sha256)
        self.store.repos[name].commit("main", files)
