"""Every kind of serve command: the deployments, and what an engine's own parser says, in its environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

from k2convert.choices import Engine
from k2convert.fit.gpus import GPUS
from k2convert.fit.layouts import Parallelism
from k2convert.fit.serving import Deployment, ServeCommand, serve_command
from k2convert.models import FAMILIES
from scripts.engine_checks.engines import ENGINES
from scripts.engine_checks.environments import python_of
from scripts.engine_options import LISTS

PARSERS = {"vllm-0.33": "vllm", "sglang": "sglang"}
"""What the client `parsing` calls the engines whose parsers it has, by the names of ENGINES."""

KINDS = (None, *(GPUS[name] for name in ("b200", "h200", "rtx-pro-6000", "dgx-spark")))
LAYOUTS = (
    Parallelism(),
    Parallelism(tensor=8),
    Parallelism(tensor=8, expert=4),
    Parallelism(tensor=8, expert=8),
    Parallelism(tensor=8, expert=8, pipeline=2),
    Parallelism(pipeline=5),
    Parallelism(tensor=8, data_attention=True),
    Parallelism(tensor=8, expert=8, data_attention=True),
    Parallelism(tensor=16, expert=16, pipeline=2),
)
CHECKPOINTS = (*product(("modelopt", "compressed-tensors"), ("w4a4", "w4a16")), (None, None))
SETTINGS = (*product((None, 131_072), (None, "fp8", "bf16"), (None, 0.93), (None, "0123abcd")),)


def deployments() -> Iterator[Deployment]:
    """Yield every combination of what a serve command depends on."""
    for (layout, activations), family, parallelism, gpu, settings in product(
        CHECKPOINTS, FAMILIES, LAYOUTS, KINDS, SETTINGS
    ):
        context, kv_cache, utilization, revision = settings
        yield Deployment(
            model="me/Kimi-NVFP4",
            layout=layout,
            activations=activations,
            family=family.card,
            parallelism=parallelism,
            gpu=gpu,
            context=context,
            kv_cache=kv_cache,
            utilization=utilization,
            revision=revision,
        )


@cache
def commands(engine: Engine) -> tuple[ServeCommand, ...]:
    """Return every command of an engine that differs in its words or notes."""
    return tuple(dict.fromkeys(serve_command(engine, deployment) for deployment in deployments()))


def check_commands(name: str, work: Path) -> list[str]:
    """Give every command and the recorded options to the parser of one of PARSERS; return what is wrong."""
    engine = ENGINES[name]
    kind = PARSERS[name]
    request = work / "serve-commands.json"
    out = work / f"serve-commands-{name}.json"
    recorded = json.loads((LISTS / f"{kind}.json").read_text(encoding="utf-8"))
    words = {command.words[1:] for command in commands(kind) if command.words}
    request.write_text(json.dumps({"commands": sorted(words), "options": recorded["options"]}), encoding="utf-8")
    out.unlink(missing_ok=True)
    python = str(python_of(engine.environment, work))
    command = [python, "-m", "scripts.engine_checks.clients.parsing", kind, str(request), str(out)]
    done = subprocess.run(command, env=engine.variables(work), check=False, capture_output=True, text=True)
    if not out.is_file():
        return [f"the parser stopped: {done.stderr.strip().rpartition(chr(10))[2]}"]
    return json.loads(out.read_text(encoding="utf-8"))
