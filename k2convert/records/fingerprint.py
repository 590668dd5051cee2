"""Identity of a job before its first shard: the fingerprint, all that the bytes of its result depend on; job.json.

The version of the package is not a part: every version with the same arithmetic continues the job.

The fingerprint has the headers of the source. Its data is too much to hash, so the description of a job also has the
identity of each source shard: sha256 of a file on the Hub; of a local file its size, and the blake3 of a sample of its
bytes. So a job goes on with a copy of its source.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, cast

from blake3 import blake3
from pydantic import JsonValue, PlainSerializer

from k2convert.checkpoint.files import ABSENT, config_differences, file_digest, parse_json_object
from k2convert.checkpoint.index import Checkpoint, list_sidecars
from k2convert.checkpoint.names import CARD_NAME, CONFIG_NAME, INDEX_NAME, LEDGER_NAME, SHARD_SUFFIX
from k2convert.errors import (
    MalformedFileError,
    PlanError,
    ResumeError,
    SourceChangedError,
    SourceReadError,
    quoted,
    shortened,
)
from k2convert.models.config import network_fields
from k2convert.plan.plan import claim_projections
from k2convert.plan.recipe import Recipe
from k2convert.quantize.rules import RULES
from k2convert.records.command import shell_line
from k2convert.records.document import Count, JsonObject, T, parse

if TYPE_CHECKING:
    from k2convert.hub.source import RemoteRepo
    from k2convert.hub.source_card import SourceCard

StoredRecipe = Annotated[Recipe, PlainSerializer(Recipe.document)]

ARITHMETIC_VERSION: Final = 1  # to be raised when the same input gives different bytes
IDENTITY_VERSION: Final = 2  # to be raised when the files of unfinished work get another meaning
_SAMPLES: Final = 256  # of a shard, evenly spaced
_SAMPLE_BYTES: Final = 1 << 12
_MOST_CHANGES: Final = 5  # of a config.json, in one line


def source_digest(source: Checkpoint) -> str:
    """Return the digest of a source's headers: names, headers and sizes of its shards."""
    headers = blake3()
    for shard, header in sorted(source.headers.items()):
        headers.update(f"{shard}\0{header.digest}\0{header.file_bytes}\n".encode())
    return headers.hexdigest()


def local_identity(path: Path) -> str:
    """Return the identity of a source shard in a folder; raises SourceReadError."""
    sample = blake3()
    try:
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            step = max(status.st_size - _SAMPLE_BYTES, 0) / (_SAMPLES - 1)
            for number in range(_SAMPLES):
                sample.update(os.pread(file.fileno(), _SAMPLE_BYTES, round(number * step)))
    except OSError as error:
        raise SourceReadError(f"{path}: cannot be read ({error.strerror}). Check permissions and disk.") from None
    return f"{status.st_size} bytes, sample {sample.hexdigest()}"


@dataclass(frozen=True, slots=True)
class Source:
    """An opened source; `remote` is None for a folder."""

    checkpoint: Checkpoint
    remote: "RemoteRepo | None" = None

    @property
    def card(self) -> "SourceCard":
        """Statements of the source's model card. Read it while the source is open."""
        from k2convert.hub.source_card import read_source_card

        path = self.checkpoint.folder / CARD_NAME
        return read_source_card(path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "")

    def identities(self) -> dict[str, str]:
        """Return which file each source shard is; see records/fingerprint.py."""
        if self.remote is None:
            return {shard: local_identity(self.checkpoint.path(shard)) for shard in self.checkpoint.headers}
        return {shard: str(self.remote.shard(shard).sha256) for shard in self.checkpoint.headers}

    @property
    def local(self) -> Path | None:
        """Its folder; None if it is on the Hub."""
        if self.remote is None:
            return self.checkpoint.folder
        return None

    @property
    def repo(self) -> str | None:
        if self.remote is not None:
            return self.remote.repo
        return None

    @property
    def revision(self) -> str | None:
        if self.remote is not None:
            return self.remote.commit
        return None


def job_fingerprint(
    *,
    source: Checkpoint,
    recipe: Recipe,
    revision: str | None,
    layer_pass: Mapping[str, JsonValue] | None = None,
) -> JsonObject:
    """Return the fingerprint field by field; `layer_pass` has what the bytes depend on if the job calibrates."""
    identity: JsonObject = {
        "arithmetic": ARITHMETIC_VERSION,
        "source_revision": revision,
        "source_headers": source_digest(source),
        "source_config": fingerprint_digest(source.config),
    }
    identity |= layer_pass or {}
    return identity | {k: v for k, v in recipe.document().items() if k not in ("name", "family", "budget")}


def fingerprint_digest(fingerprint: Mapping[str, JsonValue]) -> str:
    return blake3(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class JobDescription:
    """Identity of a destination's job: fingerprint, recipe, planned bytes of shards, identities of source shards.

    `version` is the IDENTITY_VERSION of the release that began it.

    What may change while the weights stay: `config` is the source's config.json, `copies` the blake3 of every other
    file that the job has copied and of what the index has beside the tensors, and `begun` the fingerprint by which its
    work is known, if that is not `fingerprint`.
    """

    fingerprint: JsonObject
    recipe: StoredRecipe
    shards: dict[str, Count]
    source: dict[str, str]
    version: Count = 1
    config: JsonObject | None = None
    copies: dict[str, str] = field(default_factory=dict[str, str])
    begun: JsonObject | None = None

    @property
    def source_revision(self) -> str | None:
        """The commit of the source on the Hub, None for a folder."""
        revision = self.fingerprint.get("source_revision")
        if isinstance(revision, str):
            return revision
        return None

    @property
    def identity(self) -> JsonObject:
        """The fingerprint by which records, work folders and the work branch of the job are known."""
        return self.begun or self.fingerprint

    @property
    def digest(self) -> str:
        return fingerprint_digest(self.identity)

    def describes(self, fingerprint: JsonObject) -> bool:
        """Return whether this is the job of a result with this fingerprint, apart from what its source may change."""
        return _beside_source(self.fingerprint) == _beside_source(fingerprint)

    def has_other_headers(self, fingerprint: JsonObject) -> bool:
        """Return whether the same job with this fingerprint is of a source with other headers."""
        return not self.describes(fingerprint) and self.describes(
            fingerprint | {"source_headers": self.fingerprint["source_headers"]}
        )

    def changes(self, now: "JobDescription", folder: Path) -> list[str]:
        """Return in words what is other at the source now, beside its weights; `folder` has the copies of then."""
        files = [f"{name} differs" for name, copy in now.copies.items() if self.copies.get(name, copy) != copy]
        files += [f"{name} is new" for name in now.copies if self.copies and name not in self.copies]
        files += [f"{name} is gone" for name in self.copies.keys() - now.copies if (folder / name).is_file()]
        return [*sorted(files), *_config_changes(self.config, now.config)]

    def resumed_by(self, now: "JobDescription", *, is_changed: bool) -> "JobDescription":
        """Return the job as it goes on by the same recipe, with a source that may have changed beside its weights.

        If nothing that the result has changed (`is_changed`), the job stays that of its commit. A source with other
        headers is another job: `now`.
        """
        known = replace(now, copies=self.copies | now.copies)
        if self.fingerprint == now.fingerprint:
            return replace(known, begun=self.begun)
        if not self.describes(now.fingerprint):
            return now
        if not is_changed:
            return replace(known, fingerprint=self.fingerprint, begun=self.begun)
        return replace(known, begun=self.identity)


def kept_metadata(source: Checkpoint) -> JsonObject:
    """Return what a source's index says beside the places of tensors, and a result's index keeps."""
    return {key: value for key, value in source.index_metadata.items() if key != "total_size"}


def copied_files(source: Checkpoint) -> dict[str, str]:
    """Return the blake3 of every file that a job copies from a source, and of what the index has beside the tensors."""
    copies = {str(path): file_digest(source.folder / path) for path in list_sidecars(source.folder)}
    return copies | {INDEX_NAME: fingerprint_digest(kept_metadata(source))}


def _config_changes(before: JsonObject | None, now: JsonObject | None) -> list[str]:
    """Return in words the fields of a source's config.json that are others now."""
    changes = () if before is None else config_differences(before, now, unread=())
    return [f"{field} was {_shown(then)}, now {_shown(after)}" for field, then, after in changes]


def config_changes(before: JsonObject | None, source: Checkpoint, config_text: str) -> list[str]:
    """Return in words the first fields that are others in a later config.json of a source; none of a damaged one."""
    with suppress(MalformedFileError):
        return _config_changes(before, replace(source, config_text=config_text).config)[:_MOST_CHANGES]
    return []


class Obstacle(NamedTuple):
    """Why converted weights cannot stay while config.json changes, and what to do to get what is there now."""

    problem: str
    advice: str


def config_obstacle(before: JsonObject | None, source: Checkpoint, config_text: str, recipe: Recipe) -> Obstacle | None:
    """Return what forbids that weights converted by a recipe stay under another config.json; None if they can.

    `before` is the config.json that they were converted with, `config_text` the one of now. `source` has the tensors.
    """
    try:
        now = replace(source, config_text=config_text)
    except MalformedFileError:
        return Obstacle("config.json is damaged", "")
    changes = _config_changes(before, now.config)
    if not changes:
        return None
    problem = f"config.json has changed: {', '.join(changes[:_MOST_CHANGES])}"
    rule = RULES.get(recipe.rule)
    if rule is not None and rule.needs_text and network_fields(before or {}) != network_fields(now.config):
        return Obstacle(f"{problem}; what was converted depends on it", NEW_DESTINATION)
    try:
        claim_projections(source=now, recipe=recipe)
    except PlanError:
        return Obstacle(f"{problem}; it no longer describes the tensors", "")
    return None


def _beside_source(fingerprint: JsonObject) -> JsonObject:
    """Return a fingerprint without what may change at the source while its headers stay; a folder is no repository."""
    return fingerprint | {"source_revision": fingerprint["source_revision"] is not None, "source_config": ""}


def _shown(value: object) -> str:
    return "missing" if value is ABSENT else quoted(value)


def parse_described(kind: type[T], text: str, *, where: str) -> T:
    """Return a ledger or the description of a job, of this release or an earlier one; raises MalformedFileError.

    Fields that this release does not have are left out. A rule that it does not have keeps its name.
    """
    document = parse_json_object(text, where=where)
    recipe = document.get("recipe")
    rule = cast("dict[str, Any]", recipe).get("rule") if isinstance(recipe, dict) else None
    if not isinstance(rule, str) or rule in RULES:
        return parse(kind, text, where=where, extra="ignore")
    known = json.dumps(document | {"recipe": cast("dict[str, Any]", recipe) | {"rule": "mse"}})
    described: Any = parse(kind, known, where=where, extra="ignore")
    return replace(described, recipe=described.recipe.model_copy(update={"rule": rule}))


def describe_changes(old: Mapping[str, JsonValue], new: Mapping[str, JsonValue]) -> str:
    """Say in words which fields differ, the first five of them; an empty text if none does.

    What only one of them has follows from the rule, if that differs.
    """
    different = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    if "rule" in different and None not in (old.get("rule"), new.get("rule")):
        different = [key for key in different if None not in (old.get(key), new.get(key))]
    changes = ((shortened(key), _in_words(old.get(key)), _in_words(new.get(key))) for key in different[:5])
    return "; ".join(f"{key} was {before}, now {now}" for key, before, now in changes)


def _in_words(value: JsonValue) -> str:
    if isinstance(value, list) and value:
        return " and ".join(map(quoted, value))
    return "not set" if value is None or value == [] else quoted(value)


def other_instructions(old: Mapping[str, JsonValue], new: Mapping[str, JsonValue]) -> str:
    """Return what to do if a CPU computes in another way than the one that began; an empty text otherwise."""
    before, now = (str(fields.get("device")) for fields in (old, new))
    if before == now or not (before.startswith("cpu") and now.startswith("cpu")):
        return ""
    return (
        "This machine or this version computes with other instructions, so its sums have other bytes. Continue on a "
        "machine like the first one, with the version that began. To share a job between x86-64 machines of several "
        "kinds, set ATEN_CPU_CAPABILITY=avx2 on all of them before it begins. "
    )


def changed_shards(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the source shards that have other bytes."""
    return [shard for shard in sorted(now) if before.get(shard) != now[shard]]


EARLIER_WORK: Final = "begun by release 0.3 or earlier. Finish it with that release, or start in a new folder."


def check_version(version: int, folder: Path) -> None:
    """Refuse to go on with the work in a folder that an earlier release began; raises ResumeError."""
    if version == IDENTITY_VERSION:
        return
    raise ResumeError(earlier_result(version, folder) or f"{folder}: holds work that was {EARLIER_WORK}")


def earlier_result(version: int, folder: Path) -> str:
    """Say that a folder holds a finished result of an earlier release; "" if it does not."""
    is_finished = all((folder / name).is_file() for name in (CONFIG_NAME, INDEX_NAME, LEDGER_NAME))
    if version == IDENTITY_VERSION or not is_finished or not any(folder.glob(f"*{SHARD_SUFFIX}")):
        return ""
    command = shell_line(("k2convert", "validate", str(folder)))
    return (
        f"{folder}: holds a finished result of release 0.3 or earlier, which stays as it is. `{command}` checks it. To "
        "convert again, choose a new folder."
    )


NEW_DESTINATION: Final = "To convert what is there now, choose a new destination."


def source_error(shard: str, folder: Path) -> SourceChangedError:
    """Return the error for a changed source shard of the job in a folder."""
    return SourceChangedError(
        f"{shard}: this source shard has other bytes than when the job in {folder} was begun. {NEW_DESTINATION}"
    )
