"""The source as a result is compared with it: of a pruned result, only the kept experts.

The headers of a single shard's sources are read again, and what the list of kept experts makes of them is derived here
without the view that the conversion reads (plan/pruning), so a plan or a view that is wrong is found.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from k2convert.checkpoint.header import ShardHeader, TensorInfo, read_header
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.names import LEDGER_NAME
from k2convert.errors import CheckpointError, PlanError
from k2convert.models import detect_family
from k2convert.models.names import Family, Role
from k2convert.plan.pruning import KeptExperts
from k2convert.records.ledger import Ledger, pruned_source

PRUNING_PLACE = f"{LEDGER_NAME}: pruning"
NO_SOURCE = "needs --source"


@dataclass(frozen=True, slots=True)
class SourceView:
    """What a result is compared with; if that is None, `missing` says why.

    `problem` is what is wrong with the ledger's list of kept experts, if it is not a list of this source.
    """

    checkpoint: Checkpoint | None
    missing: str = ""
    problem: str = ""


def view_source(source: Checkpoint | None, ledger: Ledger | None) -> SourceView:
    """Return the source through the ledger's list of kept experts; raises PlanError for a source of unknown family."""
    if source is None:
        return SourceView(None, NO_SOURCE)
    if ledger is not None and any(problem.startswith("pruning:") for problem in ledger.problems):
        return SourceView(None, "the ledger's list of kept experts is damaged, see rule 19")
    detect_family(source)
    try:
        return SourceView(pruned_source(source, ledger))
    except PlanError as error:
        return SourceView(None, "the ledger's list of kept experts is not of this source, see rule 9", str(error))


def read_source_shards(
    folder: Path, digests: Mapping[str, str], *, family: Family, kept: KeptExperts | None
) -> Checkpoint:
    """Return the source shards that one shard of a result comes from, as a source of their own.

    `digests` are those of the headers at the plan; CheckpointError if one changed. `kept` are the experts of a pruned
    result.
    """
    headers: dict[str, ShardHeader] = {}
    tensors: dict[str, TensorInfo] = {}
    for shard, digest in digests.items():
        headers[shard] = read_header(folder / shard)
        if headers[shard].digest != digest:
            raise CheckpointError(f"{folder / shard}: its header changed since planning. Run the same command again.")
        for tensor in headers[shard].tensors.values():
            if (seen := tensor if kept is None else _kept(tensor, kept, family)) is not None:
                tensors[seen.name] = seen
    return Checkpoint(folder, "{}", headers, tensors, {}, ())


def _kept(tensor: TensorInfo, kept: KeptExperts, family: Family) -> TensorInfo | None:
    """Return a tensor as a pruned result has it: under the expert's new number, or with the router's kept rows."""
    module, _, parameter = tensor.name.rpartition(".")
    place = family.classify(module)
    experts = None if place is None or place.layer is None else kept.layers.get(place.layer)
    if place is None or experts is None:
        return tensor
    if place.role is Role.ROUTER:
        return tensor._replace(shape=(len(experts), *tensor.shape[1:]), rows=experts)
    if place.expert is None:
        return tensor
    if place.expert not in experts:
        return None
    stem = f"{family.experts.format(layer=place.layer)}."
    _, _, projection = module.removeprefix(stem).partition(".")
    return tensor._replace(name=f"{stem}{experts.index(place.expert)}.{projection}.{parameter}")
