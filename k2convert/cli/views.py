"""How inspections, plans, runs and states are shown: tables for people, documents for programs."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k2convert.cli.console import format_bytes, format_seconds, print_line, print_table
from k2convert.job.prepare import LocalJob
from k2convert.plan.plan import action_counts
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.records.journal import JobState


def plan_document(job: LocalJob) -> dict[str, Any]:
    """The plan as data."""
    plan = job.plan
    return {
        "source": str(job.source.folder),
        "destination": str(job.destination),
        "family": plan.family,
        "recipe": plan.recipe.document(),
        "fingerprint": job.fingerprint,
        "devices": list(job.devices),
        "workers": job.workers,
        "actions": action_counts(plan) | {"drop": {"source_tensors": len(plan.dropped)}},
        "tensor_bytes_in": job.source.tensor_bytes,
        "tensor_bytes_out": plan.data_bytes,
        "num_tensors_out": sum(len(shard.outputs) for shard in plan.jobs),
        "disk_needed": job.disk_needed,
        "disk_free": job.disk_free,
        "exclude_modules": list(plan.excludes),
        "shards": [
            {
                "name": shard.name,
                "tensors": len(shard.outputs),
                "bytes_in": shard.bytes_in,
                "bytes_out": shard.data_bytes,
                "finished": shard.name in job.finished,
            }
            for shard in plan.jobs
        ],
    }


def show_plan(job: LocalJob, *, source: str | None = None, destination: str | None = None) -> None:
    """Print a dry run. With the Hub involved, `source` and `destination` name both ends, and the disk is not ours."""
    document, recipe = plan_document(job), job.plan.recipe
    print_line(
        f"{source or job.source.folder} ({job.plan.family}) -> {destination or job.destination}: "
        f"{recipe.name}, {recipe.target}, rule "
        f"{recipe.rule}, layout {recipe.layout}, {recipe.activations}, roles {', '.join(recipe.roles)}"
    )
    shards = document["shards"]
    shown = shards if len(shards) <= 12 else [*shards[:4], None, *shards[-2:]]
    rows = [
        ("...", "", "", "", "")
        if shard is None
        else (
            shard["name"],
            f"{shard['tensors']:,}",
            format_bytes(shard["bytes_in"]),
            format_bytes(shard["bytes_out"]),
            "done" if shard["finished"] else "to do",
        )
        for shard in shown
    ]
    print_table(f"{len(shards)} shards", ("shard", "tensors", "in", "out", "state"), rows)
    rows = [
        (
            name,
            f"{action['source_tensors']:,}",
            format_bytes(action.get("bytes_in", 0)) if "bytes_in" in action else "",
            f"{action['tensors']:,}" if "tensors" in action else "",
            format_bytes(action["bytes_out"]) if "bytes_out" in action else "",
        )
        for name, action in document["actions"].items()
    ]
    print_table("tensors", ("action", "source tensors", "in", "result tensors", "out"), rows)
    print_line("convert includes the tensors under drop: weight_shape becomes the result's shape")
    if source is not None:
        return
    print_line(f"disk: needs {format_bytes(job.disk_needed)}, free {format_bytes(job.disk_free)}")
    if job.disk_needed > job.disk_free:
        print_line("NOT ENOUGH ROOM: the run would be refused")


def run_document(job: LocalJob, totals: Mapping[str, WeightMetrics], seconds: float) -> dict[str, Any]:
    """A finished run as data."""
    return {
        "destination": str(job.destination),
        "shards": len(job.plan.jobs),
        "resumed_shards": len(job.finished),
        "seconds": round(seconds, 3),
        "tensor_bytes_out": job.plan.data_bytes,
        "totals": {role: metrics_document(metrics) for role, metrics in totals.items()},
    }


def metrics_document(metrics: WeightMetrics) -> dict[str, Any]:
    """Metrics with the derived ratios people ask for."""
    ratios = {
        "sqnr_db": metrics.sqnr_db,
        "relative_mse": metrics.relative_mse,
        "achieved_to_plain": metrics.achieved_to_plain,
        "achieved_to_bound": metrics.achieved_to_bound,
    }
    return metrics.to_dict() | {key: value if math.isfinite(value) else None for key, value in ratios.items()}


def show_run(job: LocalJob, totals: Mapping[str, WeightMetrics], seconds: float) -> None:
    """Print what a run did and what it lost."""
    rows = [
        (
            role,
            f"{m.num_weights:,}",
            f"{m.sqnr_db:.2f} dB" if math.isfinite(m.sqnr_db) else "exact",
            f"{m.relative_mse:.5f}",
            f"{m.achieved_to_plain:.3f}" if math.isfinite(m.achieved_to_plain) else "",
            f"{m.achieved_to_bound:.3f}" if math.isfinite(m.achieved_to_bound) else "",
        )
        for role, m in totals.items()
    ]
    if rows:
        columns = ("role", "weights", "SQNR", "relative MSE", "error / plain", "error / bound")
        print_table("weight error against the source", columns, rows)
    fresh = sum(s.bytes_in for s in job.plan.jobs if s.name not in job.finished)
    rate = f", {format_bytes(fresh / seconds)}/s in" if fresh and seconds else ""
    print_line(f"{job.destination}: {len(job.plan.jobs)} shards, {format_seconds(seconds)}{rate}")


def status_document(state: JobState) -> dict[str, Any]:
    """A job's state as data."""
    return {
        "complete": state.is_complete,
        "running": state.is_running,
        "shards": len(state.shards),
        "finished_shards": len(state.finished),
        "bytes": sum(state.shards.values()),
        "finished_bytes": sum(state.shards[name] for name in state.finished if name in state.shards),
        "pending": [name for name in state.shards if name not in state.finished],
        "recipe": state.recipe,
        "fingerprint": state.fingerprint,
    }


def show_status(destination: Path, state: JobState) -> None:
    """Print a job's state."""
    document = status_document(state)
    word = "complete" if state.is_complete else "running" if state.is_running else "not finished"
    print_line(
        f"{destination}: {word}: {document['finished_shards']} of {document['shards']} shards, "
        f"{format_bytes(document['finished_bytes'])} of {format_bytes(document['bytes'])}"
    )
    print_line(f"recipe {state.recipe['name']}: rule {state.recipe['rule']}, layout {state.recipe['layout']}")
