"""Figures of the structure: files that a command enters, modules that it loads, its frames, lines of code.

    python tests/structure.py            prints all of them as a table
    python tests/structure.py --lines    counts the lines only

A file is entered when a function of it runs. A module is loaded when it is imported. Frames are the package's functions
that are active when a kernel is called: those of its thread, and those that were active where the thread got its work.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
CODE: Final = (".py", ".cpp", ".hpp", ".css")
TINY: Final = ROOT / "tests" / "data" / "k2-tiny"
_PACKAGE: Final = str(ROOT / "k2convert") + os.sep

_TRACER: Final = """
import inspect, json, sys, threading
package, report, entered = sys.argv[1], sys.argv[2], set()
def see(frame, *_):
    code = frame.f_code
    if code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(package):
        entered.add(code.co_filename)
import k2convert.__main__
if "--calibrate" in sys.argv:
    import transformers.models.deepseek_v3.modeling_deepseek_v3  # whose calls would all be traced
threading.settrace(see)
sys.settrace(see)
try:
    sys.argv = ["k2convert", *sys.argv[3:]]
    k2convert.__main__.main()
finally:
    sys.settrace(None)
    loaded = sorted(m for m in sys.modules if m in ("torch", "ray") or m.startswith("k2convert"))
    with open(report, "w") as file:
        json.dump({"entered": sorted(entered), "loaded": loaded}, file)
"""

_STACKS: Final = """
import json, sys, threading
from concurrent.futures import ThreadPoolExecutor
import k2convert.__main__
from k2convert.quantize.kernels import _cpu
package, report, threads, longest = sys.argv[1], sys.argv[2], threading.local(), []
def active():
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(package):
            found.append(f"{frame.f_code.co_filename.removeprefix(package)}: {frame.f_code.co_qualname}")
        frame = frame.f_back
    return [*getattr(threads, "before", ()), *reversed(found)]
def carried(work):
    before = active()
    def call(*args, **keywords):
        threads.before = before
        return work(*args, **keywords)
    return call
def start(thread, begin=threading.Thread.start):
    thread.run = carried(thread.run)
    begin(thread)
def submit(pool, work, *args, begin=ThreadPoolExecutor.submit, **keywords):
    return begin(pool, carried(work), *args, **keywords)
def see(kernel):
    def call(*args):
        global longest
        stack = active()
        if not any(frame.startswith("quantize/metrics/") for frame in stack):  # a sample is converted to compare with
            longest = max(longest, stack, key=len)
        return kernel(*args)
    return call
threading.Thread.start, ThreadPoolExecutor.submit = start, submit
for name in [name for name in vars(_cpu) if name.startswith("convert")]:
    setattr(_cpu, name, see(getattr(_cpu, name)))
try:
    sys.argv = ["k2convert", *sys.argv[3:]]
    k2convert.__main__.main()
finally:
    with open(report, "w") as file:
        json.dump(longest, file)
"""


def traced(*arguments: str | Path) -> dict[str, list[str]]:
    """Run a command; return its files that it `entered`, and its modules, torch and Ray that it `loaded`."""
    report: dict[str, list[str]] = _report(_TRACER, *arguments)
    return {"entered": [path.removeprefix(_PACKAGE) for path in report["entered"]], "loaded": report["loaded"]}


def frames(*arguments: str | Path) -> list[str]:
    """Run a command; return the package's functions that are active when it calls a kernel, as "file: function"."""
    stack: list[str] = _report(_STACKS, *arguments)
    return stack


def _report(program: str, *arguments: str | Path) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-c", program, _PACKAGE, str(report), *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(report.read_text())


def num_lines(folder: Path, suffixes: Sequence[str] = CODE) -> int:
    """Return the lines of all code files below a folder, without what a build writes there."""
    return sum(path.read_text().count("\n") for path in _files(folder) if path.suffix in suffixes)


def density(folder: Path) -> dict[str, float]:
    """Count what makes the Python files below a folder hard to read: the figures to keep low."""
    lines = num_lines(folder, (".py",))
    nodes = [node for path in _files(folder) if path.suffix == ".py" for node in ast.walk(ast.parse(path.read_text()))]
    return {
        "functions with more than six parameters": sum(map(_has_many_parameters, nodes)),
        "dataclasses": sum(map(_is_dataclass, nodes)),
        "tuple assignments per 1,000 lines": 1000 * sum(map(_is_tuple_assignment, nodes)) / lines,
        "ternaries per 1,000 lines": 1000 * sum(isinstance(node, ast.IfExp) for node in nodes) / lines,
        "docstrings that begin with What, Whether, Who or How": sum(map(_begins_with_a_question, nodes)),
        "`dict[str, Any]`": sum(map(_is_untyped_mapping, nodes)),
    }


def _has_many_parameters(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")]) > 6


def _is_dataclass(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(by) for by in node.decorator_list)


def _is_tuple_assignment(node: ast.AST) -> bool:
    """Say whether several values are given several names in one line; one value that is unpacked does not count."""
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def _begins_with_a_question(node: ast.AST) -> bool:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return (ast.get_docstring(node) or "").split(" ")[0] in ("What", "Whether", "Who", "How")


def _is_untyped_mapping(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and ast.unparse(node) == "dict[str, Any]"


def _files(folder: Path) -> list[Path]:
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return [path for path in paths if path.suffix != ".pyi"]


def imported_by(package: Path) -> dict[str, set[str]]:
    """Return who imports each module of a package, by dotted names; the functions of `__init__` files do not count."""
    modules = {path: _module(path, package) for path in _files(package) if path.suffix == ".py"}
    importers: dict[str, set[str]] = {name: set() for name in modules.values()}
    for path, name in modules.items():
        if path.name == "__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for imported in {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}:
                    importers.get(imported, set()).add(name)
    return importers


def _module(path: Path, package: Path) -> str:
    return ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def num_options() -> int:
    """Return the number of options and arguments of all verbs, without --help."""
    code = (
        "import json, sys, typer, k2convert.cli.app as a;"
        "c = typer.main.get_command(a.app);"
        "print(sum(p.name != 'help' for v in c.commands.values() for p in v.params))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout)


def main() -> None:
    """Print every figure, or only the lines of code."""
    if sys.argv[1:] == ["--lines"]:
        for folder in ("k2convert", "tests", "scripts"):
            sys.stdout.write(f"{num_lines(ROOT / folder):7,}  lines of {folder}/\n")
        return
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        text = out / "text.txt"
        text.write_text("".join(f"Sentence {number} of a text. " for number in range(4000)))
        run = traced("run", TINY, out / "run", "--quiet")
        stack = frames("run", TINY, out / "stack", "--quiet")
        validate = traced("validate", out / "run", "--source", TINY, "--quiet")
        calibrated = traced("run", TINY, out / "calibrated", "--calibrate", text, "--quiet", *sys.argv[1:])
    package = ROOT / "k2convert"
    tests = ROOT / "tests"
    for label, figure in (
        ("files that `run` enters", len(run["entered"])),
        ("files that `run --calibrate` enters", len(calibrated["entered"])),
        ("files that `validate --source` enters", len(validate["entered"])),
        ("frames from `run` to the kernel", len(stack)),
        ("modules that `run` loads", len(run["loaded"])),
        ("lines of the package", num_lines(package)),
        ("files of the package", sum(path.suffix in CODE for path in _files(package))),
        ("lines of the tests", num_lines(tests)),
        ("lines of the scripts", num_lines(ROOT / "scripts")),
        ("options and arguments of the command line", num_options()),
        ("modules with one importer", sum(len(by) == 1 for by in imported_by(package).values())),
        ("lines of the README", (ROOT / "README.md").read_text().count("\n")),
        *density(package).items(),
    ):
        sys.stdout.write(f"{figure:7,.3g}  {label}\n" if isinstance(figure, float) else f"{figure:7,}  {label}\n")


if __name__ == "__main__":
    main()
