"""Which experts a result keeps: the part `pruning` of the ledger and of a job. A result with all experts has none.

    {"of": 384, "chosen_by": "REAP saliency on code.txt" or null, "experts": {"1": [0, 5, ..], "2": ..}}

`experts` maps each MoE layer to the numbers of its kept experts in the source, ascending; `of` is how many the source
has. It is also the form of a file for `run --keep-experts`, where only `experts` is required. This module is the only
one that knows the form.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, cast

from blake3 import blake3

from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import PlanError, quoted
from k2convert.models import detect_family
from k2convert.plan.pruning import KeptExperts, keep_experts

MAX_PHRASE: Final = 200


@dataclass(frozen=True, slots=True)
class PruningRecord:
    """The experts that a result keeps, of how many in the source, and in one phrase whose scores chose them."""

    kept: KeptExperts
    num_source_experts: int
    scores: str | None = None

    @property
    def digest(self) -> str:
        """The blake3 of the kept experts and of how many the source has."""
        return blake3(json.dumps([self.num_source_experts, _experts(self.kept)]).encode()).hexdigest()

    @property
    def line(self) -> str:
        """What is kept, in one line for people."""
        chosen = "" if self.scores is None else f", chosen by {self.scores}"
        return f"keeps {self.kept.num_experts} of {self.num_source_experts} experts a layer{chosen}"

    def view(self, source: Checkpoint) -> Checkpoint:
        """Return `source` with only the kept experts; raises PlanError if the list is not of this model."""
        family = detect_family(source)
        found = family.read_architecture(source.config, str(source.folder)).num_experts
        if found != self.num_source_experts:
            raise PlanError(
                f"{source.folder}: has {found} experts a layer, but the list of kept experts is for a model with "
                f"{self.num_source_experts}. Use the model that the list was made for."
            )
        return keep_experts(source, self.kept)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"of": self.num_source_experts, "chosen_by": self.scores, "experts": _experts(self.kept)}

    @classmethod
    def from_dict(cls, document: Any) -> "PruningRecord":
        """Rebuild a record from `to_dict`; raises ValueError naming a missing, unknown or mistyped field."""
        if not isinstance(document, Mapping):
            raise ValueError("pruning is not an object")
        stated = cast(Mapping[str, Any], document)
        if different := stated.keys() ^ {"of", "chosen_by", "experts"}:
            raise ValueError(f"{quoted(sorted(different))} missing or unknown")
        count, scores = stated["of"], stated["chosen_by"]
        if type(count) is not int or count < 1:
            raise ValueError(f"of: {quoted(count)} is not a count")
        check_phrase(scores)
        layers = parse_layers(stated["experts"], name="experts")
        kept = {layer: _ascending(layer, experts, below=count) for layer, experts in layers.items()}
        if len({len(experts) for experts in kept.values()}) != 1:
            raise ValueError("experts: not the same number in each layer")
        return cls(KeptExperts(kept), count, scores)


def check_phrase(value: object) -> str | None:
    """Return `chosen_by` of a document, which people are shown; raises ValueError if it is not one short line."""
    if value is None or (isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_PHRASE):
        return value
    raise ValueError(f"chosen_by: {quoted(value)} is not a line of at most {MAX_PHRASE} characters")


def parse_layers(document: Any, *, name: str) -> dict[int, list[Any]]:
    """Return lists by layer number, sorted by layer; raises ValueError if there is none, or one is not a list."""
    if not isinstance(document, Mapping) or not document:
        raise ValueError(f"{name} is not an object with a list for each layer")
    found: dict[int, list[Any]] = {}
    for layer, values in cast(Mapping[str, Any], document).items():
        if not (layer.isascii() and layer.isdecimal() and len(layer) < 7 and layer == str(int(layer))):
            raise ValueError(f"{name}: {quoted(layer)} is not the number of a layer")
        if not isinstance(values, list):
            raise ValueError(f"{name}: layer {layer} is not a list")
        found[int(layer)] = cast(list[Any], values)
    return dict(sorted(found.items()))


def _ascending(layer: int, experts: list[Any], *, below: int) -> tuple[int, ...]:
    if not experts or not all(type(expert) is int and 0 <= expert < below for expert in experts):
        raise ValueError(f"experts: layer {layer} is not a list of experts 0..{below - 1}")
    if any(first >= second for first, second in pairwise(experts)):
        raise ValueError(f"experts: layer {layer} is not ascending")
    return tuple(experts)


def _experts(kept: KeptExperts) -> dict[str, list[int]]:
    return {str(layer): list(experts) for layer, experts in sorted(kept.layers.items())}
