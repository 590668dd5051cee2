"""README.md of a published result: the report's content with metadata for the Hub, and how to serve it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.names import CARD_NAME, CONFIG_NAME, REPORT_PICTURE_NAME
from k2convert.fit.needs import gigabytes
from k2convert.fit.serving import ENGINE_NAMES, result_deployment, serve_command
from k2convert.fit.weights import Tensor
from k2convert.hub.source_card import SourceCard, front_matter
from k2convert.models import find_family
from k2convert.models.names import CONVERTIBLE_ROLES, ModelCardFacts
from k2convert.quantize.rules import RULES
from k2convert.report import render_report
from k2convert.report.calibrated import calibrated_sections, pruned_section
from k2convert.report.checks import read_checks
from k2convert.report.content import caution, needs_section, role_name, role_table
from k2convert.report.figures import Report, collect_report
from k2convert.report.markdown import render_template
from k2convert.validate.results import ValidationReport, validation_document

_LAYOUTS: Final = {"modelopt": "`modelopt`", "compressed-tensors": "`compressed-tensors` (nvfp4-pack-quantized)"}


def card_files(
    folder: Path,
    *,
    repo: str,
    base_model: str | None,
    source: SourceCard,
    revision: str | None = None,
    validation: ValidationReport,
    tensors: Iterable[Tensor],
) -> dict[str, bytes]:
    """Return the model card of a finished folder, and the report's files that the folder lacks, by file name.

    `tensors` are those of the result's shards, which need not be here. `revision` is the branch if it is not main.
    """
    report = collect_report(folder=folder, validation=validation_document(validation), tensors=tensors, name=repo)
    files = {name: data for name, data in render_report(report).items() if not (folder / name).exists()}
    has_picture = REPORT_PICTURE_NAME in files or (folder / REPORT_PICTURE_NAME).is_file()
    card = render_card(
        report,
        base_model=base_model,
        source=source,
        config=read_json_file(folder / CONFIG_NAME),
        revision=revision,
        picture=REPORT_PICTURE_NAME if has_picture else None,
    )
    return files | {CARD_NAME: card.encode()}


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
    ledger, recipe, repo = report.ledger, report.ledger.recipe, report.name
    checks = None if report.validation is None else read_checks(report.validation)
    rule, family = RULES[recipe["rule"]], find_family(str(ledger.family)).card
    scales: Mapping[str, Any] = recipe.get("input_scale") or {}
    deployment = result_deployment(
        config, family=family, kv_cache=recipe.get("kv_cache"), model=repo, revision=revision
    )
    return render_template(
        "card.md.jinja",
        front_matter=Markup(_metadata(report, family, base_model, source)),
        name=repo.partition("/")[2],
        base=base_model or family.model_kind,
        base_model=base_model,
        roles=", ".join(map(role_name, recipe["roles"])),
        kept=", ".join(_kept(family, recipe["roles"])),
        is_w4a4=recipe["activations"] == "w4a4",
        is_smoothed=ledger.calibration is not None and ledger.calibration.exponents_digest is not None,
        picture=picture,
        ledger=ledger,
        recipe=recipe,
        layout=Markup(_LAYOUTS[recipe["layout"]]),
        rule_summary=rule.summary,
        has_power_of_two_scale=rule.has_power_of_two_scale,
        input_scales={key: float(scales.get(key, 1.0)) for key in ("gate_up", "down")},
        pruning=ledger.pruning,
        pruned=None if ledger.pruning is None else pruned_section(ledger.pruning, checks),
        calibrated=list(calibrated_sections(ledger.calibration)),
        errors=role_table(report),
        caution=caution(report),
        serving={name: serve_command(engine, deployment) for engine, name in ENGINE_NAMES.items()},
        draft_heads=family.draft_heads,
        needs=needs_section(report),
        size=gigabytes(ledger.num_bytes),
        checked="" if checks is None else checks.summary,
    )


def _metadata(report: Report, family: ModelCardFacts, base_model: str | None, source: SourceCard) -> str:
    """Return the YAML front matter that the Hub reads."""
    recipe, pruning = report.ledger.recipe, report.ledger.pruning
    tags = ["nvfp4", "fp4", *family.tags, recipe["layout"], "vllm", "sglang"]
    if recipe["layout"] == "modelopt" and recipe["activations"] == "w4a4":
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


def _kept(family: ModelCardFacts, roles: Sequence[str]) -> list[str]:
    """Return the names of what stays byte for byte."""
    unconverted = [role_name(role) for role in CONVERTIBLE_ROLES if role not in roles]
    return [*family.kept, *unconverted, *(["vision tower and projector"] if family.has_vision else [])]
