"""What a job is, before its first shard: the content of job.json, and how two jobs differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k2convert.errors import quoted, shortened
from k2convert.records.fingerprint import fingerprint_digest
from k2convert.records.pruning import PruningRecord
from k2convert.records.source_identity import Identities


@dataclass(frozen=True, slots=True)
class JobDescription:
    """What a destination is for: the fingerprint, the resolved recipe, and the planned bytes of every shard.

    `source` is the identity of every source shard (source_identity.py); None if version 0.1 began the job. `pruning`
    says which experts are kept; None if all are.
    """

    fingerprint: dict[str, Any]
    recipe: dict[str, Any]
    shards: dict[str, int]
    source: Identities | None = None
    pruning: PruningRecord | None = None

    @property
    def digest(self) -> str:
        """The digest of the fingerprint, as the job's records carry it."""
        return fingerprint_digest(self.fingerprint)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as job.json has it."""
        pruning = {} if self.pruning is None else {"pruning": self.pruning.to_dict()}
        return {
            "fingerprint": self.fingerprint,
            "recipe": self.recipe,
            "shards": self.shards,
            "source": self.source,
            **pruning,
        }

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> "JobDescription":
        """Check what job.json holds; raises ValueError."""
        if not all(isinstance(document.get(key), dict) for key in ("fingerprint", "recipe", "shards")):
            raise ValueError("a part is missing")
        if not all(isinstance(document["recipe"].get(key), str) for key in ("name", "target", "rule", "layout")):
            raise ValueError("no recipe")
        if not all(type(num_bytes) is int for num_bytes in document["shards"].values()):
            raise ValueError("no sizes")
        if not isinstance(document.get("source"), dict | None):
            raise ValueError("the source is not an object")
        source: dict[str, Any] | None = document.get("source")
        if source is not None and not all(isinstance(identity, dict) for identity in source.values()):
            raise ValueError("no identities of source shards")
        pruning = PruningRecord.from_dict(document["pruning"]) if "pruning" in document else None
        return cls(document["fingerprint"], document["recipe"], document["shards"], source, pruning)


def describe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Say in words which fields differ, the first five of them; an empty text if none does."""
    different = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return "; ".join(
        f"{shortened(key)} was {quoted(old.get(key))}, now {quoted(new.get(key))}" for key in different[:5]
    )
