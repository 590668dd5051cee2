"""The command that serves a checkpoint with vLLM, SGLang or TensorRT-LLM: the only place that makes one.

Options are those of vLLM 0.33, SGLang 0.5.23 and trtllm-serve on TensorRT-LLM's main branch. tests/fit/test_serving.py
checks every command against the engines' own definitions. The engines read the quantization from config.json, so no
option names it.
"""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.layouts.compressed_tensors import MIXED_FORMAT
from k2convert.choices import Activations, Engine, Layout, ServedKvCache
from k2convert.deploy.layouts import WIDTH_ALIGNMENT, Parallelism
from k2convert.models import cuts_no_block, find_family, fp8_sizes
from k2convert.models.config import find_quantization_config, text_config
from k2convert.models.names import Family, ModelCardFacts, tensor_sizes
from k2convert.plan.recipe import Recipe

if TYPE_CHECKING:
    from k2convert.deploy.gpus import Gpu, Nvfp4Kind

ENGINE_NAMES: Final[Mapping[Engine, str]] = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}
FP8_NOTE: Final = (
    "An FP8 KV cache without scales loses long context. In BABILong at 256k tokens, GLM-5.3 scores 51 % in BF16, 47 % "
    "in FP8 with scales and 36 % without them. k2convert computes no scales, and copies those of the source."
)

NVFP4_NOTES: Final[dict["Nvfp4Kind", str]] = {
    "native": "NVFP4 runs in hardware. Weight-only checkpoints keep 16-bit activations.",
    "slow": "NVFP4 runs in hardware, but INT4 is faster on RTX PRO 6000 today: on 8 of them, with an FP8 KV cache, one "
    "request of K2.5 ran at 53 to 55 tokens/s in NVFP4 (SGLang) and at 79 in INT4 (vLLM; "
    "github.com/local-inference-lab/rtx6kpro). No such comparison is known on DGX Spark.",
    "marlin": "NVFP4 runs as weight-only, by Marlin kernels, and is no faster than the 4-bit weights of the source.",
    "unknown": "NVFP4 runs in hardware on Blackwell, and as weight-only by Marlin kernels before it. "
    "AMD's GPUs cannot run it.",
}
_COLUMNS: Final = 76
_SPARK: Final = "dgx-spark"


@dataclass(frozen=True, slots=True)
class Deployment:
    """Deployment: the checkpoint, its GPUs and its limits.

    model         a folder, or a repository on the Hub
    layout, activations   of NVFP4 weights; both None for a checkpoint that is not NVFP4
    family        has its own options for each engine
    context       most tokens of a request; None: as config.json says
    kv_cache      None: as config.json says
    utilization   share of a GPU's memory that the engine may use, as vLLM counts it; None: the engine's default
    revision      of the repository
    """

    model: str
    layout: Layout | None
    activations: Activations | None
    family: ModelCardFacts
    parallelism: Parallelism
    gpu: "Gpu | None" = None
    context: int | None = None
    kv_cache: ServedKvCache | None = None
    utilization: float | None = None
    revision: str | None = None
    has_fp8: bool = False  # weights beside NVFP4

    @property
    def needs_marlin(self) -> bool:
        """Return whether SGLang, left to choose, would quantize the activations of a weight-only checkpoint."""
        return self.activations == "w4a16" and self.layout is not None and LAYOUTS[self.layout].needs_marlin

    @property
    def sglang_kernels(self) -> str | None:
        """The MoE kernels to name to SGLang; None: it chooses well itself."""
        if self.needs_marlin:
            return "marlin"
        is_fp4 = self.activations == "w4a4" and (self.gpu is None or self.gpu.nvfp4 in ("native", "unknown"))
        if is_fp4:
            return self.family.sglang_blackwell or None
        return None

    @property
    def num_machines(self) -> int:
        """The machines that have its GPUs; 1 if the GPU is not known."""
        if self.gpu is None:
            return 1
        return -(-self.parallelism.num_gpus // self.gpu.per_machine)


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """A command, word by word, and what to know about it, one sentence or two a note.

    Without words, the engine cannot serve the deployment, for the reason in the notes.
    """

    words: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def line(self) -> str:
        """One line for a shell."""
        return shlex.join(self.words)

    @property
    def block(self) -> str:
        """Lines for a shell, broken between options."""
        lines = [""]
        options = [i for i, word in enumerate(self.words) if word.startswith("--")]
        for begin, end in pairwise([0, *(i for i in options if i), len(self.words)]):
            part = shlex.join(self.words[begin:end])
            joined = f"{lines[-1]} {part}" if lines[-1] else part
            if lines[-1] and len(joined) > _COLUMNS:
                lines.append(f"    {part}")
            else:
                lines[-1] = joined
        return " \\\n".join(lines)


def usual_parallelism(config: Mapping[str, Any], family: Family) -> Parallelism:
    """Return the largest usual tensor parallelism that heads and engines allow, and at which nothing is padded.

    Experts are not padded by any engine's kernels, and FP8 blocks of attention stay whole.
    """
    text = text_config(config)
    width = text.get("moe_intermediate_size")
    heads = text.get("num_attention_heads")
    cut = fp8_sizes(config, becomes_fp8=False)
    for size in tensor_sizes((8, 4, 2), heads, family.tensor_parallel_sizes):
        fits = isinstance(width, int) and width and width % (WIDTH_ALIGNMENT * size) == 0
        if fits and cuts_no_block(cut, size):
            return Parallelism(tensor=size)
    return Parallelism()


def result_deployment(
    config: Mapping[str, Any], kv_cache: ServedKvCache | None, *, family: str, model: str, revision: str | None = None
) -> Deployment:
    """Return how to serve a result that is at `model`, with as much tensor parallelism as is usual for its experts."""
    model_family = find_family(family)
    facts = model_family.card
    layout = usual_parallelism(config, model_family)
    scheme = nvfp4_scheme(config)
    is_mixed = has_fp8(config)
    return Deployment(model, *scheme, facts, layout, kv_cache=kv_cache, revision=revision, has_fp8=is_mixed)


def has_fp8(config: Mapping[str, Any]) -> bool:
    """Return whether config.json declares FP8 weights beside NVFP4, as k2convert writes them."""
    _, quantization = find_quantization_config(config) or ("", {})
    return quantization.get("format") == MIXED_FORMAT


def recipe_has_fp8(recipe: Recipe) -> bool:
    """Return the same of what a recipe makes."""
    return bool(recipe.fp8) and recipe.layout == "compressed-tensors"


def nvfp4_scheme(config: Mapping[str, Any]) -> tuple[Layout, Activations] | tuple[None, None]:
    """Return the layout and activations of NVFP4 weights as config.json states them; Nones for other weights."""
    _, quantization = find_quantization_config(config) or ("", {})
    for layout in LAYOUTS.values():
        if (activations := layout.read_activations(quantization)) is not None:
            return layout.name, activations
    return None, None


def serve_command(engine: Engine, deployment: Deployment) -> ServeCommand:
    """Return the command that serves a checkpoint, and what to know about it."""
    refusal = _refusal(engine, deployment)
    if refusal is not None:
        return ServeCommand((), (refusal,))
    words = {"vllm": _vllm_words, "sglang": _sglang_words, "tensorrt-llm": _tensorrt_llm_words}[engine]
    return ServeCommand(tuple(words(deployment)), tuple(_notes(engine, deployment)))


def _refusal(engine: Engine, deployment: Deployment) -> str | None:
    """Return why the engine cannot serve the family's checkpoint, or lay out a model like this; None if it can.

    vLLM's rule is in FusedMoEParallelConfig.make (model_executor/layers/fused_moe/config.py).
    """
    parallelism = deployment.parallelism
    traits = (deployment.layout, deployment.activations, "pipeline" if parallelism.pipeline > 1 else None)
    for refusing, trait, reason in deployment.family.refusals:
        if refusing == engine and trait in traits:
            return reason
    if engine == "tensorrt-llm" and deployment.has_fp8:
        return "TensorRT-LLM does not load FP8 weights beside NVFP4 in this layout. Serve it with vLLM or SGLang."
    if engine == "vllm" and parallelism.expert not in (1, parallelism.tensor):
        return (
            f"vLLM gives whole experts to all {parallelism.tensor} GPUs that hold a layer or to none, so not to "
            f"{parallelism.expert}."
        )
    return None


def _vllm_words(deployment: Deployment) -> Iterator[str]:
    parallelism = deployment.parallelism
    yield from ("vllm", "serve", deployment.model)
    yield from _option("--revision", deployment.revision)
    yield from _size(
        "--data-parallel-size" if parallelism.data_attention else "--tensor-parallel-size", parallelism.tensor
    )
    yield from _size("--pipeline-parallel-size", parallelism.pipeline)
    if parallelism.expert > 1:
        yield "--enable-expert-parallel"
    yield from _option("--max-model-len", deployment.context)
    yield from _option("--kv-cache-dtype", {"fp8": "fp8", "bf16": "bfloat16"}.get(deployment.kv_cache or ""))
    yield from _option("--gpu-memory-utilization", deployment.utilization)
    if deployment.family.has_vision:
        yield from ("--mm-encoder-tp-mode", "data")  # the heads of the vision tower need not be divided
    yield "--trust-remote-code"
    yield from shlex.split(deployment.family.vllm_options)


def _sglang_words(deployment: Deployment) -> Iterator[str]:
    parallelism = deployment.parallelism
    yield from ("python3", "-m", "sglang.launch_server", "--model-path", deployment.model)
    yield from _option("--revision", deployment.revision)
    yield from _size("--tp-size", parallelism.tensor)
    if parallelism.data_attention:
        yield from _size("--attn-dp-size", parallelism.tensor)
    yield from _size("--ep-size", parallelism.expert)
    yield from _size("--pp-size", parallelism.pipeline)
    yield from _option("--context-length", deployment.context)
    yield from _option("--kv-cache-dtype", {"fp8": "fp8_e4m3", "bf16": "bf16"}.get(deployment.kv_cache or ""))
    yield from _option("--moe-runner-backend", deployment.sglang_kernels)
    yield "--trust-remote-code"
    yield from shlex.split(deployment.family.sglang_options)


def _tensorrt_llm_words(deployment: Deployment) -> Iterator[str]:
    parallelism = deployment.parallelism
    yield from ("trtllm-serve", deployment.model)
    yield from _option("--revision", deployment.revision)
    yield from _size("--tp_size", parallelism.tensor)
    yield from _size("--ep_size", parallelism.expert)
    yield from _size("--pp_size", parallelism.pipeline)
    if parallelism.data_attention:
        yield "--enable_attention_dp"
    yield from _option("--max_seq_len", deployment.context)
    yield from _option("--kv_cache_dtype", {"fp8": "fp8"}.get(deployment.kv_cache or ""))
    yield "--trust_remote_code"
    yield from shlex.split(deployment.family.tensorrt_llm_options)


def _option(name: str, value: float | str | None) -> Iterator[str]:
    if value is not None:
        yield from (name, str(value))


def _size(name: str, size: int) -> Iterator[str]:
    """Yield the option unless its value is 1, every engine's default."""
    return _option(name, size if size > 1 else None)


def _notes(engine: Engine, deployment: Deployment) -> Iterator[str]:
    if engine == "sglang" and deployment.needs_marlin:
        yield (
            "SGLang 0.5.23 needs `--moe-runner-backend marlin` here. Without it, SGLang treats this checkpoint as W4A4 "
            "and rounds activations to 4 bits, with input scales of 1.0."
        )
    elif engine == "sglang" and (kernels := deployment.sglang_kernels) is not None:
        yield (
            f"SGLang 0.5.23 needs `--moe-runner-backend {kernels}` for this model on Blackwell: its other kernels do "
            "not have the model's activation function. Leave the option out on Hopper, where it runs Marlin."
        )
    if engine == "sglang" and deployment.utilization is not None:
        yield "`--mem-fraction-static` of SGLang counts weights and KV cache only. SGLang chooses it if it is left out."
    if engine == "tensorrt-llm" and deployment.activations == "w4a16":
        yield "Weight-only NVFP4 (`W4A16_NVFP4`) is not in older releases of TensorRT-LLM."
    if engine == "tensorrt-llm" and deployment.layout and (note := LAYOUTS[deployment.layout].tensorrt_llm_note):
        yield note
    if engine == "tensorrt-llm" and deployment.kv_cache == "bf16":
        yield "trtllm-serve cannot ask for a 16-bit KV cache: it has one unless the checkpoint declares FP8."
    if engine == "tensorrt-llm" and deployment.utilization is not None:
        yield "`--free_gpu_memory_fraction` of trtllm-serve is the share of what the weights leave free (0.9)."
    count = deployment.num_machines
    if count > 1:
        nodes = f"`--nnodes {count} --node-rank R"
        how = {
            "tensorrt-llm": "mpirun. `trtllm-llmapi-launch` goes before `trtllm-serve`.",
            "sglang": f"{nodes} --dist-init-addr HOST:25000`, R from 0.",
            "vllm": f"{nodes} --master-addr HOST`, R from 0. All but the first also get `--headless`.",
        }[engine]
        yield f"{ENGINE_NAMES[engine]}: start the command on all {count} machines with {how}"
    if deployment.kv_cache == "fp8":
        yield FP8_NOTE
    if count > 1 and deployment.gpu is not None and deployment.gpu.name == _SPARK:
        yield "Set NCCL_NVLS_ENABLE=0 on every DGX Spark of a cluster. Without it, NCCL may hang at the start."
    if deployment.gpu is not None and deployment.gpu.nvfp4 != "native" and deployment.layout is not None:
        yield f"{deployment.gpu.title}: {NVFP4_NOTES[deployment.gpu.nvfp4]}"
