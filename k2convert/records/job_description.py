"""What a job is, before its first shard: the content of job.json, and how two jobs differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import JsonValue, PlainSerializer

from k2convert.errors import ResumeError, quoted, shortened
from k2convert.plan.recipe import Recipe
from k2convert.records.document import Count, JsonObject
from k2convert.records.fingerprint import fingerprint_digest
from k2convert.records.pruning import PruningRecord

StoredRecipe = Annotated[Recipe, PlainSerializer(Recipe.document)]


@dataclass(frozen=True, slots=True)
class JobDescription:
    """What a destination is for: the fingerprint, the resolved recipe, and the planned bytes of every shard.

    `source` has the identity of every source shard (fingerprint.py). `pruning` says which experts are kept; None if all
    are.
    """

    fingerprint: JsonObject
    recipe: StoredRecipe
    shards: dict[str, Count]
    source: dict[str, str]
    pruning: PruningRecord | None = None

    @property
    def source_revision(self) -> str | None:
        """The commit of the source on the Hub, None for a folder."""
        revision = self.fingerprint.get("source_revision")
        return revision if isinstance(revision, str) else None

    @property
    def digest(self) -> str:
        """The digest of the fingerprint, as the job's records carry it."""
        return fingerprint_digest(self.fingerprint)


def describe_changes(old: Mapping[str, JsonValue], new: Mapping[str, JsonValue]) -> str:
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
