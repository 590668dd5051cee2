"""The options of the commands: their choices, types and help texts. Nothing here does anything."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from k2convert.errors import PlanError


class Rule(StrEnum):
    optimal = "optimal"
    plain = "plain"


class Layout(StrEnum):
    modelopt = "modelopt"
    compressed_tensors = "compressed-tensors"


class Activations(StrEnum):
    w4a4 = "w4a4"
    w4a16 = "w4a16"


class QuantizerKind(StrEnum):
    native = "native"
    reference = "reference"


class Target(StrEnum):
    nvfp4 = "nvfp4"
    bf16 = "bf16"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class KvCache(StrEnum):
    fp8 = "fp8"


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")]
SourceArgument = Annotated[
    str, typer.Argument(help="Folder of the INT4 checkpoint, or hf://owner/name[@revision].", show_default=False)
]
DestinationArgument = Annotated[Path, typer.Argument(help="Folder of the converted checkpoint.", show_default=False)]
ResultArgument = Annotated[
    str, typer.Argument(help="Folder of the converted checkpoint, or hf://owner/name.", show_default=False)
]
PublicOption = Annotated[bool, typer.Option("--public/--private", help="Visibility of a new repository.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Publish without asking.")]
RecipeOption = Annotated[str | None, typer.Option(help="Recipe: a file, or a shipped name. Default: by family.")]
RuleOption = Annotated[Rule | None, typer.Option(help="How block scales are chosen.")]
LayoutOption = Annotated[Layout | None, typer.Option(help="Tensor names and config of the result.")]
ActivationsOption = Annotated[Activations | None, typer.Option(help="4-bit activations, or weight-only.")]
QuantizerOption = Annotated[QuantizerKind | None, typer.Option(help="Own code, or the two libraries' chain.")]
TargetOption = Annotated[Target | None, typer.Option(help="NVFP4, or only the dequantised BF16 copy.")]
KvCacheOption = Annotated[KvCache | None, typer.Option(help="Declare an FP8 KV cache in the config.")]
InputScaleOption = Annotated[
    float | None, typer.Option(help="Constant activation scale of gate and up [default: 1.0].")
]
DownInputScaleOption = Annotated[
    float | None, typer.Option(help="Constant activation scale of down [default: as --input-scale].")
]
WorkersOption = Annotated[int | None, typer.Option(min=1, help="Shards at once [default: by cores and devices].")]
DeviceOption = Annotated[Device, typer.Option(help="Where to convert.")]
MaxDiskOption = Annotated[
    str | None, typer.Option(help="Disk to use at once, with the Hub: 200GB [default: free less 10 %].")
]
WorkFolderOption = Annotated[
    Path | None, typer.Option(help="Folder for what is on its way to the Hub [default: k2convert-work/REPO].")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan and touch nothing.")]


def input_scales(gate_up: float | None, down: float | None) -> dict[str, float] | None:
    """The recipe's input_scale, where an option sets it."""
    if gate_up is None and down is None:
        return None
    first = 1.0 if gate_up is None else gate_up
    return {"gate_up": first, "down": first if down is None else down}


def recipe_overrides(
    rule: Rule | None,
    layout: Layout | None,
    activations: Activations | None,
    quantizer: QuantizerKind | None,
    target: Target | None,
    kv_cache: KvCache | None,
    input_scale: dict[str, float] | None,
) -> dict[str, Any]:
    """What the options replace in a recipe; the reference quantizer implies the one rule it knows."""
    nvfp4_alone = {
        "--rule": rule,
        "--layout": layout,
        "--activations": activations,
        "--quantizer": quantizer,
        "--kv-cache": kv_cache,
        "--input-scale and --down-input-scale": input_scale,
    }
    given = [name for name, value in nvfp4_alone.items() if value is not None]
    if target is Target.bf16 and given:
        raise typer.BadParameter(f"--to bf16 only decodes the weights: leave out {', '.join(given)}")
    if quantizer is QuantizerKind.reference and rule is None:
        rule = Rule.plain
    chosen = {"rule": rule, "layout": layout, "activations": activations, "quantizer": quantizer, "target": target}
    values: dict[str, Any] = {key: None if option is None else option.value for key, option in chosen.items()}
    return values | {"kv_cache": None if kv_cache is None else kv_cache.value, "input_scale": input_scale}


def parse_size(text: str) -> int:
    """Bytes from `200GB`, `1.5TB`, `64GiB` or a plain number; raises PlanError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kMGT]?)(i?)B?", text.strip(), flags=re.IGNORECASE)
    if match is None:
        raise PlanError(f"{text!r}: not a size. Write for example 200GB.")
    power = " kmgt".index(match[2].lower() or " ")
    try:
        return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    except OverflowError:
        raise PlanError(f"{text[:12]}...: larger than any disk. Write for example 200GB.") from None
