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
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final

from blake3 import blake3
from pydantic import AfterValidator, Field

from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import PlanError
from k2convert.models import read_architecture
from k2convert.plan.pruning import KeptExperts, keep_experts
from k2convert.records.document import Count, LayerNumber, Share

MAX_PHRASE: Final = 200
_DIGITS: Final = 6


def _is_line(text: str) -> str:
    if not text.isprintable() or not 0 < len(text) <= MAX_PHRASE:
        raise ValueError(f"is not a line of at most {MAX_PHRASE} characters")
    return text


Phrase = Annotated[str, AfterValidator(_is_line)]  # one short line that people are shown


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The shares of a layer that its dropped experts had: of all scores, and of the router's weight, if known."""

    score: Share
    router_weight: Share | None


@dataclass(frozen=True, slots=True)
class PruningRecord:
    """The experts that a result keeps, of how many, whose scores chose them, and the shares left out, if known."""

    experts: dict[LayerNumber, tuple[Count, ...]]
    num_source_experts: Annotated[int, Field(ge=1, alias="of")]
    scores: Annotated[Phrase | None, Field(alias="chosen_by")]
    left_out: dict[LayerNumber, LeftOut] | None = None

    def __post_init__(self) -> None:
        for layer, experts in self.experts.items():
            if any(first >= second for first, second in pairwise((*experts, self.num_source_experts))):
                raise ValueError(f"layer {layer} is not an ascending list of experts below {self.num_source_experts}")
        if len({len(experts) for experts in self.experts.values()} - {0}) != 1:
            raise ValueError("experts: not the same number in each layer")
        if self.left_out is not None and self.left_out.keys() != self.experts.keys():
            raise ValueError("left_out does not have the layers of experts")

    @property
    def kept(self) -> KeptExperts:
        return KeptExperts(self.experts)

    @property
    def digest(self) -> str:
        """The blake3 of the kept experts and of how many the source has."""
        experts = {str(layer): list(experts) for layer, experts in sorted(self.experts.items())}
        return blake3(json.dumps([self.num_source_experts, experts]).encode()).hexdigest()

    @property
    def line(self) -> str:
        """Kept experts, in one line for people."""
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
        found = read_architecture(source).num_experts
        if found != self.num_source_experts:
            raise PlanError(
                f"{source.folder}: has {found} experts per layer, but the list of kept experts is for a model with "
                f"{self.num_source_experts}. Use the model that the list was made for."
            )
        return keep_experts(source, self.kept)


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
