"""What stands beside the shards: index, configs, sidecars and the ledger, all derived from plan and records.

Written when every shard is recorded, config.json and the index last of all: a folder without them is unfinished, and
no engine takes it for a checkpoint. Assembling again restores what was lost or changed and leaves alone what is right.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from k2convert import __version__
from k2convert.checkpoint.files import Content, dump_json, holds_exactly, make_folder, write_atomically
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.layouts import MODELOPT, hf_quant_config, quantized_config, unquantized_config
from k2convert.checkpoint.names import CONFIG_NAME, HF_QUANT_CONFIG_NAME, INDEX_NAME, LEDGER_NAME
from k2convert.checkpoint.sidecars import list_sidecars
from k2convert.plan.plan import Plan
from k2convert.records.ledger import _keep_versions, ledger_document
from k2convert.records.shard_record import ShardRecord


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
