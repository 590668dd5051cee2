"""The files next to the shards: index, configs, sidecars and the ledger, derived from plan and records.

They are written when every shard is recorded, the index and config.json last: without them no engine takes the folder
for a checkpoint. Assembling again restores files that were lost or changed, and keeps correct ones.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from k2convert import __version__
from k2convert.checkpoint.files import (
    Content,
    config_differences,
    discard_file,
    dump_json,
    file_digest,
    holds_exactly,
    parse_json_object,
    read_text_file,
    write_atomically,
)
from k2convert.checkpoint.folders import make_folder
from k2convert.checkpoint.index import Checkpoint, list_sidecars
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.layouts.layout import QUANTIZATION_KEYS, Quantization, unquantized_config
from k2convert.checkpoint.names import (
    CONFIG_NAME,
    EVALUATION_NAME,
    HF_QUANT_CONFIG_NAME,
    INDEX_NAME,
    LEDGER_NAME,
    WORK_FOLDER,
)
from k2convert.errors import CheckpointError, InvalidCheckpointError
from k2convert.job.prepare import Job
from k2convert.models.projections import Projection
from k2convert.plan.plan import ConvertStep, Plan
from k2convert.records.fingerprint import JobDescription, Source
from k2convert.records.ledger import ShardRecord, build_ledger, encode_ledger


def config_document(plan: Plan, source: Checkpoint) -> dict[str, Any]:
    """Return the result's config.json: the source's, except for the quantization_config if weights were converted."""
    recipe = plan.recipe
    config = source.parse_config()
    if recipe.target == "bf16":
        return unquantized_config(config)
    return LAYOUTS[recipe.layout].quantized_config(config, _declared(plan), version=__version__)


def _declared(plan: Plan) -> Quantization:
    recipe = plan.recipe
    return Quantization(
        recipe.activations, recipe.kv_cache, plan.excludes, plan.banks, plan.fp8_targets, plan.fp8_layers
    )


def encode_config(plan: Plan, source: Source) -> bytes:
    """Return the result's config.json; raises CheckpointError if the source's changed, or would differ in more."""
    path = source.checkpoint.folder / CONFIG_NAME
    if read_text_file(path) != source.checkpoint.config_text:
        raise CheckpointError(
            f"{path}: it changed after the job began. Restore it and run the same command again, "
            "or choose a new destination."
        )
    content = dump_json(config_document(plan, source.checkpoint))
    result = parse_json_object(content.decode(), where=CONFIG_NAME)
    for key, _, _ in config_differences(source.checkpoint.parse_config(), result, unread=QUANTIZATION_KEYS):
        raise InvalidCheckpointError(
            f"{CONFIG_NAME}: {key} would differ from the source's. It was not written. Run the same command again; "
            "if this happens twice, it is a defect of k2convert."
        )
    return content


def assembled_files(job: Job, records: Mapping[str, ShardRecord]) -> Iterator[tuple[Path, Content]]:
    """Yield the relative path and content of every file that is not a shard, config.json last."""
    plan = job.plan
    source = job.source.checkpoint
    recipe = job.plan.recipe
    config = encode_config(plan, job.source)
    for relative in list_sidecars(source.folder):
        yield relative, source.folder / relative
    ledger = build_ledger(
        plan=plan,
        source=job.source,
        records=records,
        fingerprint=job.description.fingerprint,
        calibration=job.calibrated,
    )
    yield Path(LEDGER_NAME), encode_ledger(job.destination.folder / LEDGER_NAME, ledger)
    hf_quant_config = LAYOUTS[recipe.layout].hf_quant_config
    if recipe.target == "nvfp4" and hf_quant_config is not None:
        yield Path(HF_QUANT_CONFIG_NAME), dump_json(hf_quant_config(_declared(plan), __version__))
    yield Path(INDEX_NAME), _encode_index(plan, {**source.index_metadata, "total_size": plan.data_bytes})
    yield Path(CONFIG_NAME), config


def _encode_index(plan: Plan, metadata: Mapping[str, Any]) -> bytes:
    """Return the index as `dump_json` would, without a document or the names of a million entries in memory."""
    begin, _, end = dump_json({"metadata": metadata, "weight_map": {"": ""}}).partition(b'"": ""')
    content = io.BytesIO()
    content.write(begin)
    comma = ""
    for name, shard in _placed_names(plan):
        content.write(
            f"{comma}{json.dumps(name, ensure_ascii=False)}: {json.dumps(shard, ensure_ascii=False)}".encode()
        )
        comma = ",\n    "
    content.write(end)
    return content.getvalue()


def _placed_names(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the result's tensors and their shards by name. Nothing else is named like the tensors of a projection."""
    tensors: list[tuple[str, str, ConvertStep | None, Projection | None]] = []
    for shard in plan.jobs:
        for step in shard.steps:
            if isinstance(step, ConvertStep):
                tensors += ((f"{member.module}.", shard.name, step, member) for member in step.members)
            else:
                tensors += ((output.name, shard.name, None, None) for output in step.outputs)
    tensors.sort(key=itemgetter(0))
    for name, shard, step, member in tensors:
        if step is None or member is None:
            yield name, shard
        else:
            yield from ((output, shard) for output in sorted(output.name for output in step.outputs_of(member)))


def assemble(job: Job, records: Mapping[str, ShardRecord]) -> list[str]:
    """Write every file that is not a shard, unless it is already correct; returns their relative paths.

    Copies of what the source no longer has are removed.
    """
    names: list[str] = []
    folder = job.destination.folder
    for relative, content in assembled_files(job, records):
        names.append(str(relative))
        target = folder / relative
        if not holds_exactly(target, content):
            if isinstance(content, bytes) and relative.name == CONFIG_NAME and (folder / EVALUATION_NAME).is_file():
                from k2convert.evaluation.plan import keep_evaluation

                if not keep_evaluation(folder, content):
                    job.hub.warn(
                        f"{folder}: {EVALUATION_NAME} measured another config.json: "
                        f"it is now {WORK_FOLDER}/{EVALUATION_NAME}"
                    )
            make_folder(target.parent)
            write_atomically(target, content)
    for name in gone_files(job.description, names):
        if (folder / name).is_file() and file_digest(folder / name) == job.description.copies[name]:
            discard_file(folder / name)
    return names


def gone_files(description: JobDescription, names: Iterable[str]) -> set[str]:
    """Return what the job once copied from its source and no longer does: not one of the `names`."""
    return description.copies.keys() - set(names)


def is_complete(job: Job, records: Mapping[str, ShardRecord]) -> bool:
    """Return whether every shard is recorded and all other files are correct. Reads the sidecars."""
    if len(records) != len(job.plan.jobs):
        return False
    files = assembled_files(job, records)
    return all(holds_exactly(job.destination.folder / relative, content) for relative, content in files)
