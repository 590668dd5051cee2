"""What a report shows, as plain values: figures of every tensor, heat maps of them, and the provenance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k2convert.fit.needs import Needs
from k2convert.models import locate_module
from k2convert.models.names import ModulePlace, Role
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.records.calibration import CalibrationRecord
from k2convert.records.ledger import TOTAL
from k2convert.records.pruning import PruningRecord

PROJECTIONS = ("gate", "up", "down")
MAX_CELLS = 1 << 20  # of one map; K2 has 23,040. A damaged record may name any expert: its map would take terabytes
NUM_WORST = 16


@dataclass(frozen=True, slots=True)
class TensorFigures:
    """The error of one converted projection against its source.

    `sqnr_plain_db` and `sqnr_bound_db` are the SQNR of `plain` and of the bound: the tensor's own SQNR, shifted by the
    ratio of squared errors on the sampled blocks. They are None if no sample was recorded or it has no error.
    """

    module: str
    role: str
    layer: int | None
    expert: int | None
    projection: str | None
    num_weights: int
    num_nonzero: int
    equal_nonzero: int
    sqnr_db: float
    relative_mse: float
    max_error_steps: float | None
    sqnr_plain_db: float | None = None
    sqnr_bound_db: float | None = None

    @property
    def place(self) -> str:
        """Layer, expert and projection in words; empty if no known model has the module."""
        if self.layer is None:
            return ""
        middle = self.role.replace("_", " ") if self.expert is None else f"expert {self.expert}"
        return f"layer {self.layer}, {middle}, {self.projection}"

    @property
    def changed_share(self) -> float:
        """The share of non-zero weights whose value changed."""
        return 1 - self.equal_nonzero / self.num_nonzero if self.num_nonzero else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class HeatMap:
    """SQNR in dB of one projection, [layers, experts]: NaN if there is no such tensor, infinite if it is exact."""

    projection: str
    layers: tuple[int, ...]
    values: NDArray[np.float64]

    @property
    def num_experts(self) -> int:
        return self.values.shape[1]


@dataclass(frozen=True, slots=True)
class Provenance:
    """Source, recipe, calibration, kept experts and versions.

    `shards` and `source_headers` map names to blake3 digests.
    """

    family: str | None
    repo: str | None
    revision: str | None
    source_headers: Mapping[str, str]
    recipe: Mapping[str, Any]
    fingerprint: Mapping[str, Any]
    versions: Mapping[str, Any]
    shards: Mapping[str, str]
    calibration: CalibrationRecord | None = None
    pruning: PruningRecord | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a report shows. `missing` are sentences about what could not be shown, and why.

    `name` is what the result is called, `made_on` the day of the report in UTC (2026-01-31) or "" if it is not said.
    `totals` are by role and under "total". `validation` is the document that `validate --json` prints, or None.
    `needs` is None if it is not known which GPUs hold the result.
    """

    name: str
    made_on: str
    provenance: Provenance
    totals: Mapping[str, WeightMetrics]
    tensors: tuple[TensorFigures, ...]
    maps: tuple[HeatMap, ...]
    finished_shards: int
    num_shards: int
    validation: Mapping[str, Any] | None
    missing: tuple[str, ...]
    needs: Needs | None = None

    @property
    def total(self) -> WeightMetrics:
        return self.totals[TOTAL]

    @property
    def is_complete(self) -> bool:
        return self.finished_shards == self.num_shards

    @property
    def rule(self) -> str:
        return str(self.provenance.recipe.get("rule", "unknown"))

    @property
    def worst(self) -> tuple[TensorFigures, ...]:
        """The tensors with the lowest SQNR, lowest first, then by name."""
        return tuple(sorted(self.tensors, key=lambda t: (t.sqnr_db, t.module))[:NUM_WORST])


def figures_from_metrics(module: str, role: str, metrics: WeightMetrics) -> TensorFigures:
    """Return the figures of a recorded tensor."""
    place = locate_projection(module)
    return TensorFigures(
        module=module,
        role=role,
        layer=place.layer if place else None,
        expert=place.expert if place else None,
        projection=place.projection if place else None,
        num_weights=metrics.num_weights,
        num_nonzero=metrics.num_nonzero,
        equal_nonzero=metrics.equal_nonzero,
        sqnr_db=metrics.sqnr_db,
        relative_mse=metrics.relative_mse,
        max_error_steps=metrics.max_error_steps,
        sqnr_plain_db=metrics.sqnr_plain_db,
        sqnr_bound_db=metrics.sqnr_bound_db,
    )


def locate_projection(module: str) -> ModulePlace | None:
    """Return layer, expert and projection of a module; None if no known model has such a projection."""
    place = locate_module(module)
    return place if place is not None and place.projection is not None else None


def heat_maps(tensors: Iterable[TensorFigures]) -> tuple[HeatMap, ...]:
    """Return maps of gate, up and down of the routed experts; empty if there are no such tensors."""
    cells = [t for t in tensors if t.role == Role.EXPERTS and t.layer is not None and t.expert is not None]
    layers = tuple(sorted({t.layer for t in cells if t.layer is not None}))
    num_experts = 1 + max((t.expert for t in cells if t.expert is not None), default=-1)
    if not cells or len(layers) * num_experts > MAX_CELLS:
        return ()
    rows = {layer: i for i, layer in enumerate(layers)}
    maps = {name: np.full((len(layers), num_experts), np.nan) for name in PROJECTIONS}
    for t in cells:
        if t.layer is not None and t.expert is not None and t.projection in maps:
            maps[t.projection][rows[t.layer], t.expert] = t.sqnr_db
    return tuple(HeatMap(name, layers, values) for name, values in maps.items() if not np.isnan(values).all())


def scale_value(byte: int) -> float:
    """Return the value of a non-negative E4M3 byte. 0x7F, which is NaN, is treated as a number."""
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
