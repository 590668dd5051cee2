"""What a Kimi K2 checkpoint contains: every tensor's name, dtype and shape.

The numbers are those of Kimi-K2-Thinking and Kimi-K2.5; the tests check that counts and bytes add up to the published
ones. A smaller `K2Shape` gives the same structure at any size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

DTYPE_BYTES = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}
GROUP_SIZE = 32
CODES_PER_WORD = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as a safetensors header declares it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class K2Shape:
    """The sizes that determine a K2 language model's tensors; the defaults are the released ones."""

    hidden: int = 7168
    moe_intermediate: int = 2048
    dense_intermediate: int = 18432
    experts: int = 384
    moe_layers: int = 60
    dense_layers: int = 1
    vocabulary: int = 163840
    heads: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope: int = 128
    qk_rope: int = 64
    v_head: int = 128

    @property
    def layers(self) -> int:
        return self.dense_layers + self.moe_layers

    def projections(self) -> dict[str, tuple[int, int]]:
        """Return the [out, in] shape of an expert's three projections."""
        wide = (self.moe_intermediate, self.hidden)
        return {"gate_proj": wide, "up_proj": wide, "down_proj": wide[::-1]}


K2_SHAPE = K2Shape()
SMALL_SHAPE = replace(
    K2_SHAPE,
    hidden=512,
    moe_intermediate=256,
    dense_intermediate=512,
    experts=2,
    moe_layers=1,
    vocabulary=64,
    heads=2,
    q_lora_rank=64,
    kv_lora_rank=64,
)


def expert_tensors(shape: K2Shape, module: str) -> Iterator[TensorSpec]:
    """Yield the nine INT4 tensors of the expert called `module`."""
    for projection, (rows, columns) in shape.projections().items():
        name = f"{module}.{projection}"
        yield TensorSpec(f"{name}.weight_packed", "I32", (rows, columns // CODES_PER_WORD))
        yield TensorSpec(f"{name}.weight_scale", "BF16", (rows, columns // GROUP_SIZE))
        yield TensorSpec(f"{name}.weight_shape", "I32", (2,))


def attention_tensors(shape: K2Shape, layer: str) -> Iterator[TensorSpec]:
    """Yield a layer's norms and multi-head latent attention."""
    query = shape.q_lora_rank
    key_value = shape.kv_lora_rank
    matrices = {
        "input_layernorm": (shape.hidden,),
        "post_attention_layernorm": (shape.hidden,),
        "self_attn.q_a_layernorm": (query,),
        "self_attn.kv_a_layernorm": (key_value,),
        "self_attn.q_a_proj": (query, shape.hidden),
        "self_attn.q_b_proj": (shape.heads * (shape.qk_nope + shape.qk_rope), query),
        "self_attn.kv_a_proj_with_mqa": (key_value + shape.qk_rope, shape.hidden),
        "self_attn.kv_b_proj": (shape.heads * (shape.qk_nope + shape.v_head), key_value),
        "self_attn.o_proj": (shape.hidden, shape.heads * shape.v_head),
    }
    for name, size in matrices.items():
        yield TensorSpec(f"{layer}.{name}.weight", "BF16", size)


def _gated_mlp(shape: K2Shape, module: str, width: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{module}.gate_proj.weight", "BF16", (width, shape.hidden))
    yield TensorSpec(f"{module}.up_proj.weight", "BF16", (width, shape.hidden))
    yield TensorSpec(f"{module}.down_proj.weight", "BF16", (shape.hidden, width))


def layer_tensors(shape: K2Shape, index: int, *, prefix: str = "model") -> Iterator[TensorSpec]:
    """Yield the tensors of layer `index`, dense or mixture of experts according to the shape."""
    layer = f"{prefix}.layers.{index}"
    yield from attention_tensors(shape, layer)
    if index < shape.dense_layers:
        yield from _gated_mlp(shape, f"{layer}.mlp", shape.dense_intermediate)
        return
    yield TensorSpec(f"{layer}.mlp.gate.weight", "BF16", (shape.experts, shape.hidden))
    yield TensorSpec(f"{layer}.mlp.gate.e_score_correction_bias", "F32", (shape.experts,))
    yield from _gated_mlp(shape, f"{layer}.mlp.shared_experts", shape.moe_intermediate)
    for expert in range(shape.experts):
        yield from expert_tensors(shape, f"{layer}.mlp.experts.{expert}")


def outer_tensors(shape: K2Shape, *, prefix: str = "model", head: str = "lm_head") -> list[TensorSpec]:
    """Return the embedding, the output head and the final norm."""
    matrix = (shape.vocabulary, shape.hidden)
    return [
        TensorSpec(f"{prefix}.embed_tokens.weight", "BF16", matrix),
        TensorSpec(f"{head}.weight", "BF16", matrix),
        TensorSpec(f"{prefix}.norm.weight", "BF16", (shape.hidden,)),
    ]


def projector_tensors(vision: int, text: int) -> list[TensorSpec]:
    """Return K2.5's projector from merged 2 x 2 vision patches to the language model."""
    merged = 4 * vision
    sizes = {
        "pre_norm.weight": (vision,),
        "pre_norm.bias": (vision,),
        "proj.0.weight": (merged, merged),
        "proj.0.bias": (merged,),
        "proj.2.weight": (text, merged),
        "proj.2.bias": (text,),
    }
    return [TensorSpec(f"mm_projector.{name}", "BF16", size) for name, size in sizes.items()]


def vision_tensors(hidden: int, intermediate: int, blocks: int, positions: int) -> list[TensorSpec]:
    """Return K2.5's vision tower; its patch embedding is a four-dimensional convolution."""
    sizes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (hidden, 3, 14, 14),
        "patch_embed.proj.bias": (hidden,),
        "patch_embed.pos_emb.weight": (positions, positions, hidden),
        "encoder.final_layernorm.weight": (hidden,),
        "encoder.final_layernorm.bias": (hidden,),
    }
    linears = {"wqkv": (3 * hidden, hidden), "wo": (hidden, hidden)}
    linears |= {"mlp.fc0": (intermediate, hidden), "mlp.fc1": (hidden, intermediate)}
    for block in range(blocks):
        module = f"encoder.blocks.{block}"
        for norm in ("norm0", "norm1"):
            sizes |= {f"{module}.{norm}.weight": (hidden,), f"{module}.{norm}.bias": (hidden,)}
        for linear, (rows, columns) in linears.items():
            sizes |= {f"{module}.{linear}.weight": (rows, columns), f"{module}.{linear}.bias": (rows,)}
    return [TensorSpec(f"vision_tower.{name}", "BF16", size) for name, size in sizes.items()]
