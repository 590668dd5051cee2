"""The command that serves a result, printed as the next one."""

from pathlib import Path

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.names import CONFIG_NAME
from k2convert.cli import console
from k2convert.models.config import tensor_parallel_size


def print_serve(model: str, *words: str, folder: Path) -> None:
    """Print how to serve a folder or a repository, with more words for it. `folder` has its config.json."""
    size = tensor_parallel_size(read_json_file(folder / CONFIG_NAME))
    words += ("--tensor-parallel-size", str(size)) if size > 1 else ()
    console.print_next(console.command("vllm", "serve", model, "--trust-remote-code", *words))
