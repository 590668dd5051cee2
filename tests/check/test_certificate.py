"""The certificate shares nothing with the conversion, and finds no fault in a right result of any kind."""

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conversions import convert

from k2convert.check import certificate, certified_fp8, certified_weights
from k2convert.check.results import ValidationReport
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint

ALL_ROLES = ("experts", "shared_experts", "dense_mlp")


def imported(source: str) -> set[str]:
    """All modules that a file imports, wherever in it."""
    modules = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + str(node.module))
    return modules


@pytest.mark.parametrize("module", [certificate, certified_fp8, certified_weights])
def test_it_imports_the_standard_library_and_numpy_alone(module: ModuleType) -> None:
    source = Path(str(module.__file__)).read_text()
    others = {name for name in imported(source) if name.partition(".")[0] not in sys.stdlib_module_names}
    assert others - {"numpy", "numpy.typing"} <= {certified_fp8.__name__, certified_weights.__name__}
    assert not {"__import__", "importlib", "import_module", "ctypes", "exec", "eval"} & {
        node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)
    }


def validated(folder: Path, source: Path) -> ValidationReport:
    return validate_checkpoint(folder=folder, source=open_checkpoint(source))


@pytest.mark.quick(9)
@pytest.mark.parametrize("activations", ["w4a4", "w4a16"])
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("rule", ["mse", "max"])
@pytest.mark.parametrize(
    "source", ["cut", "k3_tiny", "k3_edges", "minus8", "zeros", "subnormal", "wide", "split", "k25"]
)
def test_it_finds_nothing_in_a_right_result(
    source: str, rule: str, layout: str, activations: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if layout == "compressed-tensors" and rule == "max" and source in ("subnormal", "k3_edges"):
        pytest.skip("1/g does not fit into FP32")
    checkpoint: Path = request.getfixturevalue(source)
    roles = ("experts",) if source.startswith("k3") else ALL_ROLES
    out = convert(checkpoint, tmp_path / "out", rule=rule, layout=layout, activations=activations, roles=roles)
    report = validated(out, checkpoint)
    assert report.weights is not None
    certificate = report.weights.certificate
    assert (certificate.mismatches, certificate.rule) == ({}, rule)
    assert (certificate.skip_reason, certificate.is_whole) == ("", True)
    assert certificate.tensors == len(report.weights.errors) > 0
    assert certificate.copies > 0
    beyond_the_budget = {18} if source == "wide" else set[int]()
    assert set(report.contract.failed) <= beyond_the_budget
    assert not report.weights.journal_mismatches
