"""Views of plans, runs and states: tables for people, plain data for --json. Also: the question at the end."""

import math
import sys
from collections.abc import Mapping
from typing import Any, Final

import typer

from k2convert.cli.console import format_seconds, print_line, print_table
from k2convert.errors import HubError, counted, format_bytes
from k2convert.hub.branch import branch_name
from k2convert.hub.client import MAIN, Hub
from k2convert.hub.preflight import Target
from k2convert.hub.request_errors import redacted
from k2convert.job.locations import Destination
from k2convert.job.prepare import Job
from k2convert.plan.plan import action_counts
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.records.ledger import TOTAL, metrics_document

_DISK_RATE: Final = 1e9  # bytes a second
_NETWORK_RATE: Final = 1e9 / 8


def plan_document(job: Job, *, source: str) -> dict[str, Any]:
    """Return a plan as plain data. `source` is the source as the user wrote it."""
    plan = job.plan
    limits = job.limits
    document: dict[str, Any] = {
        "source": source,
        "destination": str(job.destination),
        "family": plan.family,
        "recipe": plan.recipe.document(),
        "fingerprint": job.description.fingerprint,
        "workers": limits.workers,
        "actions": action_counts(plan),
        "tensor_bytes_in": job.source.checkpoint.tensor_bytes,
        "tensor_bytes_out": plan.data_bytes,
        "num_tensors_out": sum(shard.num_outputs for shard in plan.jobs),
        "disk_needed": limits.disk_needed,
        "disk_free": limits.disk_free,
        "exclude_modules": list(plan.excludes),
        "shards": [
            {
                "name": shard.name,
                "tensors": shard.num_outputs,
                "bytes_in": shard.bytes_in,
                "bytes_out": shard.data_bytes,
                "finished": shard.name in job.finished,
            }
            for shard in plan.jobs
        ],
    }
    if job.uses_hub:
        target = job.target
        document |= {
            "work_folder": str(job.destination.folder),
            "source_commit": job.source.revision,
            "max_disk": limits.disk_allowed,
            "branch": None if target is None else branch_name(job.digest),
            "private": None if target is None else target.private,
            "notices": [] if target is None else list(target.notices),
        }
    return document


def show_plan(job: Job, document: Mapping[str, Any]) -> None:
    recipe = job.plan.recipe
    print_line(
        f"{document['source']} ({job.plan.family}) -> {job.destination}: {recipe.name}, {recipe.target}, "
        f"rule {recipe.rule}, layout {recipe.layout}, {recipe.activations}, roles {', '.join(recipe.roles)}"
    )
    rows = [
        (
            shard["name"],
            f"{shard['tensors']:,}",
            format_bytes(shard["bytes_in"]),
            format_bytes(shard["bytes_out"]),
            "done" if shard["finished"] else "to do",
        )
        for shard in document["shards"]
    ]
    shown = rows
    if len(rows) > 12:
        shown = [*rows[:4], ("...", "", "", "", ""), *rows[-2:]]
    print_table(counted(len(rows), "shard"), ("shard", "tensors", "in", "out", "state"), shown)
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
    if job.uses_hub:
        if job.source.remote is not None:
            print_line(f"source: {job.source.remote.repo} at commit {job.source.remote.commit}")
        if job.target is not None:
            kind = "private" if job.target.private else "public"
            print_line(f"publishes to {job.target.name} ({kind}) through its branch {branch_name(job.digest)}")
    needs = format_bytes(job.limits.disk_needed)
    free = format_bytes(job.limits.disk_free)
    allowed = ""
    if job.uses_hub:
        allowed = f" at once, may use {format_bytes(job.limits.disk_allowed)}"
    print_line(f"disk: needs {needs}{allowed}, free {free}")


def left_document(job: Job) -> dict[str, int]:
    """Return the bytes that a job still has to read and to write, and the minutes of both at 1 GB/s."""
    left = [shard for shard in job.plan.jobs if shard.name not in job.finished]
    bytes_in = sum(shard.bytes_in for shard in left)
    bytes_out = sum(shard.data_bytes for shard in left)
    return {
        "bytes_to_read": bytes_in,
        "bytes_to_write": bytes_out,
        "minutes_at_1_gb_s": _minutes(bytes_in + bytes_out, _DISK_RATE),
    }


def show_left(job: Job) -> None:
    """Print what a job still has to read and to write."""
    left = left_document(job)
    if not left["bytes_to_write"]:
        print_line("every shard is done")
        return
    amounts = f"reads {format_bytes(left['bytes_to_read'])}, writes {format_bytes(left['bytes_to_write'])}"
    print_line(f"{amounts}: {counted(left['minutes_at_1_gb_s'], 'minute')} at 1 GB/s, one after the other")


def show_network(job: Job) -> None:
    """Print what a job with the Hub still has to transfer, and how long that takes on a fast and on a slow line."""
    left = left_document(job)
    down = sum(job.limits.source_bytes.values()) if job.source.remote else 0
    up = left["bytes_to_write"] if job.target is not None else 0
    if not left["bytes_to_write"] or not (down or up):
        return
    ways = [f"{verb} {format_bytes(count)}" for verb, count in (("downloads", down), ("uploads", up)) if count]
    slow, fast = (_minutes(max(down, up), rate) for rate in (_NETWORK_RATE, 10 * _NETWORK_RATE))
    print_line(f"network: {' and '.join(ways)}: {counted(slow, 'minute')} at 1 Gbit/s, {fast:,} at 10 Gbit/s")


def _minutes(num_bytes: int, rate: float) -> int:
    return max(round(num_bytes / rate / 60), 1)


def run_document(job: Job, totals: Mapping[str, WeightMetrics], seconds: float) -> dict[str, object]:
    return {
        "destination": str(job.destination.folder),
        "shards": len(job.plan.jobs),
        "resumed_shards": len(job.finished),
        "seconds": round(seconds, 3),
        "tensor_bytes_out": job.plan.data_bytes,
        "totals": {role: metrics_document(metrics) for role, metrics in totals.items()},
    }


def show_run(job: Job, totals: Mapping[str, WeightMetrics], seconds: float) -> None:
    rows = [
        (
            role,
            f"{m.num_weights:,}",
            f"{m.sqnr_db:.2f} dB" if math.isfinite(m.sqnr_db) else "exact",
            f"{m.relative_mse:.5f}",
            f"{m.achieved_to_max:.3f}" if math.isfinite(m.achieved_to_max) else "",
        )
        for role, m in totals.items()
    ]
    if rows:
        columns = ("role", "weights", "SQNR", "relative MSE", "error / max")
        print_table("weight error against the source", columns, rows)
    if TOTAL in totals and (words := totals[TOTAL].cast_words) is not None:
        print_line(f"cast: {words}")
    fresh = sum(s.bytes_in for s in job.plan.jobs if s.name not in job.finished)
    rate = ""
    if fresh and seconds:
        rate = f", {format_bytes(fresh / seconds)}/s in"
    print_line(f"{job.destination.folder}: {counted(len(job.plan.jobs), 'shard')}, {format_seconds(seconds)}{rate}")


def show_commit(hub: Hub, destination: Destination, commit: str) -> None:
    from k2convert.cli.validate import print_serve

    revision = None
    if destination.revision != MAIN:
        revision = destination.revision
    branch = "" if revision is None else f", branch {revision},"
    print_line(f"{redacted(hub.endpoint)}/{destination.repo}{branch} at commit {commit}")

    print_serve(str(destination.repo), folder=destination.folder, revision=revision)


def confirm(target: Target, *, total_bytes: int, yes: bool) -> None:
    """Ask before publishing, unless `yes`; raises HubError without a terminal or without consent."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise HubError(f"{target.repo}: publishing without a terminal needs --yes.")
    kind = "private" if target.private else "PUBLIC"
    if not typer.confirm(f"Publish {format_bytes(total_bytes)} to the {kind} repository {target.name}?"):
        raise HubError(f"{target.repo}: not published.")
