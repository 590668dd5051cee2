"""`compare`: ask two servers for the log-probabilities of a text, and show how far apart they are."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import typer
from blake3 import blake3

from k2convert.checkpoint.folders import remove_empty_folder
from k2convert.checkpoint.names import WORK_SUFFIX
from k2convert.cli import console
from k2convert.cli.interrupts import say_when_interrupted
from k2convert.cli.progress import Display, waiting
from k2convert.cli.verbs import CompareOptions
from k2convert.errors import counted
from k2convert.evaluation.answers import AnswerFolder, open_saved
from k2convert.evaluation.connection import KEY_NAME, OTHER_KEY_NAME, Connection, is_address, parse_address, read_key
from k2convert.evaluation.endpoints import Endpoint, open_endpoint
from k2convert.evaluation.served import Side, ask, evaluate, extent, questions, saved_questions
from k2convert.hub.client import Hub
from k2convert.job.locations import open_source
from k2convert.job.opening import read_windows_of
from k2convert.plan.recipe import TextUse
from k2convert.records.document import plain, seal
from k2convert.records.evaluation import Evaluation, Mean, is_noise

_ANY_ID = 1 << 31  # without a checkpoint only the server knows its vocabulary
_LONGEST_BEFORE = 40


def compare(options: CompareOptions) -> None:
    """Ask what is missing, then show the figures."""
    saved = None
    if not is_address(options.reference):
        saved = open_saved(Path(options.reference))
    if saved is not None and (options.text or options.tokenizer or options.save or options.model_a):
        raise typer.BadParameter(
            f"{options.reference} has a text and answers: --text, --tokenizer, --save and --model-a are for a server"
        )
    if saved is None and not options.text:
        raise typer.BadParameter("--text is needed: what to ask the servers for")
    if options.model is None and options.save is None:
        raise typer.BadParameter("B is needed, or --save with a folder for A's answers")
    if options.model is not None and not is_address(options.model):
        raise typer.BadParameter("B is the address of a server, http://HOST:PORT/v1. Saved answers are A")
    with waiting("asks the servers which models they serve"):
        first = None
        if saved is None:
            first = _open(options, options.reference, is_reference=True)
        second = None
        if options.model is not None:
            second = _open(options, options.model, is_reference=False)
    sides, work = _sides(options, saved, first, second)
    with ExitStack() as stack:
        for side in sides:
            if side.endpoint is not None:
                stack.enter_context(side.folder.begun())
        display = Display("compare", extent(sides))
        say_when_interrupted(lambda: "every answer that came is kept. The same command resumes", console.own_command())
        with display as events:
            ask(sides, at_a_time=options.requests, events=events)
        found = evaluate(*(side.folder for side in sides)) if second else evaluate(sides[0].folder, None)
    for side in sides:
        if side.folder.folder.is_relative_to(work):
            side.folder.remove()
    remove_empty_folder(work, root=work.parent)
    if work.exists():
        console.print_note(f"{work}: stays, because it has files that are not from k2convert")
    console.show(plain(found), partial(_show, found, options))


def _open(options: CompareOptions, address: str, *, is_reference: bool) -> Endpoint:
    names = (KEY_NAME,) if is_reference else (OTHER_KEY_NAME, KEY_NAME)
    notify = console.notifier()
    connection = Connection(parse_address(address), key=read_key(*names), notify=notify)
    model, option = (options.model_a, "--model-a") if is_reference else (options.model_b, "--model-b")
    return open_endpoint(connection, model=model, option=option)


def _sides(
    options: CompareOptions, saved: AnswerFolder | None, first: Endpoint | None, second: Endpoint | None
) -> tuple[list[Side], Path]:
    """Return the servers with the folders of their answers, and the work folder, which may not be needed."""
    if saved is None:
        assert first is not None
        from k2convert.calibration.text import read_windows

        files = list(options.text or ())
        notify = console.notifier()
        use = TextUse(tokens=options.tokens, window=options.window, seed=options.seed)
        with waiting("reads the text"):
            if options.tokenizer is None:
                windows = read_windows(
                    files, tokenizer=None, vocab_size=_ANY_ID, tokens=options.tokens, window=use.window, seed=use.seed
                )
            else:
                with open_source(options.tokenizer, hub=Hub(notify=notify)) as source:
                    windows = read_windows_of(source.checkpoint, files, use)
        for note in windows.notes:
            notify(f"note: {note}")
        asked = questions(first, windows, top_k=options.top_k, is_reference=True)
    else:
        asked = saved.asked
    other = None if second is None else saved_questions(second, asked)
    digest = blake3(b"".join(seal(one) for one in (asked, other) if one is not None)).hexdigest()
    work = Path(f"compare-{digest[:12]}{WORK_SUFFIX}")
    root = None if options.save else work.parent
    sides = [Side(saved or AnswerFolder(options.save or work / "a", asked, root=root), first)]
    if other is not None:
        sides.append(Side(AnswerFolder(work / "b", other, root=work.parent), second))
    return sides, work


def _show(found: Evaluation, options: CompareOptions) -> None:
    if not found.rows:
        windows = counted(found.text.windows, "window")
        console.print_line(f"{options.save}: {found.reference.name}, {windows} of {found.text.window:,} tokens")
        console.print_next(console.command("k2convert", "compare", options.save, "http://HOST:PORT/v1"))
        return
    (row,) = found.rows
    figures = row.figures
    text = found.text
    divergence = figures.divergence
    console.print_table(
        f"{found.reference.name} against {row.model.name}: {text.windows * (text.window - 1):,} predictions in "
        f"{counted(text.windows, 'window')} of {text.window:,} tokens",
        ("figure", "value"),
        (
            (f"KL, a lower bound from the top {found.top_k}", _mean(Mean(divergence.mean, divergence.standard_error))),
            ("KL of A from itself, asked twice", f"{found.noise:.3g}"),
            ("KL, median", f"{divergence.median:.3g}"),
            ("KL, 99 % of tokens below", f"{divergence.p99:.3g}"),
            ("KL, 99.9 % of tokens below", f"{divergence.p999:.3g}"),
            ("KL, largest", f"{divergence.maximum:.3g}"),
            ("perplexity of A", f"{figures.reference_perplexity:.4f}"),
            ("perplexity of B", f"{figures.perplexity:.4f}"),
            ("log-likelihood, B less A", _mean(figures.log_likelihood)),
            ("same likeliest token", f"{100 * figures.top1_agreement:.2f} %"),
            ("A's likeliest token not in B's five", f"{100 * figures.left_top5:.2f} %"),
        ),
    )
    console.print_table(
        "by position in the window",
        ("positions", "KL"),
        [(f"{part.first:,} to {part.stop - 1:,}", f"{part.mean:.3g}") for part in divergence.by_position],
    )
    if row.worst:
        console.print_table(
            "the tokens with the largest KL",
            ("after", "text", "A", "B", "KL"),
            [
                (
                    one.before[-_LONGEST_BEFORE:],
                    one.token,
                    one.reference_token,
                    one.model_token,
                    f"{one.divergence:.3g}",
                )
                for one in row.worst
            ],
            left=(0, 1, 2, 3),
        )
    far = "different: B is farther from A than A is from itself"
    console.print_line("no difference: B is as close to A as A is to itself" if is_noise(found, row) else far)
    console.print_note("KL ranks conversions of one model. It does not say what tasks lose: run them on both servers.")
    console.print_next("k2convert guide prove")


def _mean(value: Mean) -> str:
    error = ""
    if value.standard_error is not None:
        error = f" +- {value.standard_error:.2g}"
    return f"{value.mean:.3g}{error}"
