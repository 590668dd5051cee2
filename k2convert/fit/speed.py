"""Speed of one request: a ceiling, and AIConfigurator's estimate.

The ceiling is bandwidth over the bytes read for a token. Real speeds at one request are 4 to 11 times lower: 61 layers
of small kernels and all-reduces wait for each other. So the ceiling is never shown without this factor.
"""

import logging
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from k2convert.choices import Engine
from k2convert.errors import FitError, cut, require_extra
from k2convert.fit.gpus import Gpu
from k2convert.fit.layouts import Parallelism
from k2convert.fit.model import ModelShape, Weights
from k2convert.models.names import Role

_BACKENDS: Final[dict[Engine, str]] = {"tensorrt-llm": "trtllm", "vllm": "vllm", "sglang": "sglang"}
_NOT_READ: Final = frozenset((Role.EMBEDDINGS, Role.VISION_TOWER, Role.MM_PROJECTOR))


def bytes_per_token(weights: Weights, shape: ModelShape) -> int:
    """Return the weight bytes that one token reads at batch 1: its experts, and all that every token passes.

    The embedding is one row, and vision is not read for text.
    """
    total = 0
    for role, num_bytes in weights.by_role.items():
        if role == Role.EXPERTS:
            total += num_bytes * shape.experts_per_token // shape.num_experts
        elif role not in _NOT_READ:
            total += num_bytes
    return total


def speed_ceiling(weights: Weights, shape: ModelShape, *, gpu: Gpu, layout: Parallelism) -> float | None:
    """Return the tokens a second of one request that bandwidth alone would allow; None if the bandwidth is not known.

    Pipeline stages wait for each other.
    """
    if gpu.bandwidth is None:
        return None
    return gpu.bandwidth * layout.tensor / bytes_per_token(weights, shape)


@dataclass(frozen=True, slots=True)
class EstimatedSpeed:
    """AIConfigurator's tokens a second of one request; None if it has no measurements, and `problem` says so."""

    engine: Engine
    version: str
    tokens_per_second: float | None
    problem: str = ""


_MODEL: Final = "nvidia/Kimi-K2.6-NVFP4"  # its config is in the package; K2-Thinking's text model has the same sizes
_SYSTEMS: Final = {
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
_K2_SIZES: Final = (61, 64, 8, 2048, 576)
_INPUT_TOKENS = 1000
_OUTPUT_TOKENS = 1000


def estimate_speeds(shape: ModelShape, *, gpu: Gpu, layout: Parallelism) -> list[EstimatedSpeed]:
    """Return AIConfigurator's estimate for each engine at one request, 1,000 tokens in and 1,000 out.

    Raises MissingDependencyError without the extra, FitError for a model or GPU that it has not measured.
    """
    require_extra("fit", purpose="--estimate")
    sizes = (shape.num_layers, shape.num_heads, shape.experts_per_token, shape.expert_width, shape.kv_values)
    if sizes != _K2_SIZES or shape.num_experts != 384:
        raise FitError("--estimate: AIConfigurator has measured K2 with all its experts only. Leave out --estimate.")
    if gpu.name not in _SYSTEMS:
        known = ", ".join(_SYSTEMS)
        raise FitError(f"--estimate: AIConfigurator has no NVFP4 measurements of {gpu.title}. It has them of {known}.")
    widths = {
        "tp_size": 1 if layout.data_attention else layout.tensor,
        "attention_dp_size": layout.tensor if layout.data_attention else 1,
        "pp_size": layout.pipeline,
        "moe_tp_size": layout.tensor // layout.expert,
        "moe_ep_size": layout.expert,
    }
    system = _SYSTEMS[gpu.name]
    found: list[EstimatedSpeed] = []
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the library logs the tables that it loads
    try:
        sdk: Any = import_module("aiconfigurator_core.sdk")
        database: Any = import_module("aiconfigurator_core.sdk.perf_database")
        for engine, backend in _BACKENDS.items():
            version = str(database.get_latest_database_version(system=system, backend=backend))
            try:
                handle = sdk.EngineHandle.compile(_MODEL, system, backend, backend_version=version, **widths)
                milliseconds = handle.predict_decode_latency(1, _INPUT_TOKENS, _OUTPUT_TOKENS)
            except Exception as error:  # whatever a library of measurements lacks for this layout
                found.append(EstimatedSpeed(engine, version, None, cut(str(error))))
            else:
                found.append(EstimatedSpeed(engine, version, 1000 * (_OUTPUT_TOKENS - 1) / milliseconds))
    finally:
        logging.disable(before)
    return found
