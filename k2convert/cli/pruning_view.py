"""How a job that keeps some of the experts is shown."""

from typing import Any

from k2convert.cli.console import format_bytes, print_line
from k2convert.job.prepare import Job
from k2convert.records.pruning import share_words


def pruning_document(job: Job) -> dict[str, Any]:
    """Return which experts a job keeps and what that drops, as plain data; empty if it keeps all."""
    pruning, whole, seen = job.source.pruning, job.source.whole, job.source.checkpoint
    if pruning is None or whole is None:
        return {}
    dropped = {
        "source_tensors": len(whole.tensors) - len(seen.tensors),
        "bytes_in": whole.tensor_bytes - seen.tensor_bytes,
    }
    return {"pruning": pruning.to_dict() | {"kept": pruning.kept.num_experts, "dropped": dropped}}


def show_pruning(job: Job) -> None:
    """Print which experts a job keeps and the size of the result, if it does not keep all."""
    if job.source.pruning is not None:
        dropped = pruning_document(job)["pruning"]["dropped"]
        print_line(
            f"{job.source.pruning.line}: drops {dropped['source_tensors']:,} tensors, "
            f"{format_bytes(dropped['bytes_in'])} of the source; the result has {format_bytes(job.plan.data_bytes)}"
        )
        for what, shares in job.source.pruning.shares.items():
            print_line(f"left out of the {what}: {share_words(shares)}")
