"""The groups of a quantization_config, a part of rule 11: schemes of formats, and the layers that each group names."""

from collections.abc import Mapping
from typing import Any, Final, cast

from k2convert.check.contract.result import Result
from k2convert.check.results import Findings
from k2convert.checkpoint.files import ABSENT, is_same_json, mapping_or_empty
from k2convert.checkpoint.layouts.compressed_tensors import SCALE_DTYPE
from k2convert.choices import BLOCK_SIZE
from k2convert.errors import quoted, shortened

QUARK: Final = "the config is for AMD Quark's loader, which is not checked here"


def check_groups(result: Result, wanted: Mapping[str, object], findings: Findings) -> None:
    """Compare the groups of a result with those that it should have: one of NVFP4, or one more of FP8."""
    if len(wanted) == 1:
        _check_groups(result, result.declared, cast("dict[str, Any]", next(iter(wanted.values()))), findings)
    else:
        _check_mixed_groups(mapping_or_empty(result.declared.get("config_groups")), wanted, findings)


def _check_groups(result: Result, declared: dict[str, object], wanted: Mapping[str, Any], findings: Findings) -> None:
    """Compare every group with the scheme of its library's loaders, stated here, and with the wanted targets."""
    own, dynamic = _SCHEMES[result.names.library]
    scheme = _SCHEME | own
    groups = mapping_or_empty(declared.get("config_groups"))
    is_flat = result.is_foreign and result.names.library == "modelopt" and "group_size" in declared
    if any(module.other_form for module in result.modules.values()):
        groups = {k: g for k, g in groups.items() if _num_bits(g) == 4} or groups
    if not groups and not is_flat:
        findings.error("quantization_config.config_groups", "missing")
    for name, group in groups.items():
        where = f"quantization_config.config_groups.{shortened(name)}"
        _check_scheme(mapping_or_empty(group).get("weights"), scheme | {"dynamic": False}, f"{where}.weights", findings)
        activations = mapping_or_empty(group).get("input_activations")
        if result.has_input_scale:
            _check_scheme(activations, scheme | {"dynamic": dynamic}, f"{where}.input_activations", findings)
            if "scale_dtype" in wanted["input_activations"]:
                _check_scale_dtype(activations, f"{where}.input_activations.scale_dtype", findings)
        elif activations is not None:
            findings.error(f"{where}.input_activations", "present, but the tensors are W4A16 and have no input scale")
        targets: Any = mapping_or_empty(group).get("targets")
        if result.selects or (result.is_foreign and result.names.library == "modelopt"):
            continue  # the targets of compressed-tensors are compared below, no engine reads ModelOpt's
        if wanted["targets"] == ["Linear"]:
            if not isinstance(targets, list) or "Linear" not in targets:
                findings.error(f"{where}.targets", "does not name Linear")
        elif targets != wanted["targets"]:
            findings.error(f"{where}.targets", "does not name the banks of experts")


def _check_mixed_groups(stated: Mapping[str, object], wanted: Mapping[str, object], findings: Findings) -> None:
    """Groups of NVFP4 and FP8 are exactly those that were written: another form or name gives wrong weights."""
    for name in sorted(stated.keys() | wanted.keys()):
        where = f"quantization_config.config_groups.{shortened(name)}"
        if name not in wanted:
            findings.error(where, "no group of the recipe")
        elif name not in stated:
            findings.error(where, "missing")
        else:
            _compare(where, stated[name], wanted[name], findings)


def _compare(where: str, stated: object, wanted: object, findings: Findings) -> None:
    """Name each leaf of a group that differs."""
    if not (isinstance(stated, dict) and isinstance(wanted, dict)):
        if not is_same_json(stated, wanted):
            shown = "missing" if stated is ABSENT else quoted(cast(object, stated))
            findings.error(where, f"{shown}, expected {quoted(wanted)}")
        return
    for key, value in mapping_or_empty(cast(object, wanted)).items():
        _compare(f"{where}.{key}", mapping_or_empty(cast(object, stated)).get(key, ABSENT), value, findings)


def nvfp4_targets(result: Result) -> list[str]:
    """Return what the groups of 4 bits name: names and regular expressions of modules."""
    groups = map(mapping_or_empty, mapping_or_empty(result.declared.get("config_groups")).values())
    targets = [cast(list[object], group.get("targets") or []) for group in groups if _num_bits(group) == 4]
    return [str(target) for named in targets for target in named]


def names_other_forms(result: Result) -> bool:
    """Return whether the config names another form than NVFP4 for weights: in a group, or in ModelOpt's map."""
    groups = mapping_or_empty(result.declared.get("config_groups")).values()
    listed = mapping_or_empty(result.declared.get("quantized_layers")).values()
    forms = [mapping_or_empty(entry).get("quant_algo") for entry in (*groups, *listed)]
    bits = [_num_bits(group) for group in groups]
    return any(b not in (None, 4) for b in bits) or any(form is not None and "NVFP4" not in str(form) for form in forms)


def _num_bits(group: object) -> object:
    return mapping_or_empty(mapping_or_empty(group).get("weights")).get("num_bits")


_SCHEME: Final[dict[str, object]] = {"num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
_SCHEMES: Final[dict[str, tuple[dict[str, object], object]]] = {
    "modelopt": ({}, False),
    "compressed-tensors": ({"strategy": "tensor_group", "symmetric": True}, "local"),
}
"""What a scheme has beside these keys, and `dynamic` of activations, in a config of each library."""


def _check_scheme(scheme: Any, expected: Mapping[str, object], where: str, findings: Findings) -> None:
    if not isinstance(scheme, dict):
        findings.error(where, "missing; engines would assume a different scheme")
        return
    for key, value in expected.items():
        stated = mapping_or_empty(cast(object, scheme)).get(key)
        if not is_same_json(stated, value):
            findings.error(f"{where}.{key}", f"{quoted(stated)}, expected {value!r}")


def _check_scale_dtype(activations: Any, where: str, findings: Findings) -> None:
    """Engines round block scales of activations to E4M3 whatever is stated; compressed-tensors only if this key is."""
    stated = mapping_or_empty(activations).get("scale_dtype")
    if stated is None:
        effect = "transformers with compressed-tensors 0.13 and later does not round the block scales of activations"
        findings.warn(where, f'missing; {effect}. Add "scale_dtype": "{SCALE_DTYPE}"')
    elif stated not in (SCALE_DTYPE, SCALE_DTYPE.removeprefix("torch.")):
        findings.error(where, f"{stated!r}, expected {SCALE_DTYPE!r}")
