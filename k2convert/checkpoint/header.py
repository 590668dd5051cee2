"""Safetensors headers, read strictly: everything a shard says about itself is checked before a tensor byte is touched.

Layout (https://huggingface.co/docs/safetensors, "Format"):

    | 8 bytes: header length n, little endian | n bytes of JSON, space padded | tensor data, no holes |

Refused here: truncated files, headers longer than the file or than 100 MB (the library's own limit), duplicate keys,
unknown dtypes, shapes that do not fit their byte range, gaps and overlaps, trailing bytes.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from k2convert.checkpoint.files import _DuplicateKeyError, _unique_keys, check_plain_file
from k2convert.errors import CheckpointError, SourceReadError

MAX_HEADER_BYTES = 100_000_000
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `begin` and `end` are absolute byte offsets in the file of `shard`."""

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
    """One shard's header; `digest` is the blake3 of its length prefix and JSON, as lower-case hex."""

    shard: str
    file_bytes: int
    data_begin: int
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]
    digest: str


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of one safetensors file; raises CheckpointError naming file, tensor and remedy."""
    try:
        check_plain_file(path)
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = check_header_length(prefix, shard=str(path), file_bytes=file_bytes)
            raw = prefix + file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: named by the index but missing. Download the shard again.") from None
    except OSError as error:
        raise SourceReadError(f"{path}: cannot be read ({error.strerror}). Check permissions and disk.") from None
    return parse_header(raw, shard=path.name, file_bytes=file_bytes, where=str(path))


def check_header_length(prefix: bytes, *, shard: str, file_bytes: int) -> int:
    """Return the header length that the first 8 bytes state, if the file and the format allow it."""
    if len(prefix) < 8:
        raise CheckpointError(f"{shard}: {file_bytes} bytes is too short for a safetensors file. Download it again.")
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{shard}: its header claims {length:,} bytes, over the format's limit of {MAX_HEADER_BYTES:,}. "
            "This is not a safetensors file, or it is damaged: download it again."
        )
    if 8 + length > file_bytes:
        raise CheckpointError(
            f"{shard}: its header claims {length:,} bytes but the file has {file_bytes:,}. It is truncated: "
            "download it again."
        )
    return length


def parse_header(raw: bytes, *, shard: str, file_bytes: int, where: str | None = None) -> ShardHeader:
    """Check the first `8 + n` bytes of a shard that is `file_bytes` long. `where` names it in messages."""
    where = where or shard
    length = check_header_length(raw[:8], shard=where, file_bytes=file_bytes)
    try:
        document: Any = json.loads(raw[8 : 8 + length].decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, numbers of absurd length
        raise CheckpointError(f"{where}: its header is not JSON ({error}). Download the shard again.") from None
    except _DuplicateKeyError as error:
        raise CheckpointError(f"{where}: its header names {error.key!r} twice. Download the shard again.") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{where}: its header is not a JSON object. Download the shard again.")
    entries = cast(dict[str, Any], document)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in cast(dict[str, Any], metadata).values()):
        raise CheckpointError(f"{where}: __metadata__ must map strings to strings. Download the shard again.")
    data_begin = 8 + length
    tensors = {name: _tensor_info(name, e, shard=shard, where=where, base=data_begin) for name, e in entries.items()}
    _check_coverage(tensors, data_begin=data_begin, file_bytes=file_bytes, where=where)
    digest = blake3(raw[: 8 + length]).hexdigest()
    return ShardHeader(shard, file_bytes, data_begin, cast(dict[str, str], metadata), tensors, digest)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor_info(name: str, entry: Any, *, shard: str, where: str, base: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{where}: tensor {name}: needs dtype, shape and data_offsets, has {entry!r}. Download the shard again."
        ) from None
    if not name.isprintable():
        raise CheckpointError(f"{where}: tensor {name!r}: control characters in a name. Download the shard again.")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"{where}: tensor {name}: unknown dtype {dtype!r}. Known: {', '.join(DTYPE_BYTES)}. "
            "Download the shard again, or start from Moonshot's release."
        )
    if not (all(map(_is_count, shape)) and _is_count(begin) and _is_count(end)):
        raise CheckpointError(
            f"{where}: tensor {name}: shape {list(shape)} or offsets [{begin}, {end}] are not counts. "
            "Download the shard again."
        )
    expected = DTYPE_BYTES[dtype]
    for size in shape:
        expected *= size
    if end - begin != expected:
        raise CheckpointError(
            f"{where}: tensor {name}: {dtype} {list(shape)} takes {expected:,} bytes, its range has {end - begin:,}. "
            "Download the shard again."
        )
    return TensorInfo(name, dtype, shape, base + begin, base + end, shard)


def _check_coverage(tensors: dict[str, TensorInfo], *, data_begin: int, file_bytes: int, where: str) -> None:
    position = data_begin
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if tensor.begin != position:
            kind = "overlaps the tensor before it" if tensor.begin < position else "leaves a gap before it"
            raise CheckpointError(
                f"{where}: tensor {tensor.name} {kind} (starts at byte {tensor.begin}, expected {position}). "
                "Download the shard again."
            )
        position = tensor.end
    if position != file_bytes:
        kind = "truncated" if position > file_bytes else "longer than its header says"
        raise CheckpointError(
            f"{where}: {kind}: the header accounts for {position:,} bytes, the file has {file_bytes:,}. "
            "Download the shard again."
        )


def encode_header(
    tensors: list[tuple[str, str, tuple[int, ...], int]], *, metadata: dict[str, str], alignment: int
) -> bytes:
    """Build the bytes before the data for tensors given as (name, dtype, shape, num_bytes) in file order.

    The JSON is padded with spaces, which the format allows, so that the data begin at a multiple of `alignment`:
    with 4096 the data can be written past the page cache.
    """
    document: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, dtype, shape, num_bytes in tensors:
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + num_bytes]}
        position += num_bytes
    body = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-(8 + len(body)) % alignment)
    return len(body).to_bytes(8, "little") + body
