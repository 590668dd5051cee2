"""The command that serves a result, printed as the next one."""

from pathlib import Path

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.names import CONFIG_NAME
from k2convert.cli import console
from k2convert.fit.serving import result_deployment, serve_command
from k2convert.models import find_family
from k2convert.records.ledger import read_ledger


def print_serve(model: str, *, folder: Path, revision: str | None = None) -> None:
    """Print how to serve a folder or a repository. `folder` has the result's config.json and ledger."""
    config = read_json_file(folder / CONFIG_NAME)
    ledger = read_ledger(folder)
    family, kv_cache = find_family(str(ledger.family)).card, ledger.recipe.get("kv_cache")
    deployment = result_deployment(config, family=family, kv_cache=kv_cache, model=model, revision=revision)
    console.print_next(serve_command("vllm", deployment).line)
