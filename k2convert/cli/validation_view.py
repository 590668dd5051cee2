"""A validation as tables: the contract, weight error, certificate, layers, and the command that serves the result."""

from functools import partial
from pathlib import Path

from k2convert.check.results import (
    MAX_OFFENDERS,
    CertificateReport,
    ContractReport,
    LayersReport,
    ValidationReport,
    Variant,
    WeightsReport,
    labels,
    validation_document,
)
from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.names import CONFIG_NAME
from k2convert.cli.console import print_line, print_next, print_table, print_verdict, show
from k2convert.errors import counted, exact_zero, format_decibels
from k2convert.models import family_of
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.records.ledger import find_ledger, shown_totals


def show_validation(report: ValidationReport) -> None:
    show(validation_document(report), partial(_show_tables, report))


def _show_tables(report: ValidationReport) -> None:
    _show_contract(report.contract)
    if report.weights is not None:
        _show_weights(report.weights)
    if report.layers is not None:
        _show_layers(report.layers)
    if report.layers_skipped:
        print_line(f"reference layers: skipped ({report.layers_skipped})")
    left_out = ""
    if report.passed and report.weights is None:
        left_out = f", but {counted(len(report.contract.unchecked), 'rule')} and the weights need --source"
    print_verdict(report.folder, left_out, passed=report.passed)


def _show_contract(contract: ContractReport) -> None:
    title = f"servable contract: {contract.folder} ({contract.layout}, {contract.activations})"
    columns = ("rule", "verdict", "count", "what must hold")
    print_table(title, columns, [rule.cells for rule in contract.rules], left=(0, 1, 3))
    for rule in contract.rules:
        for offender in rule.offenders:
            print_line(f"rule {rule.number} {rule.verdict}: {offender.name}: {offender.problem}")


def _error_row(label: str, error: WeightMetrics) -> tuple[str, ...]:
    changed = ""
    if error.num_nonzero:
        share = 100 * (error.num_nonzero - error.equal_nonzero) / error.num_nonzero
        changed = f"{share:.{1 if share else 0}f} %"
    steps = ""
    if error.max_error_steps is not None:
        steps = f"{error.max_error_steps:.2f}"
    plain = "zero" if error.is_zero else format_decibels(error.sqnr_db)
    return label, f"{error.num_weights:,}", plain, exact_zero(error.relative_mse), steps, changed


def _show_weights(weights: WeightsReport) -> None:
    title = "weight error, decoded from the written bytes"
    totals = weights.totals()
    if not totals:
        print_line(f"{title}: no weight could be measured")
        return
    errors = [*shown_totals(totals).items(), *(("worst", error) for _, error in weights.worst(1))]
    columns = ("", "weights", "SQNR", "relative MSE", "max error, INT4 steps", "non-zero weights changed")
    rows = [_error_row(label, error) for label, error in errors]
    shown = [i for i, name in enumerate(columns) if not name or any(row[i] for row in rows)]  # no steps without INT4
    print_table(title, [columns[i] for i in shown], [[row[i] for i in shown] for row in rows])
    for module, _ in weights.worst(1):
        print_line(f"worst: {module}")
    _show_certificate(weights.certificate)
    mismatches = weights.journal_mismatches
    if not weights.journal_compared:
        print_line("journal: skipped (no records here)")
        return
    first = f", first {mismatches[0]}" if mismatches else ""
    print_line(f"journal: {weights.journal_compared:,} tensors compared, {len(mismatches):,} differ{first}")


def _show_certificate(certificate: CertificateReport) -> None:
    if not certificate.tensors:
        print_line(f"certificate: skipped ({certificate.skip_reason or 'no tensor is converted'})")
        return
    rows = f"all {certificate.rows:,} rows" if certificate.is_whole else f"{certificate.rows:,} rows, drawn by a hash,"
    by = f"by the conditions of rule {certificate.rule}"
    if certificate.skip_reason:
        by = f"by their error alone ({certificate.skip_reason})"
    print_line(
        f"certificate: {rows} of {certificate.tensors:,} tensors checked {by}, {certificate.copies:,} copies compared; "
        f"{len(certificate.mismatches):,} differ"
    )
    for name, problem in list(certificate.mismatches.items())[:MAX_OFFENDERS]:
        print_line(f"certificate: {name}: {problem}")


def _show_layers(report: LayersReport) -> None:
    """Show every layer's rows, the result's own first."""
    variants = {error.variant for layer in report.layers for error in layer.errors}
    rows = [
        (
            str(layer.layer),
            label,
            format_decibels(error.sqnr_db),
            f"{error.cosine:.6f}",
            f"{error.worst_expert} ({format_decibels(error.worst_expert_sqnr_db)})",
        )
        for layer in report.layers
        for variant, label in labels(variants).items()
        if (error := layer.error(Variant(variant))) is not None
    ]
    title = f"reference layers, error of the MoE block against the source in FP32 ({report.hidden_states})"
    print_table(title, ("layer", "computed with", "output SQNR", "cosine", "worst expert"), rows, left=(0, 1))
    for layer in report.layers:
        for failure in layer.failures:
            print_line(f"layer {layer.layer}: {failure}")


def print_serve(model: str, *, folder: Path, family: str | None = None, revision: str | None = None) -> None:
    """Print how to serve a folder or a repository. `folder` has the result's config.json, and its ledger if any."""
    from k2convert.deploy.serving import result_deployment, serve_command

    config = read_json_file(folder / CONFIG_NAME)
    ledger = find_ledger(folder)
    if family is None:
        family = family_of(config, ()).name if ledger is None else str(ledger.source.family)
    kv_cache = None if ledger is None else ledger.recipe.kv_cache
    deployment = result_deployment(config, kv_cache, family=family, model=model, revision=revision)
    if deployment.layout is not None:  # else the config states no NVFP4
        print_next(serve_command("vllm", deployment).line)
