"""Scans for a result whose shards leave the disk one by one: each shard is scanned before it is removed.

The findings of a scan are kept as plain data in the upload record. The rules are checked on them once config, index and
ledger are written.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from k2convert.checkpoint.header import read_header
from k2convert.validate.contract.scan import ScanResult, ShardVisitor, scan_shards
from k2convert.validate.contract.subject import open_subject

_SCAN = {
    "digests": str,
    "invalid_scales": int,
    "subnormal_scales": int,
    "zero_blocks_with_codes": int,
    "scalars": str,
}


def scan_shard(
    folder: Path, shard: str, *, visitor: ShardVisitor | None = None, blake3: str | None = None
) -> dict[str, Any]:
    """Scan every byte of one finished shard; return what `join_scans` needs, ready for JSON.

    If the caller knows the file's `blake3`, only the tensors that the rules look at are read, and `visitor` gets only
    those. Raises CheckpointError if the header is damaged, SourceReadError if the file cannot be read.
    """
    subject = open_subject(folder, source=None, known_headers={shard: read_header(folder / shard)})
    found = scan_shards(subject, shard_visitor=visitor, digests={} if blake3 is None else {shard: blake3})
    return {
        "digests": found.digests,
        "invalid_scales": found.invalid_scales,
        "subnormal_scales": found.subnormal_scales,
        "zero_blocks_with_codes": found.zero_blocks_with_codes,
        "scalars": {name: data.hex() for name, data in found.scalars.items()},
    }


def is_scan(scan: Mapping[str, Any]) -> bool:
    """Return whether a document has the form that `scan_shard` returns."""
    values = {key: cast(dict[str, Any], scan[key]).values() for key in _SCAN if isinstance(scan.get(key), dict)}
    if values.keys() != _SCAN.keys() or not all(isinstance(v, _SCAN[key]) for key in values for v in values[key]):
        return False
    try:
        for data in values["scalars"]:
            bytes.fromhex(data)
    except ValueError:
        return False
    return True


def join_scans(scans: Iterable[Mapping[str, Any]]) -> ScanResult:
    """Put what the scans of all shards found together."""
    together = ScanResult()
    for scan in scans:
        together.digests.update(scan["digests"])
        together.invalid_scales.update(scan["invalid_scales"])
        together.subnormal_scales.update(scan["subnormal_scales"])
        together.zero_blocks_with_codes.update(scan["zero_blocks_with_codes"])
        together.scalars.update({name: bytes.fromhex(data) for name, data in scan["scalars"].items()})
    return together
