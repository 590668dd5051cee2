"""The card of a result, README.md: the mark that k2convert leaves in it, and what becomes of one written by hand.

The mark is a comment at the end with a digest of the text. A card without it, or whose text was edited since, is its
owner's: it stays, and its front matter only gets the fields that it lacks. So does the front matter that a new
repository gets in the browser, under the text of k2convert.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import yaml
from blake3 import blake3

from k2convert.checkpoint.files import check_plain_file, read_small_file
from k2convert.checkpoint.names import CARD_NAME
from k2convert.errors import HubError
from k2convert.hub.client import Hub
from k2convert.hub.preflight import Target
from k2convert.hub.source import read_file

_FRONT_MATTER: Final = re.compile(r"\s*---[ \t]*\r?\n(.*?)(?:\r?\n|^)---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_MARK: Final = re.compile(r"<!-- written by k2convert, text ([0-9a-f]{16}) -->\s*\Z")
_BYTES: Final = "surrogateescape"  # what is no UTF-8 stays as it is
_BOM: Final = "\ufeff"


def marked(card: str) -> str:
    """Return a card with the mark at its end."""
    return f"{card.rstrip()}\n\n<!-- written by k2convert, text {_digest(_split(card)[1])} -->\n"


def is_by_hand(card: str) -> bool:
    """Return whether a card has a text that k2convert did not write, or that was edited."""
    text = _split(card)[1]
    mark = _MARK.search(text)
    return bool(text.strip()) and (mark is None or mark[1] != _digest(text[: mark.start()]))


def find_card(folder: Path) -> str | None:
    """Return the card in a folder; None without one. Raises MalformedFileError, SourceReadError."""
    path = folder / CARD_NAME
    check_plain_file(path)
    if path.exists():
        return read_small_file(path).decode(errors=_BYTES)
    return None


def published_card(hub: Hub, target: Target) -> str | None:
    """Return the card on the target's branch; None without one. Raises HubError."""
    file = target.files.get(CARD_NAME)
    if file is None or target.head is None:
        return None
    return read_file(hub, target.repo, target.head, file).decode(errors=_BYTES)


def card_words(here: str | None, there: str | None, repo: str) -> str:
    """Return what becomes of a card that was written by hand, in the folder or the repository; empty without one."""
    is_here, is_there = (card is not None and is_by_hand(card) for card in (here, there))
    if not (is_here or is_there):
        return ""
    replaced = ""
    if is_here and is_there and here != there:
        replaced = f". It replaces the one of {repo}"
    return f"{CARD_NAME}: yours, its metadata is completed{replaced}"


def check_card(hub: Hub, card: str | None, *, where: Path) -> None:
    """Refuse a card of the folder that the Hub would refuse at the end (HubError)."""
    if card is None or not is_by_hand(card) or not _split(card)[0]:
        return
    if _completed(card, card) is None or not hub.accepts_card(card):
        raise HubError(f"{where}: the Hub does not accept its metadata. Correct the lines above its text, or move it.")


def card_to_commit(hub: Hub, written: bytes, *, here: str | None, there: str | None) -> bytes | None:
    """Return the card to commit, `written` or completed; None if the one `there` stays. Raises HubError."""
    is_here = here is not None and is_by_hand(here)
    own = here if is_here else there
    if own is None:
        return written
    completed = _completed(own, written.decode())
    if completed is None or not hub.accepts_card(completed):
        completed = own
    if completed == there:
        return None
    return completed.encode(errors=_BYTES)


def _completed(own: str, written: str) -> str | None:
    """Return `own` with the fields of `written` that it lacks, and its text if it has none; None if it is malformed."""
    matter, text = _split(own)
    written_matter, written_text = _split(written)
    try:
        own.encode()
        fields = _fields(matter)
        more = _fields(written_matter)
        if fields is None or more is None:
            return None
        added = {name: value for name, value in more.items() if _is_missing(name, value, more, fields)}
        matter = _extended(matter, added, fields | added)
    except (UnicodeEncodeError, yaml.YAMLError):
        return None
    if not is_by_hand(own):
        text = written_text
    if matter:
        return f"---\n{matter}\n---\n{text}"
    return text


def _split(card: str) -> tuple[str, str]:
    """Return the front matter of a card, without its lines of dashes, and the text."""
    card = card.removeprefix(_BOM)
    matter = _FRONT_MATTER.match(card)
    if matter is None:
        return ("", card)
    return (matter[1].strip("\r\n"), card[matter.end() :])


def _fields(matter: str) -> dict[str, Any] | None:
    """Parse front matter; None if it is no mapping. Raises YAMLError."""
    fields: object = yaml.safe_load(matter)
    if fields is None:
        return {}
    if isinstance(fields, dict):
        return cast(dict[str, Any], fields)
    return None


def _is_missing(name: str, value: object, written: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Return whether a card lacks a field. A license's name and a base's relation go with the license and the base."""
    for owner in ("license", "base_model"):
        if name.startswith(f"{owner}_") and fields.get(owner, written.get(owner)) != written.get(owner):
            return False
    return name not in fields and value is not None


def _extended(matter: str, added: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Return front matter with more fields: as it was, with new lines, or rewritten where that is not possible."""
    if not added:
        return matter
    lines = yaml.safe_dump(dict(added), sort_keys=False, allow_unicode=True).rstrip()
    longer = f"{matter}\n{lines}".strip("\n")
    try:
        if yaml.safe_load(longer) == whole:
            return longer
    except yaml.YAMLError:
        pass
    return yaml.safe_dump(dict(whole), sort_keys=False, allow_unicode=True).rstrip()


def _digest(text: str) -> str:
    return blake3(" ".join(text.split()).encode(errors=_BYTES)).hexdigest()[:16]
