"""An evaluation: its needs, and its tables: figures of models, tokens that differ most. The report has the layers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from k2convert.cli import console
from k2convert.cli.console import print_line, print_table
from k2convert.cli.interrupts import say_when_interrupted
from k2convert.cli.needs import TIME_NOTE, Needs, evaluation_needs, text_document
from k2convert.cli.options import typed_command
from k2convert.cli.progress import Display
from k2convert.errors import counted, exact_zero, format_bytes
from k2convert.records.document import plain
from k2convert.records.evaluation import EvaluatedModel, Evaluation, EvaluationRow, Verdict

if TYPE_CHECKING:
    from k2convert.evaluation.plan import EvaluationPlan

_SHOWN_TOKENS = 3


def check_and_evaluate(plan: "EvaluationPlan", reference: str, *, dry_run: bool) -> None:
    """Show what the rest needs, refuse it if that is not there, and do it unless this is a dry run."""
    layer_pass = plan.layer_pass
    left = max(layer_pass.num_layers - layer_pass.num_finished, 0)
    source = plan.checkpoints[0].checkpoint
    needs = evaluation_needs(source, layer_pass.text, layers=left, models=len(plan.models))
    models = f"{counted(len(plan.models) - 1, 'model')} and the reference"
    line = f"{models}, {layer_pass.num_layers} layers on {layer_pass.text.windows}"
    if dry_run:
        _show_plan(plan, needs, line)
    needs.check(reference)
    layer_pass.check_room()
    if dry_run:
        console.print_next(console.own_command())
        return
    console.print_event(line)
    display = Display(layer_pass.extent(layer_pass.num_finished))
    say_when_interrupted(
        lambda: (
            f"{min(layer_pass.work.num_finished(), layer_pass.num_layers)} of {layer_pass.num_layers} layers are done. "
            "The same command resumes"
        ),
        console.own_command(),
    )
    from k2convert.evaluation.streamed import evaluate

    with display as events:
        done = evaluate(plan, command=typed_command(source=reference), events=events)
    show_result(plan, done)


def _show_plan(plan: "EvaluationPlan", needs: Needs, line: str) -> None:
    layer_pass = plan.layer_pass
    document = text_document(layer_pass.text) | {
        "reference": plain(plan.models[0]),
        "models": [plain(model) for model in plan.models[1:]],
        "layers": layer_pass.num_layers,
        "finished_layers": min(layer_pass.num_finished, layer_pass.num_layers),
        "bytes_read": plan.bytes_read,
        "disk_needed": layer_pass.disk_needed,
    }
    fetched = sum(layer_pass.fetched)
    fetches = ""
    if fetched:
        fetches = f", fetches {format_bytes(fetched)} from the Hub"
    console.show(
        document | needs.document(),
        line,
        f"reads {format_bytes(plan.bytes_read)}{fetches}",
        f"disk: needs {format_bytes(layer_pass.disk_needed)} at once, may use {format_bytes(layer_pass.disk_allowed)}",
        *needs.lines(),
        TIME_NOTE,
    )


def show_result(plan: "EvaluationPlan", evaluation: Evaluation) -> None:
    paths = [str(output.path) for output in plan.outputs]
    console.show(plain(evaluation), partial(show_evaluation, evaluation), *paths, partial(_show_unkept, plan))
    console.print_next(_next_command(plan, evaluation))


def _show_unkept(plan: "EvaluationPlan") -> None:
    saved = {output.checkpoint for output in plan.outputs}
    for number, checkpoint in enumerate(plan.checkpoints):
        if number and saved.isdisjoint((None, number)):
            console.print_note(f"{checkpoint.address}: its rows are not kept in a file. Add --out FILE to keep them")


def _next_command(plan: "EvaluationPlan", evaluation: Evaluation) -> str:
    """Return the command for the report on the nearest result that keeps its figures in its folder, with its source if
    that is the reference.
    """
    saved = [plan.checkpoints[output.checkpoint] for output in plan.outputs if output.checkpoint is not None]
    by_name = {
        checkpoint.name: checkpoint
        for checkpoint in saved
        if checkpoint.source.local is not None and checkpoint.ledger is not None
    }
    rows = sorted(evaluation.rows, key=lambda row: row.figures.divergence.mean)
    nearest = next((by_name[row.model.name] for row in rows if row.model.name in by_name), None)
    if nearest is None or nearest.ledger is None:
        return "k2convert guide prove"
    reference = plan.checkpoints[0]
    headers = {shard: header.digest for shard, header in reference.checkpoint.headers.items()}
    source = ("--source", reference.address) if nearest.ledger.source.headers == headers else ()
    return console.command("k2convert", "report", nearest.address, *source)


def show_evaluation(evaluation: Evaluation) -> None:
    """Print the figures of every model, and its worst tokens."""
    text = evaluation.text
    names = ", ".join(name for name, _ in text.texts)
    dropped = ""
    if text.dropped:
        dropped = f", {text.dropped:,} windows dropped"
    print_table(
        f"against {evaluation.reference.name}, on {text.tokens:,} tokens drawn from {names}{dropped}",
        ("model", "KL, nats", "+-", "99.9 %", "max", "perplexity", "same top 1, %", "left top 5, %"),
        [(label, *_figures(row)) for label, row in zip(row_labels(evaluation.rows), evaluation.rows, strict=True)],
    )
    if evaluation.rows:
        print_line(f"perplexity of {evaluation.reference.name}: {evaluation.rows[0].figures.reference_perplexity:.3f}")
    for verdict in evaluation.verdicts:
        print_line(_verdict_line(verdict))
    for row in evaluation.rows:
        for token in (token for token in row.worst[:_SHOWN_TOKENS] if token.divergence > 0):
            print_line(
                f"{_called(row.model)}: KL {token.divergence:.3f} after {token.before[-40:]!r}: the text has "
                f"{token.token!r}, likeliest is {token.reference_token!r} by the reference, {token.model_token!r} "
                "by the model"
            )


def _figures(row: EvaluationRow) -> tuple[str, ...]:
    figures = row.figures
    divergence = figures.divergence
    return (
        exact_zero(divergence.mean),
        "" if divergence.standard_error is None else exact_zero(divergence.standard_error),
        f"{divergence.p999:.3f}",
        f"{divergence.maximum:.3f}",
        f"{figures.perplexity:.3f}",
        f"{100 * figures.top1_agreement:.2f}",
        f"{100 * figures.left_top5:.2f}",
    )


def row_labels(rows: Sequence[EvaluationRow]) -> list[str]:
    """Return model and mode of each row in few letters: without the folders above, if that tells models apart."""
    short = {row.model.name: row.model.name.rstrip("/").rpartition("/")[2] for row in rows}
    is_clear = len(set(short.values())) == len(short)
    return [_called(replace(row.model, name=short[row.model.name]) if is_clear else row.model) for row in rows]


def _verdict_line(verdict: Verdict) -> str:
    """Say which of two models is nearer to the reference, or that the text does not tell."""
    nearer, farther = (_called(model) for model in (verdict.nearer, verdict.farther))
    difference = verdict.difference
    error = ""
    if difference.standard_error is not None:
        error = f" +- {difference.standard_error:.2g}"
    if verdict.is_clear:
        return f"{nearer} is nearer than {farther}: its KL is {difference.mean:.2g}{error} less, on the same tokens"
    return (
        f"no measurable difference between {nearer} and {farther}: KL {difference.mean:.2g}{error}, on the same tokens"
    )


def _called(model: EvaluatedModel) -> str:
    return " ".join(filter(None, (model.name, model.mode)))
