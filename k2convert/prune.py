"""`k2convert prune`: copy a checkpoint with some experts of each MoE layer. The copy is a source like any other.

    experts       the kept ones have the numbers 0, 1, 2, ..., in the source's order; the others have no tensors
    router        weight and e_score_correction_bias have the rows of the kept experts
    config.json   n_routed_experts is the new count, where the model reads it: text_config of K2.5 and later

Nothing else differs. Shards keep their names and the order of their tensors. src/reap/prune.py of CerebrasResearch/reap
and REAPPruningModifier of llm-compressor change the same parts of a loaded model.

The file of --keep has one of three forms. Layers and experts have the numbers of the source:

    list            {"experts": {"1": [0, 5, ..], ..}, "of": 384}; `of`, the source's experts per layer, is optional
    ledger          k2convert.json of a result that version 0.3 pruned: its `pruning` is such a list
    REAP's report   {"model.layers.1.mlp": [0, 5, ..], ..}: report_path of llm-compressor's REAPPruningModifier

DEST/.k2convert/prune.json says which source and which experts DEST is made from; command.json is what `status` shows to
resume. A shard that has its final name is finished: it was synced before it was renamed. config.json comes last.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from k2convert.checkpoint.files import (
    Content,
    dump_json,
    holds_exactly,
    is_there,
    list_folder,
    mapping_or_empty,
    num_bytes_of,
    parse_json_object,
    read_text_file,
    write_atomically,
)
from k2convert.checkpoint.folders import make_folder
from k2convert.checkpoint.header import TensorInfo, encode_header
from k2convert.checkpoint.index import Checkpoint, list_sidecars, open_checkpoint
from k2convert.checkpoint.names import (
    COMMAND_NAME,
    CONFIG_NAME,
    INDEX_NAME,
    LOCK_NAME,
    LOST_FOUND,
    PRUNE_NAME,
    WORK_FOLDER,
)
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.checkpoint.writer import ALIGNMENT, ShardWriter
from k2convert.errors import (
    DestinationError,
    MalformedFileError,
    PlanError,
    ResumeError,
    check_disk,
    counted,
    quoted,
    remedy,
)
from k2convert.job.locations import check_destination, refuse_symlinks
from k2convert.job.resources import free_bytes
from k2convert.models import detect_family, parse_tensor_names
from k2convert.models.config import EXPERTS_KEY, key_of, stated_count, text_config
from k2convert.models.names import Architecture, Family, Role, TensorName
from k2convert.models.projections import SOURCE_REMEDY, check_model, check_source_form
from k2convert.records.command import JobCommand, keep_command
from k2convert.records.document import Count, LayerNumber, encode, parse, read_document
from k2convert.records.events import SILENT, Events
from k2convert.records.fingerprint import changed_shards, local_identity, source_digest
from k2convert.records.work_log import lock_destination

_REAP_MODULE: Final = re.compile(r"(?:\w+\.)*layers\.(0|[1-9][0-9]{0,5})\.\w+")
_NOTES: Final = ("chosen_by", "left_out")  # keys of lists that version 0.3 wrote or read, about the scores
_LIST_REMEDY: Final = (
    'Pass {"experts": {"1": [0, 5], ...}} or a REAP report of llm-compressor; `k2convert guide prune` shows the forms.'
)

KeptExperts = Mapping[int, tuple[int, ...]]
"""For each MoE layer the numbers of the kept experts in the source, ascending, equally many in each layer."""

PIECE_BYTES: Final = 16 << 20  # of a tensor, in memory at once; routers are read whole: 15 MB in K3


@dataclass(frozen=True, slots=True)
class _List:
    """A list of experts to keep."""

    experts: dict[LayerNumber, tuple[int, ...]]
    num_source_experts: Annotated[Count | None, Field(alias="of")] = None


@dataclass(frozen=True, slots=True)
class _Begun:
    """Origin of DEST: digest of headers, identity of each shard, kept experts. Small files of the source may change."""

    source_headers: str
    source: dict[str, str]
    experts: dict[LayerNumber, tuple[Count, ...]]


@dataclass(frozen=True, slots=True)
class PrunedTensor:
    """One tensor of the copy: where it is in the source, its new name, and the rows that are kept, None for all."""

    source: TensorInfo
    name: str
    rows: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.rows is None:
            return self.source.shape
        return (len(self.rows), *self.source.shape[1:])

    @property
    def num_bytes(self) -> int:
        if self.rows is None:
            return self.source.num_bytes
        return self.source.num_bytes // self.source.shape[0] * len(self.rows)


@dataclass(frozen=True, slots=True)
class PrunedShard:
    """One shard of the copy: the bytes before its data, and its tensors in file order."""

    name: str
    header: bytes
    tensors: tuple[PrunedTensor, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Pruning:
    """A planned copy. Nothing has been written yet; `finished` are the shards that an earlier run wrote."""

    source: Checkpoint
    destination: Path
    kept_experts: KeptExperts
    num_source_experts: int
    shards: tuple[PrunedShard, ...]
    finished: frozenset[str]

    @property
    def num_experts(self) -> int:
        return len(next(iter(self.kept_experts.values())))

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def finished_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards if shard.name in self.finished)


def plan_pruning(source_folder: Path, destination: Path, keep: Path) -> Pruning:
    """Plan a copy with the experts that the file `keep` lists; raises PlanError, CheckpointError, DestinationError.

    ResumeError if the destination is made from something else, DiskFullError if the rest has no room.
    """
    with remedy(SOURCE_REMEDY):
        source = open_checkpoint(source_folder)
        sidecars = list_sidecars(source_folder)
    check_destination(destination, source=source_folder)
    family = detect_family(source)
    architecture = family.read_architecture(source.config, str(source.folder))
    names = parse_tensor_names(source, family=family)
    check_source_form(source, names, family=family)
    check_model(source, names, architecture, family)
    kept_experts = read_list(keep, architecture, source.config)
    shards = tuple(_shards(source, names, family, kept_experts))
    _check_begun(destination, _begun(source, kept_experts))
    finished = frozenset(shard.name for shard in shards if _is_written(destination / shard.name, shard))
    refuse_symlinks(destination, [*(Path(shard.name) for shard in shards), *sidecars], finished=finished)
    pruning = Pruning(source, destination, kept_experts, architecture.num_experts, shards, finished)
    small = sum(num_bytes_of(source.folder / path) for path in sidecars) + len(_encode_index(pruning))
    check_disk(
        f"{destination}: the copy",
        needed=pruning.num_bytes - pruning.finished_bytes + small,
        allowed=free_bytes(destination),
        remedy="Free some space, or choose a folder on a different disk.",
    )
    return pruning


def copy_pruned(pruning: Pruning, *, command: JobCommand | None = None, events: Events = SILENT) -> None:
    """Write what is left of a planned copy; raises DestinationError, SourceReadError, DiskFullError, LockedError.

    `command` is saved: `status` names it while the copy is not finished.
    """
    folder = pruning.destination
    make_folder(folder / WORK_FOLDER)
    with lock_destination(folder, events=events), closing(ShardReader(pruning.source.path)) as reader:
        begun = _begun(pruning.source, pruning.kept_experts)
        _check_begun(folder, begun)  # another process may have begun since the plan
        record = folder / WORK_FOLDER / PRUNE_NAME
        if not record.exists():
            write_atomically(record, encode(begun))
        if command is not None:
            keep_command(folder, command)
        for shard in pruning.shards:
            if not _is_written(folder / shard.name, shard):
                _write_shard(folder / shard.name, shard, reader, events)
                events.shard_finished(shard.name)
        for relative, content in _other_files(pruning):
            if not holds_exactly(folder / relative, content):
                if is_there(folder / relative):
                    events.note(f"{relative}: differs at the source, and is taken over")
                make_folder((folder / relative).parent)
                write_atomically(folder / relative, content)


def _shards(
    source: Checkpoint, names: Mapping[str, TensorName], family: Family, kept_experts: KeptExperts
) -> Iterator[PrunedShard]:
    """Yield the shards of the copy. One with nothing but dropped experts is left out."""
    numbers = {layer: {old: new for new, old in enumerate(experts)} for layer, experts in kept_experts.items()}
    for shard, header in source.headers.items():
        in_order = sorted(header.tensors.values(), key=lambda tensor: tensor.begin)
        pruned = (_pruned(tensor, names[tensor.name], family, numbers) for tensor in in_order)
        tensors = tuple(tensor for tensor in pruned if tensor is not None)
        if tensors:
            entries = [(tensor.name, tensor.source.dtype, tensor.shape, tensor.num_bytes) for tensor in tensors]
            yield PrunedShard(shard, encode_header(entries, metadata=header.metadata, alignment=ALIGNMENT), tensors)


def _pruned(
    tensor: TensorInfo, parts: TensorName, family: Family, numbers: Mapping[int, Mapping[int, int]]
) -> PrunedTensor | None:
    """Return a tensor as the copy has it: renamed, with fewer rows, unchanged, or None for a dropped expert's."""
    layer = parts.layer
    if layer is None or layer not in numbers:
        return PrunedTensor(tensor, tensor.name)
    if parts.role is Role.ROUTER:
        return PrunedTensor(tensor, tensor.name, tuple(numbers[layer]))
    if parts.role is not Role.EXPERTS or parts.expert is None:
        return PrunedTensor(tensor, tensor.name)
    new = numbers[layer].get(parts.expert)
    if new is None:
        return None
    stem = family.experts.format(layer=layer)
    return PrunedTensor(tensor, f"{stem}.{new}" + tensor.name[len(f"{stem}.{parts.expert}") :])


def _write_shard(path: Path, shard: PrunedShard, reader: ShardReader, events: Events) -> None:
    with ShardWriter(path, shard.num_bytes) as writer:
        writer.write(shard.header)
        for tensor in shard.tensors:
            for piece in _pieces(tensor, reader):
                writer.write(piece.data)
                events.progress(bytes_in=piece.nbytes, bytes_out=piece.nbytes)
            events.progress(tensors=1)
        writer.commit()


def _pieces(tensor: PrunedTensor, reader: ShardReader) -> Iterator[Bytes]:
    """Yield the bytes of a tensor of the copy, in order."""
    source = tensor.source
    if tensor.rows is not None:
        width = source.num_bytes // source.shape[0]
        yield reader.read(source).reshape(-1, width)[list(tensor.rows)].reshape(-1)
        return
    for begin in range(0, source.num_bytes, PIECE_BYTES):
        yield reader.read(source, begin=begin, end=min(begin + PIECE_BYTES, source.num_bytes))


def _other_files(pruning: Pruning) -> Iterator[tuple[Path, Content]]:
    """Yield path and content of every file that is not a shard, config.json last."""
    for relative in list_sidecars(pruning.source.folder):
        yield relative, pruning.source.folder / relative
    yield Path(INDEX_NAME), _encode_index(pruning)
    yield Path(CONFIG_NAME), _encode_config(pruning)


def _encode_index(pruning: Pruning) -> bytes:
    weight_map = {tensor.name: shard.name for shard in pruning.shards for tensor in shard.tensors}
    total = sum(tensor.num_bytes for shard in pruning.shards for tensor in shard.tensors)
    metadata = {**pruning.source.index_metadata, "total_size": total}
    return dump_json({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def _encode_config(pruning: Pruning) -> bytes:
    config = pruning.source.parse_config()
    changed = {**text_config(config), key_of(config, EXPERTS_KEY): pruning.num_experts}
    return dump_json(changed if text_config(config) is config else {**config, "text_config": changed})


def _begun(source: Checkpoint, kept_experts: KeptExperts) -> _Begun:
    identities = {shard: local_identity(source.path(shard)) for shard in source.headers}
    return _Begun(source_digest(source), identities, dict(kept_experts))


def _check_begun(destination: Path, now: _Begun) -> None:
    """Refuse a folder that has anything else, or is of another list or source (DestinationError, ResumeError)."""
    record = destination / WORK_FOLDER / PRUNE_NAME
    own = {LOCK_NAME, PRUNE_NAME, f"{PRUNE_NAME}.tmp", COMMAND_NAME, f"{COMMAND_NAME}.tmp"}
    if not record.exists():
        files = [path for path in list_folder(destination) if path.name not in (WORK_FOLDER, LOST_FOUND)]
        files += [path for path in list_folder(destination / WORK_FOLDER) if path.name.split("-")[0] not in own]
        if files:
            raise DestinationError(f"{files[0]}: is not from `k2convert prune`. Choose a new folder.")
        return
    before = read_document(_Begun, record)
    difference = ""
    if before.experts != now.experts:
        layer = next(n for n in {**before.experts, **now.experts} if before.experts.get(n) != now.experts.get(n))
        difference = f"with a different list of experts (layer {layer} differs)"
    elif before.source_headers != now.source_headers:
        difference = "from a different source: its headers differ"
    elif changed := changed_shards(before.source, now.source):
        difference = f"from a different source: {changed[0]} has other bytes"
    if difference:
        raise ResumeError(f"{destination}: was made {difference}. Choose a new folder, or delete this one.")


def _is_written(path: Path, shard: PrunedShard) -> bool:
    """Return whether a shard is there: the file has its final name, its size and its header."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size != shard.num_bytes:
        return False
    with path.open("rb") as file:
        return file.read(len(shard.header)) == shard.header


def read_list(path: Path, architecture: Architecture, config: Mapping[str, Any]) -> KeptExperts:
    """Return the experts that a file lists; raises CheckpointError, and PlanError if they do not fit the model."""
    with remedy(_LIST_REMEDY):
        text = read_text_file(path)
        document = parse_json_object(text, where=str(path))
        if document and all(_REAP_MODULE.fullmatch(name) for name in document):
            modules = parse(dict[str, tuple[int, ...]], text, where=str(path))
            experts = {int(module.rsplit(".", 2)[1]): numbers for module, numbers in modules.items()}
            if len(experts) < len(modules):
                raise MalformedFileError(f"{path}: has a layer twice.")
            listed = _List(experts)
        else:
            stated = mapping_or_empty(document.get("pruning", document))
            stated = {key: value for key, value in stated.items() if key not in _NOTES}
            listed = parse(_List, dump_json(stated).decode(), where=str(path))
    total = architecture.num_experts
    if listed.num_source_experts not in (None, total):
        raise PlanError(
            f"{path}: is for a model with {listed.num_source_experts} experts per layer, but this model has {total}. "
            "Use a file made for this model."
        )
    kept_experts = {layer: tuple(sorted(numbers)) for layer, numbers in sorted(listed.experts.items())}
    try:
        check_kept(kept_experts, architecture, config)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    return kept_experts


def check_kept(kept_experts: KeptExperts, architecture: Architecture, config: Mapping[str, Any]) -> None:
    """Refuse a list that does not fit the model, or with which its router could not choose (PlanError)."""
    total = architecture.num_experts
    layers = architecture.moe_layers
    if not layers:
        raise PlanError("the model has no MoE layers, so it has no experts to choose from.")
    if wrong := sorted(set(kept_experts) ^ set(layers)):
        where = "has no layer" if wrong[0] in layers else "has the layer"
        raise PlanError(
            f"{where} {wrong[0]}, but the model's MoE layers are {layers[0]}..{layers[-1]} ({len(layers)}). Use a file "
            "made for this model."
        )
    count = len(kept_experts[layers[0]])
    for layer, experts in kept_experts.items():
        if outside := [expert for expert in experts if not 0 <= expert < total]:
            raise PlanError(
                f"layer {layer}: expert {quoted(outside[0])} is not in the model, which has 0..{total - 1}. "
                "Use a list made for this model."
            )
        if twice := [expert for expert, following in pairwise(experts) if expert == following]:
            raise PlanError(f"layer {layer}: expert {twice[0]} is in the list twice. Name each expert once.")
        if len(experts) != count:
            raise PlanError(
                f"layer {layer} keeps {len(experts)} experts, but layer {layers[0]} keeps {count}. Keep the same "
                "number in every layer: engines need that."
            )
    top_k = stated_count(config, "num_experts_per_tok") or 1
    if count < top_k:
        raise PlanError(
            f"keeps {counted(count, 'expert')} per layer, but each token uses {top_k} "
            f"({key_of(config, 'num_experts_per_tok')}). Keep at least {top_k}."
        )
    _check_groups(kept_experts, count, top_k, total, config)


def _check_groups(kept_experts: KeptExperts, count: int, top_k: int, total: int, config: Mapping[str, Any]) -> None:
    """Refuse groups that would not be the source's, or that hold fewer experts than a token uses (PlanError)."""
    num_groups = stated_count(config, "n_group") or 1
    used_groups = stated_count(config, "topk_group") or 1
    if num_groups == 1:
        return
    if total % num_groups or count % num_groups:
        raise PlanError(
            f"{count} of {total} experts cannot form {num_groups} equal groups ({key_of(config, 'n_group')}). "
            f"Keep a multiple of {num_groups}."
        )
    size = total // num_groups
    new_size = count // num_groups
    for layer, experts in kept_experts.items():
        for group in range(num_groups):
            if (members := sum(expert // size == group for expert in experts)) != new_size:
                raise PlanError(
                    f"layer {layer}: {members} experts of group {group} are kept, but the router needs {new_size} of "
                    f"each of its {num_groups} groups (n_group). Keep equally many of each group."
                )
    if used_groups * new_size < top_k:
        raise PlanError(
            f"{new_size} experts of each group are kept, so {used_groups} groups (topk_group) hold fewer than the "
            f"{top_k} that each token uses. Keep more."
        )
