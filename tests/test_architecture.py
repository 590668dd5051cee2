"""The shape of the code: imports go one way, one owner for each outside thing, files and functions stay small."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "k2convert"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import its own level's foundations and anything on a lower level; stages never import one another.
LEVELS = {
    "errors": 0, "buffers": 0, "lazy_torch": 0, "formats": 1, "kernels": 2, "checkpoint": 1, "k2": 2,
    "recipe": 3, "quantizers": 3, "projections": 3, "int4_config": 3, "weights": 4, "plan": 4, "journal": 4,
}  # fmt: skip
COMMAND_LINE = {"cli", "__main__", "options", "console", "streaming"} | {
    stem for stem in (p.stem for p in PACKAGE.glob("*.py")) if stem.endswith(("_commands", "views", "_view"))
}
OWNERS = {
    "rich": {"console"},
    "huggingface_hub": {"hub"},
    "typer": {"cli", "options", "hub_commands", "check_commands"},
    "yaml": {"recipe", "hub"},
    "triton": {"kernels"},
}
# What `job`, `validate` and the command line put together, and what never knows of one another.
STAGES = {"convert", "assemble", "inspection", "contract", "layers", "report", "hub"}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node


def own_imports(path: Path) -> set[str]:
    found = set()
    for module, _ in imports(path):
        parts = module.split(".")
        if parts[0] == "k2convert" and len(parts) > 1:
            found.add(parts[1])
    return found - {name_of(path)}


def test_imports_go_down() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {target}"
        for path in FILES
        if (level := LEVELS.get(name_of(path))) is not None
        for target in own_imports(path)
        if LEVELS.get(target, 99) > level
    ]
    assert not wrong


def test_stages_do_not_import_each_other() -> None:
    for path in FILES:
        if name_of(path) in STAGES:
            assert not own_imports(path) & STAGES, path.relative_to(PACKAGE)


def test_formats_need_torch_alone() -> None:
    allowed = {"torch", "numpy", "k2convert", *sys.stdlib_module_names}
    for path in (PACKAGE / "formats").glob("*.py"):
        foreign = {module.split(".")[0] for module, _ in imports(path)} - allowed
        assert not foreign, f"{path.name} imports {foreign}"
        assert own_imports(path) <= {"errors", "lazy_torch"}, path.name


def test_nothing_but_the_command_line_imports_the_command_line() -> None:
    for path in FILES:
        if name_of(path) not in COMMAND_LINE:
            assert not own_imports(path) & COMMAND_LINE, path.name


def test_each_outside_thing_has_one_owner() -> None:
    for path in FILES:
        for module, _ in imports(path):
            owners = OWNERS.get(module.split(".")[0])
            assert owners is None or name_of(path) in owners, f"{path.relative_to(PACKAGE)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= 350
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= 60, node.name


def test_help_does_not_import_heavy_libraries() -> None:
    heavy = ("torch", "numpy", "rich.progress", "pydantic", "huggingface_hub")
    code = f"import sys, k2convert.cli.app; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_int4_is_converted_and_validated_on_cpus_without_torch(tiny: Path, tmp_path: Path) -> None:
    """It takes seconds to import, and memory that a machine may want for other things."""
    code = "import sys\nfrom k2convert.cli.app import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    for arguments in (("run", tiny, tmp_path / "out"), ("validate", tmp_path / "out", "--source", tiny)):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "False"
