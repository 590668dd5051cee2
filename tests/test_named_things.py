"""A name that a docstring, a message, the guide, a recipe or a template gives to something exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from k2convert.quantize.rules import RULES

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "k2convert"
CODE = ("k2convert", "tests", "scripts")
TEXTS = (".md", ".jinja", ".yaml")
OF_OTHERS = {
    "DeepseekV3Gate",
    "GateLinear",
    "MoEGate",
    "_get_quant_method",
    "apply_quant_config_exclude_modules",
    "cvt_warp_fp16_to_fp4",
    "getrusage",
    "merge_and_unload",
}
"""Names of other projects."""
FILES_OF_OTHERS = {"tokenization_kimi.py"}
WINGS = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"models"}
"""Folders of the package; engines have one called models."""
IDENTIFIER = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`")
MODULE = re.compile(r"\b[\w/]+\.py\b")
DOTTED = re.compile(r"\b[a-z_]{3,}(?:\.[a-z_]{3,})+\.[A-Z]\w+")
RULE = re.compile(r"(?:--rule |\brule `|^rule: )(?!skipped)([a-z]\w+)", re.MULTILINE)


@cache
def known_names() -> set[str]:
    """Every identifier of the code, every string constant that could be one, and the names of others."""
    names = set(OF_OTHERS)
    for path in (p for folder in CODE for p in (ROOT / folder).rglob("*.py*")):
        if path.suffix not in (".py", ".pyi") or path == Path(__file__):
            continue
        names.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name) | ast.arg(arg=name):
                    names.add(name)
                case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                    names.add(name)
                case ast.alias(name=name):
                    names |= set(name.split("."))
                case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.-]+", text):
                    names |= {text, *text.split(".")}
    for path in PACKAGE.rglob("*.[ch]pp"):
        names |= set(re.findall(r"\w+", re.sub(r"//.*", "", path.read_text())))
    return names


@cache
def modules() -> set[str]:
    return {path.relative_to(ROOT).as_posix() for folder in CODE for path in (ROOT / folder).rglob("*.py")}


def prose() -> Iterator[tuple[str, str]]:
    """Every docstring and message of the package, and the texts beside it, with the file that it stands in."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.relative_to(ROOT).as_posix(), node.value
    pages = [ROOT / "README.md", *(ROOT / "recipes").rglob("*"), *PACKAGE.rglob("*")]
    for path in sorted(path for path in pages if path.suffix in TEXTS):
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def unknown(file: str, text: str) -> list[str]:
    """Return the names in a text that nothing has: identifiers in docstrings, modules, classes of modules, rules."""
    found: list[str] = []
    known = known_names()
    if file.endswith(".py"):
        for identifier in IDENTIFIER.findall(text):
            found += [part for part in identifier.split(".") if part not in known and len(part) > 2]
        for dotted in DOTTED.findall(text):
            *module, _ = dotted.split(".")
            found += [dotted for path in ["/".join(module)] if not any(m.endswith(f"{path}.py") for m in modules())]
    for module in MODULE.findall(text):
        is_ours = any(f"/{path}".endswith(f"/{module}") for path in modules())
        is_of_others = "/" in module and module.partition("/")[0] not in WINGS
        found += [] if is_ours or is_of_others or module in FILES_OF_OTHERS else [module]
    found += [rule for rule in RULE.findall(text) if rule not in RULES]
    return found


def test_what_is_named_exists() -> None:
    wrong = [f"{file}: {name}" for file, text in prose() for name in unknown(file, text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        ("k2convert/x.py", "See `quantize.kernels.nothing_here`."),
        ("k2convert/x.py", "See no_module.py."),
        ("k2convert/x.py", "As calibrate.channels.Calibration reads them."),
        ("k2convert/x.py", "The bytes of rule `plain`."),
        ("k2convert/guide/x.md", "Pass `--rule plain`."),
        ("recipes/x.yaml", "rule: plain\n"),
        ("k2convert/report/x.jinja", "Rule `mse` and rule `plain`."),
    ],
)
def test_a_planted_name_is_found(file: str, planted: str) -> None:
    assert unknown(file, planted), planted
