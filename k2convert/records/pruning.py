"""Which experts a result keeps: the part `pruning` of the ledger and of a job. A result with all experts has none.

    {"of": 384, "chosen_by": "REAP saliency on code.txt" or null, "experts": {"1": [0, 5, ..], "2": ..},
     "left_out": {"1": {"score": 0.12, "router_weight": 0.2}, "2": ..}}

`experts` maps each MoE layer to the numbers of its kept experts in the source, ascending; `of` is how many the source
has. `left_out`, only if the scores are known, has the shares of each layer that the dropped experts had: of the scores,
and of the router's weight, which only statistics have (else null). It is also the form of a file for `run
--keep-experts`, where only `experts` is required. This module is the only one that knows the form.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final, cast

from blake3 import blake3

from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import PlanError, quoted
from k2convert.models import detect_family
from k2convert.plan.pruning import KeptExperts, keep_experts

MAX_PHRASE: Final = 200
_DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The shares of a layer that its dropped experts had: of all scores, and of the router's weight, if known."""

    score: float
    router_weight: float | None


@dataclass(frozen=True, slots=True)
class PruningRecord:
    """The experts that a result keeps, of how many in the source, and in one phrase whose scores chose them.

    `left_out` has the shares of each layer that were left out; None if the scores are not known.
    """

    kept: KeptExperts
    num_source_experts: int
    scores: str | None = None
    left_out: Mapping[int, LeftOut] | None = None

    @property
    def digest(self) -> str:
        """The blake3 of the kept experts and of how many the source has."""
        return blake3(json.dumps([self.num_source_experts, _experts(self.kept)]).encode()).hexdigest()

    @property
    def line(self) -> str:
        """What is kept, in one line for people."""
        chosen = "" if self.scores is None else f", chosen by {self.scores}"
        return f"keeps {self.kept.num_experts} of {self.num_source_experts} experts per layer{chosen}"

    @property
    def shares(self) -> dict[str, dict[int, float]]:
        """The shares left out of each layer, by what they are shares of; empty if the scores are not known."""
        found = self.left_out or {}
        weights = {layer: part.router_weight for layer, part in found.items() if part.router_weight is not None}
        scores = {layer: part.score for layer, part in found.items()}
        shares = {"saliency": scores, "router's weight": weights} if weights else {"scores": scores}
        return shares if found else {}

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
        found = {"of": self.num_source_experts, "chosen_by": self.scores, "experts": _experts(self.kept)}
        if self.left_out is None:
            return found
        return found | {"left_out": {str(layer): asdict(part) for layer, part in self.left_out.items()}}

    @classmethod
    def from_dict(cls, document: Any) -> "PruningRecord":
        """Rebuild a record from `to_dict`; raises ValueError naming a missing, unknown or mistyped field."""
        if not isinstance(document, Mapping):
            raise ValueError("pruning is not an object")
        stated = cast(Mapping[str, Any], document)
        if different := (stated.keys() - {"left_out"}) ^ {"of", "chosen_by", "experts"}:
            raise ValueError(f"{quoted(sorted(different))} missing or unknown")
        count, scores = stated["of"], stated["chosen_by"]
        if type(count) is not int or count < 1:
            raise ValueError(f"of: {quoted(count)} is not a count")
        check_phrase(scores)
        layers = parse_layers(stated["experts"], name="experts")
        kept = {layer: _ascending(layer, experts, below=count) for layer, experts in layers.items()}
        if len({len(experts) for experts in kept.values()}) != 1:
            raise ValueError("experts: not the same number in each layer")
        return cls(KeptExperts(kept), count, scores, parse_left_out(stated.get("left_out"), layers=kept))


def left_out(
    kept: KeptExperts, scores: Mapping[int, Sequence[float]], weights: Mapping[int, Sequence[float]] | None = None
) -> dict[int, LeftOut] | None:
    """Return the shares of the experts that are not kept; None if there are scores of which there are no shares."""
    if any(min(values) < 0 or not 0 < sum(values) < math.inf for values in scores.values()):
        return None
    known = weights or {}
    return {
        layer: LeftOut(_share(scores[layer], experts), _share(known[layer], experts) if layer in known else None)
        for layer, experts in kept.layers.items()
    }


def _share(values: Sequence[float], kept: Sequence[int]) -> float:
    dropped = [value for expert, value in enumerate(values) if expert not in kept]
    return round(math.fsum(dropped) / math.fsum(values), _DIGITS)


def share_words(shares: Mapping[int, float]) -> str:
    """Return the shares of layers in words: the mean and the worst."""
    worst = max(shares, key=lambda layer: shares[layer])
    mean = math.fsum(shares.values()) / len(shares)
    return f"{100 * mean:.1f} % on average, at most {100 * shares[worst]:.1f} % (layer {worst})"


def parse_left_out(document: Any, *, layers: Mapping[int, Any]) -> dict[int, LeftOut] | None:
    """Return the shares that a document states for `layers`; raises ValueError if it is not such a document."""
    if document is None:
        return None
    stated = cast(dict[str, Any], document) if isinstance(document, dict) else {}
    if set(stated) != {str(layer) for layer in layers}:
        raise ValueError("left_out is not an object with an entry for each layer of experts")
    return {layer: _parse_shares(layer, stated[str(layer)]) for layer in layers}


def _parse_shares(layer: int, document: Any) -> LeftOut:
    stated = cast(dict[str, Any], document) if isinstance(document, dict) else {}
    score, weight = stated.get("score"), stated.get("router_weight")
    if set(stated) == {"score", "router_weight"} and _is_share(score) and (weight is None or _is_share(weight)):
        return LeftOut(cast(float, score), weight)
    raise ValueError(
        f"left_out: layer {layer} does not have the shares 'score' and 'router_weight', numbers from 0 to 1"
    )


def _is_share(value: object) -> bool:
    return type(value) in (int, float) and 0 <= cast(float, value) <= 1


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
