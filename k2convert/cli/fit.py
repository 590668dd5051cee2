"""The verb `fit`: which GPUs hold a checkpoint, with how much KV cache, and how fast one request can be."""

from dataclasses import dataclass
from typing import Any

import typer

from k2convert.checkpoint.index import Checkpoint
from k2convert.cli import console
from k2convert.cli.fit_options import FitOptions
from k2convert.cli.fit_serving import serve_commands, serving_document, show_serving
from k2convert.cli.fit_view import fit_document, fit_notes, holder_document, show_fit, show_holders, speed_document
from k2convert.cli.options import parse_size
from k2convert.fit.gpus import GPUS, Gpu, find_gpu
from k2convert.fit.layouts import complete_layout
from k2convert.fit.memory import CONTEXT, Settings, fit_layout
from k2convert.fit.search import Holder, find_holders
from k2convert.fit.speed import EstimatedSpeed, estimate_speeds
from k2convert.fit.subject import Subject, read_subject
from k2convert.hub.client import Hub
from k2convert.job.places import open_source


def fit(options: FitOptions) -> None:
    """Read the headers and answer; raises FitError for a GPU that is not known or a layout that cannot be."""
    gpu = _chosen_gpu(options)
    with open_source(options.checkpoint, hub=Hub(notify=console.print_note)) as opened:
        subject = read_subject(opened.checkpoint, experts=options.experts)
    settings = Settings(
        kv=options.kv or subject.kv,
        context=options.context or CONTEXT,
        requests=options.requests,
        utilization=options.utilization,
        overhead_bytes=parse_size(options.overhead),
    )
    asked = _Asked(options.checkpoint, opened.checkpoint, subject, settings)
    if gpu is None or options.count is None:
        _answer_all(asked, gpu, as_json=options.as_json)
    else:
        _answer_one(asked, gpu, options.count, options)
    if not options.as_json and subject.recipe is not None and options.experts is None:
        console.print_next(console.command("k2convert", "run", options.checkpoint, "DEST", "--dry-run"))


@dataclass(frozen=True, slots=True)
class _Asked:
    """The checkpoint as the user named it, what it is, and the user's settings."""

    name: str
    checkpoint: Checkpoint
    subject: Subject
    settings: Settings

    def document(self, **more: Any) -> dict[str, Any]:
        return fit_document(self.name, self.subject, self.settings) | more


def _chosen_gpu(options: FitOptions) -> Gpu | None:
    """Return the GPU asked for, None for all; raises BadParameter for options that need more than was given."""
    if options.gpu is not None and options.memory is not None:
        raise typer.BadParameter("pass --gpu or --memory, not both")
    named = options.gpu is not None or options.memory is not None
    if options.count is not None and not named:
        raise typer.BadParameter("--count needs --gpu or --memory")
    if options.memory is not None and options.count is None:
        raise typer.BadParameter("--memory needs --count")
    chosen = {"--tp": options.tp, "--ep": options.ep, "--pp": options.pp, "--dp-attention": options.dp_attention}
    chosen |= {"--dcp": options.dcp > 1, "--estimate": options.estimate}
    given = [name for name, value in chosen.items() if value]
    if given and options.count is None:
        raise typer.BadParameter(f"{', '.join(given)}: needs --gpu or --memory, and --count")
    if options.memory is not None:
        return Gpu(options.memory, f"GPU of {options.memory}", parse_size(options.memory))
    return None if options.gpu is None else find_gpu(options.gpu)


def _answer_all(asked: _Asked, gpu: Gpu | None, *, as_json: bool) -> None:
    """Say which GPUs, or which counts of one, hold the model."""
    subject, settings = asked.subject, asked.settings
    gpus = GPUS.values() if gpu is None else (gpu,)
    holders = find_holders(subject.weights, subject.shape, settings=settings, gpus=gpus)
    if as_json:
        console.print_json(asked.document(fits=[holder_document(h, subject, settings) for h in holders]))
        return
    show_holders(asked.name, subject, settings, holders)


def _answer_one(asked: _Asked, gpu: Gpu, count: int, options: FitOptions) -> None:
    """Say what a count of GPUs holds, with memory by role and speed."""
    subject, settings = asked.subject, asked.settings
    layout = complete_layout(
        count,
        subject.shape,
        tensor=options.tp,
        expert=options.ep,
        pipeline=options.pp,
        data_attention=options.dp_attention,
        decode_context=options.dcp,
    )
    fit = fit_layout(subject.weights, subject.shape, layout, memory_bytes=gpu.memory_bytes, settings=settings)
    holder = Holder(gpu, fit)
    estimates = _estimates(subject, holder) if options.estimate else []
    commands = serve_commands(subject, asked.checkpoint, holder, options=options)
    if options.as_json:
        one = holder_document(holder, subject, settings) | speed_document(subject, holder, estimates)
        console.print_json(asked.document(fits=[one | serving_document(commands)]))
        return
    show_fit(asked.name, subject, settings, holder, estimates)
    show_serving(commands, known=fit_notes(holder, settings))


def _estimates(subject: Subject, holder: Holder) -> list[EstimatedSpeed]:
    return estimate_speeds(subject.shape, gpu=holder.gpu, layout=holder.fit.layout)
