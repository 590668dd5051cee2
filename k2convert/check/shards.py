"""The one pass that validates shards: every byte is hashed, compared with the source, or decoded and measured.

`validate_shards` reads all shards of a finished result (`k2convert validate`), or the one that a job for the Hub has
just written (`check_finished_shard`). The findings on such a shard go into its record, and are joined when all shards
have been sent (`join_findings`). The scan (contract/scan.py) hashes shards and compares copies. Converted modules are
measured here, in a pool of threads. When a shard was read, the certificate checks it (certificate.py).
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore
from typing import Final

import numpy as np

from k2convert.check.certificate import Certificate, Claim, Verdict
from k2convert.check.certified_weights import Fault
from k2convert.check.contract.result import Result
from k2convert.check.contract.scan import ScanResult, ShardBytes, scan_shards
from k2convert.check.contract.tensors import shape_problems
from k2convert.check.decode import Figures, MeasuredWeight, Totals, measure_decoded, total_errors
from k2convert.check.remote import LOCAL, Shards
from k2convert.check.scaling import over_powers
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.errors import SourceReadError, remedy
from k2convert.models.names import TensorName
from k2convert.models.projections import SOURCE_REMEDY, load_projection, projection_of
from k2convert.quantize.formats.bf16 import SourceWeight
from k2convert.quantize.formats.mxfp4 import GROUP_BYTES, SCALE_BIAS, Mxfp4Weight, is_empty
from k2convert.records.events import SILENT, Events
from k2convert.records.fingerprint import ARITHMETIC_VERSION
from k2convert.records.ledger import DecodedError, ProjectionRecord

MAX_PENDING: Final = 4  # tensors measured at once; the pass over the shards waits for the slowest
SMALLEST_STEP: Final = -9
"""E4M3 has the powers of two from 2**-9 on: a cast keeps the codes of a group from there on."""


@dataclass(slots=True)
class ShardsFound:
    """Findings of the pass: by the scan, on each converted module in the order of the shards, and by the certificate.

    `recorded` are the conversion's records of the modules.
    """

    scan: ScanResult = field(default_factory=ScanResult)
    measured: dict[str, MeasuredWeight] = field(default_factory=dict[str, MeasuredWeight])
    totals: Totals = field(default_factory=Totals)
    certified: Verdict = field(default_factory=Verdict)
    recorded: Mapping[str, ProjectionRecord] = field(default_factory=dict[str, ProjectionRecord])

    def add(self, other: "ShardsFound") -> None:
        """Add what the pass over another part of the same result found, except for its totals."""
        self.scan.add(other.scan)
        self.measured |= other.measured
        self.certified.add(other.certified)
        self.recorded = other.recorded

    @property
    def errors(self) -> dict[str, DecodedError]:
        """The decoded error of each module."""
        return {module: measured.error for module, measured in self.measured.items()}

    @property
    def doubts(self) -> dict[str, str]:
        """Doubts about the source's codes, by module."""
        return {module: measured.doubt for module, measured in self.measured.items() if measured.doubt}

    def figures(self, result: Result) -> Mapping[str, Figures]:
        """Return the measured figures by role and under "total"."""
        roles = {module: result.modules[module].parts.role for module in self.measured}
        return self.totals.figures(total_errors(self.errors, roles))


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
        found = ShardsFound(recorded=recorded)
        measurer = _Measurer(result, source, reader, pool, certificate, found)

        def finished(shard: str, digest: str) -> None:
            measurer.settle()
            if result.whole is not None:
                return
            try:
                found.certified.add(certificate.check_shard(result.folder / shard, seed=digest))
            except OSError as error:
                raise SourceReadError(f"{result.folder / shard}: cannot be read ({error.strerror}).") from None
            finally:
                certificate.release()

        found.scan = scan_shards(
            result,
            shard_visitor=visitor,
            tensor_visitor=measurer.tensor,
            events=events,
            around=shards.plan(result),
            finished=finished,
        )
    _compare_errors(found)
    return found


def _path(folder: Path, tensor: TensorInfo | None) -> Path | None:
    return None if tensor is None else folder / tensor.shard


def _compare_errors(found: ShardsFound) -> None:
    """Compare the errors that the compiled code measured with those that the certificate computed of all rows."""
    for module, sums in found.certified.errors.items():
        measured = found.measured.get(module)
        if measured is None:
            continue
        error = measured.error
        if not np.allclose((error.energy, error.squared_error), sums, rtol=1e-9, atol=0):
            problem = f"measured {error.squared_error!r} of {error.energy!r}, but it is {sums[1]!r} of {sums[0]!r}"
            found.certified.problems.setdefault(module, problem)


@dataclass(slots=True)
class _Measurer:
    """Collects the tensors of each module during the scan and measures them in the pool."""

    result: Result
    source: Checkpoint
    reader: ShardReader
    pool: ThreadPoolExecutor
    certificate: Certificate
    found: ShardsFound
    _parts: dict[str, dict[str, Bytes]] = field(default_factory=dict[str, dict[str, Bytes]])
    _pending: list[Future[tuple[str, MeasuredWeight]]] = field(default_factory=list[Future[tuple[str, MeasuredWeight]]])
    _room: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(MAX_PENDING))

    def tensor(self, module: str, parameter: str, data: Bytes) -> None:
        """Keep one tensor; measure its module once codes, block scales and global scale are there."""
        names = self.result.names
        needed = (names.weight, names.block_scale, names.global_scale)
        if parameter not in needed:  # keeping the view would keep the whole batch in memory
            return
        parts = self._parts.setdefault(module, {})
        parts[parameter] = data
        if len(parts) < len(needed):
            return
        del self._parts[module]
        place = self.result.modules[module]
        if self.result.is_in_source(place) and not shape_problems(self.result, place):
            self._room.acquire()
            self._pending.append(self.pool.submit(self._measure, module, place.parts, parts))

    def _measure(self, module: str, place: TensorName, parts: Mapping[str, Bytes]) -> tuple[str, MeasuredWeight]:
        try:
            names = self.result.names
            with remedy(SOURCE_REMEDY):
                source = load_projection(self.reader.read, projection_of(self.source, place))
                source = over_powers(source, self.result.scaling.of_weight(place))
            raw = parts[names.global_scale].tobytes()
            scale, is_exact = self._global_scale(module, raw)
            packed, scales = parts[names.weight], parts[names.block_scale]
            changed = None
            recipe = self.result.recipe
            if recipe is not None and (recipe.rule, recipe.quantizer) == ("mse", "native"):
                changed = _changed_codes(source, packed, scale)
            measured = measure_decoded(
                source,
                packed=packed,
                block_scales=scales,
                global_scale=scale,
                has_exact_scale=is_exact,
                changed_codes=changed,
            )
            self.found.totals.add(place.role, measured)
            return module, measured
        finally:
            self._room.release()

    def _global_scale(self, module: str, raw: bytes) -> tuple[float, bool]:
        """Return g, and whether it is exact: a divisor is a rounded 1/g, so g is the rule's or the journal's."""
        names = self.result.names
        scale = names.decode_scalar(raw)
        if not names.is_divisor or np.frexp(scale)[0] == 0.5:
            return scale, True
        record = self.found.recorded.get(module)
        try:
            known = [self.certificate.global_scale(module)]
        except Fault:
            known = []
        known += [] if record is None else [record.global_scale]
        exact = next((scale for scale in known if scale is not None and names.stores(scale, raw)), None)
        return (scale, False) if exact is None else (exact, True)

    def settle(self) -> None:
        """Wait for the modules taken so far, and close the source's files."""
        wait(self._pending)
        self.reader.release()
        measured = [future.result() for future in self._pending]
        self._pending.clear()
        self.found.measured |= dict(measured)


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
