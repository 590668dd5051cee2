"""`fit`: which GPUs hold a checkpoint, with how much KV cache, and how fast one request can be at most."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from k2convert.choices import ServedKvCache
from k2convert.cli.options import ADDRESS, Json, argument, check_size, check_source, flag, option, refuse_contradictions
from k2convert.errors import ArgumentError, FitError, parse_size, quoted

if TYPE_CHECKING:
    from k2convert.deploy.gpus import Gpu

AUTO: Final = "auto"


def _check_experts(text: str) -> None:
    if text != AUTO and not (text.isdecimal() and 0 < len(text) < 10 and int(text)):
        raise typer.BadParameter(f"{quoted(text)} is not a number of experts. Pass one such as 192, or auto.")


Experts = Annotated[
    str | None,
    option(
        "Experts per layer if it is pruned; auto: the most that fit on --count GPUs.", "N|auto", check=_check_experts
    ),
]
Recipe = Annotated[
    str | None,
    option("Of a source: a file, or a name that `recipes` lists [default: by the model].", "RECIPE"),
]


def fit(
    checkpoint: Annotated[
        str,
        argument("CHECKPOINT", f"Folder or {ADDRESS}: a source, as it would be converted, or a result.", check_source),
    ],
    gpu: Annotated[
        str | None, option("Kind of GPU: b200, h200, rtx-pro-6000 ..., or the memory of another one: 96GB.", "GPU")
    ] = None,
    count: Annotated[int | None, option("Number of GPUs.", "N", min=1, max=1024)] = None,
    context: Annotated[
        int | None,
        option("Tokens of a request and its answer [default: 8192, or the model's maximum].", "N", min=1),
    ] = None,
    requests: Annotated[int, option("Concurrent requests.", "N", min=1)] = 1,
    kv: Annotated[ServedKvCache | None, option("KV cache [default: as config.json declares, else bf16].")] = None,
    tp: Annotated[int | None, option("Tensor parallelism: GPUs that share each layer.", "N", min=1)] = None,
    ep: Annotated[
        int | None, option("Expert parallelism: GPUs that the experts are distributed over.", "N", min=1)
    ] = None,
    pp: Annotated[int | None, option("Pipeline stages, each holding a run of layers.", "N", min=1)] = None,
    dp_attention: Annotated[
        bool, flag("--dp-attention", "Data-parallel attention: each GPU handles its own requests.")
    ] = False,
    utilization: Annotated[
        float, option("Share of the memory that the engine may use.", "SHARE", min=0.01, max=1.0)
    ] = 0.92,
    overhead: Annotated[
        str | None,
        option(
            "Memory for activations, CUDA graphs and NCCL [default: 3GB, 8.7GB on H200].", "BYTES", check=check_size
        ),
    ] = None,
    experts: Experts = None,
    recipe: Recipe = None,
    json: Json = False,
) -> None:
    """Show which GPUs hold a checkpoint, and with how much KV cache. Only headers are read. Exit code 3 if it does not
    fit.
    """
    from k2convert.cli import console
    from k2convert.cli.fit_view import Question, answer_all, answer_one
    from k2convert.deploy.layouts import complete_layout
    from k2convert.deploy.memory import CONTEXT, Settings, find_fit
    from k2convert.deploy.model import read_model
    from k2convert.hub.client import Hub
    from k2convert.job.locations import open_checkpoint_at

    console.set_output(json=json)
    chosen = {"--tp": tp, "--ep": ep, "--pp": pp, "--dp-attention": dp_attention, "--experts auto": experts == AUTO}
    given = ", ".join(name for name, value in chosen.items() if value)
    refuse_contradictions(
        (count is not None and gpu is None, "--count needs --gpu"),
        (given and count is None, f"{given}: needs --gpu and --count"),
    )
    kind = None if gpu is None else _find_gpu(gpu)
    with open_checkpoint_at(
        checkpoint, hub=Hub(notify=console.print_note, warn=console.print_note, outages_pass=False)
    ) as opened:
        whole = read_model(opened.checkpoint, recipe=recipe)
    question = Question(
        address=checkpoint,
        checkpoint=opened.checkpoint,
        whole=whole,
        model=whole if experts in (None, AUTO) else whole.with_experts(int(experts)),
        settings=Settings(
            kv=kv or whole.kv,
            context=context or min(CONTEXT, whole.shape.max_context or CONTEXT),
            requests=requests,
            utilization=utilization,
            overhead_bytes=None if overhead is None else parse_size(overhead),
        ),
        context=context,
        kv=kv,
        recipe=recipe,
    )
    if kind is None or count is None:
        fits = answer_all(question, kind)
    else:
        usual_fit = None if given else find_fit(question.model, kind, count, settings=question.settings)
        if usual_fit is None:
            layout = complete_layout(
                count, question.model.shape, tensor=tp, expert=ep, pipeline=pp, data_attention=dp_attention
            )
        else:
            layout = usual_fit.layout
        fits = answer_one(question, kind, layout, fewer_experts=experts == AUTO)
    if not fits:
        raise typer.Exit(3)


def _find_gpu(text: str) -> "Gpu":
    """Return the kind of GPU, or one that has so much memory; raises FitError, and BadParameter for a wrong size."""
    from k2convert.deploy.gpus import find_gpu

    try:
        return find_gpu(text)
    except ArgumentError as error:
        raise typer.BadParameter(f"{error}") from None
    except FitError as error:
        raise FitError(f"--gpu {error} For another one that runs NVFP4, pass its memory, such as --gpu 96GB.") from None
