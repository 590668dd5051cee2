"""Jobs with the Hub on either side, as the command line needs them: pre-flight, consent, card."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.names import CARD_NAME, CONFIG_NAME, LEDGER_NAME
from k2convert.errors import HubError, MissingDependencyError, PlanError
from k2convert.hub.card import PICTURES, ROLE_NAMES, CardFacts, build_card
from k2convert.hub.client import Hub, check_endpoint
from k2convert.hub.preflight import Target, check_target
from k2convert.hub.source_card import SourceCard
from k2convert.job.execute import output_items
from k2convert.job.places import OpenedSource
from k2convert.job.prepare import LocalJob
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.report import write_report
from k2convert.validate.results import ValidationReport, report_document


def check_job_target(local: LocalJob, opened: OpenedSource, *, repo: str, private: bool, hub: Hub) -> Target:
    """Pre-flight for a planned job, before anything is converted; raises HubError or PlanError."""
    check_endpoint()
    if local.plan.recipe.target != "nvfp4":
        raise PlanError("--to bf16 goes to a folder: only NVFP4 checkpoints are validated, and so published.")
    file_bytes = {item.name: item.output_bytes for item in output_items(local)}
    return check_target(
        hub, repo=repo, private=private, file_bytes=file_bytes, licence=opened.card.licence, source=opened.remote
    )


def confirm(target: Target, *, total_bytes: int, yes: bool, ask: Callable[[str], bool]) -> None:
    """Publishing needs a yes: typed, or --yes; raises HubError without one."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise HubError(f"{target.repo}: publishing without a terminal needs --yes.")
    kind = "private" if target.private else "PUBLIC"
    if not ask(f"Publish {total_bytes / 1e9:,.1f} GB to the {kind} repository {target.repo}?"):
        raise HubError(f"{target.repo}: not published.")


def card_files(
    folder: Path, *, repo: str, base_model: str | None, source: SourceCard, validation: ValidationReport
) -> dict[str, bytes]:
    """README.md for a finished folder, from its ledger and config, and the report that it shows."""
    made = report_files(folder, validation=validation)
    picture = next((name for name in PICTURES if name in made or (folder / name).is_file()), None)
    ledger, config = read_json_file(folder / LEDGER_NAME), read_json_file(folder / CONFIG_NAME)
    facts = card_facts(ledger, config, repo=repo, base_model=base_model, source=source, picture=picture)
    return made | {CARD_NAME: build_card(facts).encode()}


def card_facts(
    ledger: dict[str, Any],
    config: dict[str, Any],
    *,
    repo: str,
    base_model: str | None,
    source: SourceCard,
    picture: str | None,
) -> CardFacts:
    """The card's facts from the two documents published with the shards."""
    recipe, has_vision, is_optimal = ledger["recipe"], "text_config" in config, ledger["recipe"]["rule"] == "optimal"
    parsers = "--tool-call-parser kimi_k2 --reasoning-parser kimi_k2"
    kept = ["attention", "router", "embeddings and output head"]
    kept += [ROLE_NAMES[role] for role in ("shared_experts", "dense_mlp") if role not in recipe["roles"]]
    kept += ["vision tower and projector"] if has_vision else []
    return CardFacts(
        repo=repo,
        base_model=base_model,
        recipe=recipe,
        totals={role: WeightMetrics.from_dict(metrics) for role, metrics in ledger["totals"].items()},
        config=config,
        revision=ledger["source"].get("revision"),
        tool_version=ledger["k2convert"],
        versions=ledger["versions"],
        tensor_bytes=sum(int(shard["bytes"]) for shard in ledger["shards"].values()),
        source=source,
        picture=picture,
        model_kind="a Kimi K2 model",
        tags=("kimi-k2",),
        serve_options=f"--enable-auto-tool-choice {parsers}",
        sglang_options=parsers,
        kept=tuple(kept),
        has_vision=has_vision,
        rule_summary=(
            "for every block of 16 weights the E4M3 scale with the least squared error against the source's exact "
            "values, found by search, with no BF16 step between"
            if is_optimal
            else "dequantized to BF16, then quantized by amax, bit for bit as ModelOpt does by default"
        ),
        has_power_of_two_scale=is_optimal,
    )


def report_files(folder: Path, *, validation: ValidationReport) -> dict[str, bytes]:
    """report.html, report.md and report.png of a finished folder; those that are there already are kept.

    Empty where the libraries that draw are not installed.
    """
    with tempfile.TemporaryDirectory(prefix="k2convert-") as temporary:
        try:
            files = write_report(folder=folder, out=Path(temporary), validation=report_document(validation))
        except MissingDependencyError:
            return {}
        made = [path for path in (files.page, files.markdown, files.picture) if path is not None]
        return {path.name: path.read_bytes() for path in made if not (folder / path.name).exists()}
