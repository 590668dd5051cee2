"""Reads give the file's bytes wherever they lie and however they get there, and leave the system's cache as it was."""

import ctypes
import json
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

from k2convert.checkpoint.header import TensorInfo, read_header
from k2convert.checkpoint.reader import PageCache, ShardReader, same_bytes
from k2convert.errors import CheckpointError, SourceReadError
from k2convert.machine import PAGE_BYTES
from scripts.fixture_maker.damage import write_raw

NUM_BYTES = 3_000_017
SPANS = [(0, 1), (0, 8), (4095, 4098), (4096, 8192), (1, NUM_BYTES), (100_003, 2_000_001), (NUM_BYTES - 5, NUM_BYTES)]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, NUM_BYTES, dtype=np.uint8).tobytes())
    return path


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def keep_in_cache(path: Path) -> None:
    path.read_bytes()


def is_cached(path: Path) -> bool:
    with path.open("rb") as file:
        return PageCache(file.fileno()).holds_most(0, path.stat().st_size)


def can_be_read_past_the_cache(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    drop_from_cache(path)
    return not is_cached(path)


@pytest.mark.parametrize("prepare", [drop_from_cache, keep_in_cache])
@pytest.mark.parametrize(("begin", "end"), SPANS)
def test_any_span_is_read_exactly(prepare: Callable[[Path], None], begin: int, end: int, shard: Path) -> None:
    content = shard.read_bytes()
    prepare(shard)
    tensor = TensorInfo("t", "U8", (end - begin,), begin, end, "shard")
    half = (end - begin) // 2
    with ShardReader(lambda _: shard) as reader:
        assert reader.read(tensor).tobytes() == content[begin:end]
        assert reader.read(tensor, begin=half).tobytes() == content[begin + half : end]
        assert reader.read(tensor, end=half).tobytes() == content[begin : begin + half]


@pytest.mark.parametrize(("dtype", "size"), [("U8", 1), ("BF16", 2), ("F32", 4), ("I64", 8)])
@pytest.mark.parametrize("begin", [0, 1, 2, 4, 7, 8, 4093, 4104])
def test_a_tensor_at_an_odd_offset_lies_where_its_dtype_may(begin: int, dtype: str, size: int, shard: Path) -> None:
    with ShardReader(lambda _: shard) as reader:
        data = reader.read(TensorInfo("t", dtype, (80_000 // size,), begin, begin + 80_000, "shard"))
    assert data.ctypes.data % size == 0
    assert data.tobytes() == shard.read_bytes()[begin : begin + 80_000]


def test_what_was_not_cached_is_not_cached_afterwards(shard: Path) -> None:
    if not can_be_read_past_the_cache(shard):
        pytest.skip("this filesystem keeps files in memory")
    drop_from_cache(shard)
    with ShardReader(lambda _: shard) as reader:
        reader.read(TensorInfo("t", "U8", (NUM_BYTES,), 0, NUM_BYTES, "shard"))
        assert not is_cached(shard)
        keep_in_cache(shard)
        assert is_cached(shard)
        reader.read(TensorInfo("t", "U8", (NUM_BYTES,), 0, NUM_BYTES, "shard"))
        assert is_cached(shard)


@pytest.mark.parametrize("page_bytes", [4096, 65536])
def test_the_cache_is_asked_for_whole_pages(page_bytes: int, shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ARM kernel may have pages of 64 KB; `mincore` refuses an address within a page."""
    requests: list[tuple[int, int]] = []

    def mincore(address: ctypes.c_void_p, length: ctypes.c_size_t, resident: ctypes.c_void_p) -> int:
        requests.append(((address.value or 0) - start, length.value))
        num_pages = -(-length.value // page_bytes)
        ctypes.memmove(resident, bytes([0] + [1] * (num_pages - 1)), num_pages)
        return 0

    monkeypatch.setattr(mmap, "PAGESIZE", page_bytes)
    monkeypatch.setattr("k2convert.checkpoint.reader._libc", SimpleNamespace(mincore=mincore))
    with shard.open("rb") as file:
        cache = PageCache(file.fileno())
        start = cache._address
        assert not cache.holds_most(page_bytes + 77, 3 * page_bytes)
        assert cache.holds_most(2 * page_bytes, NUM_BYTES + 1)
    assert requests == [(page_bytes, 2 * page_bytes), (2 * page_bytes, NUM_BYTES - 2 * page_bytes)]


@pytest.mark.parametrize("prepare", [drop_from_cache, keep_in_cache])
@pytest.mark.parametrize("left", [0, 5 * PAGE_BYTES, 5 * PAGE_BYTES + 77])
def test_file_cut_short_is_an_error(prepare: Callable[[Path], None], left: int, shard: Path) -> None:
    with ShardReader(lambda _: shard) as reader:
        reader.read(TensorInfo("t", "U8", (8,), 0, 8, "shard"))
        os.truncate(shard, left)
        prepare(shard)
        with pytest.raises(SourceReadError, match=f"tensor t: the file ends at byte {left}"):
            reader.read(TensorInfo("t", "U8", (NUM_BYTES,), 0, NUM_BYTES, "shard"))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 65])
def test_bytes_are_compared_to_the_last_one(size: int) -> None:
    data = np.arange(size + 1, dtype=np.uint8)
    for offset in (0, 1):  # aligned or not
        part = data[offset : offset + size]
        assert same_bytes(part, part.copy())
        assert not same_bytes(part, np.append(part, np.uint8(0)))
        for index in range(size):
            other = part.copy()
            other[index] ^= 1
            assert not same_bytes(part, other)


def test_an_interrupt_while_a_file_is_opened_leaves_no_descriptor(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying the second descriptor reads from the disk, which takes long enough to be interrupted there."""

    def interrupted(*_arguments: object) -> int:
        raise KeyboardInterrupt

    drop_from_cache(shard)
    before = set(Path("/proc/self/fd").iterdir())
    tensor = TensorInfo("t", "U8", (4096,), 0, 4096, "shard")
    with monkeypatch.context() as patch, ShardReader(lambda _: shard) as reader:
        patch.setattr(os, "preadv", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reader.read(tensor)
    assert set(Path("/proc/self/fd").iterdir()) == before


ENTRIES = {
    "__metadata__": {"format": "pt"},
    "a.weight_packed": {"dtype": "I32", "shape": [4, 4], "data_offsets": [0, 64]},
    "a.weight_scale": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [64, 80]},
    "a.weight_shape": {"dtype": "I64", "shape": [2], "data_offsets": [80, 96]},
    "empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [96, 96]},
}
HEADER = json.dumps(ENTRIES).encode()
DATA = bytes(96)


def mutated(draw: random.Random) -> bytes:
    """Change, drop, double or insert one or two bytes; digits and quotes are hit more often."""
    text = bytearray(HEADER)
    for _ in range(draw.randint(1, 2)):
        targets = [i for i, byte in enumerate(text) if chr(byte) in '0123456789"[]{},:']
        index = draw.choice(targets) if draw.random() < 0.5 else draw.randrange(len(text))
        # No minus sign: "-0" is 0 to Python and an error to the library, and harmless.
        new = draw.choice(b'0123456789.eE"[]{},: nulltrue\\\x00\xff')
        match draw.randrange(4):
            case 0:
                text[index] = new
            case 1:
                del text[index]
            case 2:
                text.insert(index, text[index])
            case _:
                text.insert(index, new)
    return bytes(text)


def library_reads(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (the library's object is no mapping)
                shard.get_tensor(name)
    except (SafetensorError, UnicodeDecodeError, RuntimeError, ValueError, OverflowError):
        return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_mutated_headers_are_read_as_the_library_reads_them_or_refused(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    path = tmp_path / "shard.safetensors"
    accepted = refused = 0
    for _ in range(400):
        text = mutated(draw)
        write_raw(path, text, DATA)
        try:
            header = read_header(path)
        except CheckpointError as error:
            refused += str(path) in str(error)
            continue
        accepted += 1
        assert library_reads(path), text
        with safe_open(path, "pt") as shard:
            shapes = {name: tuple(shard.get_slice(name).get_shape()) for name in shard.keys()}  # noqa: SIM118
        assert {name: tensor.shape for name, tensor in header.tensors.items()} == shapes, text
    assert min(accepted, refused) > 20, "the mutations should do both, and every message name the file"
