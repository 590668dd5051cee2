"""The files next to the weights: tokenizer, chat template, processors, license. Copied, never executed."""

from pathlib import Path
from typing import Final

from k2convert.checkpoint.files import walk_folder
from k2convert.checkpoint.names import CARD_NAME, CONFIG_NAME, HF_QUANT_CONFIG_NAME, INDEX_NAME, LEDGER_NAME
from k2convert.errors import MalformedFileError, shortened

# The source's model card would describe the wrong weights. The other names are written by the conversion.
_NOT_COPIED: Final = frozenset({CONFIG_NAME, INDEX_NAME, HF_QUANT_CONFIG_NAME, LEDGER_NAME, CARD_NAME})
_WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".tmp", ".part"})


def list_sidecars(folder: Path) -> list[Path]:
    """Return the relative paths of the files to copy, sorted. Skips hidden files and folders; refuses links."""
    found: list[Path] = []
    for path in walk_folder(folder):
        relative = path.relative_to(folder)
        if any(part.startswith(".") or part == "__pycache__" for part in relative.parts):
            continue
        if path.is_symlink():
            raise MalformedFileError(
                f"{path}: is a link, and links are not followed. Replace it by the file itself "
                "(`hf download REPO --local-dir FOLDER` writes files)."
            )
        if path.is_file() and str(relative) not in _NOT_COPIED and path.suffix not in _WEIGHT_SUFFIXES:
            _check_name(path.name, folder=path.parent)
            found.append(relative)
    return found


def _check_name(name: str, *, folder: Path) -> None:
    """Refuse a name that is not UTF-8: no repository could hold it (MalformedFileError)."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise MalformedFileError(f"{folder}: the name {shortened(name)} is not UTF-8. Rename the file.") from None
