"""How plans, runs and states are shown: tables for people, plain data for --json."""

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from k2convert.calibrate.columns import MIN_TOKENS
from k2convert.cli.console import format_bytes, format_rate, format_seconds, format_span, print_line, print_table
from k2convert.cli.pruning_view import pruning_document, show_pruning
from k2convert.hub.branch import branch_name
from k2convert.job.estimate import Estimate
from k2convert.job.prepare import Job
from k2convert.plan.plan import action_counts
from k2convert.plan.recipe import Recipe
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.records.journal import JobState
from k2convert.records.ledger import metrics_document

STALE_SECONDS: Final = 30.0  # a running process reports every two seconds


def plan_document(job: Job, *, source: str) -> dict[str, Any]:
    """Return a plan as plain data. `source` is the source as the user wrote it."""
    plan, limits = job.plan, job.limits
    document: dict[str, Any] = {
        "source": source,
        "destination": str(job.destination),
        "family": plan.family,
        "recipe": plan.recipe.document(),
        "fingerprint": job.description.fingerprint,
        "devices": list(limits.devices),
        "workers": limits.workers,
        "actions": action_counts(plan),
        "tensor_bytes_in": job.source.checkpoint.tensor_bytes,
        "tensor_bytes_out": plan.data_bytes,
        "num_tensors_out": sum(len(shard.outputs) for shard in plan.jobs),
        "disk_needed": limits.disk_needed,
        "disk_free": limits.disk_free,
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
    document |= calibration_document(job) | pruning_document(job)
    return document | _hub_document(job) if job.uses_hub else document


def calibration_document(job: Job) -> dict[str, Any]:
    """Return what a job takes from its statistics as plain data; empty without statistics."""
    found = job.calibrated
    if found is None or job.calibration is None:
        return {}
    return {
        "calibration": {
            "file": str(job.calibration.statistics.path),
            "statistics": found.statistics,
            "texts": [name for name, _ in found.texts],
            "tokens": found.tokens,
            "weighted": found.weighted,
            "norm_scaling": found.norm_scaling,
            "fallback_experts": sum(len(layer.fallback) for layer in found.layers.values()),
            "scaled_channels": sum(
                count for layer in found.layers.values() for exponent, count in layer.exponents.items() if exponent
            ),
            "scaled_layers": sum(any(layer.exponents.keys() - {0}) for layer in found.layers.values()),
        }
    }


def _show_calibration(job: Job) -> None:
    for found in calibration_document(job).values():
        texts = f"{len(found['texts'])} text{'s' if len(found['texts']) != 1 else ''}, {found['tokens']:,} tokens"
        print_line(f"statistics: {found['file']}: {texts}")
        if num_few := found["fallback_experts"]:
            print_line(f"{num_few:,} experts have fewer than {MIN_TOKENS} tokens: importance drawn toward an even one")
        if found["norm_scaling"]:
            layers = f"{found['scaled_layers']} layer{'s' if found['scaled_layers'] != 1 else ''}"
            print_line(
                f"norm scaling: {found['scaled_channels']:,} channels of {layers} are multiplied by powers of two, "
                "which is exact"
            )


def _hub_document(job: Job) -> dict[str, Any]:
    target = job.target
    return {
        "work_folder": str(job.destination.folder),
        "source_commit": job.source.revision,
        "max_disk": job.limits.disk_allowed,
        "branch": branch_name(job.digest) if target is not None else None,
        "private": target.private if target is not None else None,
        "notices": list(target.notices) if target is not None else [],
    }


def show_plan(job: Job, *, source: str) -> None:
    """Print a dry run. `source` is the source as the user wrote it."""
    document, recipe = plan_document(job, source=source), job.plan.recipe
    print_line(
        f"{source} ({job.plan.family}) -> {job.destination}: {recipe.name}, {recipe.target}, rule {recipe.rule}, "
        f"layout {recipe.layout}, {recipe.activations}, roles {', '.join(recipe.roles)}"
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
            "copy, times powers of two" if name == "scale" else name,
            f"{action['source_tensors']:,}",
            format_bytes(action["bytes_in"]),
            f"{action['tensors']:,}",
            format_bytes(action["bytes_out"]),
        )
        for name, action in document["actions"].items()
    ]
    print_table("tensors", ("action", "source tensors", "in", "result tensors", "out"), rows)
    show_pruning(job)
    _show_calibration(job)
    if job.uses_hub:
        _show_hub(job)
    print_line(f"disk: needs {format_bytes(job.limits.disk_needed)}, free {format_bytes(job.limits.disk_free)}")


def _show_hub(job: Job) -> None:
    if job.source.remote is not None:
        print_line(f"source: {job.source.remote.repo} at commit {job.source.remote.commit}")
    if job.target is not None:
        kind = "private" if job.target.private else "public"
        print_line(f"publishes to {job.target.name} ({kind}) through its branch {branch_name(job.digest)}")
    print_line(f"uses at most {format_bytes(job.limits.disk_allowed)} of disk at one time")


def estimate_document(found: Estimate) -> dict[str, Any]:
    """Return an estimate as plain data; rates are bytes a second, null if not measured."""
    least, most = found.seconds or (None, None)
    return {
        "seconds": None if least is None or most is None else [round(least), round(most)],
        "without_network": True,
        "bytes_in": found.bytes_in,
        "bytes_out": found.bytes_out,
        "read_rate": found.read_rate,
        "write_rate": found.write_rate,
        "convert_rate": found.convert_rate,
        "memory_bytes": found.memory_bytes,
        "memory_available": found.memory_available,
    }


def show_estimate(found: Estimate) -> None:
    """Print how long the rest of a job will take, and its memory."""
    available = format_bytes(found.memory_available)
    print_line(f"memory: needs about {format_bytes(found.memory_bytes)}, available {available}")
    if not found.bytes_in:
        print_line("time: every shard is done")
        return
    if found.seconds is not None:
        print_line(f"time: {conversion_span(found)}")


def conversion_span(found: Estimate) -> str:
    """Return how long converting will take, and the rates that this comes from."""
    if found.seconds is None:
        return "not measured"
    rates = ", ".join(
        f"{word} {format_rate(rate)}" if rate else f"{word} not measured"
        for word, rate in (
            ("read", found.read_rate),
            ("convert", found.convert_rate),
            ("write", found.write_rate),
        )
    )
    return f"{format_span(*found.seconds)}, an estimate from a second of measuring here ({rates})"


def show_network(job: Job, found: Estimate) -> None:
    """Print what goes through the network, if anything does."""
    if job.uses_hub and found.bytes_in:
        down = f"download {format_bytes(sum(job.limits.source_bytes.values()))}" if job.source.remote else ""
        up = f"upload {format_bytes(found.bytes_out)}" if job.target is not None else ""
        print_line(f"network: not measured: {' and '.join(filter(None, (down, up)))}")


def run_document(job: Job, totals: Mapping[str, WeightMetrics], seconds: float) -> dict[str, Any]:
    """Return a finished run as plain data."""
    return {
        "destination": str(job.destination.folder),
        "shards": len(job.plan.jobs),
        "resumed_shards": len(job.finished),
        "seconds": round(seconds, 3),
        "tensor_bytes_out": job.plan.data_bytes,
        "totals": {role: metrics_document(metrics) for role, metrics in totals.items()},
        **calibration_document(job),
        **pruning_document(job),
    }


def show_run(job: Job, totals: Mapping[str, WeightMetrics], seconds: float) -> None:
    """Print what a run did, and the weight error."""
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
    show_pruning(job)
    fresh = sum(s.bytes_in for s in job.plan.jobs if s.name not in job.finished)
    rate = f", {format_bytes(fresh / seconds)}/s in" if fresh and seconds else ""
    print_line(f"{job.destination.folder}: {len(job.plan.jobs)} shards, {format_seconds(seconds)}{rate}")


def status_document(state: JobState) -> dict[str, Any]:
    """Return a job's state as plain data."""
    return {
        "complete": state.is_complete,
        "running": state.is_running,
        "shards": len(state.job.shards),
        "finished_shards": len(state.finished),
        "bytes": sum(state.job.shards.values()),
        "finished_bytes": sum(state.job.shards[name] for name in state.finished if name in state.job.shards),
        "pending": [name for name in state.job.shards if name not in state.finished],
        "progress": state.progress,
        "progress_age": round(state.progress_age) if state.progress is not None else None,
        "resume": None if state.command is None or state.is_complete else state.command.line(here=str(Path.cwd())),
        "recipe": state.job.recipe,
        "fingerprint": state.job.fingerprint,
        **({} if state.job.pruning is None else {"pruning": state.job.pruning.to_dict()}),
    }


def show_status(destination: Path, state: JobState) -> None:
    """Print a job's state."""
    document = status_document(state)
    word = "complete" if state.is_complete else "running" if state.is_running else "not finished"
    shards = f"{destination}: {word}: {document['finished_shards']} of {document['shards']} shards"
    if state.progress is not None:
        print_line(shards)
        show_progress(state.progress, state.progress_age)
    else:
        print_line(f"{shards}, {format_bytes(document['finished_bytes'])} of {format_bytes(document['bytes'])}")
    print_line(
        f"recipe {state.job.recipe['name']}: rule {state.job.recipe['rule']}, layout {state.job.recipe['layout']}"
    )
    if state.job.pruning is not None:
        print_line(state.job.pruning.line)


def show_progress(progress: Mapping[str, Any], age: float) -> None:
    """Print what the running process last said about its phases."""
    for name, phase in progress["phases"].items():
        done, total, rate = phase["done"], phase["total"], phase["rate"]
        if unit := phase.get("unit"):
            speed = f", {rate:,.0f} tokens/s per layer" if rate and done < total else ""
            layer = f"layer {min(done // unit + 1, total // unit)} of {total // unit}"
            print_line(f"{name}: {layer} on {unit:,} tokens{speed}")
            continue
        speed = f", {format_rate(rate)}" if rate and done < total else ""
        print_line(f"{name}: {format_bytes(min(done, total))} of {format_bytes(total)}{speed}")
    if age > STALE_SECONDS:
        print_line(f"the running process has reported nothing for {format_seconds(age)}")
    elif progress["seconds_left"]:
        print_line(f"ETA {format_seconds(progress['seconds_left'])}")


def show_recipe(recipe: Recipe) -> None:
    """Print a recipe by its name: whom it serves, what it converts and how. Lines have at most 80 columns."""
    family, roles = recipe.family or "any family", ", ".join(recipe.roles)
    terms = f"{family}; {roles}; rule {recipe.rule}; {recipe.activations}; layout {recipe.layout}"
    print_line(recipe.name)
    for text in (recipe.purpose, terms):
        for line in textwrap.wrap(text, 76, break_long_words=False, break_on_hyphens=False):
            print_line(f"    {line}")
