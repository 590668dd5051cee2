"""The command that serves a result, printed as the next one."""

from pathlib import Path

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.names import CONFIG_NAME
from k2convert.cli import console
from k2convert.fit.serving import serve_command
from k2convert.job.card import result_deployment
from k2convert.records.ledger import read_ledger


def print_serve(model: str, *, folder: Path, revision: str | None = None) -> None:
    """Print how to serve a folder or a repository. `folder` has the result's config.json and ledger."""
    config = read_json_file(folder / CONFIG_NAME)
    deployment = result_deployment(read_ledger(folder), config, model=model, revision=revision)
    console.print_next(serve_command("vllm", deployment).line)
