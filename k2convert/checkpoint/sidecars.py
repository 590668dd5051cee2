"""The files beside the weights: tokenizer, chat template, processors, licence. Copied byte for byte, never executed."""

from pathlib import Path

from k2convert.checkpoint.names import CONFIG_NAME, HF_QUANT_CONFIG_NAME, INDEX_NAME, LEDGER_NAME
from k2convert.errors import CheckpointError

# The source's own card would describe the wrong weights; the rest is rewritten or is weights in another form.
_NOT_COPIED = frozenset({CONFIG_NAME, INDEX_NAME, HF_QUANT_CONFIG_NAME, LEDGER_NAME, "README.md"})
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".tmp", ".part"})


def list_sidecars(folder: Path) -> list[Path]:
    """Relative paths of the files to copy, sorted; hidden files and folders are left out. Links are refused."""
    found: list[Path] = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if any(part.startswith(".") or part == "__pycache__" for part in relative.parts):
            continue
        if path.is_symlink():
            raise CheckpointError(
                f"{path}: is a link, and links are not followed. Put the file itself there "
                "(`hf download REPO --local-dir FOLDER` does)."
            )
        if path.is_file() and str(relative) not in _NOT_COPIED and path.suffix not in _WEIGHT_SUFFIXES:
            found.append(relative)
    return found
