"""Kimi K3: every tensor of the published checkpoint, a small one of the same form, and its edges.

compressed-tensors quantizes the small one's weights to MXFP4, as a quantizer makes them. The counts and bytes of the
whole one are those of the published repository, which the tests check.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from scripts.fixture_maker.config import K25_SIDECARS, published_config, write_sidecars
from scripts.fixture_maker.folder import SmallCheckpoint, write_small
from scripts.fixture_maker.inventory import GROUP_SIZE, TensorSpec
from scripts.fixture_maker.shards import shard_name, write_checkpoint, write_sparse, write_streamed

_PREFIX = "language_model.model"
_ROWS_AT_ONCE = 1 << 14
_A_LOG_UNIT = 128  # A_log is padded with zeros to a multiple of it
SIDECARS = {
    name.replace("kimi_k25", "kimi_k3").replace("deepseek", "kimi_linear"): text.replace("kimi_k25", "kimi_k3")
    for name, text in K25_SIDECARS.items()
} | {"tiktoken.model": "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))}
"""Its tokens are the 256 bytes. Special tokens are 256 more."""


@dataclass(frozen=True, slots=True)
class K3Shape:
    """The sizes that determine K3's tensors; the defaults are the released ones. Layers in `mla` have MLA."""

    hidden: int = 7168
    latent: int = 3584
    inner: int = 3072
    dense_inner: int = 33792
    experts: int = 896
    layers: int = 93
    mla: tuple[int, ...] = (*range(3, 92, 4), 92)
    heads: int = 96
    head_dim: int = 128
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope: int = 128
    qk_rope: int = 64
    vocabulary: int = 163840
    vision_hidden: int = 1024
    vision_qkv: int = 1536
    vision_inner: int = 4096
    vision_blocks: int = 27
    vision_positions: int = 64

    def projections(self) -> dict[str, tuple[int, int]]:
        """Return the [out, in] shape of an expert's three projections."""
        wide = (self.inner, self.latent)
        return {"w1": wide, "w3": wide, "w2": wide[::-1]}


K3_SHAPE = K3Shape()
TINY_SHAPE = K3Shape(
    hidden=512, latent=256, inner=256, dense_inner=512, experts=4, layers=4, mla=(3,), heads=2, head_dim=32,
    q_lora_rank=64, kv_lora_rank=64, qk_nope=32, qk_rope=16, vocabulary=512,
    vision_hidden=32, vision_qkv=48, vision_inner=64, vision_blocks=2, vision_positions=8,
)  # fmt: skip


def _weights(stem: str, sizes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> Iterator[TensorSpec]:
    for name, size in sizes.items():
        yield TensorSpec(f"{stem}.{name}.weight", dtype, size)


def _mlp(stem: str, hidden: int, inner: int) -> Iterator[TensorSpec]:
    wide = (inner, hidden)
    yield from _weights(stem, {"gate_proj": wide, "up_proj": wide, "down_proj": wide[::-1]})


def _attention(shape: K3Shape, stem: str, *, is_mla: bool) -> Iterator[TensorSpec]:
    hidden = shape.hidden
    width = shape.heads * shape.head_dim
    yield from _weights(stem, {"o_proj": (hidden, width), "g_proj": (width, hidden)})
    if is_mla:
        query = shape.q_lora_rank
        key_value = shape.kv_lora_rank
        sizes: dict[str, tuple[int, ...]] = {"q_a_proj": (query, hidden), "q_a_layernorm": (query,)}
        sizes |= {"q_b_proj": (shape.heads * (shape.qk_nope + shape.qk_rope), query)}
        sizes |= {"kv_a_proj_with_mqa": (key_value + shape.qk_rope, hidden), "kv_a_layernorm": (key_value,)}
        yield from _weights(stem, sizes | {"kv_b_proj": (2 * width, key_value)})
        return
    yield from _weights(stem, {f"{part}_proj": (width, hidden) for part in "qkv"})
    low = shape.head_dim
    yield from _weights(stem, {"f_a_proj": (low, hidden), "f_b_proj": (width, low), "b_proj": (shape.heads, hidden)})
    convolutions = {f"{part}_conv1d": (width, 1, 4) for part in "qkv"}
    yield from _weights(stem, convolutions | {"o_norm": (low,)}, "F32")
    yield TensorSpec(f"{stem}.A_log", "F32", (-(-shape.heads // _A_LOG_UNIT) * _A_LOG_UNIT,))
    yield TensorSpec(f"{stem}.dt_bias", "F32", (width,))


def expert_tensors(shape: K3Shape, module: str) -> Iterator[TensorSpec]:
    """Yield the six MXFP4 tensors of the expert called `module`."""
    for projection, (rows, columns) in shape.projections().items():
        yield TensorSpec(f"{module}.{projection}.weight_packed", "U8", (rows, columns // 2))
        yield TensorSpec(f"{module}.{projection}.weight_scale", "U8", (rows, columns // GROUP_SIZE))


def layer_tensors(shape: K3Shape, index: int) -> Iterator[TensorSpec]:
    """Yield the tensors of layer `index`; the first is dense."""
    layer = f"{_PREFIX}.layers.{index}"
    hidden = shape.hidden
    norms = ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm")
    yield from _weights(layer, dict.fromkeys(norms, (hidden,)))
    yield from _weights(layer, dict.fromkeys(("self_attention_res_proj", "mlp_res_proj"), (1, hidden)))
    yield from _attention(shape, f"{layer}.self_attn", is_mla=index in shape.mla)
    if index == 0:
        yield from _mlp(f"{layer}.mlp", hidden, shape.dense_inner)
        return
    moe = f"{layer}.block_sparse_moe"
    yield from _weights(moe, {"gate": (shape.experts, hidden)})
    yield TensorSpec(f"{moe}.gate.e_score_correction_bias", "F32", (shape.experts,))
    yield from _mlp(f"{moe}.shared_experts", hidden, 2 * shape.inner)
    latent = {"routed_expert_down_proj": (shape.latent, hidden), "routed_expert_up_proj": (hidden, shape.latent)}
    yield from _weights(moe, latent | {"routed_expert_norm": (shape.latent,)})
    for expert in range(shape.experts):
        yield from expert_tensors(shape, f"{moe}.experts.{expert}")


def outer_parts(shape: K3Shape) -> list[list[TensorSpec]]:
    """Return embeddings, head and norms; the vision tower; the projector."""
    matrix = (shape.vocabulary, shape.hidden)
    hidden = shape.hidden
    vision = shape.vision_hidden
    norms = {"norm": (hidden,), "output_attn_res_norm": (hidden,), "output_attn_res_proj": (1, hidden)}
    outer = [*_weights(_PREFIX, {"embed_tokens": matrix}), *_weights("language_model", {"lm_head": matrix})]
    sizes: dict[str, tuple[int, ...]] = {"patch_embed.proj": (vision, 3, 14, 14)}
    sizes |= {"patch_embed.pos_emb": (shape.vision_positions, shape.vision_positions, vision)}
    for block in range(shape.vision_blocks):
        parts: dict[str, tuple[int, ...]] = {"norm0": (vision,), "norm1": (vision,)}
        parts |= {"wqkv": (3 * shape.vision_qkv, vision), "wo": (vision, shape.vision_qkv)}
        parts |= {"mlp.fc0": (shape.vision_inner, vision), "mlp.fc1": (vision, shape.vision_inner)}
        sizes |= {f"encoder.blocks.{block}.{name}": size for name, size in parts.items()}
    tower = list(_weights("vision_tower", sizes | {"encoder.final_layernorm": (vision,)}))
    merged = 4 * vision
    projector = {"proj.0": (merged, merged), "proj.2": (hidden, merged), "post_norm": (hidden,)}
    return [[*outer, *_weights(_PREFIX, norms)], tower, list(_weights("mm_projector", projector))]


def k3_parts(shape: K3Shape = K3_SHAPE) -> list[list[TensorSpec]]:
    """Return K3's tensors by shard: one shard per layer, then the outer ones, vision tower and projector."""
    return [*(list(layer_tensors(shape, index)) for index in range(shape.layers)), *outer_parts(shape)]


def k3_config(shape: K3Shape) -> dict[str, Any]:
    """Return Kimi-K3's config.json for a model of this shape."""
    config = published_config("moonshotai/Kimi-K3")
    text = config["text_config"]
    text |= {
        "hidden_size": shape.hidden,
        "routed_expert_hidden_size": shape.latent,
        "moe_intermediate_size": shape.inner,
        "intermediate_size": shape.dense_inner,
        "num_experts": shape.experts,
        "num_experts_per_token": min(text["num_experts_per_token"], shape.experts // 2),
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.qk_nope,
        "qk_rope_head_dim": shape.qk_rope,
        "v_head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
    }
    text["linear_attn_config"] |= {
        "full_attn_layers": [layer + 1 for layer in shape.mla],
        "kda_layers": [layer + 1 for layer in range(shape.layers) if layer not in shape.mla],
        "head_dim": shape.head_dim,
        "num_heads": shape.heads,
    }
    config["vision_config"] |= {
        "text_hidden_size": shape.hidden,
        "mm_hidden_size": shape.vision_hidden,
        "vt_hidden_size": shape.vision_hidden,
        "vt_intermediate_size": shape.vision_inner,
        "qkv_hidden_size": shape.vision_qkv,
        "vt_num_hidden_layers": shape.vision_blocks,
        "init_pos_emb_height": shape.vision_positions,
        "init_pos_emb_width": shape.vision_positions,
    }
    return config


def make_k3_headers(out: Path) -> Path:
    """Write Kimi-K3 as headers and sparse data: 96 shards, 497,220 tensors, 1,560,860,324,864 tensor bytes."""
    return write_checkpoint(
        out,
        k3_parts(K3_SHAPE),
        lambda path, specs: write_sparse(path, specs, {}),
        config=k3_config(K3_SHAPE),
        sidecars=SIDECARS,
    )


def quantize_mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return weight_packed and weight_scale of a BF16 weight [N, K], as compressed-tensors quantizes it."""
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    groups = weight.float().view(weight.shape[0], -1, GROUP_SIZE)
    scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    return MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scales}, scheme)


def _values(spec: TensorSpec, shape: K3Shape, generator: torch.Generator) -> torch.Tensor:
    values = 0.02 * torch.randn(spec.shape, generator=generator)
    if spec.name.endswith("A_log"):
        values[shape.heads :] = 0
    if "norm" in spec.name:
        values += 1
    return values if spec.dtype == "F32" else values.bfloat16()


def tiny_checkpoint(sidecars: Path, shape: K3Shape = TINY_SHAPE) -> SmallCheckpoint:
    """Return a small K3 in memory: a dense KDA layer, two KDA layers and one MLA layer with four experts each."""
    generator = torch.Generator().manual_seed(0)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    parts = k3_parts(shape)
    for number, specs in enumerate(parts, start=1):
        members = shards.setdefault(shard_name(number, len(parts)), {})
        for spec in specs:
            if spec.name.endswith(".weight_packed"):
                module, (rows, size) = spec.name.removesuffix(".weight_packed"), spec.shape
                spread = 0.02 * torch.exp(0.5 * torch.randn(rows, 1, generator=generator))
                weight = (torch.randn(rows, 2 * size, generator=generator) * spread).bfloat16()
                quantized = quantize_mxfp4(weight)
                members |= {f"{module}.{leaf}": quantized[leaf] for leaf in ("weight_packed", "weight_scale")}
            elif spec.dtype != "U8":
                members[spec.name] = _values(spec, shape, generator)
    return SmallCheckpoint(k3_config(shape), shards, sidecars)


def make_k3_shaped(out: Path) -> Path:
    """Write three layers of Kimi-K3's size: dense, KDA and MLA. Their experts are zeros in sparse files."""
    shape = replace(K3_SHAPE, layers=3, mla=(2,))
    generator = torch.Generator().manual_seed(0)

    def values(spec: TensorSpec) -> Iterator[memoryview]:
        rows = 0 if spec.dtype == "U8" else spec.shape[0]
        for first in range(0, rows, _ROWS_AT_ONCE):
            some = replace(spec, shape=(min(_ROWS_AT_ONCE, rows - first), *spec.shape[1:]))
            yield memoryview(_values(some, shape, generator).view(torch.uint8).numpy()).cast("B")

    return write_checkpoint(
        out,
        k3_parts(shape),
        lambda path, specs: write_streamed(path, specs, values),
        config=k3_config(shape),
        sidecars=SIDECARS,
    )


def make_k3_tiny(out: Path, shape: K3Shape = TINY_SHAPE) -> Path:
    """Write a small Kimi-K3: four layers, four experts per MoE layer, 36 MXFP4 projections, all in the window."""
    write_small(tiny_checkpoint(Path(__file__).parent / "none", shape), out)
    write_sidecars(out, SIDECARS)
    return out


def make_k3_edges(out: Path, shape: K3Shape = TINY_SHAPE) -> Path:
    """Plant edges into the small Kimi-K3.

    Layer 1: w3 of every expert is in another shard; scales of experts 0 to 3 spread over 14, 15, 17 and 18 octaves.
    Layer 2: scales of expert 0 spread over 30; expert 1 has empty groups with the bytes 0 and 254; expert 2 only -0;
    expert 3 the bytes 0 to 3. Layer 3: scales are stored as F8_E8M0, and the largest is 2^125 in expert 0.
    """
    checkpoint = tiny_checkpoint(Path(__file__).parent / "none", shape)
    moe = f"{_PREFIX}.layers.{{}}.block_sparse_moe.experts.{{}}.{{}}"
    *_, last = checkpoint.shards
    tensors = checkpoint.tensors()
    for kind in shape.projections():
        for expert in range(4):
            spread = {0: 14, 1: 15, 2: 17, 3: 18}[expert]
            scale = tensors[f"{moe.format(1, expert, kind)}.weight_scale"]
            generator = torch.Generator().manual_seed(expert)
            scale[:] = torch.randint(120 - spread, 121, scale.shape, generator=generator)
            scale[0, :2] = torch.tensor([120 - spread, 120])
        tensors[f"{moe.format(2, 0, kind)}.weight_scale"][::2] -= 30
        packed = tensors[f"{moe.format(2, 1, kind)}.weight_packed"]
        packed[:, :32] = 0x80
        tensors[f"{moe.format(2, 1, kind)}.weight_scale"][:, :2] = torch.tensor([0, 254])
        tensors[f"{moe.format(2, 2, kind)}.weight_packed"][:] = 0x88
        scale = tensors[f"{moe.format(2, 3, kind)}.weight_scale"]
        scale[:] = torch.arange(scale.numel()).view(scale.shape) % 4
        tensors[f"{moe.format(3, 0, kind)}.weight_scale"][0, 0] = 127 + 125
        for expert in range(4):
            name = f"{moe.format(3, expert, kind)}.weight_scale"
            checkpoint.replace(name, tensors[name].view(torch.float8_e8m0fnu))
    for expert in range(4):
        for leaf in ("weight_packed", "weight_scale"):
            checkpoint.move(f"{moe.format(1, expert, 'w3')}.{leaf}", last)
    write_small(checkpoint, out)
    write_sidecars(out, SIDECARS)
    return out
