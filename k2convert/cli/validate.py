"""`validate`: check and measure a result in a folder or on the Hub, and show the findings as tables."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from k2convert.check.layers.result import LayersReport, Variant, labels
from k2convert.check.remote import folder_bytes
from k2convert.check.results import (
    MAX_OFFENDERS,
    CertificateReport,
    ContractReport,
    ValidationReport,
    WeightsReport,
    validation_document,
)
from k2convert.check.validate import LayersRequest, validate_checkpoint
from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.names import CONFIG_NAME
from k2convert.cli import console
from k2convert.cli.console import print_line, print_next, print_table, print_verdict, show
from k2convert.cli.interrupts import say_when_interrupted
from k2convert.cli.options import NOTHING_KEPT
from k2convert.cli.progress import Display
from k2convert.cli.verbs import ValidateOptions
from k2convert.errors import (
    CheckpointError,
    InvalidCheckpointError,
    K2ConvertError,
    format_bytes,
    remedy,
    require_extra,
)
from k2convert.hub.client import SCHEME, Hub, parse_repo
from k2convert.job.opened import Opened, open_ends
from k2convert.job.opening import read_windows_of
from k2convert.models import expected_family
from k2convert.plan.recipe import TextUse
from k2convert.records.command import read_command
from k2convert.records.events import Extent
from k2convert.records.journal import check_shards_are_here
from k2convert.records.ledger import DecodedError, find_ledger

if TYPE_CHECKING:
    from k2convert.check.layers.check import LayersCost

_MAX_NUMBERS: Final = 8  # layers that are listed one by one
TEXT_WINDOW: Final = 2048  # tokens that see each other, as in calibration


def validate(options: ValidateOptions) -> None:
    """Validate and show the findings; raises InvalidCheckpointError if the validation fails."""
    layers = _check_options(options)
    request = None
    if layers is not None:
        request = LayersRequest(layers, options.hidden_states, options.tokens)
    hub = Hub(notify=console.notifier())
    with open_ends(options.destination, options.source, hub=hub) as opened:
        # Checked now, because it is used after the pass over the shards, which may take hours.
        if layers is not None:
            require_extra("torch", purpose="--layers")
        if opened.source is not None and layers:
            from k2convert.check.layers.check import check_layers_exist

            check_layers_exist(opened.source, layers)
        if options.hidden_states is not None:
            if not options.hidden_states.is_file():
                raise CheckpointError(f"{options.hidden_states}: no such file. Pass a file of hidden states.")
            with remedy("Capture the hidden states again, or leave out --hidden-states."):
                read_header(options.hidden_states)
        if options.against is not None:
            with remedy("Pass a complete NVFP4 checkpoint to --against."):
                open_checkpoint(options.against)
        if request is not None and opened.source is not None and options.text:
            use = TextUse(tokens=options.tokens, window=TEXT_WINDOW, seed=0)
            request = replace(request, hidden_states=(windows := read_windows_of(opened.source, options.text, use)))
            for note in windows.notes:
                console.print_note(note)
        if opened.shards.result is None:
            check_shards_are_here(opened.folder)
        total = opened.bytes_to_read(layers)
        if options.against is not None:
            total += folder_bytes(options.against)
        if opened.shards.is_remote:
            console.print_event(f"checks {format_bytes(total)}, shard by shard; what comes from the Hub is dropped")
        cost = None
        if request is not None:
            cost = _say_layers_cost(opened, request)
        extent = Extent({"check": (total, 0)}, num_experts=0 if cost is None else cost.num_experts)
        display = Display("validate", extent)
        say_when_interrupted(lambda: NOTHING_KEPT, resumes=False)
        with display as events:
            found = validate_checkpoint(
                folder=opened.folder,
                source=opened.source,
                reference=options.reference,
                against=options.against,
                layers=request,
                events=events,
                shards=opened.shards,
            )
        found = opened.named(found)
        show_validation(found)
        if not found.passed:
            problem = "validation failed, see above. Do not publish or serve it."
            command = read_command(opened.folder)
            if command is not None and not opened.shards.is_remote:
                again = command.verifying().line(here=str(Path.cwd()))
                problem += f" `{again}` converts missing and changed shards again."
            raise InvalidCheckpointError(f"{found.folder}: {problem}")
        ref = None
        if found.folder.startswith(SCHEME):
            ref = parse_repo(found.folder)
        name, revision = (found.folder, None) if ref is None else (ref.repo, ref.revision)
        print_serve(name, folder=opened.folder, revision=revision)


def _check_options(options: ValidateOptions) -> tuple[int, ...] | None:
    """Return the layers to compute: () for all, None for none; raises BadParameter for options that contradict."""
    layers = options.layers
    hidden_states = options.hidden_states
    text = options.text
    against = options.against
    uses_hub = any(str(place).startswith(SCHEME) for place in (options.destination, options.source))
    if options.source is None and (layers or against or options.reference):
        raise typer.BadParameter("--layers, --against and --reference need --source")
    if layers and against and uses_hub:
        raise typer.BadParameter("with hf://, --layers reads only these layers: leave out --against")
    if text and (layers is None or hidden_states is not None):
        raise typer.BadParameter("--text gives --layers hidden states: pass --layers, and leave out --hidden-states")
    if text and uses_hub:
        raise typer.BadParameter("--text computes all layers below, so both checkpoints must be folders, not hf://")
    if options.reference:
        require_extra("reference", purpose="--reference")
    if text:
        require_extra("calibrate", purpose="--text")
    try:
        numbers = () if layers in (None, "all") else tuple(int(part) for part in str(layers).split(","))
    except ValueError:
        raise typer.BadParameter(f"--layers {layers}: expected numbers like 1,30,60, or all") from None
    return None if layers is None else numbers


def _say_layers_cost(opened: Opened, request: LayersRequest) -> "LayersCost | None":
    """Print the cost of --layers before anything is read; None if the result cannot be opened."""
    from k2convert.check.layers.check import layers_cost

    if opened.source is None:
        return None
    try:
        converted = None
        if not opened.shards.is_remote:
            converted = open_checkpoint(opened.folder)
        is_text = request.hidden_states is not None and not isinstance(request.hidden_states, Path)
        cost = layers_cost(source=opened.source, converted=converted, layers=request.layers, is_text=is_text)
    except K2ConvertError:  # the validation names the problem
        return None
    numbers = ",".join(map(str, cost.layers)) if len(cost.layers) <= _MAX_NUMBERS else f"{len(cost.layers)} layers"
    below = ""
    if cost.num_below:
        below = f" (and {cost.num_below} layers below, for the hidden states of the text)"
    work = f"{cost.num_experts:,} experts on {request.tokens:,} tokens and reads {format_bytes(cost.num_bytes)}"
    console.print_event(f"--layers {numbers}{below}: computes {work}")
    return cost


def show_validation(report: ValidationReport) -> None:
    show(validation_document(report), partial(_show_tables, report))


def _show_tables(report: ValidationReport) -> None:
    _show_contract(report.contract)
    if report.weights is not None:
        _show_weights("weight error, decoded from the written bytes", report.weights)
    if report.layers is not None:
        _show_layers(report.layers)
    if report.layers_skipped:
        print_line(f"reference layers: skipped ({report.layers_skipped})")
    if (other := report.comparison) is not None:
        if other.note is not None:
            print_line(other.note)
        _show_contract(other.contract)
        _show_weights(f"weight error of {other.folder}", other.weights)
        print_line(
            f"by tensor: less error here in {other.better_here:,}, less there in {other.better_there:,}, "
            f"equal in {other.equal:,}"
        )
    print_verdict(report.folder, passed=report.passed)


def _show_contract(contract: ContractReport) -> None:
    rows = [
        (str(r.number), r.verdict, f"{r.count:,}" if r.count else "", f"{r.title} ({r.note})" if r.note else r.title)
        for r in contract.rules
    ]
    title = f"servable contract: {contract.folder} ({contract.layout}, {contract.activations})"
    print_table(title, ("rule", "verdict", "count", "what must hold"), rows, left=(0, 1, 3))
    for rule in contract.rules:
        for offender in rule.offenders:
            print_line(f"rule {rule.number} {rule.verdict}: {offender.name}: {offender.problem}")


def _error_row(label: str, error: DecodedError) -> tuple[str, ...]:
    equal = ""
    if error.num_nonzero:
        equal = f"{100 * error.equal_nonzero / error.num_nonzero:.2f} %"
    steps = ""
    if error.max_error_steps is not None:
        steps = f"{error.max_error_steps:.2f}"
    plain = _decibels(error.sqnr_db)
    return label, f"{error.num_weights:,}", plain, f"{error.relative_mse:.5f}", steps, equal


def _decibels(sqnr: float | None) -> str:
    if sqnr is None:
        return "zero"
    if math.isfinite(sqnr):
        return f"{sqnr:.2f} dB"
    return "exact" if sqnr > 0 else "broken"


def _show_weights(title: str, weights: WeightsReport) -> None:
    totals = weights.totals()
    if not totals:
        print_line(f"{title}: no weight could be measured")
        return
    found = [*totals.items(), *(("worst", error) for _, error in weights.worst(1))]
    columns = ("", "weights", "SQNR", "relative MSE", "max error, INT4 steps", "non-zero unchanged")
    rows = [_error_row(label, error) for label, error in found]
    shown = [i for i, name in enumerate(columns) if not name or any(row[i] for row in rows)]  # no steps without INT4
    print_table(title, [columns[i] for i in shown], [[row[i] for i in shown] for row in rows])
    for module, _ in weights.worst(1):
        print_line(f"worst: {module}")
    _show_certificate(weights.certificate)
    _show_comparison_with("journal", weights.journal_compared, weights.journal_mismatches, "no records here")
    _show_comparison_with(
        "library decoder", weights.decoder_compared, weights.decoder_mismatches, "only with --reference"
    )


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


def _show_comparison_with(what: str, compared: int, mismatches: Sequence[str], skip_reason: str) -> None:
    if not compared:
        print_line(f"{what}: skipped ({skip_reason})")
        return
    first = f", first {mismatches[0]}" if mismatches else ""
    print_line(f"{what}: {compared:,} tensors compared, {len(mismatches):,} differ{first}")


def _show_layers(report: LayersReport) -> None:
    """Show every layer's rows, the result's own first, and the routers, of which most have the same words."""
    found = {error.variant for layer in report.layers for error in layer.errors}
    rows = [
        (
            str(layer.layer),
            label,
            f"{error.sqnr_db:.2f} dB",
            f"{error.cosine:.6f}",
            f"{error.worst_expert} ({error.worst_expert_sqnr_db:.2f} dB)",
        )
        for layer in report.layers
        for variant, label in labels(found).items()
        if (error := layer.error(Variant(variant))) is not None
    ]
    title = f"reference layers, error of the output against INT4 in FP32 ({report.hidden_states})"
    print_table(title, ("layer", "computed with", "output SQNR", "cosine", "worst expert"), rows, left=(0, 1))
    for router in dict.fromkeys(layer.router for layer in report.layers):
        same = [str(layer.layer) for layer in report.layers if layer.router == router]
        where = ""
        if len(same) != len(report.layers):
            where = f" (layer {', '.join(same)})"
        print_line(f"router: {router}{where}")
    for layer in report.layers:
        for failure in layer.failures:
            print_line(f"layer {layer.layer}: {failure}")


def print_serve(model: str, *, folder: Path, revision: str | None = None) -> None:
    """Print how to serve a folder or a repository. `folder` has the result's config.json, and its ledger if any."""
    from k2convert.fit.serving import result_deployment, serve_command

    config = read_json_file(folder / CONFIG_NAME)
    ledger = find_ledger(folder)
    family = expected_family(config, ()).name if ledger is None else str(ledger.source.family)
    kv_cache = None if ledger is None else ledger.recipe.kv_cache
    deployment = result_deployment(config, kv_cache, family=family, model=model, revision=revision)
    if deployment.layout is not None:  # else no engine of ours loads it
        print_next(serve_command("vllm", deployment).line)
