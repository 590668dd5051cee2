"""The one pass that validates shards: every byte is hashed, compared with the source, or decoded and measured.

`validate_shards` reads all shards of a finished result (`k2convert validate`), or the one that a job for the Hub has
just written (`check_finished_shard`). The findings on such a shard go into its record, and are joined when all shards
have been sent (`join_findings`). The scan (contract/scan.py) hashes shards and compares copies. Converted modules are
measured here, in a pool of threads. When a shard was read, the certificate checks it (certificate.py).
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Final

import numpy as np

from k2convert.check.certificate import Certificate, Claim, Verdict
from k2convert.check.certified_weights import Fault
from k2convert.check.contract import Figures, differing_totals, is_same_error, measured_figures
from k2convert.check.contract.modules import FP8_PARAMETERS, Module, fp8_scales
from k2convert.check.contract.result import Result, Scaling, open_shard
from k2convert.check.contract.scan import ScanResult, ShardBytes, scan_shards
from k2convert.check.contract.tensors import shape_problems
from k2convert.check.remote import LOCAL, Shards
from k2convert.checkpoint.header import ShardHeader, TensorInfo, read_header
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.errors import ChangedFileError, CheckpointError, InvalidCheckpointError, SourceReadError, remedy
from k2convert.models.names import WEIGHT, WEIGHT_SCALE, Family
from k2convert.models.projections import SOURCE_REMEDY, load_projection, projection_of
from k2convert.plan.recipe import Recipe
from k2convert.quantize.formats.bf16 import Bf16Weight, SourceWeight
from k2convert.quantize.formats.fp8 import Fp8Weight
from k2convert.quantize.formats.mxfp4 import GROUP_BYTES, SCALE_BIAS, Mxfp4Weight, is_empty
from k2convert.quantize.metrics.measure import measure_decoded, measure_fp8
from k2convert.quantize.metrics.weight_metrics import MetricsSum, PackedMetrics, WeightMetrics
from k2convert.records.events import SILENT, Events
from k2convert.records.fingerprint import ARITHMETIC_VERSION
from k2convert.records.ledger import TOTAL, ProjectionRecord, ShardFindings, ShardRecord, codes_warning, summarize

if TYPE_CHECKING:
    from k2convert.calibration.layer_files import Calibration

MAX_PENDING: Final = 4  # tensors measured at once; the pass over the shards waits for the slowest
SMALLEST_STEP: Final = -9
"""E4M3 has the powers of two from 2**-9 on: a cast keeps the codes of a group from there on."""
_REMEDY: Final = (
    "The shard was not uploaded. Run the same command again: the shard is converted again. If this happens twice, "
    "check the memory, or choose a different --device."
)


@dataclass(slots=True)
class ShardsFound:
    """Findings of the pass: by the scan, on each converted module in the order of the shards, and by the certificate.

    `totals` are the measured ones by role and under "total"; the modules' own have no histogram, for it is large.
    `has_exact_scales` is false if a rounded divisor was all there is to tell a global scale from.

    `num_stated` modules have figures of the conversion; those in `misstated` are not the measured ones.
    """

    scan: ScanResult = field(default_factory=ScanResult)
    measured: PackedMetrics = field(default_factory=PackedMetrics)
    totals: dict[str, MetricsSum] = field(default_factory=lambda: defaultdict(MetricsSum))
    has_exact_scales: bool = True
    certified: Verdict = field(default_factory=Verdict)
    num_stated: int = 0
    misstated: list[str] = field(default_factory=list[str])

    def add_measured(self, module: str, role: str, measured: WeightMetrics, stated: WeightMetrics | None) -> None:
        """Add the figures of one module, and compare those that the conversion `stated`."""
        for key in (role, TOTAL):
            self.totals[key].add(measured)
        self.measured[module] = measured
        if stated is not None:
            self.num_stated += 1
            if not is_same_error(measured, stated):
                self.misstated.append(module)

    @property
    def warnings(self) -> dict[str, str]:
        """Warnings about the source's codes, by module."""
        warnings = {module: codes_warning(m.num_minus_eight, m.num_codes) for module, m in self.measured.items()}
        return {module: warning for module, warning in warnings.items() if warning}

    @property
    def figures(self) -> Mapping[str, Figures]:
        """The measured figures by role and under "total"."""
        return measured_figures(self.totals, has_exact_scales=self.has_exact_scales)


def claim_of(result: Result) -> Claim:
    """Return what a result says of its conversion."""
    recipe = result.recipe
    exponents = result.scaling.exponents
    if recipe is None:
        return Claim(exponents=exponents)
    arithmetic = None if result.ledger is None else result.ledger.fingerprint.get("arithmetic")
    scales = recipe.input_scale
    return Claim(
        rule=recipe.rule if arithmetic in (None, ARITHMETIC_VERSION) else None,
        layout=recipe.layout,
        input_scales=(scales.gate_up, scales.down) if recipe.activations == "w4a4" else (),
        roles=recipe.roles,
        fp8=recipe.fp8,
        exponents=exponents,
    )


def validate_shards(
    result: Result,
    *,
    recorded: Mapping[str, ProjectionRecord],
    events: Events = SILENT,
    visitor: ShardBytes | None = None,
    shards: Shards = LOCAL,
) -> ShardsFound:
    """Read every shard once; with a source, measure each converted module and let the certificate check each shard.

    `visitor` gets all bytes. `shards` brings those that are on the Hub. Raises SourceReadError, FormatError.
    """
    source = result.source
    if source is None:
        around = shards.plan(result)
        return ShardsFound(scan_shards(result, shard_visitor=visitor, events=events, around=around))
    certificate = Certificate(
        result=lambda name: _path(result.folder, result.tensors.get(name)),
        source=lambda name: _path(source.folder, source.tensors.get(name)),
        claim=claim_of(result),
    )
    with ShardReader(source.path) as reader, ThreadPoolExecutor(thread_name_prefix="decode") as pool:
        findings = ShardsFound()
        measurer = _Measurer(result, source, reader, pool, certificate, findings, recorded)

        def finished(shard: str, digest: str) -> None:
            measurer.flush()
            try:
                findings.certified.add(certificate.check_shard(result.folder / shard, seed=digest))
            except OSError as error:
                raise SourceReadError(f"{result.folder / shard}: cannot be read ({error.strerror}).") from None
            finally:
                certificate.release()

        findings.scan = scan_shards(
            result,
            shard_visitor=visitor,
            tensor_visitor=measurer.tensor,
            events=events,
            around=shards.plan(result),
            finished=finished,
        )
    findings.scan.misscaled = {n: p for n, p in findings.certified.problems.items() if n in findings.scan.scaled}
    _compare_errors(findings, rtol=1e-9 if result.ledger is not None else 1e-6)  # a divisor says no exact scale
    return findings


def _path(folder: Path, tensor: TensorInfo | None) -> Path | None:
    return None if tensor is None else folder / tensor.shard


def _compare_errors(findings: ShardsFound, *, rtol: float) -> None:
    """Compare the errors that the compiled code measured with those that the certificate computed of all rows."""
    for module, sums in findings.certified.errors.items():
        measured = findings.measured.get(module)
        if measured is None:
            continue
        if not np.allclose((measured.energy, measured.squared_error), sums, rtol=rtol, atol=0):
            own = f"{measured.squared_error!r} of {measured.energy!r}"
            problem = f"measured {own}, but it is {sums[1]!r} of {sums[0]!r}"
            findings.certified.problems.setdefault(module, problem)


@dataclass(slots=True)
class _Measurer:
    """Collects the tensors of each module during the scan and measures them in the pool."""

    result: Result
    source: Checkpoint
    reader: ShardReader
    pool: ThreadPoolExecutor
    certificate: Certificate
    findings: ShardsFound
    recorded: Mapping[str, ProjectionRecord]
    _parts: dict[str, dict[str, Bytes]] = field(default_factory=dict[str, dict[str, Bytes]])
    _pending: dict[str, Future[WeightMetrics]] = field(default_factory=dict[str, Future[WeightMetrics]])
    _room: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(MAX_PENDING))

    def tensor(self, module_name: str, parameter: str, data: Bytes) -> None:
        """Keep one tensor; measure its module once codes, block scales and global scale are there."""
        names = self.result.names
        needed = (names.weight, names.block_scale, names.global_scale)
        module = self.result.modules[module_name]
        if module.is_fp8:
            needed = FP8_PARAMETERS
        if parameter not in needed:  # keeping the view would keep the whole batch in memory
            return
        parts = self._parts.setdefault(module_name, {})
        parts[parameter] = data
        if len(parts) < len(needed):
            return
        del self._parts[module_name]
        if self.result.is_in_source(module) and not shape_problems(self.result, module):
            self._room.acquire()
            self._pending[module_name] = self.pool.submit(self._measure, module, parts)

    def _measure(self, module: Module, parts: Mapping[str, Bytes]) -> WeightMetrics:
        try:
            with remedy(SOURCE_REMEDY):
                source = load_projection(self.reader.read, projection_of(self.source, module.parts))
                exponents = self.result.scaling.of_weight(module.parts)
                if exponents is not None:
                    source = source.divide_columns(exponents, name=module.name)
            if module.is_fp8:
                scales = fp8_scales(parts[WEIGHT_SCALE], module.parameters[WEIGHT_SCALE], source.shape[0])
                exact = source.bits if type(source) is Bf16Weight else source
                return measure_fp8(exact, Fp8Weight(parts[WEIGHT].reshape(source.shape), scales))
            names = self.result.names
            raw = parts[names.global_scale].tobytes()
            scale = self._global_scale(module.name, raw)
            packed, scales = parts[names.weight], parts[names.block_scale]
            changed = None
            recipe = self.result.recipe
            if recipe is not None and (recipe.rule, recipe.quantizer) == ("mse", "native"):
                changed = _changed_codes(source, packed, scale)
            return measure_decoded(
                source, packed=packed, block_scales=scales, global_scale=scale, changed_codes=changed
            )
        finally:
            self._room.release()

    def _global_scale(self, module: str, raw: bytes) -> float:
        """Return g, and note if it is not exact: a divisor is a rounded 1/g, so g is the rule's or the journal's."""
        names = self.result.names
        scale = names.decode_scalar(raw)
        if not names.is_divisor or np.frexp(scale)[0] == 0.5:
            return scale
        record = self.recorded.get(module)
        try:
            known = [self.certificate.global_scale(module)]
        except Fault:
            known = []
        known += [] if record is None else [record.global_scale]
        for exact in known:
            if exact is not None and names.stores(exact, raw):
                return exact
        self.findings.has_exact_scales = False
        return scale

    def flush(self) -> None:
        """Wait for the modules taken so far, and close the source's files."""
        wait(self._pending.values())
        self.reader.release()
        for module, measured in self._pending.items():
            record = self.recorded.get(module)
            stated = None if record is None else record.metrics
            self.findings.add_measured(module, self.result.modules[module].parts.role, measured.result(), stated)
        self._pending.clear()


def _changed_codes(source: SourceWeight, packed: Bytes, scale: float) -> int | None:
    """Return how many bytes of codes differ from an MXFP4 source's, in groups that are not below the window of a cast.

    None for other sources, and for a global scale that is no power of two.
    """
    fraction, exponent = np.frexp(scale)
    if not isinstance(source, Mxfp4Weight) or fraction != 0.5:
        return None
    groups = source.groups()
    written = packed.reshape(-1, GROUP_BYTES)
    if np.array_equal(groups, written):
        return 0
    steps = source.scale_bytes.reshape(-1).astype(np.int64) - SCALE_BIAS - (int(exponent) - 1)
    is_copied = (steps >= SMALLEST_STEP) | is_empty(groups)
    return int(np.count_nonzero((groups != written)[is_copied]))


def check_finished_shard(
    path: Path,
    record: ShardRecord,
    *,
    source_folder: Path,
    recipe: Recipe,
    calibration: "Calibration | None",
    family: Family,
) -> ShardFindings:
    """Validate a shard that was just written, while its source shards are in `source_folder`; return the findings.

    The headers of its source shards are read again, so a plan that is wrong is found. `calibration` and `family` are
    those of the conversion. Raises InvalidCheckpointError if a byte or a figure of the record is not what the source
    gives, ChangedFileError if the file is not the recorded one, CheckpointError if the source changed.
    """
    source = read_source_shards(source_folder, record.source_headers)
    try:
        result = open_shard(path, family=family, source=source, recipe=recipe)
    except CheckpointError:  # its header is not the one that was written
        raise ChangedFileError(path) from None
    if calibration is not None:
        layers = {parts.layer for parts in result.source_names.values()} & set(calibration.layers)
        exponents = {layer: calibration.exponents(layer) for layer in layers if layer is not None}
        scaling = Scaling(
            {n: layer_exponents for n, layer_exponents in exponents.items() if layer_exponents is not None}, {}
        )
        result = replace(result, calibration=calibration, scaling=scaling)
    recorded = {projection.module: projection for projection in record.projections}
    findings = validate_shards(result, recorded=recorded)
    scan = findings.scan
    if scan.digests[path.name] != record.blake3:
        raise ChangedFileError(path)
    problems = list(_problems(result, findings, record))
    if problems:
        (where, problem), more = problems[0], f" ({len(problems) - 1} more like it)" if len(problems) > 1 else ""
        raise InvalidCheckpointError(f"{path.name}: {where}: {problem}{more}. {_REMEDY}")
    return ShardFindings(
        blake3=record.blake3,
        copied=tuple(sorted(scan.compared)),
        scaled=tuple(sorted(scan.scaled)),
        decoded=dict(findings.measured),
        certified_rows=findings.certified.rows,
        certified_whole=findings.certified.all_rows,
        invalid_scales=scan.invalid_scales,
        subnormal_scales=scan.subnormal_scales,
        zero_blocks_with_codes=scan.zero_blocks_with_codes,
        scalars=scan.scalars,
    )


def _problems(result: Result, findings: ShardsFound, record: ShardRecord) -> Iterator[tuple[str, str]]:
    for name, count in findings.scan.different.items():
        yield name, f"{count:,} bytes are not the source's"
    fp8 = {module.name for module in result.fp8}
    for name in result.tensors:
        module, _, parameter = name.rpartition(".")
        expected = FP8_PARAMETERS if module in fp8 else result.expected_parameters
        is_measured = module in findings.measured and parameter in expected
        if name not in findings.scan.compared and not is_measured:
            yield name, "could not be compared with the source"
    yield from findings.certified.problems.items()
    if all(projection.metrics is not None for projection in record.projections):
        yield from differing_totals(summarize([record]), findings.figures)


def join_findings(records: Iterable[ShardRecord], result: Result) -> ShardsFound:
    """Return what the passes over single shards found, as one pass over all of them would; see `check_finished_shard`.

    The figures that a record states were those of its bytes. Names are the strings that `result` has.
    """
    joined = ShardsFound()
    for record in records:
        checked = record.checked
        scan = joined.scan
        if checked is None or checked.blake3 != record.blake3:
            continue
        scan.digests[record.shard] = record.blake3
        scan.compared.update(checked.copied)
        scan.scaled.update(checked.scaled)
        scan.all_zero.update(record.zero_copies)
        scan.invalid_scales.update(checked.invalid_scales)
        scan.subnormal_scales.update(checked.subnormal_scales)
        scan.zero_blocks_with_codes.update(checked.zero_blocks_with_codes)
        scan.scalars.update((_own_name(result, name), sys.intern(data)) for name, data in checked.scalars.items())
        rows = {_own_name(result, module): count for module, count in checked.certified_rows.items()}
        joined.certified.add(Verdict(rows=rows, copies=len(checked.copied), all_rows=checked.certified_whole))
        for projection in record.projections:
            module = _own_name(result, projection.module)
            measured = checked.decoded[module]
            joined.add_measured(module, projection.role, measured, projection.metrics)
            if measured.energy == 0.0:
                scan.all_zero.add(module)
    return joined


def _own_name(result: Result, name: str) -> str:
    """Return the string by which `result` knows a module or tensor: each record has strings of its own."""
    module = result.modules.get(name)
    if module is not None:
        return module.name
    tensor = result.tensors.get(name)
    return tensor.name if tensor is not None and tensor.name == name else name


def read_source_shards(folder: Path, digests: Mapping[str, str]) -> Checkpoint:
    """Return the source shards that one shard of a result comes from, as a source of their own.

    `digests` are those of the headers at the plan; CheckpointError if one changed.
    """
    headers = dict[str, ShardHeader]()
    tensors = dict[str, TensorInfo]()
    for shard, digest in digests.items():
        headers[shard] = read_header(folder / shard)
        if headers[shard].digest != digest:
            raise CheckpointError(f"{folder / shard}: its header changed since planning. Run the same command again.")
        tensors |= headers[shard].tensors
    return Checkpoint(folder, "{}", headers, tensors, {}, ())
