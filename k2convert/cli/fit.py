"""The verb `fit`: which GPUs hold a checkpoint, with how much KV cache, and how fast one request can be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import typer

from k2convert.checkpoint.index import Checkpoint
from k2convert.choices import Engine, parse_size
from k2convert.cli import console
from k2convert.cli.fit_view import (
    fit_document,
    fit_notes,
    holder_document,
    show_fit,
    show_holders,
    show_notes,
    show_ways_out,
    speed_document,
    ways_document,
)
from k2convert.cli.verbs import AUTO, FitOptions
from k2convert.errors import FitError
from k2convert.fit.gpus import GPUS, Gpu, find_gpu
from k2convert.fit.layouts import complete_layout
from k2convert.fit.memory import CONTEXT, UTILIZATION, Settings, fit_layout
from k2convert.fit.model import Model, read_model
from k2convert.fit.search import Holder, find_holders, most_experts, ways_out
from k2convert.fit.serving import ENGINE_NAMES, Deployment, ServeCommand, nvfp4_scheme, serve_command
from k2convert.fit.speed import estimate_speeds
from k2convert.hub.client import Hub, parse_repo
from k2convert.job.locations import open_source
from k2convert.models.config import max_positions

ServeCommands = Mapping[Engine, ServeCommand]


def fit(options: FitOptions) -> None:
    """Read the headers and answer; exits with 3 if the model does not fit. Raises FitError."""
    gpu = _chosen_gpu(options)
    with open_source(options.checkpoint, hub=Hub(notify=console.print_note)) as opened:
        whole = read_model(opened.checkpoint)
    settings = Settings(
        kv=options.kv or whole.kv,
        context=options.context or CONTEXT,
        requests=options.requests,
        utilization=options.utilization,
        overhead_bytes=parse_size(options.overhead),
    )
    experts = None if options.experts in (None, AUTO) else options.experts
    model = whole if experts is None else whole.with_experts(int(experts))
    asked = _Asked(options, opened.checkpoint, whole, model, settings)
    count = options.count
    fits = _answer_all(asked, gpu) if gpu is None or count is None else _answer_one(asked, gpu, count)
    if not fits:
        raise typer.Exit(3)


@dataclass(frozen=True, slots=True)
class _Asked:
    options: FitOptions
    checkpoint: Checkpoint
    whole: Model
    model: Model
    settings: Settings

    def document(self, **more: Any) -> dict[str, object]:
        return fit_document(self.options.checkpoint, self.model, self.settings) | more

    def print_next(self, *, experts: int | None = None) -> None:
        """Print the command that makes what fits."""
        place = self.options.checkpoint
        experts = experts or self.model.shape.num_experts
        if experts != self.whole.shape.num_experts:
            source = place if self.model.recipe is not None else "SOURCE"
            words = ("run", source, "DEST", "--keep-experts", "FILE", "--set", f"experts={experts}")
            console.print_note("FILE scores or lists the experts: `k2convert guide prune` shows what makes one")
        elif self.model.recipe is not None:
            words = ("run", place, "DEST", "--dry-run")
        else:
            return
        console.print_next(console.command("k2convert", *words))


def _chosen_gpu(options: FitOptions) -> Gpu | None:
    """Return the GPU asked for, None for all; raises BadParameter for options that need more than was given."""
    if options.gpu is not None and options.memory is not None:
        raise typer.BadParameter("pass --gpu or --memory, not both")
    if options.count is not None and options.gpu is None and options.memory is None:
        raise typer.BadParameter("--count needs --gpu or --memory")
    if options.memory is not None and options.count is None:
        raise typer.BadParameter("--memory needs --count")
    chosen = {"--tp": options.tp, "--ep": options.ep, "--pp": options.pp, "--dp-attention": options.dp_attention}
    chosen |= {"--dcp": options.dcp > 1, "--estimate": options.estimate, "--experts auto": options.experts == AUTO}
    given = [name for name, value in chosen.items() if value]
    if given and options.count is None:
        raise typer.BadParameter(f"{', '.join(given)}: needs --gpu or --memory, and --count")
    if options.memory is not None:
        return Gpu(options.memory, f"GPU of {options.memory}", parse_size(options.memory))
    try:
        return None if options.gpu is None else find_gpu(options.gpu)
    except FitError as error:
        raise FitError(f"--gpu {error} For another one that runs NVFP4, pass --memory, such as 96GB.") from None


def _answer_all(asked: _Asked, gpu: Gpu | None) -> bool:
    """Show which GPUs, or which counts of one, hold the model. Return whether any do."""
    model = asked.model
    settings = asked.settings
    gpus = GPUS.values() if gpu is None else (gpu,)
    holders = find_holders(model, settings=settings, gpus=gpus)
    document = asked.document(fits=[holder_document(h, model, settings) for h in holders])
    console.show(document, partial(show_holders, asked.options.checkpoint, model, settings, holders))
    if holders:
        asked.print_next()
    return bool(holders)


def _answer_one(asked: _Asked, gpu: Gpu, count: int) -> bool:
    """Show the memory by role and the speed of a count of GPUs, or what would fit. Return whether it fits."""
    options = asked.options
    settings = asked.settings
    model = asked.model
    layout = complete_layout(
        count,
        model.shape,
        tensor=options.tp,
        expert=options.ep,
        pipeline=options.pp,
        data_attention=options.dp_attention,
        decode_context=options.dcp,
    )
    fit = fit_layout(model.weights, model.shape, layout, memory_bytes=gpu.memory_bytes, settings=settings)
    holder = Holder(gpu, fit)
    if options.experts == AUTO and (most := most_experts(asked.whole, holder, settings=settings)) is not None:
        asked = replace(asked, model=asked.whole.with_experts(most[0]))
        holder = Holder(gpu, most[1])
    model = asked.model
    ways = None if holder.fit.holds else ways_out(asked.whole, holder, settings=settings)
    estimates = estimate_speeds(model.shape, gpu=holder.gpu, layout=layout) if options.estimate else []
    commands = serve_commands(model, asked.checkpoint, holder, options=options)
    one = holder_document(holder, model, settings) | speed_document(model, holder, estimates)
    one["serve"] = {name: {"command": found.line or None, "notes": found.notes} for name, found in commands.items()}
    views: list[Callable[[], None]] = [
        partial(show_fit, options.checkpoint, model, settings, holder, estimates),
        partial(show_serving, commands, known=fit_notes(holder, settings)),
    ]
    if ways is not None:
        one["ways_out"] = ways_document(ways)
        views.append(partial(show_ways_out, ways, holder, whole=asked.whole))
    console.show(asked.document(fits=[one]), *views)
    if ways is None:
        asked.print_next()
    elif ways.experts:
        asked.print_next(experts=ways.experts[0][0])
    return holder.fit.holds


def serve_commands(model: Model, checkpoint: Checkpoint, holder: Holder, *, options: FitOptions) -> ServeCommands:
    """Return the command of each engine, of DEST for a source; none if the GPUs do not hold the model."""
    if not holder.fit.holds:
        return {}
    recipe = model.recipe
    repo = parse_repo(options.checkpoint)
    scheme = nvfp4_scheme(checkpoint.config) if recipe is None else (recipe.layout, recipe.activations)
    place = options.checkpoint if repo is None else repo.repo
    longest = max_positions(checkpoint.config)
    deployment = Deployment(
        model=place if recipe is None else "DEST",
        layout=scheme[0],
        activations=scheme[1],
        family=model.family.card,
        parallelism=holder.fit.layout,
        gpu=holder.gpu,
        context=options.context
        or (holder.fit.longest if longest is not None and holder.fit.longest < longest else None),
        kv_cache=options.kv,
        utilization=None if options.utilization == UTILIZATION else options.utilization,
        revision=None if recipe is not None or repo is None else repo.revision,
    )
    return {engine: serve_command(engine, deployment) for engine in ENGINE_NAMES}


def show_serving(commands: ServeCommands, *, known: Sequence[str]) -> None:
    """Print each command, and its notes but for those that are `known`; why there is none, in its place."""
    for engine, command in commands.items():
        for line in ("", f"{ENGINE_NAMES[engine]}:", *(command.block.splitlines() if command.words else command.notes)):
            console.print_line(line)
    served = [command for command in commands.values() if command.words]
    show_notes(dict.fromkeys(note for command in served for note in command.notes if note not in known))
