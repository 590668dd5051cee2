"""`evaluate`: plan an evaluation, show what it needs, do it, and show what was found."""

from functools import partial
from typing import TYPE_CHECKING

import typer

from k2convert.cli import console
from k2convert.cli.evaluation_view import show_evaluation
from k2convert.cli.needs import (
    Needs,
    display_pass,
    evaluation_needs,
    may_begin,
    needs_lines,
    text_document,
)
from k2convert.cli.options import typed_command
from k2convert.cli.progress import waiting
from k2convert.cli.verbs import EvaluateOptions
from k2convert.errors import counted, format_bytes, read_size
from k2convert.hub.client import SCHEME, Hub
from k2convert.job.evaluation import EvaluationOptions, find_decoder, open_evaluation
from k2convert.job.opening import text_files
from k2convert.plan.recipe import TextUse
from k2convert.records.document import plain

if TYPE_CHECKING:
    from k2convert.evaluation.streamed import EvaluationPlan
    from k2convert.records.evaluation import Evaluation


def evaluate(options: EvaluateOptions) -> None:
    """Plan an evaluation, then show it (--dry-run) or do it."""
    places = [options.reference, *options.checkpoints]
    if options.max_disk is not None and not any(place.startswith(SCHEME) for place in places):
        raise typer.BadParameter("--max-disk only applies to hf:// checkpoints")
    with (
        waiting(f"reads the headers of {', '.join(places)}") as waits,
        open_evaluation(
            options.reference,
            options.checkpoints,
            text_files(options.text, device=options.device),
            TextUse(tokens=options.tokens, window=options.window, seed=options.seed),
            EvaluationOptions(
                options.activations,
                options.kv_cache,
                options.out,
                options.any_text,
                options.replace,
                read_size("--max-disk", options.max_disk),
            ),
            hub=Hub(notify=console.notifier()),
        ) as plan,
    ):
        waits.close()
        if (finished := plan.finished()) is not None:
            if not options.dry_run:
                plan.remove_work()
            console.print_note(f"{', '.join(str(output.path) for output in plan.outputs)}: already complete")
            _show_result(plan, finished)
            return
        _check_and_do(plan, options)


def _check_and_do(plan: "EvaluationPlan", options: EvaluateOptions) -> None:
    """Show what the rest needs, refuse it if that is not there, and do it unless this is a dry run."""
    layer_pass = plan.layer_pass
    left = max(layer_pass.num_layers - layer_pass.num_finished, 0)
    source = plan.checkpoints[0].checkpoint
    needs = evaluation_needs(source, layer_pass.text, layers=left, models=len(plan.models))
    models = f"{counted(len(plan.models) - 1, 'model')} and the reference"
    line = f"{models}, {layer_pass.num_layers} layers on {layer_pass.text.windows}"
    if options.dry_run:
        _show_plan(plan, needs, line)
    if not may_begin(layer_pass, needs, options.reference, options):
        return
    console.print_event(line)
    display = display_pass(plan, "evaluate")
    from k2convert.evaluation.streamed import evaluate as do_evaluation

    with display as events:
        done = do_evaluation(
            plan, decode=find_decoder(plan), command=typed_command(source=options.reference), events=events
        )
    _show_result(plan, done)


def _show_plan(plan: "EvaluationPlan", needs: Needs, line: str) -> None:
    document = text_document(plan.layer_pass.text) | {
        "reference": plain(plan.models[0]),
        "models": [plain(model) for model in plan.models[1:]],
        "layers": plan.layer_pass.num_layers,
        "finished_layers": min(plan.layer_pass.num_finished, plan.layer_pass.num_layers),
        "bytes_read": plan.bytes_read,
        "disk_needed": plan.layer_pass.disk_needed,
    }
    fetched = sum(plan.layer_pass.fetched)
    fetches = ""
    if fetched:
        fetches = f", fetches {format_bytes(fetched)} from the Hub"
    console.show(
        document | needs.document(),
        line,
        f"reads {format_bytes(plan.bytes_read)}{fetches}",
        *needs_lines(plan.layer_pass, needs),
    )


def _show_result(plan: "EvaluationPlan", found: "Evaluation") -> None:
    paths = [str(output.path) for output in plan.outputs]
    console.show(plain(found), partial(show_evaluation, found), *paths, partial(_show_unkept, plan))
    console.print_next(_next_command(plan, found))


def _show_unkept(plan: "EvaluationPlan") -> None:
    kept = {number for output in plan.outputs for number in output.checkpoints}
    for number, checkpoint in enumerate(plan.checkpoints):
        if number and number not in kept:
            console.print_note(f"{checkpoint.place}: its rows are not kept in a file. Add --out FILE to keep them")


def _next_command(plan: "EvaluationPlan", found: "Evaluation") -> str:
    """Return the command for the report on the nearest result in a folder, with its source if that is the reference."""
    places = {one.name: one for one in plan.checkpoints[1:] if one.source.local is not None and one.ledger is not None}
    rows = sorted(found.rows, key=lambda row: row.figures.divergence.mean)
    nearest = next((places[row.model.name] for row in rows if row.model.name in places), None)
    if nearest is None or nearest.ledger is None:
        return "k2convert guide prove"
    reference = plan.checkpoints[0]
    headers = {shard: header.digest for shard, header in reference.checkpoint.headers.items()}
    source = ("--source", reference.place) if nearest.ledger.source.headers == headers else ()
    return console.command("k2convert", "report", nearest.place, *source)
