"""FP8 layers in engines' own classes: each gets the intended method, and loads the numbers of the file.

The configs are those that k2convert writes for the small Kimi K2 and Kimi K3; shapes are the real ones, and tensor
parallelism is 1, 8 and 16 (clients/fp8_layers.py).
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from k2convert.checkpoint.index import open_checkpoint
from k2convert.choices import Engine as EngineName
from k2convert.job.assemble import config_document
from k2convert.plan.plan import plan_conversion
from k2convert.plan.recipe import load_recipe
from scripts.engine_checks.engines import Engine
from scripts.engine_checks.environments import python_of
from scripts.fixture_maker import TINY, make_k3_tiny

SIZES = (1, 8, 16)
MIXED_UP = {"vllm": {"1": 6144, "8": 768, "16": 384}, "sglang": {}}
"""Rows of K3's g_proj that get the scales of a neighbor as NVIDIA writes them, by size of tensor parallelism."""


def configs(work: Path) -> dict[str, Any]:
    """Return the quantization_config of results with FP8, by family."""
    k3 = work / "k3-tiny"
    if not k3.exists():
        make_k3_tiny(k3)
    by_family: dict[str, Any] = {}
    for family, folder, recipe in (("k2", TINY, "kimi-k2-thinking-nvfp4-fp8"), ("k3", k3, "kimi-k3-nvfp4-fp8")):
        source = open_checkpoint(folder)
        plan = plan_conversion(source=source, recipe=load_recipe(recipe))
        by_family[family] = config_document(plan, source)["quantization_config"]
    return by_family


def check_fp8(engine: Engine, kind: EngineName, work: Path) -> list[str]:
    """Return what is wrong with FP8 layers in an engine."""
    with tempfile.TemporaryDirectory(dir=work) as name:
        request, answer = Path(name) / "request.json", Path(name) / "answer.json"
        request.write_text(json.dumps({"configs": configs(work), "sizes": SIZES}), encoding="utf-8")
        client = "scripts.engine_checks.clients.fp8_layers"
        command = [python_of(engine.environment, work), "-m", client, kind, request, answer]
        done = subprocess.run(command, env=engine.variables(work), check=False, capture_output=True, text=True)
        if not answer.is_file():
            return [f"FP8 layers: the client stopped: {done.stderr.strip().rpartition(chr(10))[2]}"]
        document = json.loads(answer.read_text(encoding="utf-8"))
    problems = list(document["problems"])
    if document["mixed_up"] != MIXED_UP[kind]:
        problems.append(f"FP8 layers: of g_proj as NVIDIA writes it, {document['mixed_up']} rows are mixed up")
    return problems
