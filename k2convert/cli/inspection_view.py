"""How an inspection is shown. Apart from the other views, so that `inspect` starts without torch."""

from k2convert.cli.console import format_bytes, print_line, print_table
from k2convert.plan.inspection import Inspection


def show_inspection(found: Inspection) -> None:
    """Print an inspection."""
    layers = found.layers
    print_line(f"{found.folder}: {found.family} ({', '.join(found.architectures)}, model_type {found.model_type})")
    print_line(
        f"{layers['total']} layers ({layers['dense']} dense, {layers['moe']} MoE), {found.experts_per_layer} experts a "
        f"MoE layer, hidden {found.hidden_size}, expert width {found.moe_intermediate_size}"
    )
    print_line(
        f"{found.num_shards} shards, {found.num_tensors:,} tensors, {found.tensor_bytes:,} bytes "
        f"({format_bytes(found.tensor_bytes)}), {found.int4_projections:,} INT4 projections"
    )
    quantization = found.quantization
    if quantization is None:
        print_line("quantization_config: none")
    else:
        rest = ", ".join(f"{key} {value}" for key, value in quantization.items() if key != "where")
        print_line(f"quantization_config in {quantization['where']}: {rest}")
    rows = [
        (h.role, h.form, f"{h.num_tensors:,}", f"{h.num_weights:,}", format_bytes(h.num_bytes)) for h in found.holdings
    ]
    print_table("contents", ("role", "form", "tensors", "weights", "bytes"), rows)
    for oddity in found.oddities:
        print_line(f"note: {oddity}")
    if found.recipe is not None:
        print_line(f"recipe by default: {found.recipe}")
