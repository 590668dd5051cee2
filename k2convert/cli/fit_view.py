"""Views of `fit`: tables for people, plain data for --json."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from k2convert.cli.console import print_line, print_note, print_table
from k2convert.errors import counted, format_bytes
from k2convert.fit.memory import KV_BYTES, Fit, Settings
from k2convert.fit.model import Model
from k2convert.fit.search import Holder, WaysOut, fp8_and_bf16_tokens, gigabytes
from k2convert.fit.serving import FP8_NOTE, NVFP4_NOTES
from k2convert.fit.speed import EstimatedSpeed, bytes_per_token, speed_ceiling

_DP_NOTE = (
    "DP attention as vLLM runs it (data parallelism): all weights but the experts are on every GPU. SGLang "
    "splits shared experts and dense MLP."
)


def fit_document(name: str, model: Model, settings: Settings) -> dict[str, object]:
    """Return what was asked and what it weighs as plain data. `fits` is added by the caller."""
    return {
        "checkpoint": name,
        "family": model.family.name,
        "recipe": None if model.recipe is None else model.recipe.name,
        "experts_per_layer": model.shape.num_experts,
        "weights": {
            "bytes": model.weights.num_bytes,
            "by_role": {role.value: count for role, count in model.weights.by_role.items()},
            "bytes_per_token": bytes_per_token(model.weights, model.shape),
        },
        "kv_bytes_per_token": {kv: model.kv_values * size for kv, size in KV_BYTES.items()},
        "state_bytes_per_request": model.state_bytes,
        "settings": asdict(settings),
    }


def holder_document(holder: Holder, model: Model, settings: Settings) -> dict[str, object]:
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


def speed_document(model: Model, holder: Holder, estimates: Sequence[EstimatedSpeed]) -> dict[str, object]:
    """Return the ceiling and AIConfigurator's estimates, in tokens a second."""
    layout = holder.fit.layout
    return {
        "speed": {
            "ceiling": speed_ceiling(model.weights, model.shape, gpu=holder.gpu, layout=layout),
            "estimates": [asdict(estimate) for estimate in estimates],
        }
    }


def ways_document(ways: WaysOut) -> dict[str, object]:
    """Return what would fit, as plain data."""
    experts = [
        {"experts_per_layer": count, "context": fit.context, "kv_tokens": fit.tokens} for count, fit in ways.experts
    ]
    return {"experts": experts, "count": ways.gpus}


def show_holders(name: str, model: Model, settings: Settings, holders: Sequence[Holder]) -> None:
    """Print the GPUs that hold a model, the smallest first."""
    _show_model(name, model)
    if not holders:
        print_line(f"no known GPUs hold it with {_wanted(settings)}")
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
    print_table(f"GPUs that hold it with {_wanted(settings)}", columns, rows, left=(0, 1))
    if (longest := model.shape.max_context) in lengths:
        print_line(f"{longest:,} tokens are the most that the model was made for (max_position_embeddings)")
    show_notes(_general_notes(settings))


def _lengths(model: Model, settings: Settings) -> tuple[int, ...]:
    longest = model.shape.max_context
    return (settings.context,) if longest in (None, settings.context) else (settings.context, longest)


def _wanted(settings: Settings) -> str:
    return f"{counted(settings.requests, 'request')} of {settings.context:,} tokens, KV cache in {settings.kv}"


def show_fit(name: str, model: Model, settings: Settings, holder: Holder, estimates: Sequence[EstimatedSpeed]) -> None:
    """Print what some GPUs hold, by role, and how fast one request can be."""
    _show_model(name, model)
    fit = holder.fit
    verdict = _verdict(fit, settings, _lengths(model, settings))
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
    _show_speed(model, holder, estimates)
    show_notes(fit_notes(holder, settings))


def _verdict(fit: Fit, settings: Settings, lengths: Sequence[int]) -> str:
    if fit.pool_bytes <= 0:
        return f"does not fit: {format_bytes(-fit.pool_bytes)} too much on a GPU"
    room = f"{fit.tokens:,} tokens of {settings.kv} KV cache"
    slots = " or ".join(f"{counted(fit.slots_of(length), 'request')} of {length:,} tokens" for length in lengths)
    return f"{'fits' if fit.holds else 'does not fit'}: {room}, {slots}"


def show_ways_out(ways: WaysOut, holder: Holder, *, whole: Model) -> None:
    """Print what would fit: fewer experts of the whole model, or more GPUs."""
    layout = holder.fit.layout
    for count, fit in ways.experts:
        slots = f"{counted(fit.request_slots, 'request')} of {fit.context:,} tokens"
        kept = f"{count:,} of {whole.shape.num_experts:,} experts per layer"
        print_line(f"fits with {kept}: {fit.tokens:,} tokens of KV cache, {slots}")
    if not ways.experts:
        print_line(f"no number of experts fits on {layout.num_gpus} x {holder.gpu.title} as {layout}")
    if ways.gpus is not None:
        print_line(f"fits with all experts on {ways.gpus} x {holder.gpu.title}")


def _show_model(name: str, model: Model) -> None:
    how = "" if model.recipe is None else f", as `run` would convert it (recipe {model.recipe.name})"
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


def _show_speed(model: Model, holder: Holder, estimates: Sequence[EstimatedSpeed]) -> None:
    layout = holder.fit.layout
    ceiling = speed_ceiling(model.weights, model.shape, gpu=holder.gpu, layout=layout)
    if ceiling is not None:
        read = format_bytes(bytes_per_token(model.weights, model.shape))
        print_line(
            f"ceiling: {ceiling:,.0f} tok/s for one request, if bandwidth were all ({read} read for a token). "
            "For K2, published speeds are 4 to 11 times lower."
        )
    rows = [
        (
            "no estimate" if estimate.tokens_per_second is None else f"{estimate.tokens_per_second:.1f} tok/s",
            "1",
            str(replace(layout, decode_context=1)),  # it does not know decode context parallelism
            "NVFP4",
            f"{estimate.engine} {estimate.version}",
            f"AIConfigurator, estimated now{': ' if estimate.problem else ''}{estimate.problem}",
        )
        for estimate in estimates
    ]
    if rows:
        columns = ("speed", "requests", "layout", "weights", "engine", "source")
        print_table("speeds of K2 with all its experts", columns, rows, left=(0, 2, 3, 4, 5))


def fit_notes(holder: Holder, settings: Settings) -> list[str]:
    """Return what to know about the answer for some GPUs."""
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
    """Print what to know about an answer."""
    for note in notes:
        print_note(f"note: {note}")
