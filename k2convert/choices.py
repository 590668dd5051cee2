"""Words and sizes that several subpackages share, each defined once."""

from typing import Final, Literal

Rule = Literal["gptq", "mse", "max"]
"""Ways to choose block scales: together with the codes, layer by layer, so that each layer makes up for the ones before
it; the best E4M3 scale of every block, by squared error; or the block maximum over 6."""

Layout = Literal["modelopt", "compressed-tensors"]  # tensor names and configs of an NVFP4 checkpoint
Activations = Literal["w4a4", "w4a16"]  # 4-bit activations, or weight-only

RequestedActivations = Literal["w4a4", "w4a16", "both"]
"""Arithmetic of NVFP4 weights in an evaluation, whatever their config declares."""

QuantizerKind = Literal["native", "reference"]  # k2convert's own arithmetic, or compressed-tensors followed by ModelOpt

Target = Literal["nvfp4", "bf16"]  # what a conversion writes; bf16 is a copy of the weights

RoleName = Literal["experts", "shared_experts", "dense_mlp"]  # the roles whose weights a recipe may convert
Fp8Role = Literal["attention", "shared_experts", "dense_mlp"]  # the roles whose weights a recipe may store in FP8
KvCache = Literal["fp8"]  # KV cache types that a config may declare
ServedKvCache = Literal["fp8", "bf16"]  # KV cache types that an engine may be asked for
ComputedKvCache = Literal["fp8"]  # KV cache types that an evaluation can compute, besides FP32
Engine = Literal["vllm", "sglang", "tensorrt-llm"]  # inference engines that a serve command is for
Device = Literal["auto", "cpu", "cuda"]  # what computes a text

EVALUATION_TOKENS: Final = 32_768
EVALUATION_WINDOW: Final = 2048  # tokens that are seen together, as those of an evaluation by default
MAX_SEED: Final = 10**18 - 1
GROUP_SIZE: Final = 32  # input columns that share one INT4 scale

FP8_BLOCK: Final = 128  # rows and columns that share one scale of FP8 in blocks
BLOCK_SIZE: Final = 16  # input columns that share one NVFP4 block scale
MAX_COLUMN_EXPONENT: Final = 4  # smoothing multiplies and divides columns by powers of two from 2**-4 to 2**4
