"""A shard that was just written, validated before it is sent, by the pass over the shards; and the findings joined.

The headers of its source shards are read again, so a plan that is wrong is found.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k2convert.check.certificate import Verdict
from k2convert.check.contract.result import Result, open_shard
from k2convert.check.decode import MeasuredWeight, differing_totals
from k2convert.check.scaling import Scaling
from k2convert.check.shards import ShardsFound, validate_shards
from k2convert.checkpoint.header import ShardHeader, TensorInfo, read_header
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import ChangedFileError, CheckpointError, InvalidCheckpointError
from k2convert.models.names import Family
from k2convert.plan.recipe import Recipe
from k2convert.records.ledger import ProjectionRecord, ShardFindings, ShardRecord, doubt_of, summarize

if TYPE_CHECKING:
    from k2convert.calibration.layer_files import Calibration

_REMEDY: Final = (
    "The shard was not uploaded. Run the same command again: the shard is converted again. If this happens twice, "
    "check the memory, or choose a different --device."
)


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

    `calibration` and `family` are those of the conversion. Raises InvalidCheckpointError if a byte or a figure
    of the record is not what the source gives, ChangedFileError if the file is not the recorded one, CheckpointError if
    the source changed.
    """
    source = read_source_shards(source_folder, record.source_headers)
    try:
        result = open_shard(path, family=family, source=source, recipe=recipe)
    except CheckpointError:  # its header is not the one that was written
        raise ChangedFileError(path) from None
    if calibration is not None:
        layers = {parts.layer for parts in result.source_names.values()} & set(calibration.layers)
        exponents = {layer: calibration.exponents(layer) for layer in layers if layer is not None}
        scaling = Scaling({n: found for n, found in exponents.items() if found is not None}, {})
        result = replace(result, calibration=calibration, scaling=scaling)
    recorded = {projection.module: projection for projection in record.projections}
    found = validate_shards(result, recorded=recorded)
    scan = found.scan
    if scan.digests[path.name] != record.blake3:
        raise ChangedFileError(path)
    problems = list(_problems(result, found, record))
    if problems:
        (where, problem), more = problems[0], f" ({len(problems) - 1} more like it)" if len(problems) > 1 else ""
        raise InvalidCheckpointError(f"{path.name}: {where}: {problem}{more}. {_REMEDY}")
    return ShardFindings(
        blake3=record.blake3,
        copied=tuple(sorted(scan.compared)),
        scaled=tuple(sorted(scan.scaled)),
        decoded=found.errors,
        certified_rows=found.certified.rows,
        certified_whole=found.certified.all_rows,
        invalid_scales=scan.invalid_scales,
        subnormal_scales=scan.subnormal_scales,
        zero_blocks_with_codes=scan.zero_blocks_with_codes,
        scalars=scan.scalars,
    )


def _problems(result: Result, found: ShardsFound, record: ShardRecord) -> Iterator[tuple[str, str]]:
    for name, count in found.scan.different.items():
        yield name, f"{count:,} bytes are not the source's"
    yield from found.scan.misscaled.items()
    for name in result.tensors:
        module, _, parameter = name.rpartition(".")
        is_measured = module in found.measured and parameter in result.expected_parameters
        if name not in found.scan.compared and not is_measured:
            yield name, "could not be compared with the source"
    yield from found.certified.problems.items()
    if all(projection.metrics is not None for projection in record.projections):
        yield from differing_totals(summarize([record]), found.figures(result) if found.measured else {})


def join_findings(records: Iterable[ShardRecord]) -> ShardsFound:
    """Return what the passes over single shards found, as one pass over all of them would; see `check_finished_shard`.

    The figures that a record states were those of its bytes.
    """
    recorded: dict[str, ProjectionRecord] = {}
    joined = ShardsFound(recorded=recorded)
    for record in records:
        recorded.update((projection.module, projection) for projection in record.projections)
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
        scan.scalars.update(checked.scalars)
        joined.certified.add(
            Verdict(rows=checked.certified_rows, copies=len(checked.copied), all_rows=checked.certified_whole)
        )
        for projection in record.projections:
            module = projection.module
            error = checked.decoded[module]
            metrics = projection.metrics
            measured = MeasuredWeight(
                error, doubt="" if metrics is None else doubt_of(metrics.num_minus_eight, metrics.num_codes)
            )
            joined.totals.add(projection.role, measured)
            joined.measured[module] = measured
            if error.energy == 0.0:
                scan.all_zero.add(module)
    return joined


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
