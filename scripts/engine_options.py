"""Reads which options the engines' servers have, from their sources: `python -m scripts.engine_options WHEEL ...`.

Nothing is imported: an engine's wheel is enough, on any machine. The lists go to tests/data/engine-options, where
tests/fit/test_serving.py holds the serve commands against them. TensorRT-LLM's is not made here: see its README.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path

Kind = str | list[str]
"""What an option takes: "flag" for nothing, "int", "float", "str", or one of a list."""
Read = Callable[[str], str]
"""Returns the source of a module by its path in the package."""

LISTS = Path(__file__).resolve().parents[1] / "tests" / "data" / "engine-options"


def read_vllm(read: Read) -> dict[str, Kind]:
    """Return the options of `vllm serve` and what they take."""
    engine = "vllm/engine/arg_utils.py"
    frontend = "vllm/entrypoints/common/cli_args.py"
    modules = [ast.parse(read(module)) for module in (*_config_modules(read, engine), frontend)]
    classes = {node.name: node for tree in modules for node in tree.body if isinstance(node, ast.ClassDef)}
    literals = {name: choices for tree in modules for name, choices in _literals(tree)}
    options: dict[str, Kind] = {}
    kwargs: dict[str, str] = {}  # variable -> config class, from `cache_kwargs = get_kwargs(CacheConfig)`
    for tree in (ast.parse(read(engine)), ast.parse(read(frontend))):
        kwargs |= dict(_kwargs_variables(tree))
        for call in _calls(tree, "add_argument"):
            kind = _vllm_kind(call, kwargs, classes, literals)
            options |= dict.fromkeys(_names(call), kind)
    for name in ("BaseFrontendArgs", "FrontendArgs"):
        options |= {_option(field): _kind(of, literals) for field, of in _fields(classes[name])}
    for option, module in (("--tool-call-parser", "tool_parsers"), ("--reasoning-parser", "reasoning")):
        options[option] = _registered(ast.parse(read(f"vllm/{module}/__init__.py")))
    return options


def read_sglang(read: Read) -> dict[str, Kind]:
    """Return the options of SGLang's server and what they take."""
    folder = "sglang/srt/arg_groups"
    server = "sglang/srt/server_args.py"
    constants = dict(_constants(ast.parse(read(f"{folder}/choices.py"))))
    spaces = re.findall(r"^from sglang\.srt\.arg_groups\.fields\.(\w+) import", read(server), flags=re.MULTILINE)
    options: dict[str, Kind] = {}
    for space in dict.fromkeys(spaces):
        for node in ast.walk(ast.parse(read(f"{folder}/fields/{space}.py"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Subscript):
                options |= _sglang_options(node, constants)
    for call in _calls(ast.parse(read(server)), "add_argument"):
        options |= dict.fromkeys(_names(call), _argparse_kind(call))
    for option, module in (
        ("--tool-call-parser", "function_call/parser_names"),
        ("--reasoning-parser", "parser/reasoning_parser_names"),
    ):
        names = dict(_constants(ast.parse(read(f"sglang/srt/{module}.py"))))
        (options[option],) = [["auto", *values] for values in names.values()]
    return options


def _sglang_options(field: ast.AnnAssign, constants: Mapping[str, list[str]]) -> dict[str, Kind]:
    """Return the options of a field such as `tp_size: A[int, Arg(help="...", aliases=["--tensor-parallel-size"])]`."""
    assert isinstance(field.annotation, ast.Subscript)
    parts = field.annotation.slice
    if ast.unparse(field.annotation.value) != "A" or not isinstance(parts, ast.Tuple):
        return {}
    arg = next((part for part in parts.elts[1:] if isinstance(part, ast.Call)), None)
    given = {} if arg is None else {keyword.arg: keyword.value for keyword in arg.keywords}
    if "no_cli" in given:
        return {}
    kind = _kind(parts.elts[0], {})
    if "choices" in given:
        choices = given["choices"]
        kind = constants[choices.id] if isinstance(choices, ast.Name) else _strings(choices)
    names = [_option(ast.unparse(field.target))]
    if "cli_name" in given:
        names = _strings(given["cli_name"])
    names += _strings(given["aliases"]) if "aliases" in given else []
    return dict.fromkeys(names, kind)


def _config_modules(read: Read, engine: str) -> list[str]:
    """Return the modules of vLLM's config classes, from the package's own imports."""
    imported = re.findall(r"^from (vllm\.config\.\w+) import", read("vllm/config/__init__.py"), flags=re.MULTILINE)
    imported += re.findall(r"^from (vllm\.config\.\w+) import", read(engine), flags=re.MULTILINE)
    return [name.replace(".", "/") + ".py" for name in dict.fromkeys(imported)]


def _literals(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the module's names for literal types, such as `CacheDType = Literal["auto", ...]`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            target = node.targets[0]
            value = node.value
            if isinstance(target, ast.Name) and ast.unparse(value.value) == "Literal":
                yield target.id, _strings(value.slice)


def _kwargs_variables(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target = node.targets[0]
            call = node.value
            if isinstance(target, ast.Name) and ast.unparse(call.func) == "get_kwargs":
                yield target.id, ast.unparse(call.args[0])


def _vllm_kind(
    call: ast.Call,
    kwargs: Mapping[str, str],
    classes: Mapping[str, ast.ClassDef],
    literals: Mapping[str, list[str]],
) -> Kind:
    """Return what `add_argument("--x", **cache_kwargs["x"])` takes, or one with its keywords written out."""
    for node in ast.walk(call):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in kwargs:
            field = _strings(node.slice)[0]
            return _kind(dict(_fields(classes[kwargs[node.value.id]]))[field], literals)
    return _argparse_kind(call)


def _argparse_kind(call: ast.Call) -> Kind:
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if re.search("true|True|Boolean", given.get("action", "")):
        return "flag"
    return given["type"] if given.get("type") in ("int", "float") else "str"


def _fields(of: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for node in of.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.annotation


def _kind(annotation: ast.expr, literals: Mapping[str, list[str]]) -> Kind:
    """Return what an option of this type takes. `literals` are the names of literal types."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        return _strings(annotation.slice)
    words = re.findall(r"\w+", ast.unparse(annotation))
    if "bool" in words and "str" not in words:
        return "flag"
    for word in words:
        if word in literals:
            return literals[word]
    return next((kind for kind in ("int", "float") if kind in words), "str")


def _calls(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            yield node


def _names(call: ast.Call) -> list[str]:
    words = chain.from_iterable(_strings(argument) for argument in call.args)
    return [word for word in words if re.match("--[a-z]", word)]


def _strings(node: ast.AST) -> list[str]:
    """Return the literals in an expression as text."""
    return [str(leaf.value) for leaf in ast.walk(node) if isinstance(leaf, ast.Constant) and leaf.value is not None]


def _constants(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the module's lists."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, _strings(node.value)


def _registered(tree: ast.Module) -> list[str]:
    """Return the keys of a module's one table of parsers."""
    (table,) = [node for node in ast.walk(tree) if isinstance(node, ast.Dict) and len(node.keys) > 5]
    return [name for key in table.keys if key is not None for name in _strings(key)]


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


READERS: dict[str, Callable[[Read], dict[str, Kind]]] = {"vllm": read_vllm, "sglang": read_sglang}


def main() -> int:
    """Read wheels and write their lists."""
    parser = argparse.ArgumentParser(prog="scripts.engine_options", description=__doc__)
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL", help="from pip download --no-deps")
    for wheel in parser.parse_args().wheels:
        engine, version, *_ = wheel.name.split("-")
        with zipfile.ZipFile(wheel) as archive:
            options = READERS[engine](lambda path, archive=archive: archive.read(path).decode())
        document = {"engine": engine, "version": version, "options": dict(sorted(options.items()))}
        LISTS.mkdir(parents=True, exist_ok=True)
        (LISTS / f"{engine}.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
        print(f"{engine} {version}: {len(options)} options in {LISTS / engine}.json", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
