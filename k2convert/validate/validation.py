"""Is a finished checkpoint right? Contract, weights and reference layers, from the written bytes alone.

Weights are decoded again by code that shares nothing with what wrote them and held against the source's exact values,
in the same pass over the shards that the contract's rules need. Nothing here trusts the journal; the journal is one of
the things checked. Only which global scale a rounded divisor stands for is taken from it, where the bytes agree.
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.index import Checkpoint, open_checkpoint
from k2convert.checkpoint.layouts import LayoutNames
from k2convert.checkpoint.names import LEDGER_NAME
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.errors import CheckpointError
from k2convert.models.projections import projection_of
from k2convert.models.weights import load_projection
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, dequantize_nvfp4
from k2convert.records.journal import Journal
from k2convert.records.shard_record import ProjectionRecord
from k2convert.validate.contract import check_subject
from k2convert.validate.contract.findings import ContractReport
from k2convert.validate.contract.scan import Passing
from k2convert.validate.contract.subject import Subject, open_subject
from k2convert.validate.contract.tensors import shape_problems
from k2convert.validate.decode import DecodedError, measure_decoded
from k2convert.validate.layers.result import LayersReport
from k2convert.validate.results import Comparison, ValidationReport, WeightsReport

if TYPE_CHECKING:
    from k2convert.validate.library_decoders import Decoder

MAX_PENDING = 6  # tensors decoded at once: the pass over the shards waits for the slowest
JOURNAL_TOLERANCE = 1e-9  # both sides add float64 terms, in different orders

Advance = Callable[[int], None]


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
        from k2convert.validate.library_decoders import create_decoder

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
        from k2convert.validate.library_decoders import agrees

        assert self.decoder is not None
        global_scale = self.subject.names.decode_scalar(raw)
        if not 0 < global_scale < math.inf:  # no weight at all; the contract's rules say why
            self.decoder_mismatches.add(module)
            return
        rows, columns = shape
        written = Nvfp4Weight(
            packed=packed.copy().reshape(rows, columns // 2),
            block_scales=block_scales.copy().reshape(rows, columns // 16),
            global_scale=global_scale,
        )
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
