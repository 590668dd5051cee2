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
from k2convert.deploy.memory import (
    KV_BYTES,
    UTILIZATION,
    Fit,
    Settings,
    bytes_per_token,
    find_holders,
    fit_layout,
    gigabytes,
    most_experts,
    ways_out,
)
from k2convert.deploy.model import Model
from k2convert.deploy.serving import (
    ENGINE_NAMES,
    FP8_NOTE,
    NVFP4_NOTES,
    Deployment,
    ServeCommand,
    has_fp8,
    nvfp4_scheme,
    recipe_has_fp8,
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

    `context`, `kv` and `recipe` are what the user named, None without: commands repeat them.
    """

    address: str
    checkpoint: Checkpoint
    whole: Model
    model: Model
    settings: Settings
    context: int | None
    kv: ServedKvCache | None
    recipe: str | None

    def document(self, fits: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what was asked, what it weighs, and the answers, as plain data."""
        model = self.model
        return {
            "checkpoint": self.address,
            "family": model.family.name,
            "recipe": None if model.recipe is None else model.recipe.name,
            "experts_per_layer": model.shape.num_experts,
            "weights": {
                "bytes": model.num_bytes,
                "by_role": {role.value: count for role, count in model.bytes_by_role.items()},
                "bytes_per_token": bytes_per_token(model, Parallelism()),
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
            repo = parse_repo(self.address)
            source = self.address if self.model.recipe is not None and repo is None else "SOURCE"
            words = ("prune", source, "PRUNED", "--keep", "FILE")
            if repo is not None:
                console.print_note("SOURCE is a folder: `hf download` makes one of a repository")
            console.print_note(f"FILE lists {experts} experts per layer: `k2convert guide prune` shows what makes one")
        elif self.model.recipe is not None:
            named = () if self.recipe is None else ("--recipe", self.recipe)
            words = ("run", self.address, "DEST", *named, "--dry-run")
        else:
            return
        console.print_next(console.command("k2convert", *words))


def answer_all(question: Question, gpu: Gpu | None) -> bool:
    """Show which GPUs, or which counts of one, hold the model. Return whether any do."""
    gpus = GPUS.values() if gpu is None else (gpu,)
    fits = find_holders(question.model, settings=question.settings, gpus=gpus)
    console.show(question.document([fit_document(fit) for fit in fits]), partial(show_holders, question, fits))
    if fits:
        question.print_next()
    return bool(fits)


def answer_one(question: Question, gpu: Gpu, layout: Parallelism, *, fewer_experts: bool) -> bool:
    """Show the memory by role and the speed of a layout, or what would fit. Return whether it fits.

    With `fewer_experts` the model has the most experts that fit.
    """
    fit = fit_layout(question.model, gpu, layout, question.settings)
    if fewer_experts and (most := most_experts(question.whole, fit, question.settings)) is not None:
        fit = most
        question = replace(question, model=fit.model)
    commands = _serve_commands(question, fit)
    document = fit_document(fit)
    read = bytes_per_token(fit.model, layout)
    document["each"]["bytes_per_token"] = read
    document["bound_tokens_per_second"] = None if gpu.bandwidth is None else gpu.bandwidth / read
    document["serve"] = {
        name: {"command": command.line or None, "notes": command.notes} for name, command in commands.items()
    }
    views: list[Callable[[], None]] = [
        partial(show_fit, question.address, fit),
        partial(show_serving, commands, known=fit_notes(fit)),
    ]
    if fit.holds:
        console.show(question.document([document]), *views)
        question.print_next()
        return True
    pruned, count = ways_out(question.whole, fit)
    fewer = [
        {"experts_per_layer": way.model.shape.num_experts, "context": way.settings.context, "kv_tokens": way.tokens}
        for way in pruned
    ]
    document["ways_out"] = {"experts": fewer, "count": count}
    console.show(
        question.document([document]), *views, partial(show_ways_out, pruned, count, fit, whole=question.whole)
    )
    if pruned:
        question.print_next(experts=pruned[0].model.shape.num_experts)
    return False


def _serve_commands(question: Question, fit: Fit) -> ServeCommands:
    """Return the command of each engine, of DEST for a source; none if the GPUs do not hold the model."""
    if not fit.holds:
        return {}
    model = question.model
    config = question.checkpoint.config
    recipe = model.recipe
    repo = parse_repo(question.address)
    scheme = nvfp4_scheme(config)
    if recipe is not None:
        scheme = (recipe.layout, recipe.activations) if recipe.target == "nvfp4" else (None, None)
    model_path = question.address if repo is None else repo.repo
    context = question.context
    longest = max_positions(config)
    if context is None and longest is not None and fit.longest < longest:
        context = fit.longest
    deployment = Deployment(
        model=model_path if recipe is None else "DEST",
        layout=scheme[0],
        activations=scheme[1],
        family=model.family.card,
        parallelism=fit.layout,
        gpu=fit.gpu,
        context=context,
        kv_cache=question.kv,
        utilization=None if question.settings.utilization == UTILIZATION else question.settings.utilization,
        revision=None if recipe is not None or repo is None else repo.revision,
        has_fp8=has_fp8(config) if recipe is None else recipe_has_fp8(recipe),
    )
    return {engine: serve_command(engine, deployment) for engine in ENGINE_NAMES}


def show_serving(commands: ServeCommands, *, known: Sequence[str]) -> None:
    """Print each command, and its notes but for those that are `known`; why there is none, in its place."""
    for engine, command in commands.items():
        for line in ("", f"{ENGINE_NAMES[engine]}:", *(command.block.splitlines() if command.words else command.notes)):
            console.print_line(line)
    served = [command for command in commands.values() if command.words]
    show_notes(dict.fromkeys(note for command in served for note in command.notes if note not in known))


def fit_document(fit: Fit) -> dict[str, Any]:
    """Return what GPUs hold as plain data; figures under `each` are of the fullest GPU."""
    longest = fit.model.shape.max_context
    return {
        "gpu": fit.gpu.name,
        "count": fit.layout.num_gpus,
        "layout": asdict(fit.layout),
        "holds": fit.holds,
        "kv_tokens": fit.tokens,
        "kv_tokens_fp8": fit.tokens_in("fp8"),
        "kv_tokens_bf16": fit.tokens_in("bf16"),
        "longest_request": fit.longest,
        "requests": fit.slots_of(fit.settings.context),
        "max_context": longest,
        "requests_of_max_context": None if longest is None else fit.slots_of(longest),
        "each": {
            "memory": fit.gpu.memory_bytes,
            "usable": fit.settings.usable_bytes(fit.gpu),
            "weights": fit.weight_bytes,
            "weights_by_role": {role.value: count for role, count in fit.weights.items()},
            "overhead": fit.settings.overhead_on(fit.gpu),
            "kv_pool": fit.pool.num_bytes,
            "kv_bytes_per_token": fit.pool.kv_bytes_per_token,
            "state_bytes_per_request": fit.pool.state_bytes,
        },
        "nvfp4": fit.gpu.nvfp4,
        "notes": fit_notes(fit),
    }


def show_holders(question: Question, fits: Sequence[Fit]) -> None:
    """Print the GPUs that hold a model, the smallest first."""
    model = question.model
    settings = question.settings
    _show_model(question.address, model)
    wanted = f"{counted(settings.requests, 'request')} of {settings.context:,} tokens, KV cache in {settings.kv}"
    if not fits:
        print_line(f"no known GPUs hold it with {wanted}")
        print_line("with --gpu and --count, `fit` computes how many experts would fit")
        return
    lengths = _lengths(model, settings)
    rows = [
        (
            f"{fit.layout.num_gpus} x {fit.gpu.title}",
            str(fit.layout),
            gigabytes(fit.memory_bytes),
            gigabytes(fit.weight_bytes),
            f"{fit.tokens:,}",
            *(f"{fit.slots_of(length):,}" for length in lengths),
        )
        for fit in fits
    ]
    columns = ("GPUs", "layout", "memory", "weights on each", "KV tokens", *(f"requests of {n:,}" for n in lengths))
    print_table(f"GPUs that hold it with {wanted}", columns, rows, left=(0, 1))
    if (longest := model.shape.max_context) in lengths:
        print_line(f"the model's maximum context is {longest:,} tokens (max_position_embeddings)")
    gpus = [fit.gpu for fit in fits]
    names: dict[str, dict[str, None]] = {}
    for gpu in gpus:
        if model.is_nvfp4 and gpu.nvfp4 != "native":
            names.setdefault(NVFP4_NOTES[gpu.nvfp4], {})[gpu.title] = None
    show_notes([*(f"{', '.join(titles)}: {note}" for note, titles in names.items()), *_general_notes(settings, gpus)])


def _lengths(model: Model, settings: Settings) -> tuple[int, ...]:
    longest = model.shape.max_context
    if longest in (None, settings.context):
        return (settings.context,)
    return (settings.context, longest)


def show_fit(name: str, fit: Fit) -> None:
    """Print what some GPUs hold, by role, and how fast one request can be at most."""
    _show_model(name, fit.model)
    settings = fit.settings
    free = fit.pool.num_bytes
    verdict = f"does not fit: {format_bytes(-free)} too much on a GPU"
    if free > 0:
        lengths = _lengths(fit.model, settings)
        slots = " or ".join(f"{counted(fit.slots_of(length), 'request')} of {length:,} tokens" for length in lengths)
        fits = "fits" if fit.holds else "does not fit"
        verdict = f"{fits}: {fit.tokens:,} tokens of {settings.kv} KV cache, {slots}"
    print_line(f"{fit.layout.num_gpus} x {fit.gpu.title}, {fit.layout}: {verdict}")
    memory = fit.gpu.memory_bytes
    rows = [(role.value, format_bytes(count)) for role, count in fit.weights.items()]
    rows += [
        ("all weights", format_bytes(fit.weight_bytes)),
        ("overhead (assumed)", format_bytes(settings.overhead_on(fit.gpu))),
        ("KV cache" if free >= 0 else "MISSING", format_bytes(abs(free))),
        (f"left free ({1 - settings.utilization:.0%})", format_bytes(memory - settings.usable_bytes(fit.gpu))),
        ("memory", format_bytes(memory)),
    ]
    print_table("on the fullest GPU" if fit.layout.pipeline > 1 else "on each GPU", ("what", "bytes"), rows)
    if free > 0 and (bandwidth := fit.gpu.bandwidth) is not None:
        read = bytes_per_token(fit.model, fit.layout)
        readers = "each GPU"
        if fit.layout.pipeline > 1:
            readers = f"the {fit.layout.pipeline} stages, one after another,"
        print_line(
            f"upper bound: {bandwidth / read:,.0f} tok/s for one request, if {readers} only read "
            f"{format_bytes(read)} of weights for a token"
        )
    show_notes(fit_notes(fit))


def show_ways_out(pruned: Sequence[Fit], gpus: int | None, fit: Fit, *, whole: Model) -> None:
    for way in pruned:
        context = way.settings.context
        slots = f"{counted(way.slots_of(context), 'request')} of {context:,} tokens"
        experts = f"{way.model.shape.num_experts:,} of {whole.shape.num_experts:,} experts per layer"
        print_line(f"fits with {experts}: {way.tokens:,} tokens of KV cache, {slots}")
    if not pruned:
        gpus_named = f"{fit.layout.num_gpus} x {fit.gpu.title} as {fit.layout}"
        print_line(f"not even half of the experts fit on {gpus_named}, and keeping fewer is not proposed")
    if gpus is not None:
        print_line(f"fits with all experts on {gpus} x {fit.gpu.title}")


def _show_model(name: str, model: Model) -> None:
    how = ""
    if model.recipe is not None:
        how = f", as `run` would convert it (recipe {model.recipe.name})"
    print_line(
        f"{name} ({model.family.name}){how}: {format_bytes(model.num_bytes)} of weights, "
        f"{model.shape.num_experts} experts per layer"
    )
    fp8, bf16 = (f"{model.kv_values * KV_BYTES[kv]:,}" for kv in ("fp8", "bf16"))
    print_line(f"KV cache of one token: {fp8} bytes in fp8, {bf16} in bf16, on every GPU of a layer")
    if model.state_bytes:
        layers = f"{len(model.shape.linear_layers)} layers of linear attention"
        print_line(
            f"states of one request: {format_bytes(model.state_bytes)} in {layers}, divided by tensor parallelism"
        )


def fit_notes(fit: Fit) -> list[str]:
    notes = [f"{fit.gpu.title}: {NVFP4_NOTES[fit.gpu.nvfp4]}"] if fit.model.is_nvfp4 else []
    notes += [_DP_NOTE] if fit.layout.data_attention else []
    return notes + _general_notes(fit.settings, [fit.gpu])


def _general_notes(settings: Settings, gpus: Iterable[Gpu]) -> list[str]:
    sizes = {settings.overhead_on(gpu): gpu.title for gpu in gpus}
    least = min(sizes)
    more = "".join(f" ({format_bytes(size)} on {title})" for size, title in sizes.items() if size != least)
    overhead = (
        f"assumed: {format_bytes(least)}{more} on each GPU for activations, CUDA graphs and NCCL (--overhead). "
        "Published vLLM logs leave 2.5 to 3.5 GB for it on RTX PRO 6000, and 8.7 GB on H200."
    )
    return [overhead, *([FP8_NOTE] if settings.kv == "fp8" else [])]


def show_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print_note(f"note: {note}")
