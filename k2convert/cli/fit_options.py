"""The options of `fit`."""

from dataclasses import dataclass
from typing import Annotated, Final

import typer

from k2convert.choices import ServedKvCache
from k2convert.cli.options import JsonOption, existing_place, size_option
from k2convert.errors import quoted

AUTO: Final = "auto"


def _experts_option(text: str | None) -> str | None:
    if text is not None and text != AUTO and not (text.isdecimal() and 0 < len(text) < 10 and int(text)):
        raise typer.BadParameter(f"{quoted(text)} is not a number of experts. Pass one such as 192, or auto.")
    return text


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Arguments and options of `fit`, in the order of its help."""

    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Folder or hf://owner/name[@revision]: an INT4 source, as it would be converted, or a result.",
            callback=existing_place,
            show_default=False,
        ),
    ]
    gpu: Annotated[str | None, typer.Option(help="Kind of GPU: b200, h200, rtx-pro-6000 ...", show_default=False)] = (
        None
    )
    memory: Annotated[
        str | None, typer.Option(help="Memory of one GPU, instead of --gpu: 96GB.", callback=size_option)
    ] = None
    count: Annotated[int | None, typer.Option(min=1, max=1024, help="Number of GPUs.", show_default=False)] = None
    tp: Annotated[int | None, typer.Option(min=1, help="GPUs that hold each layer together.")] = None
    ep: Annotated[int | None, typer.Option(min=1, help="GPUs that whole experts are given to.")] = None
    pp: Annotated[int | None, typer.Option(min=1, help="Stages that hold the layers one after another.")] = None
    dp_attention: Annotated[bool, typer.Option("--dp-attention", help="Each GPU has its own requests.")] = False
    dcp: Annotated[int, typer.Option(min=1, help="GPUs of --tp that divide the KV cache.")] = 1
    kv: Annotated[
        ServedKvCache | None, typer.Option(help="KV cache [default: as config.json declares, else bf16].")
    ] = None
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one request, prompt and answer [default: 8192].")
    ] = None
    requests: Annotated[int, typer.Option(min=1, help="Requests at one time.")] = 1
    utilization: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the memory that the engine may use.")
    ] = 0.92
    overhead: Annotated[
        str, typer.Option(help="Memory for activations, CUDA graphs and NCCL on each GPU.", callback=size_option)
    ] = "3GB"
    experts: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Experts per layer if it is pruned; auto: the most that fit on --count GPUs.",
            callback=_experts_option,
            show_default=False,
        ),
    ] = None
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Ask AIConfigurator for the speed (pip install 'k2convert[fit]').")
    ] = False
    as_json: JsonOption = False
