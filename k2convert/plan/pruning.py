"""Keep some experts of each MoE layer: a source seen without the other experts.

`keep_experts` returns a Checkpoint like any other, a view that reads the source's own files. What works on a source
works on the view, so nothing after it knows of pruning. In the view

    experts       the kept ones have the numbers 0, 1, 2, ..., in the source's order; the others have no tensors
    router        weight and e_score_correction_bias have the rows of the kept experts (TensorInfo.rows)
    config.json   n_routed_experts is the new count, where the model reads it: text_config of K2.5 and later

and nothing else differs. src/reap/prune.py of CerebrasResearch/reap and REAPPruningModifier of llm-compressor change
the same parts of a loaded model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from k2convert.checkpoint.files import dump_json
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import PlanError, counted, quoted
from k2convert.models import detect_family, parse_tensor_names
from k2convert.models.config import EXPERTS_KEY, key_of, text_config
from k2convert.models.names import Architecture, Family, Role, TensorName


@dataclass(frozen=True, slots=True)
class KeptExperts:
    """Which experts are kept: for each MoE layer their numbers in the source, ascending, equally many in each layer."""

    layers: Mapping[int, tuple[int, ...]]

    @property
    def num_experts(self) -> int:
        """Return how many experts each layer keeps."""
        return len(next(iter(self.layers.values())))


def choose_experts(scores: Mapping[int, Sequence[float]], count: int, config: Mapping[str, Any]) -> KeptExperts:
    """Return the `count` best experts of each layer by score, then number; equally many of each group if possible."""
    num_groups = _count(config, "n_group")
    kept: dict[int, tuple[int, ...]] = {}
    for layer, values in scores.items():
        parts = num_groups
        if count % num_groups or len(values) % num_groups:
            parts = 1
        size = len(values) // parts
        chosen = list[int]()
        for first in range(0, parts * size, size):
            ranked = sorted(range(first, first + size), key=lambda expert: (-values[expert], expert))
            chosen += ranked[: count // parts]
        kept[layer] = tuple(sorted(chosen))
    return KeptExperts(kept)


def keep_experts(source: Checkpoint, kept: KeptExperts) -> Checkpoint:
    """Return `source` with only the kept experts; raises PlanError if the list does not fit the model."""
    family = detect_family(source)
    architecture = family.read_architecture(source.config, str(source.folder))
    check_kept(kept, architecture, source.config)
    numbers = {layer: {old: new for new, old in enumerate(experts)} for layer, experts in kept.layers.items()}
    names = parse_tensor_names(source, family=family)
    headers = dict(source.headers)
    for shard, header in source.headers.items():
        found = (_seen(t, names[t.name], family, numbers, architecture) for t in header.tensors.values())
        headers[shard] = replace(header, tensors={tensor.name: tensor for tensor in found if tensor is not None})
    tensors = {name: tensor for header in headers.values() for name, tensor in header.tensors.items()}
    config = source.parse_config()
    changed = {**text_config(config), key_of(config, EXPERTS_KEY): kept.num_experts}
    config_text = dump_json(changed if text_config(config) is config else {**config, "text_config": changed}).decode()
    return replace(source, config_text=config_text, headers=headers, tensors=tensors)


def _seen(
    tensor: TensorInfo,
    parts: TensorName,
    family: Family,
    numbers: Mapping[int, Mapping[int, int]],
    architecture: Architecture,
) -> TensorInfo | None:
    """Return a tensor as the view has it: renamed, with fewer rows, unchanged, or None for a dropped expert's."""
    layer = parts.layer
    if layer is None or layer not in numbers:
        return tensor
    if parts.role is Role.EXPERTS and parts.expert is not None:
        new = numbers[layer].get(parts.expert)
        if new is None:
            return None
        stem = family.experts.format(layer=layer)
        return tensor._replace(name=f"{stem}.{new}" + tensor.name[len(f"{stem}.{parts.expert}") :])
    if parts.role is not Role.ROUTER:
        return tensor
    if tensor.shape[:1] != (architecture.num_experts,):
        raise PlanError(
            f"{tensor.shard}: {tensor.name}: has the shape {list(tensor.shape)}, but the layer has "
            f"{architecture.num_experts} experts. Use the whole, unchanged source."
        )
    return tensor._replace(shape=(len(numbers[layer]), *tensor.shape[1:]), rows=tuple(numbers[layer]))


def check_kept(kept: KeptExperts, architecture: Architecture, config: Mapping[str, Any]) -> None:
    """Refuse a list that does not fit the model, or with which its router could not choose (PlanError)."""
    total = architecture.num_experts
    layers = architecture.moe_layers
    if not layers:
        raise PlanError("the model has no MoE layers, so no experts can be chosen. Leave out the list of experts.")
    if wrong := sorted(set(kept.layers) ^ set(layers)):
        where = "has no layer" if wrong[0] in layers else "has the layer"
        raise PlanError(
            f"{where} {wrong[0]}, but the model's MoE layers are {layers[0]}..{layers[-1]} ({len(layers)}). Use a file "
            "made for this model."
        )
    for layer, experts in kept.layers.items():
        if outside := [e for e in experts if not 0 <= e < total]:
            raise PlanError(
                f"layer {layer}: expert {quoted(outside[0])} is not in the model, which has 0..{total - 1}. "
                "Use a list made for this model."
            )
        if twice := [e for e, following in pairwise(experts) if e == following]:
            raise PlanError(f"layer {layer}: expert {twice[0]} is in the list twice. Name each expert once.")
        if len(experts) != kept.num_experts:
            raise PlanError(
                f"layer {layer} keeps {len(experts)} experts, but layer {layers[0]} keeps {kept.num_experts}. Keep the "
                "same number in every layer: engines need that."
            )
    _check_router(kept, total, config)


def _check_router(kept: KeptExperts, total: int, config: Mapping[str, Any]) -> None:
    """Refuse fewer experts than a token uses, and groups that would not be the source's (PlanError)."""
    count = kept.num_experts
    top_k = _count(config, "num_experts_per_tok")
    num_groups = _count(config, "n_group")
    used_groups = _count(config, "topk_group")
    if count < top_k:
        raise PlanError(
            f"keeps {counted(count, 'expert')} per layer, but each token uses {top_k} "
            f"({key_of(config, 'num_experts_per_tok')}). Keep at least {top_k}."
        )
    if num_groups == 1:
        return
    if total % num_groups or count % num_groups:
        raise PlanError(
            f"{count} of {total} experts cannot form {num_groups} equal groups ({key_of(config, 'n_group')}). "
            f"Keep a multiple of {num_groups}."
        )
    size = total // num_groups
    new_size = count // num_groups
    for layer, experts in kept.layers.items():
        for group in range(num_groups):
            if (found := sum(e // size == group for e in experts)) != new_size:
                raise PlanError(
                    f"layer {layer}: {found} experts of group {group} are kept, but the router needs {new_size} of "
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
