"""Every kind of serve command, given to the engine's own parser in its environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from scripts.engine_checks.deployments import commands
from scripts.engine_checks.engines import ENGINES
from scripts.engine_checks.environments import python_of
from scripts.engine_options import LISTS

PARSERS = {"vllm-0.33": "vllm_parser", "sglang": "sglang_parser"}
"""The clients that have an engine's parser, by the names of ENGINES."""


def check_commands(name: str, work: Path) -> list[str]:
    """Give every command and the recorded options to the parser of one of PARSERS; return what is wrong."""
    engine = ENGINES[name]
    parser = PARSERS[name]
    kind = parser.partition("_")[0]
    request = work / "serve-commands.json"
    out = work / f"serve-commands-{name}.json"
    recorded = json.loads((LISTS / f"{kind}.json").read_text(encoding="utf-8"))
    words = {command.words[1:] for command in commands(kind) if command.words}
    request.write_text(json.dumps({"commands": sorted(words), "options": recorded["options"]}), encoding="utf-8")
    out.unlink(missing_ok=True)
    python = str(python_of(engine.environment, work))
    command = [python, "-m", f"scripts.engine_checks.clients.{parser}", str(request), str(out)]
    done = subprocess.run(command, env=engine.variables(work), check=False, capture_output=True, text=True)
    if not out.is_file():
        return [f"the parser stopped: {done.stderr.strip().rpartition(chr(10))[2]}"]
    return json.loads(out.read_text(encoding="utf-8"))
