"""The structure: imports go one way, each outside library has one owner, files and functions stay small.

The order of the subpackages is read from the package's docstring: a new folder must have a place there first.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest
from command import python, run_here

import k2convert
from k2convert.check import certificate
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.choices import Layout, Rule
from k2convert.models import FAMILIES
from k2convert.models.kimi import K2_THINKING
from k2convert.models.names import Family
from k2convert.plan.recipe import load_recipe, shipped_recipes
from k2convert.quantize.rules import RULES

PACKAGE = Path(__file__).resolve().parents[1] / "k2convert"
FILES = sorted(PACKAGE.rglob("*.py"))
ORDER = re.findall(r"^    (\w+)", k2convert.__doc__ or "", flags=re.MULTILINE)
OWNERS = {
    "rich": {"cli/console.py", "cli/progress.py"},
    "huggingface_hub": {"hub"},
    "http": set(),
    "httpx": set(),
    "typer": {"cli"},
    "yaml": {"plan", "hub"},
    "triton": {"quantize/gptq/panel_kernels.py"},
    "pydantic": {"plan", "prune.py", "records"},
    "PIL": {"report/charts.py"},
    "markdown_it": {"report/render.py"},
    "jinja2": set(),
    "tokenizers": {"text/tokenizers.py"},
    "tiktoken": {"text/tokenizers.py"},
    "compressed_tensors": {"quantize/libraries.py"},
    "modelopt": {"quantize/libraries.py"},
    "transformers": {"forward/attention.py", "text/tokenizers.py"},
    "torch": {
        "quantize/gptq",
        "quantize/libraries.py",
        "forward",
        "check",
        "evaluation/head.py",
        "evaluation/streamed.py",
        "job/resources.py",
        "calibration/smoothing.py",
        "calibration/gptq_layer.py",
        "calibration/gptq_pass.py",
        "calibration/layer_tokens.py",
    },
}


def inside(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def subpackage_of(path: Path) -> str:
    """The folder at the top level, or the module there."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file; names imported from a package count as modules of it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                below = PACKAGE.parent / Path(*node.module.split("."), alias.name)
                is_module = below.with_suffix(".py").exists() or below.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_every_subpackage_has_its_place() -> None:
    subpackages = {subpackage_of(path) for path in FILES} - {"__init__", "__main__"}
    assert subpackages == set(ORDER), (
        "list the subpackage in the docstring of k2convert/__init__.py, from the ground up"
    )
    assert len(list(PACKAGE.glob("*.py"))) <= 6, "put the module into a subpackage: four are enough at the top level"
    for folder in PACKAGE.glob("**/"):
        assert not list(folder.glob("*.py")) or (folder / "__init__.py").is_file(), f"{folder}: add an __init__.py"


def test_no_file_name_is_in_more_than_two_subpackages() -> None:
    subpackages: dict[str, set[str]] = {}
    for path in FILES:
        subpackages.setdefault(path.name, set()).add(subpackage_of(path))
    repeated = {name for name, owners in subpackages.items() if len(owners) > 2 and name != "__init__.py"}
    assert not repeated, "name the new file for what only it does"


def test_imports_go_down() -> None:
    """A subpackage imports itself and subpackages below it; the modules of the top level are below all subpackages."""
    wrong: list[str] = []
    for path in FILES:
        subpackage = subpackage_of(path)
        if subpackage in ("__init__", "__main__"):
            continue
        for module in imports(path):
            parts = module.split(".")
            if parts[0] == "k2convert" and len(parts) > 1 and ORDER.index(parts[1]) > ORDER.index(subpackage):
                wrong.append(f"{inside(path)} imports {module}")
    assert not wrong, "move the code to the subpackage that uses it, or pass it as an argument: imports go down"


def test_there_is_no_import_circle() -> None:
    known = {module_of(path): path for path in FILES}
    del known["k2convert"]  # its version is read everywhere; its functions import others when they are called
    graph = {name: {m for m in imports(path) if m in known and m != name} for name, path in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"{' -> '.join(error.args[1])}: move what two of them need into a module below both")


@pytest.mark.parametrize("code", ["from k2convert.job.run import execute\n", "import k2convert.cli.app\n"])
def test_imports_upwards_and_new_modules_are_found(tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, test, complaint in (
        ("checkpoint", test_imports_go_down, "imports"),
        ("helpers", test_every_subpackage_has_its_place, "ground up"),
    ):
        copy = tmp_path / "k2convert" / folder / "things.py"
        copy.parent.mkdir(parents=True)
        copy.write_text(code)
        monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "k2convert")
        monkeypatch.setattr(sys.modules[__name__], "FILES", [copy])
        with pytest.raises(AssertionError, match=complaint):
            test()


def test_the_command_line_is_imported_by_nothing_else() -> None:
    for path in FILES:
        if subpackage_of(path) not in ("cli", "__main__"):
            of_cli = [m for m in imports(path) if m.startswith("k2convert.cli")]
            assert not of_cli, (
                f"{inside(path)} imports {of_cli}: pass it what it needs, or raise an error with a message"
            )


def test_each_outside_library_has_its_owners() -> None:
    for path in FILES:
        for module in imports(path):
            owners = OWNERS.get(module.split(".")[0])
            is_owner = owners is None or any(inside(path) == o or inside(path).startswith(f"{o}/") for o in owners)
            assert is_owner, f"{inside(path)} imports {module}: call its owner {owners}, or add this file to OWNERS"


def test_numbers_need_numpy_only() -> None:
    """Formats, rules and metrics are the definition that every kernel is compared with."""
    allowed = {"numpy", "k2convert", *sys.stdlib_module_names}
    for name in ("formats", "rules", "metrics"):
        for path in (PACKAGE / "quantize" / name).glob("*.py"):
            others = {module.split(".")[0] for module in imports(path)} - allowed
            assert not others, f"{inside(path)} imports {others}: definitions are NumPy only, kernels go elsewhere"


def test_families_are_asked_for_in_models_only() -> None:
    """Nothing outside the subpackage imports a family's file, or compares a family's name."""
    modules = {name: vars(module) for name, module in sys.modules.items() if name.startswith("k2convert.models.")}
    of_families = {name for name, values in modules.items() if any(isinstance(v, Family) for v in values.values())}
    listed = {"k2convert.models.kimi", "k2convert.models.kimi_k3"}
    assert of_families <= listed, f"{of_families - listed}: name the file of a new family here"
    assert of_families >= listed, f"{listed - of_families}: nothing imports it: add its row to FAMILIES in models"
    for path in FILES:
        if subpackage_of(path) == "models":
            continue
        assert not of_families & set(imports(path)), f"{inside(path)}: make it a field of Family, and ask detect_family"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                constants = [c.value for c in [node.left, *node.comparators] if isinstance(c, ast.Constant)]
                names = {f.name for f in FAMILIES} & {c for c in constants if isinstance(c, str)}
                assert not names, f"{inside(path)} compares {names}: make what differs a field of Family"


def test_every_rule_layout_and_family_has_its_rows() -> None:
    for of, words, rows, where in (
        ("Rule", get_args(Rule), RULES, "RULES in quantize/rules/__init__.py"),
        ("Layout", get_args(Layout), LAYOUTS, "LAYOUTS in checkpoint/layouts/__init__.py"),
        ("Layout", get_args(Layout), certificate._PARAMETERS, "_PARAMETERS in check/certificate.py"),
    ):
        missing = [word for word in words if word not in rows]
        assert not missing, f"{missing}: in {of} in choices.py, but without a row in {where}: add it"
        unknown = [row for row in rows if row not in words]
        assert not unknown, f"{unknown}: has a row in {where}, but is no word of {of} in choices.py: add it"
    scales = Counter(layout.global_scale for layout in LAYOUTS.values())
    assert max(scales.values()) == 1, f"{scales}: results are recognized by this name: give the new layout its own"
    divisors = {name for name, layout in LAYOUTS.items() if layout.is_divisor}
    assert divisors == set(certificate._DIVISORS), "_DIVISORS in check/certificate.py has the layouts with is_divisor"
    recipes = set(shipped_recipes())
    for family in FAMILIES:
        assert family.recipe in recipes, f"{family.name}: add recipes/{family.recipe}.yaml, its default"
        stated = load_recipe(family.recipe).family
        assert stated == family.name, f"recipes/{family.recipe}.yaml: `family` is {stated}: state {family.name}"
    names = Counter(family.name for family in FAMILIES)
    types = Counter(name for family in FAMILIES for name in family.model_types)
    for field, counts in (("name", names), ("model_type", types)):
        twice = [name for name, count in counts.items() if count > 1]
        assert not twice, f"{twice}: two families have this {field}: give the new one its own"
    assert FAMILIES[-1] is K2_THINKING, "the last one is taken for a checkpoint that resembles none: go before it"


def test_the_texts_name_every_rule_layout_and_family() -> None:
    recipes = (PACKAGE.parent / "recipes" / "README.md").read_text()
    for name in (*get_args(Rule), *get_args(Layout), *(family.name for family in FAMILIES)):
        assert f"`{name}`" in recipes, f"recipes/README.md does not name {name}: add it to the values of its key"
    readme = (PACKAGE.parent / "README.md").read_text()
    shown = run_here("run", "--help", code=0).stdout
    for name in get_args(Rule):
        assert f"\n| `{name}`" in readme, f'README.md: the table "Which rule" has no row for {name}'
        assert re.search(rf"\b{name}:\s", shown), f"the help of --rule in cli/run.py does not say what {name} is"


@pytest.mark.parametrize("path", FILES, ids=inside)
def test_files_and_functions_stay_small(path: Path) -> None:
    source = path.read_text()
    too_long = source.count("\n") - 450
    assert too_long <= 0, f"{too_long} lines too many: move what has a name of its own into a file beside it"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 90, f"{node.name}: more than 90 lines, split it at its steps"


def test_help_does_not_import_heavy_libraries() -> None:
    heavy = ("torch", "numpy", "rich.progress", "pydantic", "huggingface_hub")
    code = f"import sys, k2convert.cli.app; print([m for m in {heavy} if m in sys.modules])"
    done = python(code)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
