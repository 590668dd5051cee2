"""`inspect` and `status`: what a checkpoint holds, and how far a conversion or an evaluation is."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from k2convert.cli.options import ADDRESS, Json, argument, check_source, check_status_place
from k2convert.errors import counted, exact_zero, format_bytes

if TYPE_CHECKING:
    from k2convert.plan.inspection import Inspection


def inspect(
    source: Annotated[str, argument("SOURCE", f"Folder of a checkpoint, or {ADDRESS}.", check_source)],
    json: Json = False,
) -> None:
    """Describe a checkpoint, from its headers."""
    from k2convert.cli import console
    from k2convert.hub.client import Hub
    from k2convert.job.opening import inspect_source

    console.set_output(json=json)
    inspection = inspect_source(source, hub=Hub(notify=console.print_note, warn=console.print_note, outages_pass=False))
    console.show(inspection, partial(_show_inspection, inspection))
    if inspection.recipe is not None:
        console.print_next(console.command("k2convert", "run", source, "DEST", "--dry-run"))
    elif inspection.nvfp4_projections:
        origin = (inspection.conversion or {}).get("source")
        words = () if origin is None else ("--source", origin)
        console.print_next(console.command("k2convert", "validate", source, *words))


def status(
    destination: Annotated[
        str,
        argument("DEST", f"Folder of a conversion, file of an evaluation, or {ADDRESS}.", check_status_place),
    ],
    json: Json = False,
) -> None:
    """Show the progress of a conversion or an evaluation. For a finished one: where it was published."""
    from k2convert.cli import console
    from k2convert.cli.status_view import show_status_of

    console.set_output(json=json)
    show_status_of(destination)


def _show_inspection(inspection: "Inspection") -> None:
    from k2convert.cli.console import print_line, print_table

    layers = inspection.layers
    print_line(
        f"{inspection.folder}: {inspection.family} ({', '.join(inspection.architectures)}, "
        f"model_type {inspection.model_type})"
    )
    print_line(
        f"{layers['total']} layers ({layers['dense']} dense, {layers['moe']} MoE), {inspection.experts_per_layer} "
        f"experts per MoE layer, hidden {inspection.hidden_size}, expert width {inspection.moe_intermediate_size}"
    )
    if (conversion := inspection.conversion) is not None:
        print_line(_conversion_line(conversion))
    counts = {
        "INT4": inspection.int4_projections,
        "MXFP4": inspection.mxfp4_projections,
        "NVFP4": inspection.nvfp4_projections,
    }
    projections = " and ".join(f"{count:,} {form}" for form, count in counts.items() if count) or "no 4-bit"
    print_line(
        f"{counted(inspection.num_shards, 'shard')}, {counted(inspection.num_tensors, 'tensor')}, "
        f"{inspection.tensor_bytes:,} bytes ({format_bytes(inspection.tensor_bytes)}), {projections} projections"
    )
    quantization = inspection.quantization or {}
    rest = ", ".join(f"{key} {value}" for key, value in quantization.items() if key != "where")
    print_line(
        f"quantization_config in {quantization['where']}: {rest}" if quantization else "quantization_config: none"
    )
    rows = [
        (h.role, h.form, f"{h.num_tensors:,}", f"{h.num_weights:,}", format_bytes(h.num_bytes))
        for h in inspection.holdings
    ]
    print_table("contents", ("role", "form", "tensors", "weights", "bytes"), rows)
    for oddity in inspection.oddities:
        print_line(f"note: {oddity}")
    if inspection.recipe is not None:
        print_line(f"recipe by default: {inspection.recipe}")


def _conversion_line(conversion: Mapping[str, Any]) -> str:
    if conversion["target"] != "nvfp4":
        return f"converted to {conversion['target']} by k2convert"
    line = f"converted by rule {conversion['rule']}, layout {conversion['layout']}, {conversion['activations']}"
    if (error := conversion.get("relative_mse")) is None:
        return line
    compared = conversion.get("achieved_to_max")
    more = ""
    if compared is not None:
        more = f", {compared:.3f} of that of rule max"
    return f"{line}: NVFP4 weight error {exact_zero(error)}{more}"
