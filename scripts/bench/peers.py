"""Runs a published pipeline on one folder: `python -m scripts.bench.peers chain|expanded SOURCE DESTINATION`."""

import sys
import warnings
from pathlib import Path

IGNORE = (
    "re:.*gate$",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|down)_proj$",
    "lm_head",
    "re:.*embed_tokens$",
)


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


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    name, source, destination = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    llm_compressor(source, destination, observer={"chain": None, "expanded": "nvfp4_expanded_mse"}[name])
