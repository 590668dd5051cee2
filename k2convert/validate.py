"""Is a finished checkpoint right? Contract, weights and reference layers, from the written bytes alone.

Weights are decoded again by code that shares nothing with what wrote them and held against the source's exact values,
in the same pass over the shards that the contract's rules need. Nothing here trusts the journal; the journal is one of
the things checked. Only which global scale a rounded divisor stands for is taken from it, where the bytes agree.
"""

import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any

from k2convert.checkpoint.index import Checkpoint, open_checkpoint, read_json_file
from k2convert.checkpoint.layouts import LayoutNames
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.checkpoint.sidecars import LEDGER_NAME
from k2convert.contract import ContractReport, Passing, Subject, check_subject, open_subject
from k2convert.contract.rules_tensors import shape_problems
from k2convert.errors import CheckpointError
from k2convert.formats.arrays import Nvfp4Arrays
from k2convert.formats.nvfp4 import dequantize_nvfp4
from k2convert.journal import Journal, ProjectionRecord
from k2convert.kernels.decode import DecodedError, measure_decoded
from k2convert.layers.result import LayersReport
from k2convert.projections import projection_of
from k2convert.weights import load_projection

if TYPE_CHECKING:
    from k2convert.quantizers.decoders import Decoder

MAX_PENDING = 6  # tensors decoded at once: the pass over the shards waits for the slowest
JOURNAL_TOLERANCE = 1e-9  # both sides add float64 terms, in different orders

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """Measured error of every converted tensor by module, and where somebody's record or decoder disagrees."""

    errors: dict[str, DecodedError]
    roles: dict[str, str]
    journal_mismatches: tuple[str, ...]
    journal_compared: int
    decoder_mismatches: tuple[str, ...]
    decoder_compared: int

    @property
    def passed(self) -> bool:
        return not self.journal_mismatches and not self.decoder_mismatches

    def totals(self) -> dict[str, DecodedError]:
        """Errors added up by role, and under "total"."""
        by_role: dict[str, list[DecodedError]] = defaultdict(list)
        for module, error in self.errors.items():
            by_role[self.roles[module]].append(error)
        result = {role: _add(found) for role, found in sorted(by_role.items())}
        return result | {"total": _add(list(self.errors.values()))} if result else result

    def worst(self, count: int) -> list[tuple[str, DecodedError]]:
        """The tensors with the least SQNR."""
        return sorted(self.errors.items(), key=lambda item: -item[1].relative_mse)[:count]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Another checkpoint of the same source, measured and held to the contract beside ours."""

    folder: str
    contract: ContractReport
    weights: WeightsReport
    better_here: int
    better_there: int
    equal: int


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Everything `validate` found; `passed` decides the exit code."""

    folder: str
    contract: ContractReport
    weights: WeightsReport | None
    layers: LayersReport | None
    comparison: Comparison | None

    @property
    def passed(self) -> bool:
        parts = (self.weights, self.layers)
        return self.contract.passed and all(part.passed for part in parts if part is not None)


def validate_checkpoint(
    *,
    folder: Path,
    source: Checkpoint | None,
    reference: bool = False,
    against: Path | None = None,
    check_reference_layers: Callable[[Checkpoint, Checkpoint], LayersReport] | None = None,
    progress: Advance | None = None,
    passing: Passing | None = None,
) -> ValidationReport:
    """Validate `folder`; weights, layers and comparison need `source`. CheckpointError where one cannot be read.

    `passing` is called with the names of its shards and all their bytes, for whoever needs those too.
    """
    _refuse_bf16(folder)
    contract, weights = measure_folder(
        folder=folder, source=source, reference=reference, progress=progress, passing=passing
    )
    layers = None
    if check_reference_layers is not None and source is not None and contract.passed:
        layers = check_reference_layers(source, open_checkpoint(folder))
    comparison = None
    if against is not None and source is not None and weights is not None:
        theirs, errors = measure_folder(folder=against, source=source, reference=False, progress=progress)
        assert errors is not None
        comparison = compare(str(against), weights, theirs, errors)
    return ValidationReport(str(folder), contract, weights, layers, comparison)


def _refuse_bf16(folder: Path) -> None:
    ledger = folder / LEDGER_NAME
    if ledger.is_file() and read_json_file(ledger).get("recipe", {}).get("target") == "bf16":
        raise CheckpointError(
            f"{folder}: holds a BF16 copy (--to bf16), and this checks NVFP4 checkpoints. The hash of every shard is "
            f"in {LEDGER_NAME}."
        )


def measure_folder(
    *,
    folder: Path,
    source: Checkpoint | None,
    reference: bool,
    progress: Advance | None,
    passing: Passing | None = None,
) -> tuple[ContractReport, WeightsReport | None]:
    """Check the contract of one folder and, against a source, measure every converted tensor in the same pass."""
    subject = open_subject(folder, source=source)
    if source is None:
        return check_subject(subject, progress=progress, passing=passing), None
    recorded = {p.module: p for record in Journal(folder).finished().values() for p in record.projections}
    decoder = None
    if reference:
        from k2convert.quantizers.decoders import create_decoder

        decoder = create_decoder(subject.layout)
    with ShardReader(source.path) as reader, ThreadPoolExecutor(thread_name_prefix="decode") as pool:
        measurer = _Measurer(
            subject=subject, source=source, reader=reader, pool=pool, decoder=decoder, recorded=recorded
        )
        contract = check_subject(
            subject, tensor_errors=measurer, observe=measurer.observe, progress=progress, passing=passing
        )
        errors = measurer.results()
    mismatches, compared = _compare_journal(recorded, errors)
    report = WeightsReport(
        errors=errors,
        roles={name: subject.modules[name].parts.role for name in errors},
        journal_mismatches=tuple(mismatches),
        journal_compared=compared,
        decoder_mismatches=tuple(sorted(measurer.decoder_mismatches)),
        decoder_compared=len(errors) if reference else 0,
    )
    return contract, report


@dataclass(slots=True)
class _Measurer(Mapping[str, DecodedError]):
    """Collects a module's tensors as they pass, decodes them in the pool, and hands the figures to rule 18."""

    subject: Subject
    source: Checkpoint
    reader: ShardReader
    pool: ThreadPoolExecutor
    decoder: "Decoder | None"
    recorded: Mapping[str, ProjectionRecord]
    decoder_mismatches: set[str] = field(default_factory=set[str])
    _parts: dict[str, dict[str, Bytes]] = field(default_factory=dict[str, dict[str, Bytes]])
    _pending: dict[str, Future[DecodedError]] = field(default_factory=dict[str, Future[DecodedError]])
    _room: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(MAX_PENDING))

    def observe(self, module: str, parameter: str, data: Bytes) -> None:
        """Take one tensor of a converted module; decodes when codes, block scales and global scale are there."""
        names = self.subject.names
        needed = (names.weight, names.block_scale, names.global_scale)
        if parameter not in needed:  # kept, its view would keep the whole batch it lies in
            return
        parts = self._parts.setdefault(module, {})
        parts[parameter] = data
        if len(parts) == len(needed):
            del self._parts[module]
            if not shape_problems(self.subject, self.subject.modules[module]):
                self._room.acquire()
                self._pending[module] = self.pool.submit(self._measure, module, parts)

    def _measure(self, module: str, parts: dict[str, Bytes]) -> DecodedError:
        try:
            names = self.subject.names
            source = load_projection(self.reader, projection_of(self.source, self.subject.modules[module].parts))
            raw = parts[names.global_scale].tobytes()
            packed, block_scales = parts[names.weight], parts[names.block_scale]
            global_scale = _global_scale(names, raw, self.recorded.get(module))
            if self.decoder is not None:
                self._decode_again(module, packed, block_scales, raw, source.shape)
            return measure_decoded(source, packed=packed, block_scales=block_scales, global_scale=global_scale)
        finally:
            self._room.release()

    def _decode_again(
        self, module: str, packed: Bytes, block_scales: Bytes, raw: bytes, shape: tuple[int, int]
    ) -> None:
        from k2convert.quantizers.decoders import agrees

        assert self.decoder is not None
        global_scale = self.subject.names.decode_scalar(raw)
        if not 0 < global_scale < math.inf:  # no weight at all; the contract's rules say why
            self.decoder_mismatches.add(module)
            return
        rows, columns = shape
        written = Nvfp4Arrays(
            packed=packed.copy().reshape(rows, columns // 2),
            block_scales=block_scales.copy().reshape(rows, columns // 16),
            global_scale=global_scale,
        ).to_torch()
        (stored,) = struct.unpack("<f", raw)
        theirs = self.decoder(written.packed, written.block_scales, stored)
        if not agrees(theirs, dequantize_nvfp4(written), stored=stored):
            self.decoder_mismatches.add(module)

    def results(self) -> dict[str, DecodedError]:
        """Every module measured so far, in the order of the shards; waits for the last."""
        return {module: future.result() for module, future in self._pending.items()}

    def __getitem__(self, module: str) -> DecodedError:
        return self._pending[module].result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._pending)

    def __len__(self) -> int:
        return len(self._pending)


def _global_scale(names: LayoutNames, raw: bytes, record: ProjectionRecord | None) -> float:
    """The journal's global scale where the file holds exactly its bytes, else what those bytes mean by themselves.

    A divisor is a rounded 1/g, and the figures of a conversion are measured with g.
    """
    if record is not None and names.stores(record.global_scale, raw):
        return record.global_scale
    return names.decode_scalar(raw)


def _compare_journal(
    recorded: Mapping[str, ProjectionRecord], errors: Mapping[str, DecodedError]
) -> tuple[list[str], int]:
    """Hold the journal's figures, where there is one, against what the bytes say."""
    mismatches: list[str] = []
    compared = 0
    for module, projection in recorded.items():
        measured, stated = errors.get(module), projection.metrics
        if measured is None or stated is None:
            continue
        compared += 1
        same = all(
            math.isclose(getattr(measured, key), stated[key], rel_tol=JOURNAL_TOLERANCE)
            for key in ("squared_error", "energy", "equal_nonzero", "num_nonzero")
        )
        if not same:
            mismatches.append(module)
    return mismatches, compared


def compare(folder: str, ours: WeightsReport, contract: ContractReport, theirs: WeightsReport) -> Comparison:
    """Count on which side each tensor has less error."""
    common = [(ours.errors[m], theirs.errors[m]) for m in ours.errors if m in theirs.errors]
    return Comparison(
        folder=folder,
        contract=contract,
        weights=theirs,
        better_here=sum(a.squared_error < b.squared_error for a, b in common),
        better_there=sum(a.squared_error > b.squared_error for a, b in common),
        equal=sum(a.squared_error == b.squared_error for a, b in common),
    )


def _add(errors: list[DecodedError]) -> DecodedError:
    steps = [e.max_error_steps for e in errors if e.max_error_steps is not None]
    return DecodedError(
        num_weights=sum(e.num_weights for e in errors),
        num_nonzero=sum(e.num_nonzero for e in errors),
        equal_nonzero=sum(e.equal_nonzero for e in errors),
        energy=math.fsum(e.energy for e in errors),
        squared_error=math.fsum(e.squared_error for e in errors),
        max_error_steps=max(steps) if steps else None,
    )


def report_document(report: ValidationReport) -> dict[str, Any]:
    """The whole report as plain data, for --json and the HTML report."""
    document: dict[str, Any] = {
        "folder": report.folder,
        "passed": report.passed,
        "contract": report.contract.to_dict(),
        "weights": None if report.weights is None else _weights_document(report.weights),
        "layers": None if report.layers is None else report.layers.to_dict(),
        "against": None,
    }
    if report.comparison is not None:
        other = report.comparison
        document["against"] = {
            "folder": other.folder,
            "contract": other.contract.to_dict(),
            "weights": _weights_document(other.weights),
            "better_here": other.better_here,
            "better_there": other.better_there,
            "equal": other.equal,
        }
    return document


def _weights_document(weights: WeightsReport) -> dict[str, Any]:
    return {
        "passed": weights.passed,
        "totals": {role: error_document(error) for role, error in weights.totals().items()},
        "worst": {module: error_document(error) for module, error in weights.worst(8)},
        "journal": {"compared": weights.journal_compared, "mismatches": list(weights.journal_mismatches)},
        "library_decoder": {"compared": weights.decoder_compared, "mismatches": list(weights.decoder_mismatches)},
    }


def error_document(error: DecodedError) -> dict[str, Any]:
    """One tensor's or total's figures; ratios that are not finite become None."""
    figures = {"sqnr_db": error.sqnr_db, "relative_mse": error.relative_mse, "squared_error": error.squared_error}
    return {
        "num_weights": error.num_weights,
        "num_nonzero": error.num_nonzero,
        "equal_nonzero": error.equal_nonzero,
        "energy": error.energy,
        "max_error_steps": error.max_error_steps,
        **{key: value if value is not None and math.isfinite(value) else None for key, value in figures.items()},
    }
