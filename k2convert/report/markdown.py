"""report.md, the figures of the page as Markdown; and README.md, the card of a result, with metadata for the Hub.

Every value that a template shows is escaped, so text of a checkpoint, a recipe or another card is shown unchanged and
does nothing. The filters of `render_template` make tables, sections and code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.fit.search import gigabytes
from k2convert.fit.serving import ENGINE_NAMES, result_deployment, serve_command
from k2convert.hub.own_card import marked
from k2convert.hub.source_card import SourceCard, front_matter
from k2convert.models import find_family
from k2convert.models.names import CONVERTIBLE_ROLES, ModelCardFacts
from k2convert.quantize.rules import RULES
from k2convert.report.calibrated import calibrated_sections, pruned_section
from k2convert.report.content import bits_words, caution, needs_section, role_name, role_table, sections
from k2convert.report.evaluated import evaluation_section
from k2convert.report.figures import Report
from k2convert.report.wording import Section, Table

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def render_markdown(report: Report, *, page: str, picture: str | None) -> str:
    """Return report.md. `page` and `picture` are the names of files in the same folder."""
    return render_template(
        "report.md.jinja",
        caution=caution(report),
        missing=report.missing,
        sections=[section for section in sections(report) if section.tables or not section.charts],
        page=page,
        picture=picture,
    )


def render_template(file: str, **values: object) -> str:
    """Return a Markdown template filled in. Every value is escaped, except those of the filters below."""

    def shown(value: object) -> object:
        if isinstance(value, Markup) or not isinstance(value, str):
            return value
        return sentence(value)

    environment = Environment(undefined=StrictUndefined, finalize=shown, trim_blocks=True, lstrip_blocks=True)
    filters = {"table": table, "section": section, "code": code, "raw": Markup}
    environment.filters.update(filters)  # pyright: ignore[reportArgumentType, reportCallIssue]
    template = environment.from_string(resources.files("k2convert.report").joinpath(file).read_text(encoding="utf-8"))
    return re.sub(r"\n{3,}", "\n\n", template.render(values)).strip() + "\n"


def sentence(text: str) -> str:
    """Return text with what is between backticks as code, and everything else escaped."""
    if len(parts := text.split("`")) % 2 == 0:
        return escape(text)
    return "".join(code(part) if i % 2 else escape(part) for i, part in enumerate(parts))


def escape(text: str) -> str:
    """Escape text from a checkpoint or recipe, so that Markdown shows it unchanged."""
    return _SPECIAL.sub(r"\\\1", re.sub(r"\s+", " ", text)).replace(r"\<", "&lt;").replace(r"\&", "&amp;")


def code(text: str) -> Markup:
    """Return text as code, or as plain text if it has characters that would end the code."""
    plain = " ".join(text.split())
    return Markup(f"`{plain}`" if re.fullmatch(r"[^`|<&\\]+", plain) else escape(plain))


def section(found: Section, level: int, *, is_folded: bool = False, with_tables: bool = True) -> Markup:
    """Return a section under a heading; `is_folded` hides tables that have a summary until they are opened."""
    parts = [f"{'#' * level} {escape(found.title)}", *map(sentence, found.sentences)]
    for shown in found.tables if with_tables else ():
        text = table(shown)
        if is_folded and shown.summary:
            text = f"<details><summary>{escape(shown.summary)}</summary>\n\n{text}\n\n</details>"
        parts.append(text)
    return Markup("\n\n".join(parts))


def table(found: Table) -> Markup:
    """Return a table. Columns of numbers are aligned at the right."""
    alignments = ["---:" if found.is_numeric(i) else "---" for i in range(len(found.columns))]
    rows = [[code(c) if found.is_code and i else escape(c) for i, c in enumerate(row)] for row in found.rows]
    lines = [[escape(column) for column in found.columns], alignments, *rows]
    return Markup("\n".join(f"| {' | '.join(cells)} |" for cells in lines))


def render_card(
    report: Report,
    *,
    base_model: str | None,
    source: SourceCard,
    config: Mapping[str, Any],
    revision: str | None = None,
    picture: str | None = None,
) -> str:
    """Return README.md. The report is named after the repository and has a validation."""
    ledger = report.ledger
    recipe = report.ledger.recipe
    repo = report.name
    rule = RULES[recipe.rule]
    family = find_family(str(ledger.source.family)).card
    deployment = result_deployment(
        config, recipe.kv_cache, family=str(ledger.source.family), model=repo, revision=revision
    )
    serving = {name: serve_command(engine, deployment) for engine, name in ENGINE_NAMES.items()}
    said = {note for command in serving.values() for note in command.notes}
    traits = (recipe.layout, recipe.activations, "pipeline")
    refused = [reason for _, trait, reason in family.refusals if trait in traits]
    kept = [*family.kept, *(role_name(role) for role in CONVERTIBLE_ROLES if role not in recipe.roles)]
    if family.has_vision:
        kept.append("vision tower and projector")
    card = render_template(
        "card.md.jinja",
        front_matter=Markup(_metadata(report, family, base_model, source)),
        name=repo.partition("/")[2],
        base=base_model or family.model_kind,
        base_model=base_model,
        roles=", ".join(map(role_name, recipe.roles)),
        kept=", ".join(kept),
        is_w4a4=recipe.activations == "w4a4",
        is_smoothed=ledger.calibration is not None and ledger.calibration.exponents_digest is not None,
        picture=picture,
        ledger=ledger,
        recipe=recipe,
        layout=Markup(LAYOUTS[recipe.layout].title),
        transformers_note=LAYOUTS[recipe.layout].transformers_note,
        rule_summary=rule.summary,
        has_power_of_two_scale=rule.has_power_of_two_scale,
        input_scales=recipe.input_scale.model_dump(),
        pruning=ledger.pruning,
        pruned=None if ledger.pruning is None else pruned_section(ledger.pruning, report.checks),
        calibrated=list(calibrated_sections(ledger.calibration)),
        evaluation=None if report.evaluation is None else evaluation_section(report.evaluation, recipe),
        errors=role_table(report),
        caution=caution(report),
        serving=serving,
        draft_heads=family.draft_heads.get((base_model or "").rpartition("/")[2], ()),
        serving_notes=[*family.notes, *(reason for reason in refused if reason not in said)],
        source_title=report.source_format.title,
        bits=bits_words(report.source_format),
        needs=needs_section(report),
        size=gigabytes(ledger.num_bytes),
        checked="" if report.checks is None else report.checks.summary,
    )
    return marked(card)


def _metadata(report: Report, family: ModelCardFacts, base_model: str | None, source: SourceCard) -> str:
    recipe = report.ledger.recipe
    pruning = report.ledger.pruning
    tags = ["nvfp4", "fp4", *family.tags, recipe.layout, "vllm", "sglang"]
    if recipe.activations == "w4a4" and not LAYOUTS[recipe.layout].tensorrt_llm_note:
        tags.append("tensorrt-llm")
    if pruning is not None:
        # The ecosystem's word `reap` is for the scores of REAP only.
        tags += ["pruned", "reap"] if "REAP" in (pruning.scores or "").split() else ["pruned"]
    return front_matter(
        source,
        base_model=base_model,
        base_model_relation="quantized" if base_model else None,
        library_name=source.library_name or "transformers",
        pipeline_tag=source.pipeline_tag or ("image-text-to-text" if family.has_vision else "text-generation"),
        tags=[*tags, "k2convert"],
    )
