"""The layout that NVIDIA's ModelOpt 0.47 exports. vLLM, SGLang and TensorRT-LLM read it."""

from collections.abc import Mapping
from typing import Any, Final

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.checkpoint.layouts.layout import CheckpointLayout, Quantization
from k2convert.choices import BLOCK_SIZE, Activations

MIXED_PRECISION: Final = "MIXED_PRECISION"
FP8_BLOCKS: Final = "FP8_PB_WO"
"""ModelOpt's name of FP8 with a scale for each block of 128 x 128 weights."""
_ALGORITHMS: Final[dict[str, Activations]] = {"NVFP4": "w4a4", "W4A16_NVFP4": "w4a16"}
"""Activations by ModelOpt's name of the scheme."""


def _scheme(declared: Quantization) -> tuple[str, dict[str, Any]]:
    """Return ModelOpt's name of the whole scheme, and the scheme of each layer; no layers if all have one."""
    algorithm = next(name for name, activations in _ALGORITHMS.items() if activations == declared.activations)
    if not declared.banks:
        return algorithm, {}
    layers: dict[str, Any] = {bank: {"quant_algo": algorithm, "group_size": BLOCK_SIZE} for bank in declared.banks}
    return MIXED_PRECISION, layers | {name: {"quant_algo": FP8_BLOCKS} for name in declared.fp8_layers}


def _quantization_config(declared: Quantization, version: str) -> dict[str, Any]:
    algorithm, layers = _scheme(declared)
    tensor = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
    group: dict[str, Any] = {"input_activations": tensor} if declared.activations == "w4a4" else {}
    group |= {"weights": dict(tensor), "targets": list(declared.banks) or ["Linear"]}
    result: dict[str, Any] = {"config_groups": {"group_0": group}}
    if declared.fp8_layers:
        result["config_groups"]["group_1"] = {"quant_algo": FP8_BLOCKS, "targets": list(declared.fp8_layers)}
    if layers:
        result["quantized_layers"] = layers
    result |= {"ignore": list(declared.excludes), "quant_algo": algorithm, "group_size": BLOCK_SIZE}
    if declared.kv_cache == "fp8":
        result["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    result["producer"] = {"name": "k2convert", "version": version}
    # Engines ignore the map of layers under the plain name.
    result["quant_method"] = "modelopt_mixed" if layers else "modelopt"
    return result


def _hf_quant_config(declared: Quantization, version: str) -> dict[str, Any]:
    """Return hf_quant_config.json. vLLM's fallback reader requires the producer "modelopt"."""
    algorithm, layers = _scheme(declared)
    return {
        "producer": {"name": "modelopt", "version": f"k2convert {version}"},
        "quantization": {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": "FP8" if declared.kv_cache == "fp8" else None,
            "group_size": BLOCK_SIZE,
            **({"quantized_layers": layers} if layers else {}),
            "exclude_modules": list(declared.excludes),
        },
    }


def _read_activations(stated: Mapping[str, Any]) -> Activations | None:
    algorithm = stated.get("quant_algo")
    if algorithm == MIXED_PRECISION:  # all banks of experts have the same entry; other layers may have others
        layers = mapping_or_empty(stated.get("quantized_layers")).values()
        stated_algorithms = [str(mapping_or_empty(entry).get("quant_algo")) for entry in layers]
        algorithm = next((name for name in stated_algorithms if name in _ALGORITHMS), None)
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        return None
    groups = list(map(mapping_or_empty, mapping_or_empty(stated.get("config_groups")).values()))
    inputs = [mapping_or_empty(group.get("input_activations")) for group in groups]
    has_scale = any(scheme.get("num_bits") == 4 for scheme in inputs)
    if groups and not has_scale:
        return "w4a16"
    return _ALGORITHMS[algorithm]


MODELOPT: Final = CheckpointLayout(
    name="modelopt",
    title="`modelopt`",
    weight="weight",
    block_scale="weight_scale",
    global_scale="weight_scale_2",
    input_scale="input_scale",
    is_divisor=False,
    library="modelopt",
    declared_keys=("quant_method", "quant_algo", "group_size", "quantized_layers"),
    quantization_config=_quantization_config,
    read_activations=_read_activations,
    exclude_entry=lambda part, is_open: f"*{part}*" if is_open else f"*{part}",
    hf_quant_config=_hf_quant_config,
    needs_marlin=True,
)
