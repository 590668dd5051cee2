"""Records what vLLM's loader reads and writes, and checks that nothing is missing, left over or written twice."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as compressed_tensors_moe,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from scripts.engine_checks.clients.files import Checkpoint
from scripts.engine_checks.clients.outcome import Outcome

MOE_METHODS = (ModelOptNvFp4FusedMoE, compressed_tensors_moe.CompressedTensorsW4A4Nvfp4MoEMethod)
CACHE_SCALES = (".q_scale", ".k_scale", ".v_scale", ".prob_scale")  # of an FP8 cache; 1.0 where the files have none
NOT_NVFP4 = ("Unquantized", "ModelOptKVCache")
FUSED = {
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_g_proj": ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
    "in_proj_qkvgfab": ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"),
    "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PROJECTOR = {"mm_projector.linear_1": "mm_projector.proj.0", "mm_projector.linear_2": "mm_projector.proj.2"}


@dataclass(slots=True)
class Loading:
    """What happened while vLLM loaded: names read, parameters written, parts of experts, and the values afterwards.

    `experts` and `modules` are by vLLM's name of a layer's fused experts, before vLLM prepares them for its kernels.
    """

    read: list[str] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    unset: list[str] = field(default_factory=list)
    parts: Counter[tuple[str, str, str, int]] = field(default_factory=Counter)
    others: dict[str, Tensor] = field(default_factory=dict)
    experts: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)


def record_loading() -> Loading:
    """Hook into vLLM's loader. Floating-point parameters are NaN before loading, so that one left out shows."""
    loading = Loading()
    _replace(DefaultModelLoader, "get_all_weights", lambda plain: _recorded_reads(loading, plain))
    _replace(DefaultModelLoader, "load_weights", lambda plain: _recorded_writes(loading, plain))
    _replace(RoutedExperts, "weight_loader", lambda plain: _recorded_parts(loading, plain))
    for method in MOE_METHODS:
        _replace(method, "process_weights_after_loading", lambda plain: _recorded_experts(loading, plain))
    return loading


def _replace(owner: type, name: str, wrap: Callable[[Any], Any]) -> None:
    setattr(owner, name, wrap(getattr(owner, name)))


def _recorded_reads(loading: Loading, plain: Any) -> Any:
    def get_all_weights(self: Any, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in plain(self, *args, **options):
            loading.read.append(name)
            yield name, tensor

    return get_all_weights


def _recorded_writes(loading: Loading, plain: Any) -> Any:
    def load_weights(self: Any, model: Any, config: Any) -> Any:
        counted = {n: p for n, p in model.named_parameters() if not n.endswith(CACHE_SCALES)}
        loading.parameters = set(counted)
        for parameter in counted.values():
            if parameter.is_floating_point():
                parameter.data.copy_(torch.full((), float("nan")))
        own = type(model).load_weights

        def recorded(weights: Any) -> Any:
            loading.written = own(model, weights)
            for name, parameter in counted.items():
                if parameter.is_floating_point() and parameter.float().isnan().any():
                    loading.unset.append(name)
                if "routed_experts" not in name:
                    loading.others[name] = parameter.detach().clone()
            return loading.written

        model.load_weights = recorded
        return plain(self, model, config)

    return load_weights


def _recorded_parts(loading: Loading, plain: Any) -> Any:
    def weight_loader(
        self: Any,
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> Any:
        done = plain(self, param, loaded_weight, weight_name, shard_id, expert_id, return_success)
        if done is not False:
            part = next(name for name, value in self.named_parameters() if value is param)
            loading.parts[self.layer_name, part, shard_id, expert_id] += 1
        return done

    return weight_loader


def _recorded_experts(loading: Loading, plain: Any) -> Any:
    def process_weights_after_loading(self: Any, layer: Any) -> Any:
        loading.modules[layer.layer_name] = layer
        loading.experts[layer.layer_name] = {n: p.detach().clone() for n, p in layer.named_parameters()}
        return plain(self, layer)

    return process_weights_after_loading


def check_methods(model: Any, files: Checkpoint, outcome: Outcome) -> None:
    """vLLM's own choice for every module of its model: NVFP4 for each layer's experts, and for nothing else."""
    chosen = {name: getattr(module, "quant_method", None) for name, module in model.named_modules()}
    methods = {name: type(method).__name__ for name, method in chosen.items() if method is not None}
    for method, count in sorted(Counter(methods.values()).items()):
        outcome.note(f"{count:4} x {method}")
    banks = {f"{files.prefix}{files.bank(layer)}.routed_experts" for layer in files.moe_layers}
    wrong = sorted(banks ^ {name for name, method in methods.items() if not method.startswith(NOT_NVFP4)})
    outcome.check("every bank of experts gets an NVFP4 method, no other module does", not wrong, ", ".join(wrong[:4]))


def check_loading(loading: Loading, files: Checkpoint, outcome: Outcome) -> None:
    """Everything in the files was read, every parameter was written, every part of every expert exactly once."""

    def counts(name: str) -> bool:  # vLLM has parameters for input scales that W4A16 does not use
        return not (files.is_weight_only and name.endswith(("input_scale", "input_global_scale")))

    outcome.check("NVFP4 in every MoE layer and nowhere else", len(loading.experts) == len(files.moe_layers))
    detail = f"{len(loading.read)} of {len(files.tensors)}"
    outcome.check("every tensor of the files was read once", sorted(loading.read) == sorted(files.tensors), detail)
    missed = sorted(filter(counts, loading.parameters - loading.written))
    detail = f"{len(loading.written)} of {len(loading.parameters)}; missing {missed[:4]}"
    outcome.check("every parameter was written", not missed, detail if missed else str(len(loading.parameters)))
    unset = list(filter(counts, loading.unset))
    outcome.check("no parameter is left unset", not unset, ", ".join(unset[:4]))
    expected = files.num_matrices * len(files.parameters)
    once = len(loading.parts) == expected and set(loading.parts.values()) == {1}
    outcome.check("every part of every expert was written once", once, f"{len(loading.parts)} of {expected}")
    wrong = [name for name, value in loading.others.items() if not _holds_the_files(name, value, files)]
    outcome.check("every other parameter holds the files' values", not wrong, ", ".join(wrong[:4]))


def _holds_the_files(name: str, value: Tensor, files: Checkpoint) -> bool:
    module = name.split(".")[-2] if name.count(".") else ""
    wanted = [name.replace(module, source) for source in FUSED.get(module, (module,))]
    wanted = [_file_name(source, files) for source in wanted]
    if not all(source in files.tensors for source in wanted):
        return False
    stored = torch.cat([torch.atleast_1d(files.tensors[source]) for source in wanted])
    if name.endswith("A_log"):  # the files pad it with zeros
        stored = stored[: len(value)]
    rows = value[: stored.shape[0]] if value.dim() else value  # vLLM pads the vocabulary
    return rows.numel() == stored.numel() and torch.equal(
        rows.reshape(stored.shape).float(), stored.to(rows.dtype).float()
    )


def _file_name(name: str, files: Checkpoint) -> str:
    """Name in the files of a parameter of vLLM's model."""
    if name not in files.tensors:
        for theirs, stored in PROJECTOR.items():
            name = name.replace(theirs, stored)
    return name
