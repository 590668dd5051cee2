"""`prune`: copy a checkpoint with some of its experts."""

from pathlib import Path
from typing import Annotated

from k2convert.cli.interrupts import say_when_interrupted
from k2convert.cli.options import RESUMES, Json, Quiet, argument, check_folder, flag, option, typed_command
from k2convert.errors import counted, format_bytes


def prune(
    source: Annotated[Path, argument("SOURCE", "Folder of the INT4 or MXFP4 checkpoint.", check_folder)],
    destination: Annotated[Path, argument("DEST", "Folder of the copy.", check_folder)],
    keep: Annotated[Path, option("Experts to keep: a list, or a REAP report of llm-compressor.", "FILE")],
    dry_run: Annotated[bool, flag("--dry-run", "Print the size of the copy, and write nothing.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy a checkpoint with only some experts of each MoE layer. The copy is a source like any other. Running it again
    resumes.
    """
    from k2convert.checkpoint.index import missing_sidecars
    from k2convert.cli import console
    from k2convert.cli.progress import Display
    from k2convert.prune import copy_pruned, plan_pruning
    from k2convert.records.events import Extent

    console.set_output(json=json, quiet=quiet)
    say_when_interrupted(lambda: "" if dry_run else RESUMES, resumes=not dry_run)
    pruning = plan_pruning(source, destination, keep)
    for name, problem in missing_sidecars(source):
        console.print_note(f"warning: {source}: {name}: {problem}")
    num_shards = len(pruning.shards)
    num_finished = len(pruning.finished)
    if not dry_run:
        extent = Extent({"copy": (pruning.num_bytes, pruning.finished_bytes)}, num_shards, num_finished)
        with Display(extent) as events:
            copy_pruned(pruning, command=typed_command(source=str(source)), events=events)
    lines = [
        f"{destination}: {pruning.num_experts} of {pruning.num_source_experts} experts per layer, "
        f"{counted(num_shards, 'shard')}, {format_bytes(pruning.num_bytes)}"
    ]
    if num_finished:
        lines.append(f"finished before: {counted(num_finished, 'shard')}")
    if dry_run:
        lines.append(f"to write: {format_bytes(pruning.num_bytes - pruning.finished_bytes)}")
    if pruning.num_experts == pruning.num_source_experts:
        console.print_note(f"{keep}: keeps all experts, so the copy has the weights of the source")
    document = {
        "source": str(source),
        "destination": str(destination),
        "experts": pruning.num_experts,
        "of": pruning.num_source_experts,
        "shards": num_shards,
        "finished_shards": num_finished,
        "bytes": pruning.num_bytes,
        "finished_bytes": pruning.finished_bytes,
    }
    console.show(document, *lines)
    if dry_run:
        console.print_next(console.command("k2convert", "prune", source, destination, "--keep", keep))
        return
    prefix = destination.resolve() if destination.name in ("", "..") else destination
    console.print_next(console.command("k2convert", "run", destination, f"{prefix}-NVFP4"))
