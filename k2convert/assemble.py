"""What stands beside the shards: index, configs, sidecars and the ledger, all derived from plan and records.

Written when every shard is recorded, config.json and the index last of all: a folder without them is unfinished, and
no engine takes it for a checkpoint. Assembling again restores what was lost or changed and leaves alone what is right.
"""

import json
import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from k2convert import __version__
from k2convert.checkpoint.index import CONFIG_NAME, INDEX_NAME, Checkpoint, dump_json, read_json_file
from k2convert.checkpoint.layouts import (
    HF_QUANT_CONFIG_NAME,
    MODELOPT,
    hf_quant_config,
    quantized_config,
    unquantized_config,
)
from k2convert.checkpoint.sidecars import LEDGER_NAME, list_sidecars
from k2convert.checkpoint.writer import Content, holds_exactly, make_folder, write_atomically
from k2convert.errors import K2ConvertError
from k2convert.formats.metrics import WeightMetrics, total_metrics
from k2convert.journal import ShardRecord
from k2convert.plan import Plan


def summarize(records: Mapping[str, ShardRecord]) -> dict[str, WeightMetrics]:
    """Totals of all measured projections, by role and under "total"."""
    by_role: dict[str, list[WeightMetrics]] = defaultdict(list)
    for _, record in sorted(records.items()):
        for projection in record.projections:
            if projection.metrics is not None:
                by_role[projection.role].append(WeightMetrics.from_dict(projection.metrics))
    totals = {role: total_metrics(found) for role, found in sorted(by_role.items())}
    if totals:
        totals["total"] = total_metrics([m for found in by_role.values() for m in found])
    return totals


def read_totals(destination: Path) -> dict[str, WeightMetrics]:
    """The totals that the ledger of a finished conversion holds, as `summarize` made them."""
    found: dict[str, dict[str, Any]] = read_json_file(destination / LEDGER_NAME).get("totals", {})
    return {role: WeightMetrics.from_dict(metrics) for role, metrics in found.items()}


def index_document(plan: Plan, source: Checkpoint) -> dict[str, Any]:
    """model.safetensors.index.json of the result; `total_size` is the exact sum of tensor bytes."""
    weight_map = {output.name: job.name for job in plan.jobs for output in job.outputs}
    metadata = {**source.index_metadata, "total_size": plan.data_bytes}
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


def config_document(plan: Plan, source: Checkpoint) -> dict[str, Any]:
    """config.json of the result: the source's, but for its one quantization_config."""
    recipe = plan.recipe
    if recipe.target == "bf16":
        return unquantized_config(source.config)
    return quantized_config(
        source.config,
        layout=recipe.layout,
        activations=recipe.activations,
        kv_cache=recipe.kv_cache,
        excludes=list(plan.excludes),
        version=__version__,
    )


def ledger_document(
    *, plan: Plan, source: Checkpoint, records: Mapping[str, ShardRecord], fingerprint: dict[str, Any], repo: str | None
) -> dict[str, Any]:
    """k2convert.json: from what, by which recipe and versions, every shard's hash, and what was lost in numbers."""
    return {
        "k2convert": __version__,
        "source": {
            "family": plan.family,
            "repo": repo,
            "revision": fingerprint["source_revision"],
            "headers": {shard: header.digest for shard, header in sorted(source.headers.items())},
        },
        "recipe": plan.recipe.document(),
        "fingerprint": fingerprint,
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "shards": {
            name: {"blake3": record.blake3, "bytes": record.file_bytes, "tensors": record.num_tensors}
            for name, record in sorted(records.items())
        },
        "totals": {role: metrics.to_dict() for role, metrics in summarize(records).items()},
    }


def assembled_files(
    *,
    plan: Plan,
    source: Checkpoint,
    destination: Path,
    records: Mapping[str, ShardRecord],
    fingerprint: dict[str, Any],
    repo: str | None = None,
) -> Iterator[tuple[Path, Content]]:
    """Everything that is not a shard, by relative path, as it has to stand in `destination`; config.json comes last."""
    for relative in list_sidecars(source.folder):
        yield relative, source.folder / relative
    ledger = ledger_document(plan=plan, source=source, records=records, fingerprint=fingerprint, repo=repo)
    yield Path(LEDGER_NAME), dump_json(_keep_versions(destination / LEDGER_NAME, ledger))
    recipe = plan.recipe
    if recipe.target == "nvfp4" and recipe.layout == MODELOPT:
        yield (
            Path(HF_QUANT_CONFIG_NAME),
            hf_quant_config(
                activations=recipe.activations,
                kv_cache=recipe.kv_cache,
                excludes=list(plan.excludes),
                version=__version__,
            ),
        )
    yield Path(INDEX_NAME), dump_json(index_document(plan, source))
    yield Path(CONFIG_NAME), dump_json(config_document(plan, source))


def assemble(
    *,
    plan: Plan,
    source: Checkpoint,
    destination: Path,
    records: Mapping[str, ShardRecord],
    fingerprint: dict[str, Any],
    repo: str | None = None,
) -> list[str]:
    """Write everything that is not a shard, but for what has the right bytes; the index and config.json last.

    Returns the paths of all of it, relative to the destination.
    """
    names: list[str] = []
    files = assembled_files(
        plan=plan, source=source, destination=destination, records=records, fingerprint=fingerprint, repo=repo
    )
    for relative, content in files:
        names.append(str(relative))
        target = destination / relative
        if not holds_exactly(target, content):
            make_folder(target.parent)
            write_atomically(target, content)
    return names


def _keep_versions(path: Path, ledger: dict[str, Any]) -> dict[str, Any]:
    """The ledger that is there if it says the same but for versions: those of the run that converted."""
    try:
        found = read_json_file(path)
    except K2ConvertError:
        return ledger
    same = json.loads(dump_json(ledger | {"versions": found.get("versions")})) == found
    return found if same and isinstance(found["versions"], dict) else ledger
