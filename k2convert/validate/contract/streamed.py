"""The contract for a result whose shards leave the disk one by one: each shard is scanned before it is removed.

The findings of a scan are kept as plain data in the upload record. The rules are checked on them once config, index and
ledger are written. What was compared with the source's bytes while the shards were converted is in their records.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from k2convert.checkpoint.header import ShardHeader, read_header
from k2convert.checkpoint.index import Checkpoint
from k2convert.records.shard_record import SourceCheck
from k2convert.validate.contract import check_subject
from k2convert.validate.contract.findings import ContractReport
from k2convert.validate.contract.scan import ScanResult, ShardVisitor, scan_shards
from k2convert.validate.contract.subject import open_subject
from k2convert.validate.decode import DecodedError

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
    """Scan every byte of one finished shard; return what `check_streamed` needs, ready for JSON.

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


def check_streamed(
    folder: Path,
    *,
    headers: Mapping[str, ShardHeader],
    scans: Iterable[Mapping[str, Any]],
    source: Checkpoint,
    checks: Iterable[SourceCheck],
) -> ContractReport:
    """Check the contract on a folder that holds everything except the shards.

    `headers` are the planned ones of all shards. A scan's hash of the whole file, compared with the ledger, covers its
    header. `checks` are the comparisons of the shards with the `source`: what is in none of them fails.
    """
    together, compared = ScanResult(), set[str]()
    for scan in scans:
        together.digests.update(scan["digests"])
        together.invalid_scales.update(scan["invalid_scales"])
        together.subnormal_scales.update(scan["subnormal_scales"])
        together.zero_blocks_with_codes.update(scan["zero_blocks_with_codes"])
        together.scalars.update({name: bytes.fromhex(data) for name, data in scan["scalars"].items()})
    errors: dict[str, DecodedError] = {}
    for check in checks:
        compared.update(check.copied)
        errors |= decoded_errors(check)
    together.compared = frozenset(compared)
    return check_subject(open_subject(folder, source=source, known_headers=dict(headers)), together, errors=errors)


def decoded_errors(check: SourceCheck) -> dict[str, DecodedError]:
    """Return the measured errors of a shard's converted projections, by module."""
    return {module: DecodedError(**figures) for module, figures in check.decoded.items()}
