"""What a result's card says: facts from the ledger, the config and the validation, and the report's files."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.names import CARD_NAME, CONFIG_NAME, REPORT_PICTURE_NAME
from k2convert.errors import MissingDependencyError
from k2convert.fit.needs import COLUMNS, Needs
from k2convert.fit.serving import ENGINE_NAMES, Deployment, nvfp4_scheme, serve_command, usual_parallelism
from k2convert.fit.weights import Tensor
from k2convert.hub.card import ROLE_NAMES, CardCommand, CardFacts, build_card
from k2convert.hub.card_calibration import CardCalibration, CardFeedback
from k2convert.hub.card_needs import CardNeeds
from k2convert.hub.card_pruning import CardPruning
from k2convert.hub.source_card import SourceCard
from k2convert.models import find_family
from k2convert.models.names import CONVERTIBLE_ROLES, ModelCardFacts
from k2convert.quantize.rules import RULES
from k2convert.records.calibration import CalibrationRecord
from k2convert.records.ledger import Ledger, read_ledger
from k2convert.report import write_report
from k2convert.report.feedback import feedback_totals
from k2convert.report.needs import result_needs
from k2convert.report.pruning import WARNING, layer_table, left_out_sentences
from k2convert.validate.results import ValidationReport, validation_document


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
    """Return the model card of a finished folder, and the report that it shows, by file name.

    `tensors` are those of the result's shards, which need not be here. `revision` is the branch if it is not main.
    """
    needs = result_needs(folder, tensors)
    files = report_files(folder, name=repo, validation=validation, needs=needs)
    has_picture = REPORT_PICTURE_NAME in files or (folder / REPORT_PICTURE_NAME).is_file()
    ledger, config = read_ledger(folder), read_json_file(folder / CONFIG_NAME)
    family, rule = find_family(str(ledger.family)).card, RULES[ledger.recipe["rule"]]
    facts = CardFacts(
        repo=repo,
        base_model=base_model,
        recipe=ledger.recipe,
        totals=ledger.totals,
        revision=ledger.revision,
        tool_version=ledger.tool_version,
        versions=ledger.versions,
        tensor_bytes=ledger.num_bytes,
        source=source,
        picture=REPORT_PICTURE_NAME if has_picture else None,
        model_kind=family.model_kind,
        tags=family.tags,
        serving=_serving(result_deployment(ledger, config, model=repo, revision=revision)),
        kept=_kept_parts(family, ledger.recipe["roles"]),
        has_vision=family.has_vision,
        rule_summary=rule.summary,
        has_power_of_two_scale=rule.has_power_of_two_scale,
        checked=validation.contract.summary,
        calibration=_card_calibration(ledger),
        needs=None if needs is None else CardNeeds(needs.summary, COLUMNS, needs.rows, needs.note),
        pruning=_card_pruning(ledger),
    )
    return files | {CARD_NAME: build_card(facts).encode()}


def result_deployment(
    ledger: Ledger, config: Mapping[str, Any], *, model: str, revision: str | None = None
) -> Deployment:
    """Return how to serve a result that is at `model`, with as much tensor parallelism as is usual for its experts."""
    layout, activations = nvfp4_scheme(config)
    return Deployment(
        model=model,
        layout=layout,
        activations=activations,
        family=find_family(str(ledger.family)).card,
        parallelism=usual_parallelism(config),
        kv_cache=ledger.recipe.get("kv_cache"),
        revision=revision,
    )


def _serving(deployment: Deployment) -> tuple[CardCommand, ...]:
    commands = [(name, serve_command(engine, deployment)) for engine, name in ENGINE_NAMES.items()]
    return tuple(CardCommand(name, command.block, command.notes) for name, command in commands)


def _card_pruning(ledger: Ledger) -> CardPruning | None:
    found = ledger.pruning
    if found is None:
        return None
    columns, rows = layer_table(found)
    return CardPruning(
        num_kept=found.kept.num_experts,
        num_experts=found.num_source_experts,
        scores=found.scores,
        warning=WARNING,
        left_out=left_out_sentences(found),
        columns=columns,
        rows=rows,
    )


def _card_calibration(ledger: Ledger) -> CardCalibration | None:
    found = ledger.calibration
    if found is None:
        return None
    return CardCalibration(
        texts=tuple(name for name, _ in found.texts),
        tokens=found.tokens,
        is_weighted=found.weighted,
        has_norm_scaling=found.exponents_digest is not None,
        feedback=_card_feedback(found),
    )


def _card_feedback(record: CalibrationRecord) -> CardFeedback | None:
    found = feedback_totals(record)
    if found is None:
        return None
    return CardFeedback(
        layers=found.layers,
        better_layers=found.better_layers,
        measured_layers=found.measured_layers,
        measured_on=record.measured_on,
        error=None if found.last is None else found.last.feedback_error,
        optimal_error=None if found.last is None else found.last.optimal_error,
        warning=record.warning,
        plain_experts=found.plain_experts,
        experts=found.experts,
    )


def _kept_parts(family: ModelCardFacts, roles: Sequence[str]) -> tuple[str, ...]:
    """Return the names of what stays byte for byte."""
    unconverted = [ROLE_NAMES[role] for role in CONVERTIBLE_ROLES if role not in roles]
    return (*family.kept, *unconverted, *(("vision tower and projector",) if family.has_vision else ()))


def report_files(folder: Path, *, name: str, validation: ValidationReport, needs: Needs | None) -> dict[str, bytes]:
    """Return the report's files by file name, without those that the folder has already. `name` is the result's.

    Empty if the libraries that draw the report are not installed.
    """
    with tempfile.TemporaryDirectory(prefix="k2convert-") as temporary:
        try:
            document = validation_document(validation)
            files = write_report(folder=folder, out=Path(temporary), validation=document, needs=needs, name=name)
        except MissingDependencyError:
            return {}
        made = [path for path in (files.page, files.markdown, files.picture) if path is not None]
        return {path.name: path.read_bytes() for path in made if not (folder / path.name).exists()}
