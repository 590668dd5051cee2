"""Is a finished checkpoint right? Contract, weights and reference layers, checked on the written bytes.

Weights are decoded by code that shares nothing with the code that wrote them, and compared with the source's exact
values, in the same pass over the shards that the contract's rules need. Then they are made again by the recipe's rule
and compared byte for byte (see weights.py). Journal and ledger are not trusted: their figures are checked too. Only one
number is taken from the journal: if no rule is known, which global scale a rounded divisor means.
"""

import math
import struct
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Final

from k2convert.checkpoint.index import Checkpoint, open_checkpoint
from k2convert.checkpoint.names import LEDGER_NAME
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.choices import BLOCK_SIZE, Rule
from k2convert.errors import CheckpointError, remedy
from k2convert.models.names import TensorName
from k2convert.models.projections import SOURCE_REMEDY, projection_of
from k2convert.models.weights import load_projection
from k2convert.quantize.formats.int4 import SourceWeight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, dequantize_nvfp4
from k2convert.records.events import SILENT, Events
from k2convert.records.journal import Journal
from k2convert.records.shard_record import ProjectionRecord
from k2convert.validate.contract import check_subject
from k2convert.validate.contract.findings import ContractReport
from k2convert.validate.contract.scan import ShardVisitor, scan_shards
from k2convert.validate.contract.subject import Subject, open_subject
from k2convert.validate.contract.tensors import shape_problems
from k2convert.validate.decode import DecodedError
from k2convert.validate.layers.result import LayerBudget, LayersReport
from k2convert.validate.operands import check_operands
from k2convert.validate.remote import LOCAL, Shards
from k2convert.validate.results import (
    Comparison,
    ValidationReport,
    WeightsReport,
    merge_contracts,
    merge_layers,
    merge_weights,
)
from k2convert.validate.rule_check import checkable_rule, rule_report, sharing_modules
from k2convert.validate.totals import Totals, is_same_error
from k2convert.validate.weights import CheckedWeight, WrittenWeight, check_weights

if TYPE_CHECKING:
    from k2convert.validate.library_decoders import Decoder

RESULT_REMEDY: Final = "Run the conversion again: it replaces what is damaged."

MAX_PENDING: Final = 3  # sets of tensors checked at once; the pass over the shards waits for the slowest
MAX_HELD: Final = 4  # sets that wait for a tensor


@dataclass(frozen=True, slots=True)
class LayersRequest:
    """Which reference layers to compute: `layers` empty means all, `hidden_states` None means synthetic ones."""

    layers: tuple[int, ...]
    hidden_states: Path | None
    tokens: int


def validate_checkpoint(
    *,
    folder: Path,
    source: Checkpoint | None,
    reference: bool = False,
    against: Path | None = None,
    layers: LayersRequest | None = None,
    events: Events = SILENT,
    visitor: ShardVisitor | None = None,
    shards: Shards = LOCAL,
) -> ValidationReport:
    """Validate `folder`; raises CheckpointError if a checkpoint cannot be read.

    Weights, `layers` and the comparison with the folder `against` need `source`; without it they are left out.
    `reference` also decodes every tensor with the layout's own library. `visitor` gets all bytes of the folder's
    shards. Reference layers are computed only if the contract holds. `shards` brings those that are on the Hub; of a
    result or source there, only the given `layers` are read.
    """
    subject = open_subject(folder, source=source, read=shards.header_reader)
    check_operands(subject)
    if layers is not None and source is not None and shards.is_remote:
        return _validate_layers(subject, source, layers, reference=reference, events=events, shards=shards)
    contract, weights = _measure(subject, reference=reference, events=events, visitor=visitor, shards=shards)
    layers_report = None
    if layers is not None and source is not None and contract.passed:
        layers_report = _compute_layers(layers, subject=subject, source=source, events=events, shards=shards)
    comparison = None
    if against is not None and source is not None and weights is not None:
        other = open_subject(against, source=source)
        theirs = replace(shards, result=None)
        their_contract, their_weights = _measure(other, reference=False, events=events, visitor=None, shards=theirs)
        assert their_weights is not None
        comparison = compare(str(against), weights, their_contract, their_weights)
    return ValidationReport(str(folder), contract, weights, layers_report, comparison)


def _validate_layers(
    subject: Subject, source: Checkpoint, request: LayersRequest, *, reference: bool, events: Events, shards: Shards
) -> ValidationReport:
    """Check headers and configs, and read only the MoE blocks of the layers, one layer on disk at a time."""
    from k2convert.validate.layers.check import moe_layers

    contracts: list[ContractReport] = []
    weights: list[WeightsReport] = []
    computed: list[LayersReport] = []
    for layer in request.layers or moe_layers(source):
        part, wanted = subject.of_layer(layer), replace(request, layers=(layer,))
        with shards.around_layer(part, layer):
            contract, measured = _measure(part, reference=reference, events=events, visitor=None, shards=LOCAL)
            contracts.append(contract)
            weights += [] if measured is None else [measured]
            if contract.passed:
                computed.append(_compute_layers(wanted, subject=subject, source=source, events=events, shards=shards))
    return ValidationReport(
        str(subject.folder), merge_contracts(contracts), merge_weights(weights), merge_layers(computed), comparison=None
    )


def _measure(
    subject: Subject, *, reference: bool, events: Events, visitor: ShardVisitor | None, shards: Shards
) -> tuple[ContractReport, WeightsReport | None]:
    """Check the contract and, if there is a source, measure every converted tensor in the same pass."""
    if subject.ledger is not None and subject.ledger.recipe.get("target") == "bf16":
        raise CheckpointError(
            f"{subject.folder}: holds a BF16 copy (--to bf16), but only NVFP4 checkpoints can be validated. "
            f"{LEDGER_NAME} has the hash of every shard."
        )
    source = subject.source
    if source is None:
        around = shards.plan(subject)
        return check_subject(subject, scan_shards(subject, shard_visitor=visitor, events=events, around=around)), None
    recorded = _recorded(subject)
    decoder = None
    if reference:
        from k2convert.validate.library_decoders import create_decoder

        decoder = create_decoder(subject.layout)
    rule, skip_reason = checkable_rule(subject.ledger, subject.recipe)
    with ShardReader(source.path) as reader, ThreadPoolExecutor(thread_name_prefix="decode") as pool:
        measurer = _Measurer(
            subject=subject,
            source=source,
            reader=reader,
            pool=pool,
            decoder=decoder,
            recorded=recorded,
            rule=rule,
            sharing=sharing_modules(subject),
        )
        around = shards.plan(subject, settle=measurer.settle)
        scan = scan_shards(subject, shard_visitor=visitor, tensor_visitor=measurer, events=events, around=around)
        checked = measurer.results()
    errors = {module: found.error for module, found in checked.items()}
    mismatches, compared = compare_journal(recorded, errors)
    weights = WeightsReport(
        errors=errors,
        roles={name: subject.modules[name].parts.role for name in errors},
        rule=rule_report(rule, skip_reason, checked),
        journal_mismatches=tuple(mismatches),
        journal_compared=compared,
        decoder_mismatches=tuple(sorted(measurer.decoder_mismatches)),
        decoder_compared=len(errors) if reference else 0,
    )
    is_whole = subject.whole is None and errors.keys() >= {module.name for module in subject.converted}
    totals = measurer.totals.figures(weights.totals(), num_modules=len(errors)) if is_whole and errors else None
    return check_subject(subject, scan, errors=errors, totals=totals), weights


def _recorded(subject: Subject) -> dict[str, ProjectionRecord]:
    """Return the journal's records of the job that the ledger states, by module; empty without a ledger."""
    if subject.ledger is None:
        return {}
    records = Journal(subject.folder).finished(subject.ledger.digest).values()
    return {projection.module: projection for record in records for projection in record.projections}


def _compute_layers(
    request: LayersRequest, *, subject: Subject, source: Checkpoint, events: Events, shards: Shards
) -> LayersReport:
    from k2convert.validate.layers.check import check_layers, moe_layers

    with remedy(RESULT_REMEDY):
        converted = open_checkpoint(subject.folder, read=shards.header_reader)
    budget = subject.budget
    return check_layers(
        source=source,
        converted=converted,
        layers=request.layers or moe_layers(source),
        hidden_states=request.hidden_states,
        tokens=request.tokens,
        budget=LayerBudget(layer_sqnr_db=budget.layer_sqnr_db, expert_sqnr_db=budget.expert_sqnr_db),
        events=events,
    )


@dataclass(slots=True)
class _Measurer:
    """Collects the tensors of each module during the scan and checks them in the pool; a TensorVisitor.

    Modules that share a global scale are checked together if they come soon after one another. `sharing` maps each
    sharing key to the modules of the source that have it.
    """

    subject: Subject
    source: Checkpoint
    reader: ShardReader
    pool: ThreadPoolExecutor
    decoder: "Decoder | None"
    recorded: Mapping[str, ProjectionRecord]
    rule: Rule | None
    sharing: Mapping[str, Mapping[str, TensorName]]
    totals: Totals = field(default_factory=Totals)
    decoder_mismatches: set[str] = field(default_factory=set[str])
    _parts: dict[str, dict[str, Bytes]] = field(default_factory=dict[str, dict[str, Bytes]])
    _held: dict[str, dict[str, dict[str, Bytes]]] = field(default_factory=dict[str, dict[str, dict[str, Bytes]]])
    _pending: list[Future[list[CheckedWeight]]] = field(default_factory=list[Future[list[CheckedWeight]]])
    _room: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(MAX_PENDING))

    def tensor(self, module: str, parameter: str, data: Bytes) -> None:
        """Take one tensor; check its module once codes, block scales and global scale are there."""
        names = self.subject.names
        needed = (names.weight, names.block_scale, names.global_scale)
        if parameter not in needed:  # keeping the view would keep the whole batch in memory
            return
        parts = self._parts.setdefault(module, {})
        parts[parameter] = data
        if len(parts) == len(needed):
            del self._parts[module]
            if not shape_problems(self.subject, self.subject.modules[module]):
                self._hold(module, parts)

    def _hold(self, module: str, parts: dict[str, Bytes]) -> None:
        """Check a module with those that share its global scale, when all of them are here or too many wait."""
        key = self.subject.modules[module].parts.sharing_key
        held = self._held.setdefault(key, {})
        held[module] = parts
        if len(held) >= len(self.sharing.get(key, ())):
            self._submit(key)
        elif len(self._held) > MAX_HELD:
            self._submit(next(iter(self._held)))

    def _submit(self, key: str) -> None:
        self._room.acquire()
        self._pending.append(self.pool.submit(self._check, key, self._held.pop(key)))

    def _check(self, key: str, held: dict[str, dict[str, Bytes]]) -> list[CheckedWeight]:
        try:
            weights = [self._weight(module, parts) for module, parts in held.items()]
            others = {module: place for module, place in self.sharing.get(key, {}).items() if module not in held}
            partners = [] if self.rule is None else [self._load(place) for place in others.values()]
            checked = check_weights(weights, partners=partners, names=self.subject.names, rule=self.rule)
            for found in checked:
                self.totals.add(self.subject.modules[found.module].parts.role, found)
            return [replace(found, metrics=None) for found in checked]
        finally:
            self._room.release()

    def _weight(self, module: str, parts: Mapping[str, Bytes]) -> WrittenWeight:
        names, record = self.subject.names, self.recorded.get(module)
        source = self._load(self.subject.modules[module].parts)
        raw = parts[names.global_scale].tobytes()
        packed, block_scales = parts[names.weight], parts[names.block_scale]
        if self.decoder is not None:
            self._decode_by_library(module, packed, block_scales, raw, source.shape)
        recorded_scale = None if record is None else record.global_scale
        return WrittenWeight(module, source, packed, block_scales, raw, recorded_scale)

    def _load(self, place: TensorName) -> SourceWeight:
        with remedy(SOURCE_REMEDY):
            return load_projection(self.reader, projection_of(self.source, place))

    def _decode_by_library(
        self, module: str, packed: Bytes, block_scales: Bytes, raw: bytes, shape: tuple[int, int]
    ) -> None:
        from k2convert.validate.library_decoders import agrees

        assert self.decoder is not None
        global_scale = self.subject.names.decode_scalar(raw)
        if not 0 < global_scale < math.inf:  # rule 6 reports it
            self.decoder_mismatches.add(module)
            return
        rows, columns = shape
        written = Nvfp4Weight(
            packed=packed.copy().reshape(rows, columns // 2),
            block_scales=block_scales.copy().reshape(rows, columns // BLOCK_SIZE),
            global_scale=global_scale,
        )
        (stored,) = struct.unpack("<f", raw)
        theirs = self.decoder(written.packed, written.block_scales, stored)
        if not agrees(theirs, dequantize_nvfp4(written), stored=stored):
            self.decoder_mismatches.add(module)

    def settle(self) -> None:
        """Check the modules taken so far, and close the source's files."""
        self._submit_all()
        wait(self._pending)
        self.reader.close()

    def results(self) -> dict[str, CheckedWeight]:
        """Wait for the last module; return every checked module in the order of the shards."""
        self._submit_all()
        return {found.module: found for future in self._pending for found in future.result()}

    def _submit_all(self) -> None:
        for key in list(self._held):
            self._submit(key)


def compare_journal(
    recorded: Mapping[str, ProjectionRecord], errors: Mapping[str, DecodedError]
) -> tuple[list[str], int]:
    """Compare recorded with measured figures; return the modules that differ, and how many were compared."""
    mismatches: list[str] = []
    compared = 0
    for module, projection in recorded.items():
        measured, stated = errors.get(module), projection.metrics
        if measured is None or stated is None:
            continue
        compared += 1
        if not is_same_error(measured, stated):
            mismatches.append(module)
    return mismatches, compared


def compare(folder: str, ours: WeightsReport, contract: ContractReport, theirs: WeightsReport) -> Comparison:
    """Compare two results of the same source tensor by tensor: count which one has less error."""
    common = [(ours.errors[m], theirs.errors[m]) for m in ours.errors if m in theirs.errors]
    return Comparison(
        folder=folder,
        contract=contract,
        weights=theirs,
        better_here=sum(a.squared_error < b.squared_error for a, b in common),
        better_there=sum(a.squared_error > b.squared_error for a, b in common),
        equal=sum(a.squared_error == b.squared_error for a, b in common),
    )
