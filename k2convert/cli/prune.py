"""`prune`: copy a checkpoint with some of its experts."""

from functools import partial

from k2convert.cli import console
from k2convert.cli.progress import Display
from k2convert.cli.verbs import PruneOptions
from k2convert.errors import counted, format_bytes
from k2convert.prune import Pruning, copy_pruned, plan_pruning
from k2convert.records.events import Extent


def prune(options: PruneOptions) -> None:
    """Copy what is left, and say what the copy is."""
    pruning = plan_pruning(options.source, options.destination, options.keep)
    done = pruning.finished_bytes
    num_shards = len(pruning.shards)
    if not options.dry_run:
        extent = Extent({"copy": (pruning.num_bytes, done)}, num_shards, len(pruning.finished))
        with Display("prune", extent) as events:
            copy_pruned(pruning, events=events)
    document = {
        "source": str(options.source),
        "destination": str(options.destination),
        "experts": pruning.num_experts,
        "of": pruning.num_source_experts,
        "shards": num_shards,
        "finished_shards": len(pruning.finished),
        "bytes": pruning.num_bytes,
        "finished_bytes": done,
    }
    console.show(document, partial(_show, pruning, options))
    place = options.destination
    if place.name in ("", ".."):
        place = place.resolve()
    words = (options.source, options.destination, "--keep", options.keep)
    if options.dry_run:
        console.print_next(console.command("k2convert", "prune", *words))
    else:
        console.print_next(console.command("k2convert", "run", options.destination, f"{place}-NVFP4"))


def _show(pruning: Pruning, options: PruneOptions) -> None:
    size = format_bytes(pruning.num_bytes)
    console.print_line(
        f"{options.destination}: {pruning.num_experts} of {pruning.num_source_experts} experts per layer, "
        f"{counted(len(pruning.shards), 'shard')}, {size}"
    )
    if pruning.finished:
        console.print_line(f"finished before: {counted(len(pruning.finished), 'shard')}")
    if options.dry_run:
        console.print_line(f"to write: {format_bytes(pruning.num_bytes - pruning.finished_bytes)}")
