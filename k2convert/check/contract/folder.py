"""Rules 11 to 13 and 15 to 17: configs and other files, compared with the tensors and the source."""

import filecmp
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final, cast

from k2convert import __version__
from k2convert.check.contract.groups import QUARK, check_groups
from k2convert.check.contract.result import Result, ShardsByName, read_leniently
from k2convert.check.results import Findings
from k2convert.checkpoint.files import (
    ABSENT,
    check_fetched,
    config_differences,
    file_digest,
    is_same_json,
    mapping_or_empty,
    mode_of,
    parse_json_object,
    read_json_file,
    walk_folder,
)
from k2convert.checkpoint.index import engine_links_out, list_sidecars, missing_sidecars
from k2convert.checkpoint.layouts.compressed_tensors import MIXED_FORMAT
from k2convert.checkpoint.layouts.layout import QUANTIZATION_KEYS, Quantization
from k2convert.checkpoint.layouts.modelopt import MIXED_PRECISION
from k2convert.checkpoint.names import (
    CONFIG_NAME,
    HF_QUANT_CONFIG_NAME,
    INDEX_NAME,
    SHARD_SUFFIX,
    SINGLE_SHARD_NAME,
    TIKTOKEN_NAME,
    TOKENIZER_NAME,
)
from k2convert.choices import BLOCK_SIZE
from k2convert.errors import K2ConvertError, counted, quoted, shortened
from k2convert.models.config import FP8, KV_SCALES, kv_cache_form
from k2convert.models.names import Role
from k2convert.plan.plan import fp8_targets
from k2convert.records.fingerprint import config_obstacle


def check_quantization_config(result: Result) -> Findings:
    """Rule 11. If there is a second or nested quantization_config or compression_config, engines may read that one."""
    findings = Findings(11)
    if result.config is None:
        return findings.error(CONFIG_NAME, result.config_problem)
    fields = list(_find_keys(result.config, ""))
    for field in fields:
        if field != QUANTIZATION_KEYS[0]:
            findings.error(field, "a second quantization config; engines may read this one")
    if QUANTIZATION_KEYS[0] not in fields:
        return findings.error(QUANTIZATION_KEYS[0], "missing at the top level")
    declared = result.declared
    if result.is_quark:
        return findings.skip(QUARK)
    wanted = result.names.quantization_config(_expected_declaration(result), __version__)
    expected = {key: wanted[key] for key in result.names.declared_keys if key in wanted}
    if result.is_foreign:
        _allow_other_forms(result, expected, findings)
    for key, value in expected.items():
        if key == "quantized_layers":
            _check_banks(declared.get(key), cast(dict[str, object], value), findings)
        elif not is_same_json(declared.get(key), value):
            findings.error(f"quantization_config.{key}", f"{quoted(declared.get(key))}, expected {value!r}")
    check_groups(result, mapping_or_empty(wanted["config_groups"]), findings)
    if result.names.needs_marlin and not result.has_input_scale:
        findings.note = "SGLang 0.5.23 needs --moe-runner-backend marlin; else it rounds activations to 4 bits"
    return findings


def _allow_other_forms(result: Result, expected: dict[str, object], findings: Findings) -> None:
    """Leave to another tool what engines accept in a config: where group sizes stand, and how much is listed."""
    declared = result.declared
    if "group_size" not in declared and declared.get("config_groups"):
        expected.pop("group_size", None)  # ModelOpt states it in the groups, which are checked below
    if result.names.library != "modelopt":
        if declared.get("format") == MIXED_FORMAT:
            expected["format"] = MIXED_FORMAT
        return
    algorithm = "NVFP4" if result.has_input_scale else "W4A16_NVFP4"
    has_banks = expected.pop("quantized_layers", None) is not None
    if declared.get("quant_algo") == MIXED_PRECISION:
        expected |= {"quant_algo": MIXED_PRECISION, "quant_method": f"{result.names.library}_mixed"}
        _check_listed(result, {"quant_algo": algorithm, "group_size": BLOCK_SIZE}, findings)
        return
    expected["quant_algo"] = algorithm
    if has_banks:
        findings.warn("quantization_config.quant_algo", "TensorRT-LLM needs MIXED_PRECISION with quantized_layers here")
    if result.names.read_activations(declared) == "w4a16" and not result.has_input_scale:
        del expected["quant_algo"]  # without input activations in its groups, NVFP4 is W4A16 to vLLM
    if str(declared.get("quant_method")).startswith(result.names.library):
        del expected["quant_method"]


def _check_listed(result: Result, entry: Mapping[str, object], findings: Findings) -> None:
    """Each layer of experts is listed under some name. Entries of other forms may stand beside it."""
    stated = mapping_or_empty(result.declared.get("quantized_layers"))
    names = [name for name, value in stated.items() if entry.items() <= mapping_or_empty(value).items()]
    layers = {name.partition("layers.")[2].partition(".")[0] for name in names if name.endswith(".experts")}
    for layer in sorted({str(m.parts.layer) for m in result.converted if m.parts.role is Role.EXPERTS} - layers):
        findings.error(f"quantization_config.quantized_layers: layer {layer}", f"its experts are not listed as {entry}")


def _check_banks(stated: object, expected: Mapping[str, object], findings: Findings) -> None:
    """Engines look up experts and FP8 layers by names of their own; what they do not find is not quantized to them."""
    stated = mapping_or_empty(stated)
    for bank in sorted(expected.keys() | stated.keys()):
        if not is_same_json(stated.get(bank), expected.get(bank)):
            wanted = "no converted layer has this name"
            if bank in expected:
                wanted = f"expected {expected[bank]!r}"
            findings.error(
                f"quantization_config.quantized_layers.{shortened(bank)}", f"{quoted(stated.get(bank))}, {wanted}"
            )


def _find_keys(node: Any, path: str) -> Iterator[str]:
    for key, value in mapping_or_empty(node).items():
        field = f"{path}.{shortened(key)}" if path else shortened(key)
        if key in QUANTIZATION_KEYS:
            yield field
        elif isinstance(value, dict):
            yield from _find_keys(value, field)


def _expected_declaration(result: Result) -> Quantization:
    """Return what the configs must declare of the tensors; the exclude list is rule 14's."""
    activations = "w4a4" if result.has_input_scale else "w4a16"
    targets: tuple[tuple[str, ...], ...] = ()
    if result.fp8 and result.recipe is not None and result.config is not None:
        architecture = result.family.read_architecture(result.config, str(result.folder))
        targets = fp8_targets(result.family, result.recipe, architecture)
    moe_layers = {m.parts.layer for m in result.converted if m.parts.role is Role.EXPERTS and m.parts.layer is not None}
    banks = result.family.bank_names(sorted(moe_layers))
    layers = result.family.fp8_names(module.name for module in result.fp8 if not module.other_form)
    return Quantization(activations, None, (), banks, targets, layers)


def check_config_unchanged(result: Result) -> Findings:
    """Rule 12. Engines read more than the quantization from config.json, and their defaults differ."""
    findings = Findings(12)
    if result.source is None:
        return findings.skip(result.no_source)
    if result.config is None:
        return findings.skip("config.json cannot be read, see rule 11")
    is_foreign = result.is_foreign
    is_as_converted = _is_config_as_converted(result)
    changed = _source_changed(result) if is_as_converted else ""
    for field, before, after in config_differences(
        parse_json_object(result.source_config, where=CONFIG_NAME), result.config, unread=QUANTIZATION_KEYS
    ):
        stated = "missing" if after is ABSENT else quoted(after)
        problem = stated
        if before is ABSENT:
            problem = f"{stated}, not in the source"
        elif after is not ABSENT:
            problem = f"{stated}, was {quoted(before)}"
        # If transformers saved it again, it added and omitted defaults, and renamed the inner model_type.
        is_added = before is ABSENT or after is ABSENT or before == after
        is_usual = is_foreign and (is_added or field.rpartition(".")[2] in _NOT_READ)
        if is_as_converted:
            problem = f"{stated}, {'missing' if before is ABSENT else quoted(before)} now: {changed}"
        (findings.warn if is_usual or is_as_converted else findings.error)(field, problem)
    return findings


_NOT_READ: Final = ("model_type", "transformers_version", "_name_or_path", "use_cache", "torch_dtype", "dtype")
"""Fields that other tools change when they save a model, and that change no weight in an engine."""


def _source_changed(result: Result) -> str:
    """Say that the source is not as the job in the folder knows it, and what `run` makes of that."""
    job = result.job
    source = result.source
    changed = "the source is not as at the conversion"
    if job is not None and source is not None:
        obstacle = config_obstacle(job.config, source, result.source_config, job.recipe)
        if obstacle is not None:
            return f"{changed}, and `k2convert run` refuses it: {obstacle.problem}"
    return f"{changed}; `k2convert run` with this source takes it over"


def _is_config_as_converted(result: Result) -> bool:
    """Return whether the journal says that config.json is what was made of the source's: the source changed since."""
    if result.job is None or result.job.config is None:
        return False
    return not any(config_differences(result.job.config, result.config, unread=QUANTIZATION_KEYS))


def check_hf_quant_config(result: Result, *, compare_lists: bool) -> Findings:
    """Rule 13. TensorRT-LLM reads this file first. vLLM's fallback reader requires the producer name `modelopt`.

    Except for the exclude list, fields are compared with the tensors and the recipe, so that a fault in config.json is
    not reported twice. `compare_lists` is False if rule 14 found config.json's list wrong or missing.
    """
    findings = Findings(13)
    path = result.folder / HF_QUANT_CONFIG_NAME
    if result.names.hf_quant_config is None:
        if path.exists():
            findings.error(HF_QUANT_CONFIG_NAME, "belongs to the modelopt layout, but the tensors are in the other one")
        return findings
    if result.is_quark:
        return findings.skip(QUARK)
    document, problem = read_leniently(path, read_json_file)
    habit = result.habit(findings)
    if document is None:
        habit(HF_QUANT_CONFIG_NAME, f"{problem}; TensorRT-LLM reads it first")
        return findings
    producer = mapping_or_empty(document.get("producer")).get("name")
    if producer != "modelopt":
        habit("producer.name", f"{quoted(producer)}, expected 'modelopt'")
    stated = mapping_or_empty(document.get("quantization"))
    recipe = result.recipe
    declared = result.declared
    has_fp8_cache = recipe.kv_cache is not None if recipe is not None else declared.get("kv_cache_scheme") is not None
    declaration = replace(_expected_declaration(result), kv_cache="fp8" if has_fp8_cache else None)
    expected: dict[str, object] = result.names.hf_quant_config(declaration, __version__)["quantization"]
    expected["exclude_modules"] = declared.get("ignore", declared.get("exclude_modules"))
    if result.is_foreign:
        expected.pop("quantized_layers", None)
        cache = expected["kv_cache_quant_algo"]
        if kv_cache_form(declared) not in ("", FP8):  # rule 15 reports it
            del expected["kv_cache_quant_algo"]
        elif not is_same_json(stated.get("kv_cache_quant_algo", cache), cache):
            problem = f"{quoted(stated['kv_cache_quant_algo'])}, expected {quoted(cache)} as in config.json"
            findings.warn("quantization.kv_cache_quant_algo", f"{problem}: TensorRT-LLM reads only this file")
            del expected["kv_cache_quant_algo"]
        expected |= {key: declared[key] for key in ("quant_algo", "quantized_layers") if key in declared}
    for key in expected:
        if key not in stated:
            habit(f"quantization.{key}", "missing; vLLM refuses a file without it")
        elif (compare_lists or key != "exclude_modules") and not is_same_json(stated[key], expected[key]):
            problem = f"{quoted(stated[key])}, expected {quoted(expected[key])} as in config.json"
            findings.error(f"quantization.{key}", problem)
    return findings


_Range = tuple[float, float]


def check_kv_cache(result: Result, values: Mapping[str, _Range]) -> Findings:
    """Rule 15. An FP8 cache changes answers at long context, so the recipe must ask for it. Its default scale is 1.

    `values` are the least and the largest number of each tensor of scales.
    """
    findings = Findings(15)
    scheme = result.declared.get("kv_cache_scheme")
    recipe = result.recipe
    field = "quantization_config.kv_cache_scheme"
    if recipe is not None and (recipe.kv_cache is not None) != (scheme is not None):
        demand = "does not ask for one"
        if recipe.kv_cache is not None:
            demand = "asks for one"
        findings.error(field, f"{quoted(scheme)}, but the recipe {demand}")
    form = kv_cache_form(result.declared)
    if form not in ("", FP8):
        result.habit(findings)(field, f"{form}: only scales of a static FP8 cache are checked here")
        return findings
    scales = _kv_scales(result, values)
    attention = [m for m in result.modules.values() if m.parts.role is Role.ATTENTION]
    latent = {m.parts.layer for m in attention if m.name.endswith("kv_b_proj")}  # linear attention has no cache
    layers = (latent or {m.parts.layer for m in attention}) - scales.keys()
    if scales:
        findings.note = f"{counted(len(scales), 'layer')} with scales of an FP8 cache"
    if form and not result.names.vllm_reads_kv_cache:
        findings.warn(field, "no effect in vLLM 0.32 and 0.33: serve with --kv-cache-dtype fp8")
    elif form and layers:
        problem = "FP8 cache without k and v scales: engines use 1.0"
        findings.warn(field, f"{problem} in {counted(len(layers), 'layer')}" if scales else problem)
    elif not form and scales:
        findings.warn(field, "missing, so the scales have no effect: serve with --kv-cache-dtype fp8")
    for layer, kinds in scales.items():
        layer_name = f"layer {layer}"
        stated = " and ".join(f"{kind} scale {least:g}" for kind, (least, _) in sorted(kinds.items()))
        k, v = (kinds.get(kind, _NO_SCALE)[0] for kind in "kv")
        if not form:
            continue
        if k < 0 and v < 0:
            findings.warn(layer_name, f"{stated}: vLLM and SGLang use 1.0 in place of scales below zero")
        elif not k > 0:
            findings.error(layer_name, f"{stated}, but no k scale above zero: vLLM and SGLang refuse it")
        elif not v > 0:
            findings.warn(layer_name, f"{stated}, but no v scale above zero: vLLM and SGLang use the k scale for both")
        for least, largest in kinds.values():
            if _LARGEST_KV_SCALE < largest < math.inf:  # rule 7 reports infinity
                findings.error(
                    layer_name, f"scale {largest:g}: an FP8 cache rounds what is below {largest / 1024:g} to zero"
                )
            elif 0 < least < 1 / _LARGEST_KV_SCALE:
                findings.error(layer_name, f"scale {least:g}: an FP8 cache holds nothing above {448 * least:g}")
    return findings


_NO_SCALE: Final = (-1.0, -1.0)  # as vLLM and SGLang begin
_LARGEST_KV_SCALE: Final = 1e6


def _kv_scales(result: Result, values: Mapping[str, _Range]) -> dict[int | None, dict[str, _Range]]:
    """Return the scales of each layer: of keys ("k"), of values ("v"), with least and largest number."""
    scales: dict[int | None, dict[str, _Range]] = defaultdict(dict)
    for module in result.modules.values():
        for parameter in module.parameters.keys() & set(KV_SCALES):
            name = module.name.rpartition(".")[2] if parameter == "output_scale" else parameter
            kind = name.partition("_")[0]
            value = values.get(f"{module.name}.{parameter}", (1.0, 1.0))
            scales[module.parts.layer] |= dict.fromkeys((kind,) if kind in ("k", "v") else ("k", "v"), value)
    return dict(sorted(scales.items(), key=str))


def check_package(result: Result) -> Findings:
    """Rule 16: index and shards agree and are complete, and there are no stray shards or temporary files."""
    findings = Findings(16)
    habit = result.habit(findings)
    for shard, problem in result.unreadable.items():
        findings.error(shortened(shard), problem)
    _check_index(result, findings)
    for path in _visible_files(result.folder):
        name = str(path.relative_to(result.folder))
        if path.suffix == SHARD_SUFFIX and name not in result.headers and name not in result.unreadable:
            habit(name, "a shard that the index does not name: remove it")
        elif path.suffix in (".tmp", ".part", ".incomplete"):
            habit(name, "a temporary file: remove it")
    return findings


def _visible_files(folder: Path) -> list[Path]:
    """Return all files, also behind links. Hidden folders (journal, download cache) are not part of the package."""
    return [
        path
        for path in walk_folder(folder)
        if not any(part.startswith(".") for part in path.relative_to(folder).parts[:-1]) and S_ISREG(mode_of(path))
    ]


def _check_index(result: Result, findings: Findings) -> None:
    single = result.index is None and list(result.headers) == [SINGLE_SHARD_NAME]
    if single and not (result.folder / INDEX_NAME).exists():
        return
    if result.index is None:
        findings.error(INDEX_NAME, result.index_problem)
        return
    weight_map: Any = result.index.get("weight_map")
    if not isinstance(weight_map, Mapping):
        findings.error(INDEX_NAME, "has no weight_map")
        return
    if not isinstance(weight_map, ShardsByName):  # which is right
        _check_weight_map(result, cast(Mapping[str, object], weight_map), findings)
    total: Any = mapping_or_empty(result.index.get("metadata")).get("total_size")
    actual = sum(t.num_bytes for header in result.headers.values() for t in header.tensors.values())
    if not result.unreadable and (total != actual or isinstance(total, float)):
        problem = f"{quoted(total)}, but the tensors have {actual} bytes"
        result.habit(findings)(f"{INDEX_NAME}: metadata.total_size", problem)
    num_found = sum(len(header.tensors) for header in result.headers.values())
    if num_found != len(result.tensors):
        num_names = len({name for header in result.headers.values() for name in header.tensors})
        if num_found != num_names:
            findings.error(INDEX_NAME, f"{num_found - num_names} tensors appear in two shards")


def _check_weight_map(result: Result, mapped: Mapping[str, object], findings: Findings) -> None:
    for name, shard in mapped.items():
        if not isinstance(shard, str):
            findings.error(shortened(name), f"the index says {quoted(shard)}, which is not a file name")
        elif shard not in result.unreadable and not _holds(result, shard, name):
            actual_shard = next((other for other in result.headers if _holds(result, other, name)), None)
            where = "is in no shard" if actual_shard is None else f"is in {actual_shard}"
            findings.error(shortened(name), f"the index says {shortened(shard)}, but it {where}")
    for shard, header in result.headers.items():
        for name in header.tensors:
            if name not in mapped:
                findings.error(name, f"in {shortened(shard)}, but not in the index")


def _holds(result: Result, shard: str, name: str) -> bool:
    return shard in result.headers and name in result.headers[shard].tensors


def check_sidecars(result: Result) -> Findings:
    """Rule 17. Files are compared with the source's and never run. Code that the source does not have is an error."""
    findings = Findings(17)
    for name, problem in missing_sidecars(result.folder):
        findings.warn(name, problem)
    for path in _visible_files(result.folder):
        if path.is_symlink() or path.suffix == SHARD_SUFFIX:
            continue
        try:
            check_fetched(path)
        except K2ConvertError as error:
            problem = str(error).removeprefix(f"{path}: ").removesuffix(".")
            findings.error(str(path.relative_to(result.folder)), problem)
    if result.source is None:
        return findings.skip(result.no_source)
    copied = {} if result.job is None else result.job.copies
    changed = _source_changed(result) if copied else ""

    def differs(relative: Path, problem: str, *, is_usual: bool = False) -> None:
        path = result.folder / relative
        found_digest = file_digest(path) if path.is_file() else None
        if copied and found_digest == copied.get(str(relative)):
            findings.warn(str(relative), f"{problem}: {changed}")
        else:
            (findings.warn if is_usual else findings.error)(str(relative), problem)

    expected = list_sidecars(result.source.folder)
    for relative in expected:
        path = result.folder / relative
        is_saved_again = result.is_foreign and path.name not in (TOKENIZER_NAME, TIKTOKEN_NAME)
        if not path.is_file():
            differs(relative, "missing", is_usual=result.is_foreign)
        elif not filecmp.cmp(path, result.source.folder / relative, shallow=False):
            differs(relative, "differs from the source's", is_usual=is_saved_again)
    for relative, target in engine_links_out(result.source.folder).items():
        if not (result.folder / relative).exists():
            problem = f"missing: the source has a link to {target}, out of the checkpoint. Put the file in its place"
            result.habit(findings)(str(relative), problem)
    for path in _visible_files(result.folder):
        relative = path.relative_to(result.folder)
        if path.suffix == ".py" and relative not in expected:
            differs(relative, "code that is not in the source", is_usual=result.is_foreign)
    findings.note = f"{len(expected)} files compared"
    return findings
