"""The source as a result's ledger asks for it: of a pruned result, with only the kept experts."""

from dataclasses import dataclass

from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.names import LEDGER_NAME
from k2convert.errors import PlanError
from k2convert.models import detect_family
from k2convert.records.ledger import Ledger, pruned_source

PRUNING_PLACE = f"{LEDGER_NAME}: pruning"
NO_SOURCE = "needs --source"


@dataclass(frozen=True, slots=True)
class SeenSource:
    """What a result is compared with; if that is None, `missing` says why.

    `problem` is what is wrong with the ledger's list of kept experts, if it is not a list of this source.
    """

    checkpoint: Checkpoint | None
    missing: str = ""
    problem: str = ""


def see_source(source: Checkpoint | None, ledger: Ledger | None) -> SeenSource:
    """Return the source through the ledger's list of kept experts; raises PlanError for a source of unknown family."""
    if source is None:
        return SeenSource(None, NO_SOURCE)
    if ledger is not None and any(problem.startswith("pruning:") for problem in ledger.problems):
        return SeenSource(None, "the ledger's list of kept experts is damaged, see rule 19")
    detect_family(source)
    try:
        return SeenSource(pruned_source(source, ledger))
    except PlanError as error:
        return SeenSource(None, "the ledger's list of kept experts is not of this source, see rule 9", str(error))
