"""An opened source: a folder, or a repository of the Hub at one commit."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.names import CARD_NAME
from k2convert.records.fingerprint import local_identity
from k2convert.records.pruning import PruningRecord

if TYPE_CHECKING:
    from k2convert.hub.source import RemoteRepo
    from k2convert.hub.source_card import SourceCard


@dataclass(frozen=True, slots=True)
class Source:
    """An opened source. `remote` is None for a folder.

    If `pruning` is set, `checkpoint` has only the kept experts, and `whole` is the source with all of them.
    """

    checkpoint: Checkpoint
    remote: "RemoteRepo | None" = None
    pruning: PruningRecord | None = None
    whole: Checkpoint | None = None

    def pruned(self, pruning: PruningRecord) -> "Source":
        """Return the source with only the kept experts; raises PlanError if they are not of this model."""
        return replace(self, checkpoint=pruning.view(self.checkpoint), pruning=pruning, whole=self.checkpoint)

    @property
    def card(self) -> "SourceCard":
        """Statements of the source's model card. Read it while the source is open."""
        from k2convert.hub.source_card import read_source_card_file

        return read_source_card_file(self.checkpoint.folder / CARD_NAME)

    def identities(self) -> dict[str, str]:
        """Return which file each source shard is; see records/fingerprint.py."""
        checkpoint = self.checkpoint
        remote = self.remote
        if remote is None:
            return {shard: local_identity(checkpoint.path(shard)) for shard in checkpoint.headers}
        return {shard: str(remote.shard(shard).sha256) for shard in checkpoint.headers}

    @property
    def repo(self) -> str | None:
        return self.remote.repo if self.remote is not None else None

    @property
    def revision(self) -> str | None:
        return self.remote.commit if self.remote is not None else None
