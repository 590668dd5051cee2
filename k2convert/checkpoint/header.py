"""Safetensors headers, read strictly: everything a shard states about itself is checked before any tensor is read.

Layout (https://huggingface.co/docs/safetensors, "Format"):

    | 8 bytes: header length n, little endian | n bytes of JSON, space padded | tensor data without gaps |

These are refused with MalformedFileError: truncated files, headers longer than the file or than 100 MB (the limit of
the safetensors library), duplicate keys, unknown dtypes, shapes that do not fit their byte range, gaps, overlaps and
trailing bytes.

The number of tensors has no limit of its own: one costs about as many bytes of memory as its entry has in the JSON,
times ten, whether it holds data or not.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from blake3 import blake3

from k2convert.checkpoint.files import DuplicateKeyError, check_plain_file, parse_json, reading
from k2convert.errors import CheckpointError, MalformedFileError, quoted, shortened

MAX_HEADER_BYTES = 100_000_000
LFS_BEGINNING: Final = b"version "  # of a Git LFS pointer; a header of 2 EB would begin so
MAX_NAME_LENGTH: Final = 200  # of a tensor; Kimi's longest has 77 characters
_MAX_COUNT: Final = (1 << 63) - 1
MAX_RANK: Final = 32  # of a tensor; NumPy's limit before 2.0
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_DTYPES: Final = {dtype: dtype for dtype in DTYPE_BYTES}  # JSON gives a new string for each entry


class TensorInfo(NamedTuple):
    """The place of one tensor: `begin` and `end` are byte offsets from the start of the file `shard`.

    A NamedTuple, because K2.5 has 208,550 of them: with a frozen dataclass `fit` took 2.5 s for it, not 2.1 s.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    shard: str

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The header of one shard. `digest` is the blake3 of its length prefix and JSON, in lower-case hex."""

    shard: str
    file_bytes: int
    data_begin: int
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]
    digest: str


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of one safetensors file; raises MalformedFileError naming file and tensor."""
    with reading(path, missing="missing, but the index names it."):
        check_plain_file(path)
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = check_header_length(prefix, shard=str(path), file_bytes=file_bytes)
            raw = prefix + file.read(length)
    return parse_header(raw, shard=path.name, file_bytes=file_bytes, where=str(path))


def check_header_length(prefix: bytes, *, shard: str, file_bytes: int) -> int:
    """Return the header length that the first 8 bytes state, if the file and the format allow it."""
    if len(prefix) < 8:
        raise MalformedFileError(f"{shard}: {file_bytes} bytes is too short for a safetensors file.")
    length = int.from_bytes(prefix[:8], "little")
    if prefix[:8] == LFS_BEGINNING:
        raise CheckpointError(
            f"{shard}: is a Git LFS pointer, not the file that it stands for. Run `git lfs pull` in the repository."
        )
    if length > MAX_HEADER_BYTES:
        raise MalformedFileError(
            f"{shard}: the header claims {length:,} bytes, more than the format's limit of {MAX_HEADER_BYTES:,}. "
            "The file is damaged, or it is not a safetensors file."
        )
    if 8 + length > file_bytes:
        raise MalformedFileError(
            f"{shard}: the header claims {length:,} bytes, the file has {file_bytes:,}: truncated."
        )
    return length


def parse_header(raw: bytes, *, shard: str, file_bytes: int, where: str | None = None) -> ShardHeader:
    """Check the first `8 + n` bytes of a shard that is `file_bytes` long. `where` names the shard in messages."""
    where = where or shard
    length = check_header_length(raw[:8], shard=where, file_bytes=file_bytes)
    try:
        document = parse_json(raw[8 : 8 + length].decode("utf-8"))
    except DuplicateKeyError as error:
        raise MalformedFileError(f"{where}: the header has a {error}.") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number with too many digits
        raise MalformedFileError(f"{where}: the header is not JSON ({error}).") from None
    if not isinstance(document, dict):
        raise MalformedFileError(f"{where}: the header is not a JSON object.")
    entries = cast(dict[str, Any], document)
    metadata = entries.pop("__metadata__", None)
    if metadata is None:  # the safetensors library accepts null
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in cast(dict[str, Any], metadata).values()):
        raise MalformedFileError(f"{where}: __metadata__ must map strings to strings.")
    data_begin = 8 + length
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # one tuple for all tensors of a shape
    end = data_begin
    for name in entries:  # in place, so that the entries and what is made of them are never both whole in memory
        try:
            tensor = _tensor_info(name, entries[name], shard=shard, base=data_begin)
            begin = end if end == tensor.begin else tensor.begin  # the same number, not one of its own
            end = tensor.end
            entries[name] = tensor._replace(shape=shapes.setdefault(tensor.shape, tensor.shape), begin=begin)
        except MalformedFileError as error:
            raise MalformedFileError(f"{where}: tensor {shortened(name)}: {error}") from None
    tensors = cast(dict[str, TensorInfo], entries)
    for name, tensor in tensors.items():
        if tensor.dtype == "I8" and (name.endswith("_packed") or f"{name}_scale_2" in tensors):
            tensors[name] = tensor._replace(dtype="U8")  # two codes in a byte, whose sign nobody reads
    _check_coverage(tensors, data_begin=data_begin, file_bytes=file_bytes, where=where)
    digest = blake3(raw[: 8 + length]).hexdigest()
    return ShardHeader(shard, file_bytes, data_begin, cast(dict[str, str], metadata), tensors, digest)


def _tensor_info(name: str, entry: Any, *, shard: str, base: int) -> TensorInfo:
    if len(name) > MAX_NAME_LENGTH or not name.isprintable():
        problem = "has control characters"
        if name.isprintable():
            problem = "is longer than any model's"
        raise MalformedFileError(f"the name {problem}.")
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise MalformedFileError(f"needs dtype, shape and data_offsets, but has {quoted(entry)}.") from None
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise MalformedFileError(f"unknown dtype {quoted(dtype)}. Known dtypes: {', '.join(DTYPE_BYTES)}.")
    if len(shape) > MAX_RANK:
        raise MalformedFileError(f"has {len(shape):,} dimensions, more than {MAX_RANK}.")
    # In one loop, without a call for each number: this function runs 208,550 times for K2.5. `type`, because a bool is
    # an int too.
    expected = DTYPE_BYTES[dtype]
    are_counts = True
    for size in shape:
        are_counts = are_counts and type(size) is int and 0 <= size <= _MAX_COUNT
        expected *= size if are_counts else 0
    are_counts = are_counts and type(begin) is int and 0 <= begin <= _MAX_COUNT
    if not (are_counts and type(end) is int and 0 <= end <= _MAX_COUNT):
        raise MalformedFileError(f"shape {quoted(list(shape))} or offsets {quoted([begin, end])} are not counts.")
    if end - begin != expected:
        needed = f"{expected:,}" if expected < 1 << 63 else "too many"
        raise MalformedFileError(f"{dtype} {quoted(list(shape))} needs {needed} bytes, its range has {end - begin:,}.")
    return TensorInfo(name, _DTYPES[dtype], shape, base + begin, base + end, shard)


def _check_coverage(tensors: dict[str, TensorInfo], *, data_begin: int, file_bytes: int, where: str) -> None:
    position = data_begin
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if tensor.begin != position:
            kind = "leaves a gap before it"
            if tensor.begin < position:
                kind = "overlaps the previous tensor"
            raise MalformedFileError(
                f"{where}: tensor {shortened(tensor.name)} {kind} (it starts at byte {tensor.begin}, "
                f"expected {position})."
            )
        position = tensor.end
    if position != file_bytes:
        kind = "longer than its header states"
        if position > file_bytes:
            kind = "truncated"
        raise MalformedFileError(f"{where}: {kind}: the header has {position:,} bytes, the file {file_bytes:,}.")


def encode_header(
    tensors: list[tuple[str, str, tuple[int, ...], int]], *, metadata: dict[str, str], alignment: int
) -> bytes:
    """Build the bytes before the data for (name, dtype, shape, num_bytes), padded to `alignment`, as O_DIRECT needs."""
    document: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, dtype, shape, num_bytes in tensors:
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + num_bytes]}
        position += num_bytes
    body = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-(8 + len(body)) % alignment)
    return len(body).to_bytes(8, "little") + body
