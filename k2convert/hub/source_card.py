"""Statements of the source's own card, and what of it the Hub accepts in the card of the result."""

from dataclasses import dataclass, replace
from typing import Any, cast

from k2convert.hub.client import Hub


@dataclass(frozen=True, slots=True)
class SourceCard:
    """Statements of the source's own card that the result's card carries over."""

    licence: str | None = None
    licence_name: str | None = None  # with its link, for the Hub's license `other`
    licence_link: str | None = None
    pipeline_tag: str | None = None
    library_name: str | None = None


def read_source_card(text: str) -> SourceCard:
    """License, task and library from a card's front matter; empty if the card has none or it is malformed."""
    from huggingface_hub import ModelCard

    text = text.lstrip("\ufeff \t\r\n")
    if not text.startswith("---"):
        return SourceCard()
    try:
        data: dict[str, object] = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # the YAML parser has its own errors; a malformed card must not stop the job
        return SourceCard()
    stated: Any = data.get("license")
    choices = cast(list[Any], stated) if isinstance(stated, list) else [stated]
    return SourceCard(
        _text(next(iter(choices), None)),
        _text(data.get("license_name")),
        _text(data.get("license_link")),
        _text(data.get("pipeline_tag")),
        _text(data.get("library_name")),
    )


def accepted_card(hub: Hub, card: SourceCard) -> SourceCard:
    """The part of a source's card that the Hub accepts; an unknown license becomes `other`. Raises HubError."""
    name = card.licence_name or card.licence
    other = SourceCard("other", name, card.licence_link)
    as_other = replace(card, licence="other", licence_name=name)
    for offered in (card, replace(card, pipeline_tag=None), as_other, other):
        if hub.accepts_card(f"---\n{front_matter(offered)}\n---\n"):
            return offered
    return replace(other, licence=None)


def _text(value: object) -> str | None:
    if isinstance(value, str) and value:
        return value
    return None


def front_matter(source: SourceCard, **more: Any) -> str:
    """Front matter with the fields of the source's card; `more` adds to them and replaces them."""
    from huggingface_hub import ModelCardData

    fields: dict[str, Any] = {
        "license": source.licence or "unknown",
        "license_name": source.licence_name,
        "license_link": source.licence_link,
        "library_name": source.library_name,
        "pipeline_tag": source.pipeline_tag,
    }
    data: Any = ModelCardData(**{key: value for key, value in (fields | more).items() if value is not None})
    return str(data.to_yaml()).strip()
