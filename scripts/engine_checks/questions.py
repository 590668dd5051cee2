"""What engines say without a checkpoint: of serve commands, of exclude lists, of the formats of compare_servers.

Each engine answers in its own environment (clients/questions.py). TensorRT-LLM has no wheel for CPUs. Its function that
reads exclude lists is compared by `python -m scripts.engine_checks.questions F`, where F is a Python file that contains
`QuantConfig.is_module_excluded_from_quantization`.
"""

import ast
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from k2convert.check.contract import matchers
from k2convert.choices import Engine as EngineName
from scripts.compare_servers import Server
from scripts.engine_checks.deployments import LISTS, commands
from scripts.engine_checks.engines import Engine
from scripts.engine_checks.environments import python_of
from scripts.engine_checks.model_server import ModelServer, markov
from scripts.engine_checks.variants import ROOT

sys.path.insert(0, str(ROOT / "tests" / "check" / "contract"))

import matcher_cases
import test_matchers as ours

FORMS = ("{}", "{}", "*{}", "{}*", "*{}*", "{}.*", "re:.*{}", "re:{}.*", "re:.*{}$")
NUM_RANDOM = 500  # lists for each layout and kind of names
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
OURS = {
    ("vllm", "modelopt"): ours.vllm,
    ("vllm", "compressed-tensors"): ours.vllm_packed,
    ("sglang", "modelopt"): ours.sglang,
    ("sglang", "compressed-tensors"): ours.sglang_packed,
}
Case = dict[str, Any]
"""Layout, whether names are wrapped as K2.5's, lists of entries, and the engine's names of modules."""


def check_questions(engine: Engine, kind: EngineName, work: Path) -> list[str]:
    """Ask an engine everything; return what is wrong. Its options are left in `work`/options-KIND.json."""
    recorded = json.loads((LISTS / f"{kind}.json").read_text(encoding="utf-8"))
    cases = list_cases(TITLES[kind], ("modelopt", "compressed-tensors"))
    request = {
        "commands": sorted({command.words[1:] for command in commands(kind) if command.words}),
        "lists": cases,
        "documents": documents(kind),
    }
    answers = ask(engine, kind, request, work)
    options = {"engine": kind, "version": answers["version"], "options": dict(sorted(answers["options"].items()))}
    (work / f"options-{kind}.json").write_text(json.dumps(options) + "\n", encoding="utf-8")
    problems = [*answers["commands"], *answers["documents"]]
    for name, takes in recorded["options"].items():
        real = answers["options"].get(name)
        if real is None:
            problems.append(f"{name}: recorded, but the parser does not have it")
        elif (takes == "flag") != (real == "flag"):
            problems.append(f"{name}: recorded as {takes}, but the parser says {real}")
    for case, rows in zip(cases, answers["lists"], strict=True):
        problems += disagreements(case, rows, OURS[kind, case["layout"]])
    return problems


def ask(engine: Engine, kind: EngineName, request: dict[str, Any], work: Path) -> dict[str, Any]:
    """Return an engine's answers; raises RuntimeError with its last line if it stops."""
    with tempfile.TemporaryDirectory(dir=work) as name:
        request_path = Path(name) / "request.json"
        answer = Path(name) / "answer.json"
        request_path.write_text(json.dumps(request), encoding="utf-8")
        client = "scripts.engine_checks.clients.questions"
        command = [python_of(engine.environment, work), "-m", client, kind, request_path, answer]
        done = subprocess.run(command, env=engine.variables(work), check=False, capture_output=True, text=True)
        if not answer.is_file():
            raise RuntimeError(f"{engine.name} stopped: {done.stderr.strip().rpartition(chr(10))[2]}")
        return json.loads(answer.read_text(encoding="utf-8"))


def documents(kind: EngineName) -> dict[str, Any]:
    """Return a question of compare_servers, and the answers of the tests' server."""
    with ModelServer(markov(1), engine=kind) as server:
        Server(server.url, "", None).ask(list(range(12)), 8)
        question = server.requests[0]
        return {"question": question, "answer": server.answer(question), "models": server.listing()}


def list_cases(title: str, layouts: Sequence[str]) -> list[Case]:
    """Return the exclude lists that an engine is asked about; the same each time."""
    return [
        {"layout": layout, "wrapped": wrapped, "lists": list(_lists(title, wrapped)), "modules": modules}
        for layout in layouts
        for wrapped in (False, True)
        for modules in [matcher_cases.modules_of(title, wrapped=wrapped)]
    ]


def _lists(title: str, wrapped: bool) -> Iterator[list[str]]:
    """Yield the published lists, and random ones of one to six whole names, parts of them, globs and expressions."""
    yield from matcher_cases.LISTS.values()
    names = [name for of in (title, "checkpoint") for name in matcher_cases.modules_of(of, wrapped=wrapped)]
    draw = random.Random(1 + wrapped)
    for _ in range(NUM_RANDOM):
        entries: list[str] = []
        for _ in range(draw.randint(1, 6)):
            words = draw.choice(names).split(".")
            begin = draw.randrange(len(words))
            end = draw.randint(begin + 1, len(words))
            text = ".".join(words[begin:end] if draw.random() < 0.6 else words)
            entries.append(draw.choice(FORMS).format(text))
        yield entries


def disagreements(case: Case, rows: list[list[bool | str]], matcher: Callable[..., bool]) -> Iterator[str]:
    """Yield where our matcher disagrees with an engine, which has a row for each list."""
    for entries, row in zip(case["lists"], rows, strict=True):
        for module, theirs in zip(case["modules"], row, strict=True):
            mine = _outcome(matcher, module, entries, case["wrapped"])
            if mine != theirs:
                yield f"{case['layout']}: {module} {entries}: the engine says {theirs}, validate {mine}"


def _outcome(matcher: Callable[..., bool], module: str, entries: list[str], wrapped: bool) -> bool | str:
    try:
        return bool(matcher(module, entries, wrapped))
    except ValueError:
        return "refused"


def main() -> int:
    """Compare TensorRT-LLM's function with ours."""
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    name = "is_module_excluded_from_quantization"
    (method,) = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name]
    space: dict[str, Any] = {"fnmatch": SimpleNamespace(fnmatch=fnmatch)}
    exec("from __future__ import annotations\n" + ast.unparse(method), space)

    def theirs(module: str, entries: list[str], wrapped: bool) -> bool:
        mapped = matchers.map_tensorrt_llm_excludes(entries, ours.naming(wrapped))
        return space[name](SimpleNamespace(exclude_modules=mapped), module)

    takes_subtrees = "rsplit" in text  # newer releases
    title = "TensorRT-LLM, unfused" if takes_subtrees else "TensorRT-LLM"
    problems: list[str] = []
    for case in list_cases(title, ("modelopt",)):
        rows = [[_outcome(theirs, m, entries, case["wrapped"]) for m in case["modules"]] for entries in case["lists"]]
        problems += disagreements(case, rows, ours.tensorrt_llm_subtree if takes_subtrees else ours.tensorrt_llm)
    print("\n".join(problems[:5]) or "no disagreement")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
