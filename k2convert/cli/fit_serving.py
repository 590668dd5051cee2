"""How `fit` says which commands serve a checkpoint on the GPUs asked about."""

from collections.abc import Mapping, Sequence
from typing import Any

from k2convert.checkpoint.index import Checkpoint
from k2convert.choices import Engine
from k2convert.cli.console import print_line, print_note
from k2convert.cli.fit_options import FitOptions
from k2convert.fit.memory import UTILIZATION
from k2convert.fit.search import Holder
from k2convert.fit.serving import ENGINE_NAMES, Deployment, ServeCommand, nvfp4_scheme, serve_command
from k2convert.fit.subject import Subject
from k2convert.hub.client import parse_repo
from k2convert.models.config import max_positions

ServeCommands = Mapping[Engine, ServeCommand]


def serve_commands(subject: Subject, checkpoint: Checkpoint, holder: Holder, *, options: FitOptions) -> ServeCommands:
    """Return the command of each engine, empty if the GPUs do not hold the model.

    A source is served as the result DEST of its recipe. Requests are limited to the context asked for, or to the cache:
    an engine refuses to start if the model's longest request does not fit.
    """
    if not holder.fit.holds:
        return {}
    recipe, repo = subject.recipe, parse_repo(options.checkpoint)
    scheme = nvfp4_scheme(checkpoint.config) if recipe is None else (recipe.layout, recipe.activations)
    model = options.checkpoint if repo is None else repo.repo
    longest = max_positions(checkpoint.config)
    deployment = Deployment(
        model=model if recipe is None else "DEST",
        layout=scheme[0],
        activations=scheme[1],
        family=subject.family.card,
        parallelism=holder.fit.layout,
        gpu=holder.gpu,
        context=options.context
        or (holder.fit.longest if longest is not None and holder.fit.longest < longest else None),
        kv_cache=options.kv,
        utilization=None if options.utilization == UTILIZATION else options.utilization,
        revision=None if recipe is not None or repo is None else repo.revision,
    )
    return {engine: serve_command(engine, deployment) for engine in ENGINE_NAMES}


def serving_document(commands: ServeCommands) -> dict[str, Any]:
    """Return the commands as plain data."""
    return {
        "serve": {
            engine: {"command": command.line or None, "notes": list(command.notes)}
            for engine, command in commands.items()
        }
    }


def show_serving(commands: ServeCommands, *, known: Sequence[str]) -> None:
    """Print each command, and its notes but for those that are `known`."""
    for engine, command in commands.items():
        print_line(f"\n{ENGINE_NAMES[engine]}:")
        if command.words:
            print_line(command.block)
    notes = dict.fromkeys(note for command in commands.values() for note in command.notes)
    for note in notes:
        if note not in known:
            print_note(f"note: {note}")
