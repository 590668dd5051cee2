"""`inspect`: what a checkpoint holds, as tables for people and plain data for --json."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from k2convert.cli.console import command, print_line, print_next, print_note, print_table, show
from k2convert.cli.verbs import InspectOptions
from k2convert.errors import counted, format_bytes
from k2convert.hub.client import Hub
from k2convert.job.opening import inspect_source
from k2convert.plan.inspection import Inspection


def inspect(options: InspectOptions) -> None:
    """Show a checkpoint, from its headers."""
    source = options.source
    found = inspect_source(source, hub=Hub(notify=print_note))
    show(asdict(found), partial(_show_inspection, found))
    if found.recipe is not None:
        print_next(command("k2convert", "run", source, "DEST", "--dry-run"))
    elif found.nvfp4_projections:
        print_next(command("k2convert", "validate", source))


def _show_inspection(found: Inspection) -> None:
    layers = found.layers
    print_line(f"{found.folder}: {found.family} ({', '.join(found.architectures)}, model_type {found.model_type})")
    print_line(
        f"{layers['total']} layers ({layers['dense']} dense, {layers['moe']} MoE), {found.experts_per_layer} experts "
        f"per MoE layer, hidden {found.hidden_size}, expert width {found.moe_intermediate_size}"
    )
    if (conversion := found.conversion) is not None:
        print_line(_conversion_line(conversion))
    counts = {"INT4": found.int4_projections, "MXFP4": found.mxfp4_projections, "NVFP4": found.nvfp4_projections}
    projections = " and ".join(f"{count:,} {form}" for form, count in counts.items() if count) or "no 4-bit"
    print_line(
        f"{counted(found.num_shards, 'shard')}, {counted(found.num_tensors, 'tensor')}, {found.tensor_bytes:,} bytes "
        f"({format_bytes(found.tensor_bytes)}), {projections} projections"
    )
    quantization = found.quantization or {}
    rest = ", ".join(f"{key} {value}" for key, value in quantization.items() if key != "where")
    print_line(
        f"quantization_config in {quantization['where']}: {rest}" if quantization else "quantization_config: none"
    )
    rows = [
        (h.role, h.form, f"{h.num_tensors:,}", f"{h.num_weights:,}", format_bytes(h.num_bytes)) for h in found.holdings
    ]
    print_table("contents", ("role", "form", "tensors", "weights", "bytes"), rows)
    for oddity in found.oddities:
        print_line(f"note: {oddity}")
    if found.recipe is not None:
        print_line(f"recipe by default: {found.recipe}")


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
    return f"{line}: weight error {error:.5f}{more}"
