"""The figures of a report, collected from the folder of a finished conversion.

Totals and provenance are those of the ledger (k2convert.json). Figures of single tensors are those of the journal
(.k2convert/), which a published folder lacks, or of a validation that measured the shards against the source. The
report states what is missing; nothing is filled in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.checkpoint.files import list_folder, read_json_file
from k2convert.checkpoint.index import check_level
from k2convert.checkpoint.names import CONFIG_NAME, EVALUATION_NAME, LEDGER_NAME, SHARD_SUFFIX, WORK_FOLDER, model_name
from k2convert.deploy.model import Model, Tensor, read_result
from k2convert.errors import CheckpointError, K2ConvertError, remedy
from k2convert.models import find_family, locate_module
from k2convert.models.names import Role, SourceFormat
from k2convert.models.source_formats import INT4, MXFP4
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.records.command import shell_line
from k2convert.records.document import plain, shown
from k2convert.records.evaluation import Evaluation, fresh_evaluation
from k2convert.records.journal import Journal, find_published
from k2convert.records.ledger import TOTAL, Ledger, ShardRecord, find_ledger, metrics_document, totals_by_format

if TYPE_CHECKING:
    from k2convert.check.results import ValidationReport

_PROJECTIONS: Final = ("gate", "up", "down")
MAX_CELLS: Final = 1 << 20  # of one map; K2 has 23,040. A damaged record may name any expert: its map would take TB
NUM_WORST: Final = 8
_LEDGER_REMEDY: Final = "Delete the file and run the conversion again: the file is written again from the records."


@dataclass(frozen=True, slots=True)
class TensorFigures:
    """The error of one converted projection against its source.

    `sqnr_max_db` is the SQNR of rule `max`: the tensor's own, shifted by the ratio of squared errors on the sample. It
    is None if no sample was recorded or it has no error.
    """

    module: str
    role: str
    layer: int | None
    expert: int | None
    projection: str | None
    sqnr_db: float
    relative_mse: float
    max_error_steps: float | None
    changed_share: float
    """The share of non-zero weights whose value changed."""
    sqnr_max_db: float | None

    @property
    def location(self) -> str:
        """Layer, expert and projection in words; empty if no known model has the module."""
        if self.layer is None:
            return ""
        middle = self.role.replace("_", " ") if self.expert is None else f"expert {self.expert}"
        return f"layer {self.layer}, {middle}, {self.projection}"


@dataclass(frozen=True, slots=True, eq=False)
class HeatMap:
    """SQNR in dB of one projection, [layers, experts]: NaN if there is no such tensor, infinite if it is exact."""

    projection: str
    layers: tuple[int, ...]
    values: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a report shows. `missing` are sentences about what could not be shown, and why.

    `name` is what the result is called. `model` is None if it is not known which GPUs hold the result. `evaluation` is
    of the result's own weights. `made_on` is the day of the report in UTC (2026-01-31).
    """

    name: str
    ledger: Ledger
    tensors: tuple[TensorFigures, ...]
    maps: tuple[HeatMap, ...]
    validation: ValidationReport | None
    missing: tuple[str, ...]
    model: Model | None
    evaluation: Evaluation | None
    made_on: str

    @property
    def total(self) -> WeightMetrics:
        """The error of all NVFP4 weights: that of FP8 beside them is in the table of roles."""
        return next(iter(totals_by_format(self.ledger.totals).values()))

    @property
    def source_format(self) -> SourceFormat:
        """Form in which the source stored the converted weights: only INT4 codes are counted."""
        return MXFP4 if self.total.num_codes is None else INT4

    @property
    def rule(self) -> str:
        return self.ledger.recipe.rule

    @property
    def title(self) -> str:
        """Title of the report: the source's repository if it is known, else the name of the result or of the recipe."""
        name = self.ledger.source.repo or self.name or self.ledger.recipe.name
        return f"{name}: {self.source_format.title} to NVFP4"

    @property
    def worst(self) -> tuple[TensorFigures, ...]:
        """The tensors with the lowest SQNR, lowest first, then by name."""
        return tuple(sorted(self.tensors, key=lambda t: (t.sqnr_db, t.module))[:NUM_WORST])


def collect_report(
    *,
    folder: Path,
    validation: ValidationReport | None = None,
    tensors: Iterable[Tensor] | None = None,
    name: str | None = None,
) -> Report:
    """Collect everything about `folder`. The errors that a validation measured are used if there is no journal.
    `tensors` are those of the result's shards, to compute what it needs.

    `name` is the result's, by default the folder's. Raises CheckpointError if the folder holds no finished conversion
    or a BF16 copy, or if its ledger or journal is damaged.
    """
    ledger = read_finished(folder)
    records = Journal(folder).records(ledger)
    missing: list[str] = []
    if len(records) == len(ledger.shards):
        tensor_errors = _recorded(records)
    elif validation is not None and validation.weights is not None and validation.weights.errors:
        missing.append(_MEASURED_AGAIN)
        measured = sorted(validation.weights.errors.items())
        tensor_errors = tuple(tensor_figures(module, error) for module, error in measured)
    else:
        missing.append(_NO_TENSORS)
        tensor_errors = ()
    maps: tuple[HeatMap, ...] = ()
    if any(math.isfinite(figure.sqnr_db) for figure in tensor_errors):  # else every cell would be the same
        maps = heat_maps(tensor_errors)
        if not maps:
            missing.append("No map of layers and experts: the recorded names are not those of a known model's experts.")
    evaluation = None
    try:
        evaluation = fresh_evaluation(folder, weights=ledger.weights)
    except CheckpointError as error:
        path = folder / EVALUATION_NAME
        missing.append(f"{EVALUATION_NAME} is not shown: {str(error).removeprefix(f'{path}: ')}")
    if validation is None:
        missing.append(_why_not_validated(folder))
    model = None
    if tensors is not None and ledger.source.family is not None:
        with suppress(K2ConvertError):  # `fit` does not know every model
            config = read_json_file(folder / CONFIG_NAME)
            family = find_family(ledger.source.family)
            model = read_result(tensors, family=family, config=config, where=str(folder))
    return Report(
        name=model_name(folder) if name is None else name,
        ledger=ledger,
        tensors=tensor_errors,
        maps=maps,
        validation=validation,
        missing=tuple(missing),
        model=model,
        evaluation=evaluation,
        made_on=datetime.now(UTC).date().isoformat(),
    )


_MEASURED_AGAIN: Final = (
    f"The journal ({WORK_FOLDER}) is not in this folder. Tensors were measured again from the written bytes, so single "
    "tensors are not compared with max."
)
_NO_TENSORS: Final = (
    f"There are no figures of single tensors: the journal ({WORK_FOLDER}) is not in this folder. Totals are those of "
    f"the ledger ({LEDGER_NAME}). With --source every tensor is measured again."
)


def _why_not_validated(folder: Path) -> str:
    """Return why a report has no validation, and what gives one."""
    if can_be_validated(folder):
        return "The servable contract was not checked for this report. `k2convert validate` checks it."
    if (published := find_published(folder)) is not None:
        return (
            f"The shards are not in this folder. The servable contract was checked before they were published: "
            f"`k2convert report hf://{published.repo}` shows the verdict."
        )
    return (
        "The shards are not in this folder, so the servable contract was not checked. Write the report of the folder "
        "or the repository that has them."
    )


def read_finished(folder: Path) -> Ledger:
    """Return the ledger of a finished conversion; raises CheckpointError if there is nothing to report on."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder. Pass the folder of a conversion.")
    with remedy(_LEDGER_REMEDY):
        ledger = find_ledger(folder)
    if ledger is None and Journal(folder).job() is not None:
        command = shell_line(("k2convert", "status", str(folder)))
        raise CheckpointError(
            f"{folder}: the conversion is not finished, so there is nothing to report on. `{command}` says how far "
            "it is."
        )
    if ledger is None:
        check_level(folder)
        raise CheckpointError(
            f"{folder}: has neither {LEDGER_NAME} nor {WORK_FOLDER}, so there is nothing to report on. To measure an "
            "NVFP4 checkpoint of a different tool, use `k2convert validate` with --source."
        )
    if ledger.recipe.target != "nvfp4":
        raise CheckpointError(f"{folder}: holds a BF16 copy (target bf16), which is exact: there is no error to show.")
    if TOTAL not in ledger.totals:
        raise CheckpointError(f"{folder / LEDGER_NAME}: totals has no total. {_LEDGER_REMEDY}")
    return ledger


def can_be_validated(folder: Path) -> bool:
    """Return whether the folder holds a finished conversion with its shards."""
    return (folder / CONFIG_NAME).is_file() and any(path.name.endswith(SHARD_SUFFIX) for path in list_folder(folder))


def _recorded(records: Mapping[str, ShardRecord]) -> tuple[TensorFigures, ...]:
    return tuple(
        tensor_figures(projection.module, projection.metrics, role=projection.role)
        for shard in sorted(records)
        for projection in records[shard].projections
        if projection.metrics is not None
    )


def tensor_figures(module: str, error: WeightMetrics, *, role: str | None = None) -> TensorFigures:
    """Return the figures of a tensor, recorded or measured. `role` is by default the one that the name tells."""
    if (module_place := locate_module(module)) is not None and module_place.projection is None:
        module_place = None
    return TensorFigures(
        module=module,
        role=role or (module_place.role if module_place else "unknown"),
        **{key: getattr(module_place, key, None) for key in ("layer", "expert", "projection")},
        sqnr_db=error.sqnr_db,
        relative_mse=error.relative_mse,
        max_error_steps=error.max_error_steps,
        changed_share=1 - error.equal_nonzero / error.num_nonzero if error.num_nonzero else 0.0,
        sqnr_max_db=error.sqnr_max_db,
    )


def heat_maps(tensors: Iterable[TensorFigures]) -> tuple[HeatMap, ...]:
    """Return maps of gate, up and down of the routed experts; empty if there are no such tensors."""
    cells = {
        (t.projection, t.layer, t.expert): t.sqnr_db
        for t in tensors
        if t.role == Role.EXPERTS and t.layer is not None and t.expert is not None
    }
    layers = tuple(sorted({layer for _, layer, _ in cells}))
    num_experts = 1 + max((expert for _, _, expert in cells), default=-1)
    if not cells or len(layers) * num_experts > MAX_CELLS:
        return ()
    rows = {layer: i for i, layer in enumerate(layers)}
    maps = {name: np.full((len(layers), num_experts), np.nan) for name in _PROJECTIONS}
    for (projection, layer, expert), sqnr_db in cells.items():
        if projection in maps:
            maps[projection][rows[layer], expert] = sqnr_db
    return tuple(HeatMap(name, layers, values) for name, values in maps.items() if not np.isnan(values).all())


def figures_document(report: Report) -> dict[str, Any]:
    """Return totals, worst tensors and contract as plain data, for --json; figures that are not finite become None."""
    contract = None
    parts = {"calibration": report.ledger.calibration, "evaluation": report.evaluation}
    if (validation := report.validation) is not None:
        contract_report = validation.contract
        contract = {
            "rules": len(contract_report.rules),
            "held": len(contract_report.rules) - len(contract_report.unchecked) - len(contract_report.failed),
            "skipped": len(contract_report.unchecked),
            "failed": contract_report.failed,
            "passed": validation.passed,
        }
    return {
        "rule": report.rule,
        "totals": {role: metrics_document(metrics) for role, metrics in report.ledger.totals.items()},
        "worst": shown(report.worst),
        "contract": contract,
        "missing": list(report.missing),
        **{name: plain(part) for name, part in parts.items() if part is not None},
    }
