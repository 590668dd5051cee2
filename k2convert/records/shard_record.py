"""The record of one finished shard: plain data, ready for JSON, and checked when it is read back."""

from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, cast

from k2convert.errors import quoted, shortened
from k2convert.quantize.metrics.weight_metrics import check_metrics


@dataclass(frozen=True, slots=True)
class ProjectionRecord:
    """What was measured of one converted projection. `metrics` is WeightMetrics.to_dict()."""

    module: str
    role: str
    global_scale: float
    metrics: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One finished shard: hashes and size of the file, digests of the source headers it was converted from.

    `sha256`, by which the Hub identifies files, is set if the shard was written for upload.
    """

    shard: str
    fingerprint: str
    blake3: str
    file_bytes: int
    num_tensors: int
    source_headers: dict[str, str]
    projections: tuple[ProjectionRecord, ...] = field(default=())
    sha256: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data. `asdict` would copy each of the metrics' hundred thousand numbers."""
        document = {f.name: getattr(self, f.name) for f in fields(self)}
        return document | {"projections": [{f.name: getattr(p, f.name) for f in fields(p)} for p in self.projections]}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> "ShardRecord":
        """Rebuild a record from `to_dict`; raises ValueError naming a missing, unknown or mistyped field."""
        stated: dict[str, Any] = {"sha256": None} | document
        _check_types(stated, _RECORD_TYPES)
        for projection in stated["projections"]:
            _check_types(projection, _PROJECTION_TYPES)
            check_metrics(projection["metrics"], where=shortened(projection["module"]))
        stated["projections"] = tuple(ProjectionRecord(**p) for p in stated["projections"])
        return cls(**stated)


_RECORD_TYPES: dict[str, tuple[type, ...]] = {
    "shard": (str,),
    "fingerprint": (str,),
    "blake3": (str,),
    "file_bytes": (int,),
    "num_tensors": (int,),
    "source_headers": (dict,),
    "projections": (list,),
    "sha256": (str, NoneType),
}


_PROJECTION_TYPES: dict[str, tuple[type, ...]] = {
    "module": (str,),
    "role": (str,),
    "global_scale": (float, int),
    "metrics": (dict, NoneType),
}


def _check_types(document: Any, types: dict[str, tuple[type, ...]]) -> None:
    if not isinstance(document, dict):
        raise ValueError(f"{quoted(document)} is not an object")
    stated = cast(dict[str, Any], document)
    if stated.keys() != types.keys():
        raise ValueError(f"{quoted(sorted(stated.keys() ^ types.keys()))} missing or unknown")
    for field_name, allowed in types.items():
        if type(stated[field_name]) not in allowed:
            raise ValueError(f"{field_name} is {quoted(stated[field_name])}")
