"""A name that a docstring, a comment, a message, the guide, a recipe or a template gives to something exists."""

import ast
import re
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

import k2convert
from k2convert.cli.app import app
from k2convert.cli.guide import read_pages
from k2convert.plan.recipe import Recipe
from k2convert.quantize.rules import RULES

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "k2convert"
CODE = ("k2convert", "tests", "scripts")
TEXTS = (".md", ".yaml")
CONTRIBUTING = ".github/CONTRIBUTING.md"
OF_OTHERS = {
    "DeepseekV3Gate", "GateLinear", "ModelOptQuantConfig", "ModelOptQuantConfigBase", "MoEGate", "QuantConfig",
    "_get_quant_method", "apply_quant_config_exclude_modules", "cvt_warp_fp16_to_fp4", "find_matching_patterns",
    "getrusage", "merge_and_unload", "vpmaddwd",
}  # fmt: skip
"""Names of other projects."""
FILES_OF_OTHERS = {"tokenization_kimi.py"}
FOLDERS = {path.name for code in CODE for path in (ROOT / code, *(ROOT / code).rglob("*")) if path.is_dir()}
FOLDERS -= {"layers", "models"}
"""Folders of the code; engines have some called layers and models."""
IDENTIFIER = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`")
MODULE = re.compile(r"\b[\w/]+\.py\b")
DOTTED = re.compile(r"\b[a-z_]{3,}(?:\.[a-z_]{3,})+\.[A-Z]\w+")
RULE = re.compile(r"(?:--rule |\b[Rr]ule `|^rule: )(?!skipped)([a-z]\w+)", re.MULTILINE)
EXTRAS = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)


class Files(Container[str]):
    """The files of the repository that a pattern with a name in it finds."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __contains__(self, name: object) -> bool:
        return any(ROOT.glob(self.pattern.format(str(name).replace(".", "/"), name)))


def setting_names() -> Iterator[str]:
    """Every key of `--set`, and of a recipe."""
    for name, field in Recipe.model_fields.items():
        yield name
        yield from (f"{name}.{inner}" for inner in getattr(field.annotation, "model_fields", {}))


def variables() -> set[str]:
    """Every variable of the environment that the package reads by a name of its own."""
    return set(re.findall(r'"(K2CONVERT_\w+)"', "".join(path.read_text() for path in PACKAGE.rglob("*.py"))))


CHECKS: tuple[tuple[str, Container[str]], ...] = (
    (r"`k2convert\s+([a-z]+)\b", typer.main.get_command(app).commands),  # type: ignore[attr-defined]
    (r"\bk2convert guide ([a-z]+)", read_pages()),
    (r"--set ['\"]?([\w.]+)=", {*setting_names(), "key"}),
    (r"\bK2CONVERT_\w+", variables()),
    (r"-m ((?:scripts|k2convert)[\w.]*\w)", Files("{0}*.py")),
    (r"\b(?!llama\.)[\w-]+\.[ch]pp\b", Files("k2convert/**/{1}")),
    (r"`k2convert\.([a-z]\w+)(?=\(|`)", {*dir(k2convert), *FOLDERS, "errors", "json"}),
    (r"(?:--recipe |\brecipe `?)((?:kimi|max)-[\w.-]+\w)", Files("recipes/{1}.yaml")),
    (r"k2convert\[(\w+)\]", {*EXTRAS, "extra"}),
)
"""A way to name something, and what has these names."""


@cache
def known_names() -> set[str]:
    """Every identifier of the code, every string constant that could be one, and the names of others."""
    names = OF_OTHERS | {path.stem for path in (*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*"))}
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
    """Every docstring, message and comment of the package, and the texts beside it, each with its file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        nodes = ast.walk(ast.parse(text))
        texts = {node.value: None for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        yield file, "\n|\n".join([*texts, *re.findall(r"(?:^ *|  )# .*", text, flags=re.MULTILINE)])
    for path in sorted(PACKAGE.rglob("*.[ch]pp")):
        yield path.relative_to(ROOT).as_posix(), "\n".join(re.findall(r"//.*", path.read_text()))
    pages = [ROOT / "README.md", ROOT / CONTRIBUTING, *(ROOT / "recipes").rglob("*"), *PACKAGE.rglob("*")]
    for path in sorted(path for path in pages if path.suffix in TEXTS):
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def unknown(file: str, text: str) -> list[str]:
    """Return the names in a text that nothing has: identifiers in code's prose, modules, classes of modules, rules, and
    what CHECKS has.
    """
    names: list[str] = []
    known = known_names()
    if file.endswith((".py", "pp", CONTRIBUTING)):
        for identifier in IDENTIFIER.findall(text):
            names += [part for part in identifier.split(".") if part not in known and len(part) > 2]
        for dotted in DOTTED.findall(text):
            *module, _ = dotted.split(".")
            names += [dotted for path in ["/".join(module)] if not any(m.endswith(f"{path}.py") for m in modules())]
    for module in MODULE.findall(text):
        is_ours = any(f"/{path}".endswith(f"/{module}") for path in modules())
        is_of_others = "/" in module and module.partition("/")[0] not in FOLDERS
        names += [] if is_ours or is_of_others or module in FILES_OF_OTHERS else [module]
    names += [rule for rule in RULE.findall(text) if rule not in RULES]
    for pattern, known_here in CHECKS:
        names += [name for name in re.findall(pattern, text) if name not in known_here]
    return names


def test_what_is_named_exists() -> None:
    wrong = [f"{file}: {name}" for file, text in prose() for name in unknown(file, text)]
    hint = "nothing has these names: correct them, or add those of another project to OF_OTHERS"
    assert not wrong, "\n".join([*wrong, hint])


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        ("k2convert/x.py", "See `quantize.kernels.nothing_here`."),
        ("k2convert/x.py", "See no_module.py."),
        ("k2convert/x.py", "As calibrate.channels.Calibration reads them."),
        ("k2convert/x.py", "The bytes of rule `plain`."),
        ("k2convert/guide/x.md", "Pass `--rule plain`."),
        ("recipes/x.yaml", "rule: plain\n"),
        ("k2convert/report/x.py", "Rule `mse` and rule `plain`."),
        ("k2convert/report/x.py", "Rule `plain` was used."),
        ("k2convert/report/x.py", "Made by `k2convert convert`."),
        ("k2convert/x.py", "See `k2convert guide proof`."),
        ("k2convert/x.py", "Pass --set calibration.num=3."),
        ("README.md", "Set K2CONVERT_CACHE."),
        ("k2convert/guide/x.md", "By `python -m scripts.bench.gptq_counts`."),
        ("k2convert/x.hpp", "// as in vector_columns.cpp"),
        ("k2convert/x.hpp", "// as `read_columns_of` does"),
        ("k2convert/guide/x.md", "Call `k2convert.transform()`."),
        ("k2convert/guide/x.md", "Use `--recipe kimi-k2-mlp`."),
        ("README.md", "pip install k2convert[cuda]"),
        ("k2convert/x.py", "See kernels/fast.py."),
        (CONTRIBUTING, "As `swapped_operands_of` does."),
    ],
)
def test_a_planted_name_is_found(file: str, planted: str) -> None:
    assert unknown(file, planted), planted


SHOWN_AS_IT_IS = ("repo", "verb", "kv_cache")
"""A command of a message may hold these unquoted: none of them can have a space or a sign of the shell."""


def unquoted_in_commands(source: str) -> list[str]:
    """Return what f-strings put into commands between backticks, unless a shell reads it as one word."""
    errors: list[str] = []
    for node in ast.walk(ast.parse(source)):
        text = ""
        for value in node.values if isinstance(node, ast.JoinedStr) else ():
            if isinstance(value, ast.FormattedValue):
                is_command = text.count("`") % 2 and re.match("(k2convert|hf|vllm|pip) ", text.rpartition("`")[2])
                shown = ast.unparse(value.value)
                if is_command and "shlex.quote" not in shown and shown.rpartition(".")[2] not in SHOWN_AS_IT_IS:
                    errors.append(f"line {value.lineno}: {shown}")
                text += "X"
            elif isinstance(value, ast.Constant):
                text += str(value.value)
    return errors


def test_commands_of_messages_can_be_pasted() -> None:
    assert unquoted_in_commands('f"{a}: lost. `k2convert status {folder}` says more."') == ["line 1: folder"]
    for path in (ROOT / "k2convert").rglob("*.py"):
        assert not unquoted_in_commands(path.read_text()), (
            f"{path}: use records.command.shell_line, or below records shlex.quote for each word"
        )
