"""Loads FP8 weights into an engine's own linear layers: `fp8_layers ENGINE REQUEST ANSWER`, both JSON.

The request has the quantization_config of a result of Kimi K2 and of Kimi K3, and sizes of tensor parallelism. Layers
have the models' own shapes, names and classes; their config, methods, parameters and weight loaders are the engine's.
Random codes and scales take the place of a checkpoint. The answer has what is wrong: a layer with another method than
its format's, and rows whose loaded codes or scales are not those of the file. Kernels are left out.

`shared` is false for K3 as NVIDIA writes it: g_proj has scales of its own. The rows that vLLM 0.33.0 then mixes up are
counted.
"""

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

from scripts.engine_checks.clients import sglang_on_cpu, vllm_on_cpu

BLOCK = 128
HIDDEN = 7168
PERIOD = 131  # columns after which random codes repeat: no multiple of it is where a weight is cut
COLUMN, ROW, WHOLE = "column", "row", "whole"  # how tensor parallelism cuts a weight


@dataclass(frozen=True)
class Layer:
    """A layer of an engine: its name, its parts with (rows, cut), the columns, and whether it is FP8."""

    name: str
    make: Callable[[str], Any]
    parts: tuple[tuple[int, str], ...]
    columns: int
    is_fp8: bool = True
    shared_from: int = 99  # parts from this one on have the same scales in all rows


def stored(
    rows: int, columns: int, *, in_blocks: bool, row_of_scales: Tensor | None, seed: int
) -> tuple[Tensor, Tensor]:
    """Return random codes E4M3 [N, K] and scales as files have them."""
    generator = torch.Generator().manual_seed(seed)
    tile = torch.randint(0, 0x7F, (rows, PERIOD), dtype=torch.uint8, generator=generator)
    codes = tile.repeat(1, -(-columns // PERIOD))[:, :columns].contiguous()
    if not in_blocks:
        return codes.view(torch.float8_e4m3fn), torch.rand(rows, 1, generator=generator) + 0.5
    if row_of_scales is not None:
        scales = row_of_scales.expand(-(-rows // BLOCK), -1).clone()
    else:
        shape = (-(-rows // BLOCK), -(-columns // BLOCK))
        scales = torch.exp2(torch.randint(-12, -2, shape, generator=generator).float())
    return codes.view(torch.float8_e4m3fn), scales[:, None, :, None].clone()


def of_rows(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [N, K], and the scales [N, C] that each row has: one, or one for each 128 columns."""
    grid = scales.reshape(scales.shape[0], -1)
    if len(grid) != len(codes):
        grid = grid.repeat_interleave(BLOCK, 0)[: len(codes)]
    return codes.view(torch.uint8), grid


def cut(values: Tensor, how: str, size: int, rank: int) -> Tensor:
    """Return what a rank has of codes or scales of rows; a row's only scale is not cut."""
    if how == WHOLE or (how == ROW and values.shape[1] == 1):
        return values
    return values.chunk(size, dim=1 if how == ROW else 0)[rank]


class Vllm:
    prefix = "language_model.model."

    def __init__(self) -> None:
        vllm_on_cpu.enable(is_weight_only=False)
        import vllm.model_executor.layers.linear as linear
        import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors as packed
        import vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_fp8 as scheme
        import vllm.model_executor.layers.quantization.modelopt as modelopt
        import vllm.model_executor.parameter as parameter

        self.linear, self.packed, self.scheme, self.modelopt, self.parameter = (
            linear, packed, scheme, modelopt, parameter
        )  # fmt: skip

    def config(self, family: str, stated: dict[str, Any]) -> Any:
        if family == "k2":
            from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM

            config = self.packed.CompressedTensorsConfig.from_config(stated)
            fused = {"fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"]}
            config.packed_modules_mapping = DeepseekV2ForCausalLM.packed_modules_mapping | fused
            return config
        from vllm.models.kimi_k3.nvidia.model import KimiLinearModel

        config = self.modelopt.ModelOptMixedPrecisionConfig.from_config(stated)
        config.packed_modules_mapping = KimiLinearModel.packed_modules_mapping
        return config

    def parallel(self, size: int, rank: int) -> ExitStack:
        stack = ExitStack()
        for module in (self.linear, self.parameter):
            stack.enter_context(patch.object(module, "get_tensor_model_parallel_world_size", lambda: size))
            stack.enter_context(patch.object(module, "get_tensor_model_parallel_rank", lambda: rank))
        kernel = MagicMock()
        stack.enter_context(patch.object(self.scheme, "init_fp8_linear_kernel", lambda *_, **__: kernel))
        stack.enter_context(patch.object(self.modelopt, "select_linear_kernel", lambda *_, **__: kernel))
        stack.enter_context(patch.object(self.modelopt, "expose_input_quant_key", lambda *_: None))
        named = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
        for module in (self.scheme, self.packed):
            if hasattr(module, "get_current_vllm_config"):
                stack.enter_context(patch.object(module, "get_current_vllm_config", lambda: named))
        config = self.packed.CompressedTensorsConfig
        stack.enter_context(patch.object(config, "_check_scheme_supported", lambda *_, **__: True))
        return stack

    def layers(self, family: str, config: Any, size: int) -> Iterator[Layer]:
        linear = self.linear

        def merged(columns: int, rows: list[int], **options: Any) -> Callable[[str], Any]:
            return lambda name: linear.MergedColumnParallelLinear(
                columns, rows, bias=False, quant_config=config, prefix=name, **options
            )

        def column(columns: int, rows: int) -> Callable[[str], Any]:
            return lambda name: linear.ColumnParallelLinear(columns, rows, bias=False, quant_config=config, prefix=name)

        def row(columns: int, rows: int) -> Callable[[str], Any]:
            return lambda name: linear.RowParallelLinear(columns, rows, bias=False, quant_config=config, prefix=name)

        if family == "k2":
            yield from _k2(merged, column, row, "fused_qkv_a_proj", merged(HIDDEN, [1536, 576], disable_tp=True))
            return

        def in_proj(name: str) -> Any:
            from vllm.models.kimi_k3.nvidia.kda import _KimiGDNMergedColumnParallelLinear as Merged

            rows = [12288] * 4 + [128, 96]
            padding = -(4 * 12288 // size + 128 + 96 // size) % BLOCK
            rows += [padding * size] if padding else []
            return Merged(
                HIDDEN, rows, replicated_shard_id=4, tp_size=size, padding_size=padding, bias=False,
                quant_config=config, prefix=name,
            )  # fmt: skip

        def qkv_gate(name: str) -> Any:
            return linear.KimiK3MergedQKVGateLinear(HIDDEN, 1536, 512, 64, 96, 128, quant_config=config, prefix=name)

        gate_parts = ((1536, WHOLE), (576, WHOLE), (12288, COLUMN))
        yield Layer("layers.3.self_attn.fused_qkv_a_g_proj", qkv_gate, gate_parts, HIDDEN, shared_from=1)
        kda = (*((12288, COLUMN) for _ in range(4)), (128, WHOLE), (96, COLUMN))
        yield Layer("layers.1.self_attn.in_proj_qkvgfab", in_proj, kda, HIDDEN)
        yield from _k3(merged, column, row)

    def load(self, module: Any, _name: str, tensors: list[tuple[Tensor, Tensor]]) -> None:
        for number, pair in enumerate(tensors):
            for parameter, tensor in zip((module.weight, module.weight_scale), pair, strict=True):
                shard = (number,) if len(tensors) > 1 else ()
                parameter.weight_loader(parameter, tensor, *shard)

    def loaded(self, module: Any) -> tuple[Tensor, Tensor]:
        return of_rows(module.weight.data, module.weight_scale.data)


class Sglang:
    prefix = "model."

    def __init__(self) -> None:
        sglang_on_cpu.enable()
        import sglang.srt.layers.linear as linear
        import sglang.srt.layers.quantization.compressed_tensors.compressed_tensors as packed
        import sglang.srt.layers.quantization.modelopt_quant as modelopt

        self.linear, self.packed, self.modelopt = linear, packed, modelopt

    def config(self, family: str, stated: dict[str, Any]) -> Any:
        if family == "k2":
            config = self.packed.CompressedTensorsConfig.from_config(stated)
            config.packed_modules_mapping = {"fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"]}
            return config
        from sglang.srt.models.kimi_k3 import KimiK3ForConditionalGeneration

        config = self.modelopt.ModelOptMixedPrecisionConfig.from_config(stated)
        config.packed_modules_mapping = KimiK3ForConditionalGeneration.packed_modules_mapping
        return config

    def parallel(self, size: int, rank: int) -> ExitStack:
        stack = ExitStack()
        linear = self.linear
        stack.enter_context(patch.object(linear, "get_group_rank_size", lambda _: (rank, size)))
        stack.enter_context(patch.object(linear, "get_parallel", MagicMock))
        stack.enter_context(patch.object(linear, "get_forward", lambda: MagicMock(sp_active=False)))
        for name in dir(linear):
            if name.startswith("_resolve") and "group" in name:
                stack.enter_context(patch.object(linear, name, lambda *_, **__: None))
        config = self.packed.CompressedTensorsConfig
        stack.enter_context(patch.object(config, "_check_scheme_supported", lambda *_, **__: True))
        return stack

    def layers(self, family: str, config: Any, _size: int) -> Iterator[Layer]:
        linear = self.linear

        def merged(columns: int, rows: list[int]) -> Callable[[str], Any]:
            return lambda name: linear.MergedColumnParallelLinear(
                columns, rows, bias=False, quant_config=config, prefix=name
            )

        def column(columns: int, rows: int, **options: Any) -> Callable[[str], Any]:
            return lambda name: linear.ColumnParallelLinear(
                columns, rows, bias=False, quant_config=config, prefix=name, **options
            )

        def row(columns: int, rows: int) -> Callable[[str], Any]:
            return lambda name: linear.RowParallelLinear(columns, rows, bias=False, quant_config=config, prefix=name)

        def whole(columns: int, rows: int) -> Callable[[str], Any]:
            return lambda name: linear.ReplicatedLinear(columns, rows, bias=False, quant_config=config, prefix=name)

        fused = "fused_qkv_a_proj_with_mqa"
        if family == "k2":
            yield from _k2(merged, column, row, fused, whole(HIDDEN, 2112))
            return
        yield Layer(f"layers.3.self_attn.{fused}", whole(HIDDEN, 2112), ((1536, WHOLE), (576, WHOLE)), HIDDEN)
        yield Layer("layers.3.self_attn.g_proj", column(HIDDEN, 12288), ((12288, COLUMN),), HIDDEN)
        kda = tuple((12288, COLUMN) for _ in range(4))
        yield Layer("layers.1.self_attn.fused_qkvg_proj", merged(HIDDEN, [12288] * 4), kda, HIDDEN)
        yield Layer("layers.1.self_attn.f_a_proj", whole(HIDDEN, 128), ((128, WHOLE),), HIDDEN)
        beta = column(HIDDEN, 96, skip_block_quant_check=True)
        yield Layer("layers.1.self_attn.b_proj", beta, ((96, COLUMN),), HIDDEN)
        yield from _k3(merged, column, row)

    def load(self, module: Any, name: str, tensors: list[tuple[Tensor, Tensor]]) -> None:
        scales = getattr(module, "weight_scale_inv", None)
        in_blocks = scales is not None
        if scales is None:
            scales = module.weight_scale
        pairs = [(codes, scale[:, 0, :, 0] if in_blocks else scale) for codes, scale in tensors]
        if isinstance(module, self.linear.ReplicatedLinear):  # as the models' own loaders join them
            module.weight.data.copy_(torch.cat([codes for codes, _ in pairs]))
            scales.data.copy_(torch.cat([scale for _, scale in pairs]))
            return
        for number, (codes, scale) in enumerate(pairs):
            shard = (number,) if len(pairs) > 1 else ()
            module.weight.weight_loader(module.weight, codes, *shard)
            if name.endswith(".b_proj"):  # all ranks share one row of blocks (load_weights of kimi_k3)
                scales.data.copy_(scale)
            else:
                scales.weight_loader(scales, scale, *shard)

    def loaded(self, module: Any) -> tuple[Tensor, Tensor]:
        scales = getattr(module, "weight_scale_inv", None)
        return of_rows(module.weight.data, module.weight_scale.data if scales is None else scales.data)


Make = Callable[..., Callable[[str], Any]]


def _k2(merged: Make, column: Make, row: Make, fused: str, make_fused: Callable[[str], Any]) -> Iterator[Layer]:
    stem = "layers.3.self_attn"
    yield Layer(f"{stem}.{fused}", make_fused, ((1536, WHOLE), (576, WHOLE)), HIDDEN)
    yield Layer(f"{stem}.q_b_proj", column(1536, 12288), ((12288, COLUMN),), 1536)
    yield Layer(f"{stem}.kv_b_proj", column(512, 16384), ((16384, COLUMN),), 512, is_fp8=False)
    yield Layer(f"{stem}.o_proj", row(8192, HIDDEN), ((HIDDEN, ROW),), 8192)
    for mlp, width in (("layers.3.mlp.shared_experts", 2048), ("layers.0.mlp", 18432)):
        both = ((width, COLUMN), (width, COLUMN))
        yield Layer(f"{mlp}.gate_up_proj", merged(HIDDEN, [width, width]), both, HIDDEN)
        yield Layer(f"{mlp}.down_proj", row(width, HIDDEN), ((HIDDEN, ROW),), width)


def _k3(merged: Make, column: Make, row: Make) -> Iterator[Layer]:
    yield Layer("layers.3.self_attn.q_b_proj", column(1536, 18432), ((18432, COLUMN),), 1536)
    yield Layer("layers.3.self_attn.kv_b_proj", column(512, 24576), ((24576, COLUMN),), 512)
    yield Layer("layers.3.self_attn.o_proj", row(12288, HIDDEN), ((HIDDEN, ROW),), 12288)
    yield Layer("layers.1.self_attn.f_b_proj", column(BLOCK, 12288), ((12288, COLUMN),), BLOCK)
    yield Layer("layers.1.self_attn.o_proj", row(12288, HIDDEN), ((HIDDEN, ROW),), 12288)
    shared = "layers.1.mlp.shared_experts"
    both = ((6144, COLUMN), (6144, COLUMN))
    yield Layer(f"{shared}.gate_up_proj", merged(HIDDEN, [6144, 6144]), both, HIDDEN, is_fp8=False)
    yield Layer(f"{shared}.down_proj", row(6144, HIDDEN), ((HIDDEN, ROW),), 6144, is_fp8=False)


@torch.no_grad()
def wrong_rows(
    engine: Vllm | Sglang, layer: Layer, size: int, rank: int, *, in_blocks: bool, shared: bool
) -> int | str:
    """Make and load a layer; return how many of its rows are not those of the file, or what else is wrong."""
    module = layer.make(f"{engine.prefix}{layer.name}")
    is_fp8 = module.weight.dtype == torch.float8_e4m3fn
    if is_fp8 != layer.is_fp8:
        return f"its weight is {module.weight.dtype} ({type(module.quant_method).__name__})"
    if not is_fp8:
        return 0
    row = torch.exp2(torch.randint(-12, -2, (1, -(-layer.columns // BLOCK))).float()) if shared else None
    tensors = [
        stored(rows, layer.columns, in_blocks=in_blocks, seed=number,
               row_of_scales=row if number >= layer.shared_from else None)
        for number, (rows, _) in enumerate(layer.parts)
    ]  # fmt: skip
    engine.load(module, layer.name, tensors)
    loaded = engine.loaded(module)
    done = 0
    wrong = 0
    for pair, (_, how) in zip(tensors, layer.parts, strict=True):
        codes, scales = (cut(values, how, size, rank) for values in of_rows(*pair))
        own = slice(done, done + len(codes))
        wrong += int(((loaded[0][own] != codes).any(dim=1) | (loaded[1][own] != scales).any(dim=1)).sum())
        done = own.stop
    return wrong


def main() -> int:
    name, request, answer = sys.argv[1:]
    requested = json.loads(Path(request).read_text(encoding="utf-8"))
    engine = {"vllm": Vllm, "sglang": Sglang}[name]()
    problems: list[str] = []
    mixed_up: dict[str, int] = {}
    checked = 0
    for family, stated in requested["configs"].items():
        for size in requested["sizes"]:
            rank = size // 2
            with engine.parallel(size, rank):
                for layer in engine.layers(family, engine.config(family, stated), size):
                    options = {"in_blocks": family == "k3"}
                    wrong = wrong_rows(engine, layer, size, rank, shared=True, **options)
                    checked += 1
                    if wrong:
                        problem = wrong if isinstance(wrong, str) else f"{wrong:,} rows are not those of the file"
                        problems.append(f"{family}, TP {size}, rank {rank}: {layer.name}: {problem}")
                    if layer.shared_from < len(layer.parts):
                        mixed_up[str(size)] = wrong_rows(engine, layer, size, rank, shared=False, **options)
    version = importlib.metadata.version(name).partition("+")[0]
    document = {"version": version, "checked": checked, "problems": problems, "mixed_up": mixed_up}
    Path(answer).write_text(json.dumps(document), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
