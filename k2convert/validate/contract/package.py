"""Rules 16, 17 and 19: the files of the folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from k2convert.checkpoint.files import mapping_or_empty, walk_folder
from k2convert.checkpoint.names import INDEX_NAME, LEDGER_NAME, SHARD_SUFFIX, SINGLE_SHARD_NAME
from k2convert.checkpoint.sidecars import list_sidecars
from k2convert.errors import quoted, shortened
from k2convert.records.ledger import Ledger
from k2convert.validate.contract.findings import Findings
from k2convert.validate.contract.result import Subject
from k2convert.validate.contract.scan import ScanResult
from k2convert.validate.contract.source_view import PRUNING_PLACE
from k2convert.validate.totals import Figures, differing_totals

_TEMPORARY_SUFFIXES = (".tmp", ".part", ".incomplete")
_COMPARE_BYTES = 1 << 20


def check_package(subject: Subject) -> Findings:
    """Rule 16: index and shards agree and are complete, and there are no links, stray shards or temporary files."""
    found = Findings(16)
    for shard, problem in subject.unreadable.items():
        found.error(shortened(shard), problem)
    _check_index(subject, found)
    for path in _visible_files(subject.folder):
        name = str(path.relative_to(subject.folder))
        if path.is_symlink():
            if name not in subject.unreadable and name != INDEX_NAME:  # reported already
                found.error(name, "a link, not a file")
        elif path.suffix == SHARD_SUFFIX and name not in subject.headers and name not in subject.unreadable:
            found.error(name, "a shard that the index does not name")
        elif path.suffix in _TEMPORARY_SUFFIXES:
            found.error(name, "a temporary file")
    return found


def _visible_files(folder: Path) -> list[Path]:
    """Return all files. Hidden folders (the journal, a download cache) are not part of the package."""
    result: list[Path] = []
    for path in walk_folder(folder):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts[:-1])
        if not hidden and (path.is_symlink() or path.is_file()):
            result.append(path)
    return result


def _check_index(subject: Subject, found: Findings) -> None:
    single = subject.index is None and list(subject.headers) == [SINGLE_SHARD_NAME]
    if single and not (subject.folder / INDEX_NAME).exists():
        return
    if subject.index is None:
        found.error(INDEX_NAME, subject.index_problem)
        return
    weight_map: Any = subject.index.get("weight_map")
    if not isinstance(weight_map, dict):
        found.error(INDEX_NAME, "has no weight_map")
        return
    mapped = cast(dict[str, Any], weight_map)
    shard_of = {name: shard for shard, header in subject.headers.items() for name in header.tensors}
    for name, shard in mapped.items():
        if not isinstance(shard, str):
            found.error(shortened(name), f"the index says {quoted(shard)}, which is not a file name")
        elif shard not in subject.unreadable and shard_of.get(name) != shard:
            where = f"is in {shard_of[name]}" if name in shard_of else "is in no shard"
            found.error(shortened(name), f"the index says {shortened(shard)}, but it {where}")
    for name, shard in shard_of.items():
        if name not in mapped:
            found.error(name, f"in {shortened(shard)}, but not in the index")
    total: Any = mapping_or_empty(subject.index.get("metadata")).get("total_size")
    actual = sum(t.num_bytes for header in subject.headers.values() for t in header.tensors.values())
    if not subject.unreadable and (total != actual or isinstance(total, float)):
        found.error(f"{INDEX_NAME}: metadata.total_size", f"{quoted(total)}, but the tensors have {actual} bytes")
    num_found = sum(len(header.tensors) for header in subject.headers.values())
    if num_found != len(shard_of):
        found.error(INDEX_NAME, f"{num_found - len(shard_of)} tensors appear in two shards")


def check_sidecars(subject: Subject) -> Findings:
    """Rule 17. Files are compared with the source's and never run. Code that the source does not have is an error."""
    found = Findings(17)
    if subject.source is None:
        found.skip(subject.no_source)
        return found
    expected = list_sidecars(subject.source.folder)
    for relative in expected:
        path = subject.folder / relative
        if path.is_symlink():
            continue  # reported by rule 16
        if not path.is_file():
            found.error(str(relative), "missing")
        elif not _same_bytes(path, subject.source.folder / relative):
            found.error(str(relative), "differs from the source's")
    for path in _visible_files(subject.folder):
        relative = path.relative_to(subject.folder)
        if path.suffix == ".py" and relative not in expected:
            found.error(str(relative), "code that is not in the source")
    found.note = f"{len(expected)} files compared"
    return found


def _same_bytes(left: Path, right: Path) -> bool:
    if left.stat().st_size != right.stat().st_size:
        return False
    with left.open("rb") as one, right.open("rb") as other:
        while block := one.read(_COMPARE_BYTES):
            if block != other.read(_COMPARE_BYTES):
                return False
    return True


def check_ledger(subject: Subject, scan: ScanResult, totals: Mapping[str, Figures] | None) -> Findings:
    """Rule 19: the ledger states source and recipe, the size and hash of every shard, and what was measured.

    `totals` are the measured figures by role; None if they are not known.
    """
    found = Findings(19)
    ledger = subject.ledger
    if (subject.folder / LEDGER_NAME).is_symlink():
        found.skip(f"{LEDGER_NAME} is a link, see rule 16")
        return found
    if ledger is None:
        found.error(LEDGER_NAME, subject.ledger_problem)
        return found
    for problem in ledger.problems:
        found.error(LEDGER_NAME, problem)
    stated, used = ledger.calibration, ledger.fingerprint.get("statistics")
    # With rule gptq, the statistics come out of the conversion. They do not identify it.
    digest = None if stated is None or stated.gptq else stated.statistics
    if digest != used and not ledger.problems:
        found.error(f"{LEDGER_NAME}: calibration.statistics", f"is not the fingerprint's digest {quoted(used)}")
    if not ledger.problems and not subject.list_problem and (problem := _list_problem(ledger)):
        found.error(PRUNING_PLACE, problem)
    for shard, digest in scan.digests.items():
        stated, size = ledger.shards.get(shard), _file_bytes(subject, scan, shard)
        if stated is None:
            found.error(shortened(shard), "not in the ledger")
        elif stated.num_bytes != size:
            found.error(shard, f"{size:,} bytes, but the ledger says {stated.num_bytes:,}")
        elif stated.blake3 != digest:
            found.error(shard, "its blake3 is not the ledger's: the file was changed after it was written")
    for shard in sorted(set(ledger.shards) - set(scan.digests) - set(subject.unreadable)):
        found.error(shortened(shard), "in the ledger, but missing")
    if subject.source is not None and ledger.headers:
        headers = {shard: header.digest for shard, header in subject.source.headers.items()}
        if headers != ledger.headers:
            found.warn(LEDGER_NAME, "states different source headers than --source has")
    if subject.is_int4:
        found.note = "no weight was converted"
    elif totals is None:
        found.note = "totals were not compared: not every converted weight was measured"
    else:
        for place, problem in differing_totals(ledger.totals, totals):
            found.error(f"{LEDGER_NAME}: {place}", problem)
    return found


def _list_problem(ledger: Ledger) -> str:
    """Return how the list of kept experts differs from what the conversion used; empty if it does not."""
    used, kept = ledger.fingerprint.get("kept_experts"), ledger.fingerprint.get("num_kept_experts")
    if ledger.pruning is None:
        return "" if used is None else f"missing, but {quoted(kept)} experts a layer were kept, by the fingerprint"
    return "" if ledger.pruning.digest == used else f"its digest is not the fingerprint's {quoted(used)}"


def _file_bytes(subject: Subject, scan: ScanResult, shard: str) -> int:
    header = subject.headers.get(shard)
    return scan.unreadable_bytes[shard] if header is None else header.file_bytes
