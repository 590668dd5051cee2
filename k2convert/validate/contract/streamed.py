"""The contract for results whose shards leave the disk one by one: each is scanned before it goes.

What a scan found is kept as plain data (with the upload record), and is held against the rules when config, index and
ledger are there. Comparisons with the source's bytes are left out, as they are without `--source`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from k2convert.checkpoint.header import ShardHeader, read_header
from k2convert.validate.contract import check_subject
from k2convert.validate.contract.findings import ContractReport
from k2convert.validate.contract.scan import Passing, ScanResult, scan_shards
from k2convert.validate.contract.subject import open_subject

_SCAN = {
    "digests": str,
    "invalid_scales": int,
    "subnormal_scales": int,
    "zero_blocks_with_codes": int,
    "scalars": str,
}


def scan_shard(
    folder: Path, shard: str, *, passing: Passing | None = None, blake3: str | None = None
) -> dict[str, Any]:
    """Look at every byte of one finished shard; returns what `check_streamed` needs, ready for JSON.

    With its `blake3` given, only at what the rules look at themselves: whoever gives it vouches for the rest.
    `passing` is called with the shard's name and all bytes in order. Raises CheckpointError where its header is
    damaged, SourceReadError where it cannot be read.
    """
    subject = open_subject(folder, source=None, known_headers={shard: read_header(folder / shard)})
    digests = None if blake3 is None else {shard: blake3}
    found = scan_shards(subject, observe=None, advance=None, passing=passing, digests=digests)
    return {
        "digests": found.digests,
        "invalid_scales": found.invalid_scales,
        "subnormal_scales": found.subnormal_scales,
        "zero_blocks_with_codes": found.zero_blocks_with_codes,
        "scalars": {name: data.hex() for name, data in found.scalars.items()},
    }


def is_scan(scan: Mapping[str, Any]) -> bool:
    """Whether this has the form of what `scan_shard` returns."""
    values = {key: cast(dict[str, Any], scan[key]).values() for key in _SCAN if isinstance(scan.get(key), dict)}
    if values.keys() != _SCAN.keys() or not all(isinstance(v, _SCAN[key]) for key in values for v in values[key]):
        return False
    try:
        for data in values["scalars"]:
            bytes.fromhex(data)
    except ValueError:
        return False
    return True


def check_streamed(
    folder: Path, *, headers: Mapping[str, ShardHeader], scans: Iterable[Mapping[str, Any]]
) -> ContractReport:
    """Check the contract on a folder that holds everything but the shards.

    `headers` are those of all shards as planned: a shard's digest, held against the ledger, vouches for its header.
    """
    together = ScanResult()
    for scan in scans:
        together.digests.update(scan["digests"])
        together.invalid_scales.update(scan["invalid_scales"])
        together.subnormal_scales.update(scan["subnormal_scales"])
        together.zero_blocks_with_codes.update(scan["zero_blocks_with_codes"])
        together.scalars.update({name: bytes.fromhex(data) for name, data in scan["scalars"].items()})
    subject = open_subject(folder, source=None, known_headers=dict(headers))
    return check_subject(subject, scan=together)
