"""Loads a checkpoint with the real SGLang on a CPU, and checks what it holds and what it prepares for its kernels."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scripts.engine_checks.clients import sglang_on_cpu
from scripts.engine_checks.clients.files import PROJECTIONS, Checkpoint, same_bytes
from scripts.engine_checks.clients.outcome import Outcome, read_arguments

BACKEND = "flashinfer_cutlass"
NOT_NVFP4 = ("Unquantized", "ModelOptFp8KVCache")
K3_BACKEND = "flashinfer_trtllm"  # the others have no SiTU
WEIGHT_ONLY_BACKEND = "marlin"  # its other backends take the method of W4A4 for the modelopt layout


@dataclass(slots=True)
class Loading:
    """Names that SGLang read, and how often each part of an expert was written: (layer, parameter, shard, expert)."""

    read: list[str] = field(default_factory=list)
    parts: Counter[tuple[int, str, str, int]] = field(default_factory=Counter)


def main() -> int:
    arguments = read_arguments(__doc__)
    sglang_on_cpu.enable()
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.version import __version__

    files = Checkpoint(arguments.checkpoint)
    outcome = Outcome(f"SGLang {__version__}{files.suffix}")
    backend = K3_BACKEND if files.is_k3 else BACKEND
    if files.is_modelopt and files.is_weight_only:
        backend = WEIGHT_ONLY_BACKEND
    config = sglang_on_cpu.start(arguments.checkpoint, backend=backend)
    loading = record_loading(files)
    try:
        model = load(config)
    except Exception as error:  # whatever SGLang refuses it with
        return outcome.refused(error, arguments.out)
    outcome.note(f"{type(model).__name__}, {config.quantization}, --moe-runner-backend {backend}")
    experts = {module.layer_id: module for module in model.modules() if isinstance(module, FusedMoE)}
    check_methods(model, files, outcome)
    if files.is_k3 and not files.is_modelopt:
        check_skipped(loading, experts, files, outcome)
    else:
        check_loading(loading, model, experts, files, outcome)
        for layer, module in experts.items() if not outcome.failed else ():
            check_weights(layer, module, files, outcome)
        if not outcome.failed:
            check_kernel_format(experts, files, outcome)
    torch.distributed.destroy_process_group()
    return outcome.save(arguments.out)


def record_loading(files: Checkpoint) -> Loading:
    """Hook into SGLang's loader. Floating-point parameters are NaN before loading, so that one left out shows."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.model_loader.loader import DefaultModelLoader

    loading = Loading()
    all_weights = DefaultModelLoader._get_all_weights
    load_only = DefaultModelLoader.load_weights_only
    expert_loader = FusedMoE.weight_loader

    def get_all_weights(self: Any, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in all_weights(self, *args, **options):
            loading.read.append(name)
            yield name, tensor

    def load_weights_only(model: Any, weights: Any, device: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and not _is_unused(name, files):
                parameter.data.copy_(torch.full((), float("nan")))
        load_only(model, weights, device)

    def weight_loader(
        self: Any,
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        *rest: Any,
        **more: Any,
    ) -> Any:
        part = next((name for name, value in self.named_parameters() if value is param), weight_name)
        loading.parts[self.layer_id, part, shard_id, expert_id] += 1
        return expert_loader(self, param, loaded_weight, weight_name, shard_id, expert_id, *rest, **more)

    DefaultModelLoader._get_all_weights = get_all_weights
    DefaultModelLoader.load_weights_only = staticmethod(load_weights_only)
    DefaultModelLoader.postprocess_weights = staticmethod(lambda model, device: None)  # see check_kernel_format
    FusedMoE.weight_loader = weight_loader
    return loading


def load(config: Any) -> Any:
    """Return SGLang's model with the checkpoint's weights, before they are prepared for kernels."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader

    return get_model_loader(LoadConfig()).load_model(model_config=config, device_config=DeviceConfig("cpu"))


def check_methods(model: Any, files: Checkpoint, outcome: Outcome) -> None:
    """SGLang's own choice for every module of its model: NVFP4 for each layer's experts, and for nothing else."""
    chosen = {name: _method(module) for name, module in model.named_modules() if hasattr(module, "quant_method")}
    methods = {name: type(method).__name__ for name, method in chosen.items() if method is not None}
    for method, count in sorted(Counter(methods.values()).items()):
        outcome.note(f"{count:4} x {method}")
    banks = {f"{files.prefix}model.layers.{layer}.mlp.experts" for layer in files.moe_layers}
    wrong = sorted(banks ^ {name for name, method in methods.items() if not method.startswith(NOT_NVFP4)})
    outcome.check("every bank of experts gets an NVFP4 method, no other module does", not wrong, ", ".join(wrong[:4]))


def check_skipped(loading: Loading, experts: dict[int, Any], files: Checkpoint, outcome: Outcome) -> None:
    """SGLang renames `weight_packed` of Kimi K3, finds no such parameter, and goes on without a message."""
    outcome.engine += ", codes skipped"
    expected = {(layer, f"{part}_{name}") for layer in experts for part in ("w13", "w2") for name in files.parameters}
    written = {(layer, part) for layer, part, _, _ in loading.parts}
    codes = {(layer, part) for layer, part in expected if part.endswith("weight_packed")}
    detail = f"of {len(expected)} fused parameters {len(written)} are written"
    outcome.check("known: no codes of compressed-tensors arrive", expected - written == codes, detail)


def check_loading(loading: Loading, model: Any, experts: dict[int, Any], files: Checkpoint, outcome: Outcome) -> None:
    """Everything in the files was read, every parameter was written, every part of every expert exactly once."""
    outcome.check("fused experts in every MoE layer", sorted(experts) == list(files.moe_layers))
    narrow = (torch.uint8, torch.float8_e4m3fn)
    others = [n for n, p in model.named_parameters() if p.dtype in narrow and ".experts." not in n]
    outcome.check("nothing else is quantized", not others, ", ".join(others[:4]))
    detail = f"{len(loading.read)} of {len(files.tensors)}"
    outcome.check("every tensor of the files was read once", sorted(loading.read) == sorted(files.tensors), detail)
    left = [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.float().isnan().any() and not _is_made_later(name, files)
    ]
    outcome.check("every parameter was written", not left, ", ".join(left[:4]))
    held, stored = (sum(map(torch.numel, _others(named))) for named in (dict(model.named_parameters()), files.tensors))
    outcome.check("no tensor is left over", held == stored, f"{held:,} and {stored:,} elements outside the experts")
    expected = files.num_matrices * len(files.parameters)
    once = len(loading.parts) == expected and set(loading.parts.values()) == {1}
    outcome.check("every part of every expert was written once", once, f"{len(loading.parts)} of {expected}")


def _others(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Return what is outside the routed experts, less A_log, which the files pad, and the scales of a cache."""
    left_out = ("A_log", "k_scale", "v_scale")
    return [tensor for name, tensor in tensors.items() if ".experts." not in name and not name.endswith(left_out)]


def _is_unused(name: str, files: Checkpoint) -> bool:
    return files.is_weight_only and "input" in name  # SGLang's default for them is 1.0


def _is_made_later(name: str, files: Checkpoint) -> bool:
    return "swizzled" in name or name.endswith(("k_scale", "v_scale")) or _is_unused(name, files)


def _method(module: Any) -> Any:
    return getattr(module, "scheme", None) or module.quant_method


def check_weights(layer: int, module: Any, files: Checkpoint, outcome: Outcome) -> None:
    """The fused parameters hold the files' bytes."""
    fused = dict(module.named_parameters())
    up_first = getattr(_method(module), "load_up_proj_weight_first", False)  # as the kernel wants the rows
    wrong = []
    for expert in range(files.num_experts):
        for index, projection in enumerate(PROJECTIONS):
            name = files.expert(layer, expert, projection)
            if not _has_bytes(fused, files, name, expert, index, up_first):
                wrong.append(name)
    detail = f"wrong: {wrong[:2]}" if wrong else f"{files.num_experts * len(PROJECTIONS)} matrices"
    outcome.check(f"layer {layer}: fused experts hold the files' bytes", not wrong, detail)
    scale = fused[f"w13_{files.parameters[2]}"]
    outcome.check(f"layer {layer}: gate and up share their global scale", same_bytes(scale[:, 0], scale[:, 1]))


def _has_bytes(fused: dict[str, Tensor], files: Checkpoint, name: str, expert: int, index: int, up_first: bool) -> bool:
    codes, scales, *scalars = files.parameters
    if index == PROJECTIONS.index("down_proj"):
        loaded = {parameter: fused[f"w2_{parameter}"][expert] for parameter in files.parameters}
    else:
        half = 1 - index if up_first else index  # of the rows; scalars stay in the order gate, up
        loaded = {parameter: fused[f"w13_{parameter}"][expert].chunk(2)[half] for parameter in (codes, scales)}
        loaded |= {parameter: fused[f"w13_{parameter}"][expert].flatten() for parameter in scalars}
        loaded |= {parameter: loaded[parameter][index] for parameter in scalars if loaded[parameter].numel() == 2}
    return all(same_bytes(value, files.get(f"{name}.{parameter}")) for parameter, value in loaded.items())


def check_kernel_format(experts: dict[int, Any], files: Checkpoint, outcome: Outcome) -> None:
    """What process_weights_after_loading makes, decoded by SGLang's own reference, where it needs no GPU."""
    try:
        for module in experts.values():
            _method(module).process_weights_after_loading(module)
    except Exception as error:  # whatever a missing kernel raises
        outcome.note(f"not prepared for kernels without a GPU: {type(error).__name__}: {str(error)[:120]}")
        return
    if not files.is_modelopt:
        return
    for layer, module in experts.items():
        worst = max(_kernel_errors(layer, module, files))
        detail = f"largest relative difference {worst:.2g}"
        outcome.check(f"layer {layer}: the kernels' format decodes to the files' numbers", worst < 1e-6, detail)


def _kernel_errors(layer: int, module: Any, files: Checkpoint) -> Iterator[float]:
    from sglang.test.quant_ref_utils import dequantize_nvfp4_to_dtype

    for expert in range(files.num_experts):
        names = [files.expert(layer, expert, projection) for projection in PROJECTIONS]
        gate, up, down = (files.weight(name).float() for name in names)
        inputs = [files.input_scale(name) or 1.0 for name in names]  # alpha holds the input scale too
        for codes, scales, alpha, wanted in (
            (module.w13_weight, module.w13_blockscale_swizzled, module.g1_alphas[expert] / inputs[0], (gate, up)),
            (module.w2_weight, module.w2_blockscale_swizzled, module.g2_alphas[expert] / inputs[2], (down,)),
        ):
            decoded = dequantize_nvfp4_to_dtype(codes[expert], scales[expert], 1 / alpha, torch.float32)
            orders = (torch.cat(wanted), torch.cat(wanted[::-1]))  # FlashInfer's kernels take up before gate
            yield min(float((decoded[: len(o)] - o).abs().max() / o.abs().max()) for o in orders)


if __name__ == "__main__":
    sys.exit(main())
