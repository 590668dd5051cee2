"""How an inspection is shown, and what a checkpoint's ledger adds to it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from k2convert.cli.console import format_bytes, print_line, print_table
from k2convert.errors import CheckpointError
from k2convert.plan.inspection import Inspection
from k2convert.records.ledger import find_ledger


def stated_pruning(folder: Path) -> dict[str, Any] | None:
    """Return what a folder's ledger says of the experts that are kept; None for all, or without a sound ledger."""
    try:
        ledger = find_ledger(folder)
    except CheckpointError:
        return None
    record = None if ledger is None else ledger.pruning
    if record is None:
        return None
    shares = {str(layer): asdict(part) for layer, part in (record.left_out or {}).items()}
    counts = {"kept": record.kept.num_experts, "of": record.num_source_experts, "chosen_by": record.scores}
    return counts | ({"left_out": shares} if shares else {})


def _projections(found: Inspection) -> str:
    counts = {"INT4": found.int4_projections, "NVFP4": found.nvfp4_projections}
    shown = [f"{count:,} {form}" for form, count in counts.items() if count]
    return f"{' and '.join(shown) or 'no 4-bit'} projections"


def show_inspection(found: Inspection) -> None:
    """Print an inspection."""
    layers = found.layers
    print_line(f"{found.folder}: {found.family} ({', '.join(found.architectures)}, model_type {found.model_type})")
    print_line(
        f"{layers['total']} layers ({layers['dense']} dense, {layers['moe']} MoE), {found.experts_per_layer} experts a "
        f"MoE layer, hidden {found.hidden_size}, expert width {found.moe_intermediate_size}"
    )
    if (pruning := found.pruning) is not None:
        chosen = "" if pruning["chosen_by"] is None else f", chosen by {pruning['chosen_by']}"
        print_line(f"keeps {pruning['kept']} of {pruning['of']} experts per layer{chosen}")
    print_line(
        f"{found.num_shards} shards, {found.num_tensors:,} tensors, {found.tensor_bytes:,} bytes "
        f"({format_bytes(found.tensor_bytes)}), {_projections(found)}"
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
