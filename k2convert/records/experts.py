"""The experts to keep, by the file of `k2convert prune --keep`, and whether the router could choose from them.

    list            {"experts": {"1": [0, 5, ..], ..}, "of": 384}; `of`, the source's experts per layer, is optional
    ledger          k2convert.json of a result that version 0.3 pruned: its `pruning` is such a list
    REAP's report   {"model.layers.1.mlp": [0, 5, ..], ..}: report_path of llm-compressor's REAPPruningModifier

Layers and experts have the numbers of the source.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from k2convert.checkpoint.files import dump_json, mapping_or_empty, parse_json_object, read_text_file
from k2convert.errors import MalformedFileError, PlanError, counted, quoted, remedy
from k2convert.models.config import key_of, text_config
from k2convert.models.names import Architecture
from k2convert.records.document import Count, LayerNumber, parse

_REAP_MODULE: Final = re.compile(r"(?:\w+\.)*layers\.(0|[1-9][0-9]{0,5})\.\w+")
_NOTES: Final = ("chosen_by", "left_out")  # keys of lists that version 0.3 wrote or read, about the scores
_LIST_REMEDY: Final = (
    'Pass {"experts": {"1": [0, 5], ...}} or a REAP report of llm-compressor; `k2convert guide prune` shows the forms.'
)

KeptExperts = Mapping[int, tuple[int, ...]]
"""For each MoE layer the numbers of the kept experts in the source, ascending, equally many in each layer."""


@dataclass(frozen=True, slots=True)
class _List:
    """A list of experts to keep."""

    experts: dict[LayerNumber, tuple[int, ...]]
    num_source_experts: Annotated[Count | None, Field(alias="of")] = None


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
    kept = {layer: tuple(sorted(numbers)) for layer, numbers in sorted(listed.experts.items())}
    try:
        check_kept(kept, architecture, config)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    return kept


def check_kept(kept: KeptExperts, architecture: Architecture, config: Mapping[str, Any]) -> None:
    """Refuse a list that does not fit the model, or with which its router could not choose (PlanError)."""
    total = architecture.num_experts
    layers = architecture.moe_layers
    if not layers:
        raise PlanError("the model has no MoE layers, so it has no experts to choose from.")
    if wrong := sorted(set(kept) ^ set(layers)):
        where = "has no layer" if wrong[0] in layers else "has the layer"
        raise PlanError(
            f"{where} {wrong[0]}, but the model's MoE layers are {layers[0]}..{layers[-1]} ({len(layers)}). Use a file "
            "made for this model."
        )
    count = len(kept[layers[0]])
    for layer, experts in kept.items():
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
    top_k = _count(config, "num_experts_per_tok")
    if count < top_k:
        raise PlanError(
            f"keeps {counted(count, 'expert')} per layer, but each token uses {top_k} "
            f"({key_of(config, 'num_experts_per_tok')}). Keep at least {top_k}."
        )
    _check_groups(kept, count, total, config)


def _check_groups(kept: KeptExperts, count: int, total: int, config: Mapping[str, Any]) -> None:
    """Refuse groups that would not be the source's, or that hold fewer experts than a token uses (PlanError)."""
    top_k = _count(config, "num_experts_per_tok")
    num_groups = _count(config, "n_group")
    used_groups = _count(config, "topk_group")
    if num_groups == 1:
        return
    if total % num_groups or count % num_groups:
        raise PlanError(
            f"{count} of {total} experts cannot form {num_groups} equal groups ({key_of(config, 'n_group')}). "
            f"Keep a multiple of {num_groups}."
        )
    size = total // num_groups
    new_size = count // num_groups
    for layer, experts in kept.items():
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


def _count(config: Mapping[str, Any], key: str) -> int:
    value = text_config(config).get(key_of(config, key))
    if isinstance(value, int) and value > 0:
        return value
    return 1
