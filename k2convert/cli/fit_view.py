"""Answers of `fit`: which GPUs hold a checkpoint, with how much KV cache, and how fast one request can be at most."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from k2convert.checkpoint.index import Checkpoint
from k2convert.choices import Engine, ServedKvCache
from k2convert.cli import console
from k2convert.cli.console import print_line, print_note, print_table
from k2convert.deploy.gpus import GPUS, Gpu
from k2convert.deploy.layouts import Parallelism
from k2convert.deploy.memory import KV_BYTES, UTILIZATION, Fit, Settings, bytes_per_token, fit_layout
from k2convert.deploy.model import Model
from k2convert.deploy.search import Holder, find_holders, fp8_and_bf16_tokens, gigabytes, most_experts, ways_out
from k2convert.deploy.serving import (
    ENGINE_NAMES,
    FP8_NOTE,
    NVFP4_NOTES,
    Deployment,
    ServeCommand,
    nvfp4_scheme,
    serve_command,
)
from k2convert.errors import counted, format_bytes
from k2convert.hub.client import parse_repo
from k2convert.models.config import max_positions

ServeCommands = Mapping[Engine, ServeCommand]

_DP_NOTE = (
    "DP attention as vLLM runs it (data parallelism): all weights but the experts are on every GPU. SGLang "
    "splits shared experts and dense MLP."
)
_PRUNING_NOTE = (
    "pruning costs quality, and more on tasks unlike the text that chose the experts. With half of its experts, K2 "
    "kept almost all of its score on code, Moonlight 17 % of its score on mathematics (`k2convert guide prune`)."
)


@dataclass(frozen=True, slots=True)
class Question:
    """A checkpoint and what is asked of its GPUs: `whole` has all experts, `model` as many as were asked for.

    `context` and `kv` are what the user named, None without: serve commands repeat them.
    """

    place: str
    checkpoint: Checkpoint
    whole: Model
    model: Model
    settings: Settings
    context: int | None
    kv: ServedKvCache | None

    def document(self, fits: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what was asked, what it weighs, and the answers, as plain data."""
        model = self.model
        return {
            "checkpoint": self.place,
            "family": model.family.name,
            "recipe": None if model.recipe is None else model.recipe.name,
            "experts_per_layer": model.shape.num_experts,
            "weights": {
                "bytes": model.weights.num_bytes,
                "by_role": {role.value: count for role, count in model.weights.by_role.items()},
                "bytes_per_token": bytes_per_token(model.weights, model.shape, Parallelism()),
            },
            "kv_bytes_per_token": {kv: model.kv_values * size for kv, size in KV_BYTES.items()},
            "state_bytes_per_request": model.state_bytes,
            "settings": asdict(self.settings),
            "fits": fits,
        }

    def print_next(self, *, experts: int | None = None) -> None:
        """Print the command that makes what fits; none that keeps less than half of the experts."""
        experts = experts or self.model.shape.num_experts
        total = self.whole.shape.num_experts
        if experts != total:
            console.print_note(f"note: {_PRUNING_NOTE}")
            if 2 * experts < total:
                return
            source = self.place if self.model.recipe is not None else "SOURCE"
            words = ("prune", source, "PRUNED", "--keep", "FILE")
            console.print_note(f"FILE lists {experts} experts per layer: `k2convert guide prune` shows what makes one")
        elif self.model.recipe is not None:
            words = ("run", self.place, "DEST", "--dry-run")
        else:
            return
        console.print_next(console.command("k2convert", *words))


def answer_all(asked: Question, gpu: Gpu | None) -> bool:
    """Show which GPUs, or which counts of one, hold the model. Return whether any do."""
    model = asked.model
    settings = asked.settings
    gpus = GPUS.values() if gpu is None else (gpu,)
    holders = find_holders(model, settings=settings, gpus=gpus)
    document = asked.document([holder_document(h, model, settings) for h in holders])
    console.show(document, partial(show_holders, asked.place, model, settings, holders))
    if holders:
        asked.print_next()
    return bool(holders)


def answer_one(asked: Question, gpu: Gpu, layout: Parallelism, *, fewer_experts: bool) -> bool:
    """Show the memory by role and the speed of a layout, or what would fit. Return whether it fits.

    With `fewer_experts` the model has the most experts that fit.
    """
    settings = asked.settings
    model = asked.model
    fit = fit_layout(model.weights, model.shape, layout, memory_bytes=gpu.memory_bytes, settings=settings)
    holder = Holder(gpu, fit)
    if fewer_experts and (most := most_experts(asked.whole, holder, settings=settings)) is not None:
        asked = replace(asked, model=asked.whole.with_experts(most[0]))
        holder = Holder(gpu, most[1])
    model = asked.model
    commands = _serve_commands(asked, holder)
    one = holder_document(holder, model, settings)
    read = bytes_per_token(model.weights, model.shape, layout)
    one["each"]["bytes_per_token"] = read
    one["bound_tokens_per_second"] = None if gpu.bandwidth is None else gpu.bandwidth / read
    one["serve"] = {name: {"command": found.line or None, "notes": found.notes} for name, found in commands.items()}
    views: list[Callable[[], None]] = [
        partial(show_fit, asked.place, model, settings, holder),
        partial(show_serving, commands, known=fit_notes(holder, settings)),
    ]
    if holder.fit.holds:
        console.show(asked.document([one]), *views)
        asked.print_next()
        return True
    experts, gpus = ways_out(asked.whole, holder, settings=settings)
    fewer = [{"experts_per_layer": count, "context": fit.context, "kv_tokens": fit.tokens} for count, fit in experts]
    one["ways_out"] = {"experts": fewer, "count": gpus}
    console.show(asked.document([one]), *views, partial(show_ways_out, experts, gpus, holder, whole=asked.whole))
    if experts:
        asked.print_next(experts=experts[0][0])
    return False


def _serve_commands(asked: Question, holder: Holder) -> ServeCommands:
    """Return the command of each engine, of DEST for a source; none if the GPUs do not hold the model."""
    if not holder.fit.holds:
        return {}
    model = asked.model
    config = asked.checkpoint.config
    recipe = model.recipe
    repo = parse_repo(asked.place)
    scheme = nvfp4_scheme(config) if recipe is None else (recipe.layout, recipe.activations)
    place = asked.place if repo is None else repo.repo
    context = asked.context
    longest = max_positions(config)
    if context is None and longest is not None and holder.fit.longest < longest:
        context = holder.fit.longest
    deployment = Deployment(
        model=place if recipe is None else "DEST",
        layout=scheme[0],
        activations=scheme[1],
        family=model.family.card,
        parallelism=holder.fit.layout,
        gpu=holder.gpu,
        context=context,
        kv_cache=asked.kv,
        utilization=None if asked.settings.utilization == UTILIZATION else asked.settings.utilization,
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


def holder_document(holder: Holder, model: Model, settings: Settings) -> dict[str, Any]:
    """Return what GPUs hold as plain data; figures under `each` are of the fullest GPU."""
    fit = holder.fit
    fp8, bf16 = fp8_and_bf16_tokens(model, holder, settings=settings)
    return {
        "gpu": holder.gpu.name,
        "count": fit.layout.num_gpus,
        "layout": asdict(fit.layout),
        "holds": fit.holds,
        "kv_tokens": fit.tokens,
        "kv_tokens_fp8": fp8,
        "kv_tokens_bf16": bf16,
        "longest_request": fit.longest,
        "requests": fit.request_slots,
        "max_context": model.shape.max_context,
        "requests_of_max_context": None if (longest := model.shape.max_context) is None else fit.slots_of(longest),
        "each": {
            "memory": fit.memory_bytes,
            "usable": fit.usable_bytes,
            "weights": fit.weight_bytes,
            "weights_by_role": {role.value: count for role, count in fit.weights.items()},
            "overhead": fit.overhead_bytes,
            "kv_pool": fit.pool_bytes,
            "kv_bytes_per_token": fit.kv_bytes_per_token,
            "state_bytes_per_request": fit.state_bytes,
        },
        "nvfp4": holder.gpu.nvfp4,
        "notes": fit_notes(holder, settings),
    }


def show_holders(name: str, model: Model, settings: Settings, holders: Sequence[Holder]) -> None:
    """Print the GPUs that hold a model, the smallest first."""
    _show_model(name, model)
    wanted = f"{counted(settings.requests, 'request')} of {settings.context:,} tokens, KV cache in {settings.kv}"
    if not holders:
        print_line(f"no known GPUs hold it with {wanted}")
        print_line("with --gpu and --count, `fit` computes how many experts would fit")
        return
    lengths = _lengths(model, settings)
    rows = [
        (
            f"{holder.fit.layout.num_gpus} x {holder.gpu.title}",
            str(holder.fit.layout),
            gigabytes(holder.memory_bytes),
            gigabytes(holder.fit.weight_bytes),
            f"{holder.fit.tokens:,}",
            *(f"{holder.fit.slots_of(length):,}" for length in lengths),
        )
        for holder in holders
    ]
    columns = ("GPUs", "layout", "memory", "weights on each", "KV tokens", *(f"requests of {n:,}" for n in lengths))
    print_table(f"GPUs that hold it with {wanted}", columns, rows, left=(0, 1))
    if (longest := model.shape.max_context) in lengths:
        print_line(f"{longest:,} tokens are the most that the model was made for (max_position_embeddings)")
    names: dict[str, dict[str, None]] = {}
    for holder in holders:
        if holder.gpu.nvfp4 != "native":
            names.setdefault(NVFP4_NOTES[holder.gpu.nvfp4], {})[holder.gpu.title] = None
    show_notes([*(f"{', '.join(titles)}: {note}" for note, titles in names.items()), *_general_notes(settings)])


def _lengths(model: Model, settings: Settings) -> tuple[int, ...]:
    longest = model.shape.max_context
    if longest in (None, settings.context):
        return (settings.context,)
    return (settings.context, longest)


def show_fit(name: str, model: Model, settings: Settings, holder: Holder) -> None:
    """Print what some GPUs hold, by role, and how fast one request can be at most."""
    _show_model(name, model)
    fit = holder.fit
    verdict = f"does not fit: {format_bytes(-fit.pool_bytes)} too much on a GPU"
    if fit.pool_bytes > 0:
        lengths = _lengths(model, settings)
        slots = " or ".join(f"{counted(fit.slots_of(length), 'request')} of {length:,} tokens" for length in lengths)
        fits = "fits" if fit.holds else "does not fit"
        verdict = f"{fits}: {fit.tokens:,} tokens of {settings.kv} KV cache, {slots}"
    print_line(f"{fit.layout.num_gpus} x {holder.gpu.title}, {fit.layout}: {verdict}")
    rows = [(role.value, format_bytes(count)) for role, count in fit.weights.items()]
    rows += [
        ("all weights", format_bytes(fit.weight_bytes)),
        ("overhead (assumed)", format_bytes(fit.overhead_bytes)),
        ("KV cache" if fit.pool_bytes >= 0 else "MISSING", format_bytes(abs(fit.pool_bytes))),
        (f"left free ({1 - settings.utilization:.0%})", format_bytes(fit.memory_bytes - fit.usable_bytes)),
        ("memory", format_bytes(fit.memory_bytes)),
    ]
    print_table("on the fullest GPU" if fit.layout.pipeline > 1 else "on each GPU", ("what", "bytes"), rows)
    if (bandwidth := holder.gpu.bandwidth) is not None:
        read = bytes_per_token(model.weights, model.shape, fit.layout)
        print_line(
            f"upper bound: {bandwidth / read:,.0f} tok/s for one request, if each GPU did nothing but read its "
            f"{format_bytes(read)} of weights for a token"
        )
    show_notes(fit_notes(holder, settings))


def show_ways_out(experts: Sequence[tuple[int, Fit]], gpus: int | None, holder: Holder, *, whole: Model) -> None:
    layout = holder.fit.layout
    for count, fit in experts:
        slots = f"{counted(fit.request_slots, 'request')} of {fit.context:,} tokens"
        kept = f"{count:,} of {whole.shape.num_experts:,} experts per layer"
        print_line(f"fits with {kept}: {fit.tokens:,} tokens of KV cache, {slots}")
    if not experts:
        gpus_named = f"{layout.num_gpus} x {holder.gpu.title} as {layout}"
        print_line(f"not even half of the experts fit on {gpus_named}, and keeping fewer is not proposed")
    if gpus is not None:
        print_line(f"fits with all experts on {gpus} x {holder.gpu.title}")


def _show_model(name: str, model: Model) -> None:
    how = ""
    if model.recipe is not None:
        how = f", as `run` would convert it (recipe {model.recipe.name})"
    print_line(
        f"{name} ({model.family.name}){how}: {format_bytes(model.weights.num_bytes)} of weights, "
        f"{model.shape.num_experts} experts per layer"
    )
    fp8, bf16 = (f"{model.kv_values * KV_BYTES[kv]:,}" for kv in ("fp8", "bf16"))
    print_line(f"KV cache of one token: {fp8} bytes in fp8, {bf16} in bf16, on every GPU of a layer")
    if model.state_bytes:
        layers = f"{len(model.shape.linear_layers)} layers of linear attention"
        print_line(
            f"states of one request: {format_bytes(model.state_bytes)} in {layers}, divided by tensor parallelism"
        )


def fit_notes(holder: Holder, settings: Settings) -> list[str]:
    notes = [f"{holder.gpu.title}: {NVFP4_NOTES[holder.gpu.nvfp4]}"]
    notes += [_DP_NOTE] if holder.fit.layout.data_attention else []
    return notes + _general_notes(settings)


def _general_notes(settings: Settings) -> list[str]:
    overhead = (
        f"assumed: {format_bytes(settings.overhead_bytes)} on each GPU for activations, CUDA graphs and NCCL "
        "(--overhead). Published vLLM logs leave 2.5 to 3.5 GB for it on RTX PRO 6000, and 8.7 GB on H200: "
        "use --overhead 8.7GB there."
    )
    return [overhead, *([FP8_NOTE] if settings.kv == "fp8" else [])]


def show_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print_note(f"note: {note}")
