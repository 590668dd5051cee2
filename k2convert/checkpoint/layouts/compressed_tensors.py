"""The format nvfp4-pack-quantized of compressed-tensors 0.13 and later; 0.12 refuses the key `scale_dtype`."""

import re
from collections.abc import Mapping
from typing import Any, Final

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.checkpoint.layouts.layout import CheckpointLayout, Quantization
from k2convert.choices import BLOCK_SIZE, Activations

_FORMAT: Final = "nvfp4-pack-quantized"
_FP8_FORMAT: Final = "float-quantized"
MIXED_FORMAT: Final = "mixed-precision"
SCALE_DTYPE: Final = "torch.float8_e4m3fn"
"""Without it compressed-tensors does not round the block scales of activations."""


def _quantization_config(declared: Quantization, _: str) -> dict[str, Any]:
    shared: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "group_size": BLOCK_SIZE,
        "num_bits": 4,
        "observer_kwargs": {},
        "scale_dtype": SCALE_DTYPE,
        "strategy": "tensor_group",
        "symmetric": True,
        "type": "float",
    }
    # "local": block scales are computed from the activations at run time.
    group: dict[str, Any] = {
        "input_activations": (shared | {"dynamic": "local", "observer": "static_minmax"})
        if declared.activations == "w4a4"
        else None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": shared | {"dynamic": False, "observer": "memoryless_minmax"},
    }
    groups = {"group_0": group}
    if declared.fp8_targets:
        nvfp4, fp8 = map(list, declared.fp8_targets)
        groups = {"group_0": {"format": _FORMAT, **group, "targets": nvfp4}, "group_1": _fp8_group(fp8)}
    kv_scheme = {"dynamic": False, "num_bits": 8, "strategy": "tensor", "symmetric": True, "type": "float"}
    return {
        "config_groups": groups,
        "format": MIXED_FORMAT if declared.fp8_targets else _FORMAT,
        "global_compression_ratio": None,
        "ignore": list(declared.excludes),
        "kv_cache_scheme": kv_scheme if declared.kv_cache == "fp8" else None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _fp8_group(targets: list[str]) -> dict[str, Any]:
    """Return the group of layers with one scale for each output row, and one for each token at run time."""
    shared: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "format": _FP8_FORMAT,
        "input_activations": shared | {"strategy": "token", "dynamic": True},
        "output_activations": None,
        "targets": targets,
        "weights": shared | {"strategy": "channel", "dynamic": False, "observer": "memoryless_minmax"},
    }


def _read_activations(stated: Mapping[str, Any]) -> Activations | None:
    groups = list(map(mapping_or_empty, mapping_or_empty(stated.get("config_groups")).values()))
    groups = [group for group in groups if (group.get("format") or stated.get("format")) == _FORMAT]
    if not groups:
        return None
    if any(group.get("input_activations") for group in groups):
        return "w4a4"
    return "w4a16"


COMPRESSED_TENSORS: Final = CheckpointLayout(
    name="compressed-tensors",
    title="`compressed-tensors` (nvfp4-pack-quantized)",
    weight="weight_packed",
    block_scale="weight_scale",
    global_scale="weight_global_scale",
    input_scale="input_global_scale",
    is_divisor=True,
    library="compressed-tensors",
    declared_keys=("quant_method", "format"),
    quantization_config=_quantization_config,
    read_activations=_read_activations,
    exclude_entry=lambda part, is_open: f"re:.*{re.escape(part)}{'.*' if is_open else '$'}",
    vllm_reads_kv_cache=False,
    tensorrt_llm_note="Only recent releases of TensorRT-LLM read this layout; all of them read the `modelopt` layout.",
    transformers_note="transformers: use version 4 (tested with 4.57.6) and compressed-tensors 0.13 or later; 0.12 "
    "refuses this config. transformers 5 (tested with 5.23.0) drops the global scale of NVFP4 experts while loading, "
    "and answers wrongly.",
)
