"""Runs a published pipeline on one folder: `python -m scripts.bench.peers chain|expanded|quark SOURCE DESTINATION`.

`quark` runs in the environment of AMD Quark, in which k2convert is not installed.
"""

import sys
import warnings
from pathlib import Path

from scripts.engine_checks.environments import QUARK, ensure, python_of

ENVIRONMENTS = Path(__file__).resolve().parents[2] / "build" / "engines"
IGNORE = (
    "re:.*gate$", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj$", "lm_head",
    "re:.*embed_tokens$",
)  # fmt: skip


def llm_compressor(source: Path, destination: Path, *, observer: str | None) -> None:
    """Run llm-compressor's one-pass chain, INT4 -> BF16 -> NVFP4A16, with its default observer or a searching one."""
    from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from llmcompressor import model_free_ptq

    scheme: QuantizationScheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    assert scheme.weights is not None
    if observer is not None:
        scheme.weights.observer = observer
    converter = CompressedTensorsDequantizer(str(source))
    model_free_ptq(str(source), str(destination), scheme=scheme, ignore=IGNORE, converter=converter, device="cpu")


def quark(source: Path, destination: Path) -> None:
    """Run AMD Quark's file-to-file mode with its scheme and template for Kimi K2: the routed experts in NVFP4."""
    from quark.torch import LLMTemplate, ModelQuantizer  # pyright: ignore[reportMissingImports]

    config = LLMTemplate.get("kimi_k2").get_config(scheme="nvfp4")
    ModelQuantizer(config).direct_quantize_checkpoint(str(source), str(destination), device="cpu")


def quark_python() -> Path:
    """Return the interpreter with AMD Quark; its environment (1.8 GB) is made when first needed. Raises SetupError."""
    ensure(QUARK, ENVIRONMENTS, lambda text: print(text, file=sys.stderr, flush=True))
    return python_of(QUARK, ENVIRONMENTS)


def main() -> None:
    warnings.simplefilter("ignore")
    name = sys.argv[1]
    source = Path(sys.argv[2])
    destination = Path(sys.argv[3])
    if name == "quark":
        quark(source, destination)
    else:
        llm_compressor(source, destination, observer={"chain": None, "expanded": "nvfp4_expanded_mse"}[name])


if __name__ == "__main__":
    main()
