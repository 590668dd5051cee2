"""What a job is, before its first shard: the content of job.json, and how two jobs differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from k2convert.errors import ResumeError, quoted, shortened
from k2convert.records.fingerprint import fingerprint_digest
from k2convert.records.pruning import PruningRecord


@dataclass(frozen=True, slots=True)
class JobDescription:
    """What a destination is for: the fingerprint, the resolved recipe, and the planned bytes of every shard.

    `source` has the identity of every source shard (fingerprint.py). `pruning` says which experts are kept; None if all
    are.
    """

    fingerprint: dict[str, Any]
    recipe: dict[str, Any]
    shards: dict[str, int]
    source: dict[str, str]
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
        source = document.get("source")
        if not isinstance(source, dict):
            raise ValueError("the source is not an object")
        identities = cast(dict[str, Any], source)
        if not all(isinstance(identity, str) for identity in identities.values()):
            raise ValueError("no identities of source shards")
        pruning = PruningRecord.from_dict(document["pruning"]) if "pruning" in document else None
        return cls(document["fingerprint"], document["recipe"], document["shards"], identities, pruning)


def describe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Say in words which fields differ, the first five of them; an empty text if none does."""
    different = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return "; ".join(
        f"{shortened(key)} was {quoted(old.get(key))}, now {quoted(new.get(key))}" for key in different[:5]
    )


def changed_shards(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the source shards whose identity (fingerprint.py) differs."""
    return [shard for shard in sorted(now) if before.get(shard) != now[shard]]


def source_error(shard: str, work: Path) -> ResumeError:
    """Return the error for a changed source shard of the job that is kept in the folder `work`."""
    return ResumeError(
        f"{shard}: this source shard has a different size or time of modification than when the job in {work.parent} "
        f"was begun. Restore it with its time (cp -a and rsync -t keep it), or delete {work} to start over."
    )
