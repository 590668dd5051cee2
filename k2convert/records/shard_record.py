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
class SourceCheck:
    """What was compared with the source while a shard was written for upload. Everything in it agreed.

    `blake3` is the hash of the file as it was compared, `copied` are the tensors with the source's bytes, `decoded` the
    figures of the converted projections by module: a DecodedError as plain data, and how many blocks were made again by
    the reference arithmetic (0 without a rule).
    """

    blake3: str
    copied: tuple[str, ...]
    decoded: dict[str, dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"blake3": self.blake3, "copied": list(self.copied), "decoded": self.decoded}

    @classmethod
    def from_dict(cls, document: Any) -> "SourceCheck":
        """Rebuild it from `to_dict`; raises ValueError naming a missing, unknown or mistyped field."""
        stated = _check_types(document, _CHECK_TYPES)
        if not all(isinstance(name, str) for name in stated["copied"]):
            raise ValueError("copied is not a list of names")
        for figures in stated["decoded"].values():
            _check_types(_NO_WEIGHTS | figures, _DECODED_TYPES)
        return cls(stated["blake3"], tuple(stated["copied"]), stated["decoded"])


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One finished shard: hashes and size of the file, digests of the source headers it was converted from.

    `sha256`, by which the Hub identifies files, and `checked` are set if the shard was written for upload.
    """

    shard: str
    fingerprint: str
    blake3: str
    file_bytes: int
    num_tensors: int
    source_headers: dict[str, str]
    projections: tuple[ProjectionRecord, ...] = field(default=())
    sha256: str | None = None
    checked: SourceCheck | None = None

    @property
    def is_checked(self) -> bool:
        """Whether the bytes with this hash were compared with the source."""
        return self.checked is not None and self.checked.blake3 == self.blake3

    def to_dict(self) -> dict[str, Any]:
        """Return plain data. `asdict` would copy each of the metrics' hundred thousand numbers."""
        document = {f.name: getattr(self, f.name) for f in fields(self)}
        document["projections"] = [{f.name: getattr(p, f.name) for f in fields(p)} for p in self.projections]
        if self.checked is None:
            del document["checked"]
        else:
            document["checked"] = self.checked.to_dict()
        return document

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> "ShardRecord":
        """Rebuild a record from `to_dict`; raises ValueError naming a missing, unknown or mistyped field."""
        stated = _check_types({"sha256": None, "checked": None} | document, _RECORD_TYPES)
        for projection in stated["projections"]:
            _check_types(projection, _PROJECTION_TYPES)
            check_metrics(projection["metrics"], where=shortened(projection["module"]))
        stated["projections"] = tuple(ProjectionRecord(**p) for p in stated["projections"])
        if stated["checked"] is not None:
            stated["checked"] = SourceCheck.from_dict(stated["checked"])
            if stated["checked"].decoded.keys() != {p.module for p in stated["projections"]}:
                raise ValueError("checked and projections name different modules")
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
    "checked": (dict, NoneType),
}


_PROJECTION_TYPES: dict[str, tuple[type, ...]] = {
    "module": (str,),
    "role": (str,),
    "global_scale": (float, int),
    "metrics": (dict, NoneType),
}


_CHECK_TYPES: dict[str, tuple[type, ...]] = {"blake3": (str,), "copied": (list,), "decoded": (dict,)}


_DECODED_TYPES: dict[str, tuple[type, ...]] = {
    "num_weights": (int,),
    "num_nonzero": (int,),
    "equal_nonzero": (int,),
    "energy": (float,),
    "squared_error": (float,),
    "max_error_steps": (float, NoneType),
    "weighted_energy": (float, NoneType),
    "weighted_error": (float, NoneType),
    "sampled_blocks": (int,),
}
_NO_WEIGHTS: dict[str, Any] = {"weighted_energy": None, "weighted_error": None}
"""Figures that only weights with importance have."""


def _check_types(document: Any, types: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    """Return a document whose fields have the right types; raises ValueError."""
    if not isinstance(document, dict):
        raise ValueError(f"{quoted(document)} is not an object")
    stated = cast(dict[str, Any], document)
    if stated.keys() != types.keys():
        raise ValueError(f"{quoted(sorted(stated.keys() ^ types.keys()))} missing or unknown")
    for field_name, allowed in types.items():
        if type(stated[field_name]) not in allowed:
            raise ValueError(f"{field_name} is {quoted(stated[field_name])}")
    return stated
