"""A finished checkpoint as the rules see it. It is read leniently, so that one damaged file does not hide other faults.

`checkpoint.index.open_checkpoint` refuses a folder at the first inconsistency. Here every shard, the index, the configs
and the ledger are read separately, and a file that cannot be read becomes a finding of one rule. Tensors are listed
under the prefix they should have, so only rule 2 reports a wrong prefix.
"""

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from k2convert.check.contract.modules import CONVERTED_WHILE_LOADING, Module, read_modules
from k2convert.check.results import NO_SOURCE, Findings, Offender
from k2convert.checkpoint.files import (
    MAX_SMALL_FILE_BYTES,
    check_plain_file,
    list_folder,
    mapping_or_empty,
    parse_json_object,
    read_json_file,
    reading,
)  # fmt: skip
from k2convert.checkpoint.header import ShardHeader, TensorInfo, read_header
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.layouts.layout import QUANTIZATION_KEYS, CheckpointLayout
from k2convert.checkpoint.layouts.modelopt import MIXED_PRECISION
from k2convert.checkpoint.names import (
    CONFIG_NAME,
    HF_QUANT_CONFIG_NAME,
    INDEX_NAME,
    JOB_NAME,
    LEDGER_NAME,
    SHARD_SUFFIX,
    WORK_FOLDER,
)
from k2convert.errors import CheckpointError
from k2convert.models import TensorNames, detect_family, family_of
from k2convert.models.config import KV_SCALES, find_quantization_config
from k2convert.models.names import (
    CONVERTIBLE_ROLES,
    WEIGHT,
    WEIGHT_PACKED,
    Family,
    ModulePlace,
    Role,
    TensorName,
    column_scaling,
    reads_norm,
)
from k2convert.plan.recipe import GPTQ_TENSOR_SQNR_DB, Budget, Recipe
from k2convert.records.calibration import CalibrationRecord
from k2convert.records.fingerprint import JobDescription
from k2convert.records.journal import Journal
from k2convert.records.ledger import Ledger, find_ledger

if TYPE_CHECKING:
    from k2convert.calibration.layer_files import Calibration

T = TypeVar("T")
_INDEX_ENTRY: Final = re.compile(rb' *"([ !#-[\]-~]+)": "([ !#-[\]-~]+)"(,?)\r?\n')

Exponents = NDArray[np.int8]
"""One number for each hidden channel: int8 [K]."""


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """The exponents a of a result's MoE layers.

    `problems` are norms whose exponents could not be derived, and a ledger that states others, by
    layer: None for what is wrong with all of them.
    """

    exponents: Mapping[int, Exponents]
    problems: Mapping[int | None, Offender]

    def changes_copy(self, parts: TensorName, *, family: Family) -> bool:
        """Return whether smoothing scales the columns of this copied tensor."""
        change = column_scaling(parts, family=family)
        return change is not None and self._of_layer(change.layer) is not None

    def of_weight(self, parts: ModulePlace) -> Exponents | None:
        """Return a [K]: the weight of this module is over 2**a, whatever its format. None: unchanged."""
        if reads_norm(parts):
            return self._of_layer(parts.layer)
        return None

    def _of_layer(self, layer: int | None) -> Exponents | None:
        exponents = None if layer is None else self.exponents.get(layer)
        if exponents is not None and exponents.any():
            return exponents
        return None


NO_SCALING: Final = Scaling({}, {})
"""Every copied tensor must have the source's bytes."""


@dataclass(frozen=True, slots=True)
class Result:
    """Contents of a folder by its headers and JSON files, and the source it was converted from, if given.

    config, index, ledger      None if the file is missing or damaged; `*_problem` has the reason
    source                     if it is None, no_source has the reason
    headers, unreadable        shards that could be read, and why others could not
    tensors                    the name a tensor should have -> where it is
    renamed                    name found -> name it should have, if they differ
    unknown                    names that are not part of the family's models
    names, has_input_scale     layout and activations as found in the tensors: a differing config is wrong, not followed
    calibration                of the conversion, while it runs
    scaling                    exact smoothing, if the ledger states it
    job                        the job that converted the folder, if its journal is here; then the source is read by
                               the config.json that it had, and source_config is the text of the one it has now
    """

    folder: Path
    headers: dict[str, ShardHeader]
    tensors: dict[str, TensorInfo]
    renamed: dict[str, str]
    unknown: tuple[str, ...]
    modules: dict[str, Module]
    family: Family
    names: CheckpointLayout
    has_input_scale: bool
    source: Checkpoint | None
    source_names: Mapping[str, TensorName]
    int4_modules: frozenset[str]
    recipe: Recipe | None
    config: Mapping[str, Any] | None = None
    config_problem: str = ""
    index: Mapping[str, Any] | None = None
    index_problem: str = ""
    unreadable: Mapping[str, str] = field(default_factory=dict[str, str])
    ledger: Ledger | None = None
    ledger_problem: str = ""
    no_source: str = ""
    job: JobDescription | None = None
    source_config: str = ""
    calibration: "Calibration | None" = None
    scaling: Scaling = NO_SCALING

    @property
    def expected_parameters(self) -> tuple[str, ...]:
        """The parameters of a converted projection."""
        names = self.names
        scalars = (names.global_scale, names.input_scale) if self.has_input_scale else (names.global_scale,)
        return (names.weight, names.block_scale, *scalars)

    @property
    def budget(self) -> Budget:
        """The error budget of the recipe; without one the lowest of the rules, since another tool may calibrate."""
        if self.recipe is None:
            return Budget(tensor_sqnr_db=GPTQ_TENSOR_SQNR_DB)
        return self.recipe.budget

    def habit(self, findings: Findings) -> Callable[[str, str], object]:
        """Return how to report what no engine needs: an error in a result of ours, a warning in one of another tool."""
        return findings.warn if self.is_foreign else findings.error

    @property
    def is_foreign(self) -> bool:
        """Return whether another tool made the folder: it has no ledger, and nothing in it names k2convert."""
        has_job = (self.folder / WORK_FOLDER / JOB_NAME).exists()
        if self.ledger is not None or self.ledger_problem != "missing" or has_job:
            return False
        producer = mapping_or_empty(self.declared.get("producer"))
        return producer.get("name") != "k2convert"

    @property
    def declared(self) -> dict[str, object]:
        """The quantization_config of config.json; empty if there is none."""
        return mapping_or_empty((self.config or {}).get(QUANTIZATION_KEYS[0]))

    @property
    def is_quark(self) -> bool:
        """Return whether AMD Quark's loader is named, whose configs no engine of this contract reads."""
        return self.declared.get("quant_method") == "quark"

    @property
    def calibration_record(self) -> CalibrationRecord | None:
        """The calibration that the ledger states."""
        if self.ledger is None:
            return None
        return self.ledger.calibration

    @property
    def is_smoothed(self) -> bool:
        """Return whether the ledger states smoothing."""
        return self.calibration_record is not None and self.calibration_record.exponents_digest is not None

    @property
    def converted(self) -> list[Module]:
        """The modules that are NVFP4, or should be."""
        return [module for module in self.modules.values() if module.is_converted]

    @property
    def fp8(self) -> list[Module]:
        """The modules that are FP8, or should be."""
        return [module for module in self.modules.values() if module.is_fp8]

    @property
    def other_experts(self) -> list[Module]:
        """The routed experts that another tool left in a quantized form that is not NVFP4."""
        return [m for m in self.modules.values() if m.other_form and m.parts.role is Role.EXPERTS]

    def is_unjudged(self, name: str) -> bool:
        """Return whether another tool's tensor is not compared with the source: dtype, form, name or use are others."""
        module_name, _, parameter = name.rpartition(".")
        module = self.modules.get(module_name)
        is_other = parameter in KV_SCALES or self.family.expected_name(name) != name or self.is_recast(name)
        return self.is_foreign and (is_other or (module is not None and bool(module.other_form)))

    def is_decoded(self, name: str) -> bool:
        """Return whether another tool decoded a weight that is packed in the source; the certificate compares it."""
        module_name, _, parameter = name.rpartition(".")
        module = self.modules.get(module_name)
        is_packed = parameter == WEIGHT and module_name in self.int4_modules
        return self.is_foreign and is_packed and module is not None and not module.is_converted

    def is_recast(self, name: str) -> bool:
        """Return whether a copied tensor is in another dtype than the source's, which engines convert while loading."""
        before = None if self.source is None else self.source.tensors.get(name)
        tensor = self.tensors.get(name)
        if before is None or tensor is None or before.shape != tensor.shape:
            return False
        return before.dtype != tensor.dtype and {before.dtype, tensor.dtype} <= CONVERTED_WHILE_LOADING

    @property
    def selects(self) -> bool:
        """Return whether the config of another tool names what is quantized, so that it need not exclude the rest."""
        groups = map(mapping_or_empty, mapping_or_empty(self.declared.get("config_groups")).values())
        names_all = self.names.library == "modelopt" or any("Linear" in str(g.get("targets")) for g in groups)
        return self.is_foreign and (self.declared.get("quant_algo") == MIXED_PRECISION or not names_all)

    def is_in_source(self, module: Module) -> bool:
        """Return whether the source has a weight of this module; true without a source."""
        source = self.source
        return source is None or any(f"{module.name}.{name}" in source.tensors for name in (WEIGHT, WEIGHT_PACKED))

    @property
    def incomplete(self) -> str:
        """Why rules about all tensors cannot be checked; empty if every shard was read."""
        if not self.unreadable:
            return ""
        return f"{next(iter(self.unreadable))} cannot be read, see rule 16"


def read_result(
    folder: Path,
    *,
    source: Checkpoint | None,
    known_headers: dict[str, ShardHeader] | None = None,
    read: Callable[[Path], ShardHeader] = read_header,
) -> Result:
    """Read everything except tensor data; raises CheckpointError if the folder does not exist.

    `known_headers` are those of shards that were removed. `read`
    reads the header of a shard that is not in the folder itself, and raises as `read_header` does.
    Raises PlanError if the source belongs to no known family.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder. Pass the folder of a finished conversion.")
    config, config_problem = read_leniently(folder / CONFIG_NAME, read_json_file)
    index_path = folder / INDEX_NAME
    headers, unreadable = known_headers, dict[str, str]()
    if headers is None:
        stated, _ = read_leniently(index_path, lambda path: _read_index(path, {}))
        headers, unreadable = _read_headers(folder, stated, read)
        del stated
    index, index_problem = read_leniently(index_path, lambda path: _read_index(path, headers))
    ledger, ledger_problem = read_leniently(folder / LEDGER_NAME, lambda path: find_ledger(path.parent))
    if config is not None and ledger is None and find_quantization_config(config) is None:
        config = {**config, **_declared_beside(folder)}
    recipe = None if ledger is None else ledger.recipe
    job = None if ledger is None else Journal(folder).job_of(ledger)
    source_config = "" if source is None else source.config_text
    if source is not None and job is not None and job.config is not None:
        source = replace(source, config_text=json.dumps(job.config))
    if source is not None:
        detect_family(source)
    no_source = NO_SOURCE if source is None else ""
    if ledger is None and ledger_problem != "missing":
        source = None
        no_source = "the ledger is damaged, see rule 19"
    tensor_names = [name for header in headers.values() for name in header.tensors]
    family = detect_family(source) if source is not None else family_of(config, tensor_names)
    return replace(
        _from_headers(folder, headers, family=family, source=source, recipe=recipe),
        config=config,
        config_problem=config_problem,
        index=index,
        index_problem=index_problem,
        unreadable=unreadable,
        ledger=ledger,
        ledger_problem=ledger_problem,
        no_source=no_source,
        job=job,
        source_config=source_config,
    )


def _read_index(path: Path, headers: Mapping[str, ShardHeader]) -> dict[str, Any]:
    """Read the index, by lines if each is an entry, as libraries write it: a parser would need 430 MB for K3's.

    Names and shards are the strings of the headers.
    """
    check_plain_file(path)
    frame: list[bytes] = []
    mapped: dict[str, str] = {}
    begin, comma, is_right = 0, b",", True
    with reading(path, missing="missing."), path.open("rb") as file:
        is_usual = os.fstat(file.fileno()).st_size <= MAX_SMALL_FILE_BYTES
        for line in file if is_usual else ():
            entry = _INDEX_ENTRY.fullmatch(line)
            if entry is None:
                frame.append(line)
                continue
            begin = begin or len(frame)
            name, shard = entry[1].decode(), sys.intern(entry[2].decode())
            tensor = headers[shard].tensors.get(name) if shard in headers else None
            is_usual = is_usual and bool(comma) and len(frame) == begin and name not in mapped
            is_right = is_right and tensor is not None
            mapped[name if tensor is None else tensor.name] = shard
            comma = entry[3]
    is_usual = is_usual and not comma and frame[begin - 1].strip() == b'"weight_map": {'
    document = parse_json_object(b"".join(frame).decode("utf-8", "replace"), where=str(path)) if is_usual else {}
    if document.get("weight_map") != {}:
        return read_json_file(path)
    held = ShardsByName(headers)
    return document | {"weight_map": held if is_right and len(mapped) == len(held) else mapped}


@dataclass(frozen=True, slots=True, eq=False)
class ShardsByName(Mapping[str, str]):
    """The shard of each tensor, as an index states it: a dict of its own would take 40 MB for K3."""

    headers: Mapping[str, ShardHeader]

    def __getitem__(self, name: str) -> str:
        for shard, header in self.headers.items():
            if name in header.tensors:
                return shard
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for header in self.headers.values() for name in header.tensors)

    def __len__(self) -> int:
        return sum(len(header.tensors) for header in self.headers.values())


def _declared_beside(folder: Path) -> dict[str, object]:
    """Return the quantization_config that engines read in hf_quant_config.json, if config.json has none."""
    document, _ = read_leniently(folder / HF_QUANT_CONFIG_NAME, read_json_file)
    stated = mapping_or_empty((document or {}).get("quantization"))
    scheme = {"num_bits": 8, "type": "float"} if stated.get("kv_cache_quant_algo") == "FP8" else None
    quantization = {"quant_method": "modelopt", "ignore": stated.get("exclude_modules"), "kv_cache_scheme": scheme}
    return {QUANTIZATION_KEYS[0]: stated | quantization} if stated else {}


def open_shard(path: Path, *, family: Family, source: Checkpoint, recipe: Recipe) -> Result:
    """Return one finished shard of a result that is not assembled yet; `source` has the shards that it comes from."""
    return _from_headers(path.parent, {path.name: read_header(path)}, family=family, source=source, recipe=recipe)


def _from_headers(
    folder: Path, headers: dict[str, ShardHeader], *, family: Family, source: Checkpoint | None, recipe: Recipe | None
) -> Result:
    tensors = dict[str, TensorInfo]()
    renamed = dict[str, str]()
    for name, tensor in (item for header in headers.values() for item in header.tensors.items()):
        if (expected := family.expected_name(name)) != name:
            renamed[name] = expected
        tensors.setdefault(renamed.get(name, name), tensor)  # K3's million names would take 116 MB again
    parts_by_module: dict[str, TensorName] = {}

    def place_of(module: str) -> ModulePlace | None:
        return parts_by_module.get(module) or family.classify(module)

    parameters: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, parts in TensorNames(tensors, place_of).items():
        parameters[parts.module][parts.parameter] = tensors[name]
        parts_by_module.setdefault(parts.module, parts)
    source_names = TensorNames({} if source is None else source.tensors, place_of)
    int4 = frozenset(parts.module for parts in source_names.values() if parts.parameter == WEIGHT_PACKED)
    found_parameters = set[str]().union(*parameters.values())
    layouts = [layout for layout in LAYOUTS.values() if layout.global_scale in found_parameters]
    names = layouts[0] if layouts else next(iter(LAYOUTS.values()))
    modules = read_modules(parameters, parts_by_module, names=names, family=family, int4_modules=int4, recipe=recipe)
    if recipe is not None:
        has_input_scale = recipe.activations == "w4a4"
    else:
        converted = [m for m in modules.values() if m.is_converted and m.parts.role in CONVERTIBLE_ROLES]
        has_input_scale = sum(names.input_scale in m.parameters for m in converted) * 2 > len(converted)
    return Result(
        folder=folder,
        headers=headers,
        tensors=tensors,
        renamed=renamed,
        unknown=tuple(name for name in tensors if name.rpartition(".")[0] not in parameters),
        modules=modules,
        family=family,
        names=names,
        has_input_scale=has_input_scale,
        source=source,
        source_names=source_names,
        int4_modules=int4,
        recipe=recipe,
    )


def read_leniently(path: Path, read: Callable[[Path], T | None]) -> tuple[T | None, str]:
    """Return what a file holds, or None and what is wrong with it."""
    try:
        content = read(path)
    except CheckpointError as error:
        return None, str(error).removeprefix(f"{path}: ").removesuffix(".")
    return content, "missing" if content is None else ""


def _read_headers(
    folder: Path, index: Mapping[str, Any] | None, read: Callable[[Path], ShardHeader]
) -> tuple[dict[str, ShardHeader], dict[str, str]]:
    """Read the headers of the shards that the index names, or of all shards; return why others cannot be read."""
    weight_map: Any = index.get("weight_map") if index else None
    if isinstance(weight_map, Mapping):
        shards = sorted({s for s in weight_map.values() if isinstance(s, str)})  # type: ignore[reportUnknownVariableType]
    else:
        shards = [path.name for path in list_folder(folder) if path.name.endswith(SHARD_SUFFIX)]
    headers: dict[str, ShardHeader] = {}
    unreadable: dict[str, str] = {}
    for shard in shards:
        if Path(shard).name != shard:
            unreadable[shard] = "a path, not a file name"
            continue
        header, unreadable[shard] = read_leniently(folder / shard, read)
        if header is not None:
            headers[shard] = header
            del unreadable[shard]
    return headers, unreadable
