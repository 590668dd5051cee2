"""A finished checkpoint as the rules see it: read leniently, so that one damaged thing does not hide the others.

`checkpoint.index.open_checkpoint` refuses a folder at the first thing that does not fit; here every shard, the index
and the configs are read on their own, and what cannot be read is kept as a problem for the rule that owns it. Tensor
names are held under the prefix they should have, so a wrong prefix is one rule's finding and not everybody's.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.header import ShardHeader, TensorInfo, read_header
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.layouts import COMPRESSED_TENSORS, LAYOUTS, MODELOPT, LayoutNames
from k2convert.checkpoint.names import CONFIG_NAME, INDEX_NAME, SHARD_SUFFIX
from k2convert.errors import CheckpointError, PlanError
from k2convert.models.kimi import TEXT_PREFIX, WRAPPED_PREFIX, detect_family, parse_tensor_name
from k2convert.models.names import CONVERTIBLE_ROLES, WEIGHT, WEIGHT_PACKED, WEIGHT_SHAPE, Role, TensorName
from k2convert.records.ledger import Ledger, read_ledger

_LANGUAGE_PARTS = ("layers.", "embed_tokens.", "norm.")


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the result: its parameters by name, and its place in the model."""

    name: str
    parts: TensorName
    parameters: Mapping[str, TensorInfo]
    is_converted: bool


@dataclass(frozen=True, slots=True)
class Subject:
    """Everything about the folder that headers and JSON say; `source` is the checkpoint it was made from, if given.

    `tensors` maps the name a tensor should have to where it lies; `renamed` the names found to those, where they
    differ; `unknown` are tensors that belong to no Kimi K2 model. `layout` and `has_input_scale` are read off the
    tensors, so a config that says otherwise is found wrong and not followed.
    """

    folder: Path
    config: dict[str, Any] | None
    config_problem: str
    index: dict[str, Any] | None
    index_problem: str
    headers: dict[str, ShardHeader]
    unreadable: dict[str, str]
    tensors: dict[str, TensorInfo]
    renamed: dict[str, str]
    unknown: tuple[str, ...]
    modules: dict[str, Module]
    prefix: str
    layout: str
    has_input_scale: bool
    source: Checkpoint | None
    source_names: Mapping[str, TensorName]
    int4_modules: frozenset[str]
    ledger: Ledger

    @property
    def names(self) -> LayoutNames:
        """Parameter names of the layout."""
        return LAYOUTS[self.layout]

    @property
    def is_wrapped(self) -> bool:
        """K2.5's form: the language model inside a multimodal wrapper."""
        return self.prefix == WRAPPED_PREFIX

    @property
    def expected_parameters(self) -> tuple[str, ...]:
        """What each converted projection must consist of."""
        names = self.names
        scalars = (names.global_scale, names.input_scale) if self.has_input_scale else (names.global_scale,)
        return (names.weight, names.block_scale, *scalars)

    @property
    def converted(self) -> list[Module]:
        """The modules that are, or should be, NVFP4."""
        return [module for module in self.modules.values() if module.is_converted]

    @property
    def incomplete(self) -> str:
        """Why nothing can be said about the tensors as a whole; empty where every shard was read."""
        if not self.unreadable:
            return ""
        return f"{next(iter(self.unreadable))} cannot be read, see rule 16"


def open_subject(
    folder: Path, *, source: Checkpoint | None, known_headers: dict[str, ShardHeader] | None = None
) -> Subject:
    """Read everything but tensor bytes; raises CheckpointError only where there is no folder.

    `known_headers` stand in for the shards' own where these have left the folder, or when only some are meant.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder. Give the folder of a finished conversion.")
    config, config_problem = _read_json(folder / CONFIG_NAME)
    index, index_problem = _read_json(folder / INDEX_NAME)
    headers, unreadable = _read_headers(folder, index) if known_headers is None else (known_headers, {})
    prefix = detect_family(source)[1] if source is not None else _expected_prefix(config, headers)
    tensors, renamed = _named_as_expected(headers, prefix)
    parsed, unknown = _parse(tensors, prefix)
    source_names = _parse(source.tensors, prefix)[0] if source is not None else {}
    int4 = frozenset(parts.module for parts in source_names.values() if parts.parameter == WEIGHT_PACKED)
    ledger = read_ledger(folder)
    layout = _detect_layout(parsed)
    modules = _modules(tensors, parsed, int4, ledger, LAYOUTS[layout])
    return Subject(
        folder=folder,
        config=config,
        config_problem=config_problem,
        index=index,
        index_problem=index_problem,
        headers=headers,
        unreadable=unreadable,
        tensors=tensors,
        renamed=renamed,
        unknown=unknown,
        modules=modules,
        prefix=prefix,
        layout=layout,
        has_input_scale=_has_input_scale(modules, LAYOUTS[layout], ledger),
        source=source,
        source_names=source_names,
        int4_modules=int4,
        ledger=ledger,
    )


def _read_json(path: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        return read_json_file(path), ""
    except CheckpointError as error:
        return None, str(error)


def _read_headers(folder: Path, index: dict[str, Any] | None) -> tuple[dict[str, ShardHeader], dict[str, str]]:
    """Headers of the shards the index names (of all there are, without an index), and why others cannot be read."""
    weight_map: Any = index.get("weight_map") if index else None
    if isinstance(weight_map, dict):
        shards = sorted({s for s in weight_map.values() if isinstance(s, str)})  # type: ignore[reportUnknownVariableType]
    else:
        shards = sorted(path.name for path in folder.glob(f"*{SHARD_SUFFIX}"))
    headers: dict[str, ShardHeader] = {}
    unreadable: dict[str, str] = {}
    for shard in shards:
        if Path(shard).name != shard:
            unreadable[shard] = "is a path and not a file name"
            continue
        try:
            headers[shard] = read_header(folder / shard)
        except CheckpointError as error:
            unreadable[shard] = str(error).removeprefix(f"{folder / shard}: ")
    return headers, unreadable


def _expected_prefix(config: dict[str, Any] | None, headers: dict[str, ShardHeader]) -> str:
    if config is not None:
        return WRAPPED_PREFIX if isinstance(config.get("text_config"), dict) else TEXT_PREFIX
    wrapped = any(name.startswith("language_model.") for header in headers.values() for name in header.tensors)
    return WRAPPED_PREFIX if wrapped else TEXT_PREFIX


def _restore_prefix(name: str, prefix: str) -> str:
    """The name under the prefix it should have; names outside the language model stay as they are."""
    body = name
    for head in (WRAPPED_PREFIX, "language_model.", TEXT_PREFIX):
        if body.startswith(head):
            body = body[len(head) :]
            break
    if body.startswith(_LANGUAGE_PARTS):
        return prefix + body
    return prefix.removesuffix(TEXT_PREFIX) + body if body.startswith("lm_head.") else name


def _named_as_expected(headers: dict[str, ShardHeader], prefix: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    tensors: dict[str, TensorInfo] = {}
    renamed: dict[str, str] = {}
    for header in headers.values():
        for found, tensor in header.tensors.items():
            name = _restore_prefix(found, prefix)
            if name != found:
                renamed[found] = name
            tensors.setdefault(name, tensor)
    return tensors, renamed


def _parse(tensors: Mapping[str, TensorInfo], prefix: str) -> tuple[dict[str, TensorName], tuple[str, ...]]:
    parsed: dict[str, TensorName] = {}
    unknown: list[str] = []
    for name in tensors:
        try:
            parsed[name] = parse_tensor_name(name, prefix=prefix)
        except PlanError:
            unknown.append(name)
    return parsed, tuple(unknown)


def _detect_layout(parsed: Mapping[str, TensorName]) -> str:
    found = {parts.parameter for parts in parsed.values()}
    if LAYOUTS[MODELOPT].global_scale in found:
        return MODELOPT
    return COMPRESSED_TENSORS if LAYOUTS[COMPRESSED_TENSORS].global_scale in found else MODELOPT


def _modules(
    tensors: Mapping[str, TensorInfo],
    parsed: Mapping[str, TensorName],
    int4: frozenset[str],
    ledger: Ledger,
    names: LayoutNames,
) -> dict[str, Module]:
    parameters: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    first: dict[str, TensorName] = {}
    for name, parts in parsed.items():
        parameters[parts.module][parts.parameter] = tensors[name]
        first.setdefault(parts.module, parts)
    marks = {WEIGHT_PACKED, WEIGHT_SHAPE, names.block_scale, names.global_scale, names.input_scale}
    roles = {Role.EXPERTS, *(ledger.recipe.roles if ledger.recipe is not None else ())}
    modules: dict[str, Module] = {}
    for module, found in parameters.items():
        weight = found.get(WEIGHT)
        looks_converted = not marks.isdisjoint(found) or (weight is not None and weight.dtype == "U8")
        is_converted = looks_converted or module in int4 or first[module].role in roles
        modules[module] = Module(module, first[module], found, is_converted)
    return modules


def _has_input_scale(modules: Mapping[str, Module], names: LayoutNames, ledger: Ledger) -> bool:
    if ledger.recipe is not None:
        return ledger.recipe.activations == "w4a4"
    converted = [m for m in modules.values() if m.is_converted and m.parts.role in CONVERTIBLE_ROLES]
    return sum(names.input_scale in m.parameters for m in converted) * 2 > len(converted)
