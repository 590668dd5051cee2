"""What works without the optional libraries, and the one line that names the missing one."""

import json
import shlex
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import get_args

import pytest
from command import cli_environment, messages_of, python
from conversions import convert
from structure import ROOT, TINY

from k2convert.errors import Extra, install_remedy

WITHOUT = """
import json, sys
for name in "torch triton compressed_tensors modelopt llmcompressor transformers tokenizers jinja2".split():
    sys.modules[name] = None
from command import run_here
done = [run_here(*words) for words in json.load(sys.stdin)]
print(json.dumps([vars(one) for one in done]))
"""


def run_without_extras(*commands: Sequence[str | Path]) -> list[CompletedProcess[str]]:
    """Run commands in one process that cannot import any optional library."""
    words = json.dumps([list(map(str, command)) for command in commands])
    environment = cli_environment() | {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    done = python(WITHOUT, input=words, env=environment)
    assert done.returncode == 0, done.stderr
    return [CompletedProcess(**fields) for fields in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, converted without any optional library."""
    destination = tmp_path_factory.mktemp("extras") / "nvfp4"
    (done,) = run_without_extras(("run", TINY, destination))
    assert done.returncode == 0, done.stderr
    return destination


@pytest.mark.slow
def test_the_main_commands_need_no_optional_library(converted: Path) -> None:
    commands = [
        ("inspect", TINY),
        ("status", converted),
        ("validate", converted, "--source", TINY),
        ("report", converted, "--source", TINY, "--out", converted.parent / "report"),
    ]
    for done in run_without_extras(*commands):
        assert done.returncode == 0, (done.args, done.stderr)


def test_a_missing_library_is_one_line_that_names_the_extra(converted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    validate = ("validate", converted, "--source", TINY)
    commands: dict[tuple[str | Path, ...], Extra] = {
        ("run", TINY, out, "--set", "quantizer=reference"): "reference",
        ("run", TINY, out, "--calibrate", TINY / "eval.txt"): "calibrate",
        ("evaluate", TINY, converted, "--text", TINY / "eval.txt"): "calibrate",
        (*validate, "--layers", "1"): "torch",
        (*validate, "--layers", "all"): "torch",
        (*validate, "--layers", "1", "--text", TINY / "eval.txt"): "calibrate",
    }
    for done, extra in zip(run_without_extras(*commands), commands.values(), strict=True):
        assert (done.returncode, done.stdout) == (1, ""), done.args
        [line] = [line for line in messages_of(done.stderr).splitlines() if "validate:" not in line]
        assert line.startswith("error: ")
        assert f"Install it with: {sys.executable} -m pip install " in line
        assert line.endswith(install_remedy(extra=extra))
    assert not out.exists()


@pytest.mark.parametrize(
    ("quantizer", "libraries"),
    [("native", {"numpy"}), ("reference", {"numpy", "torch", "compressed-tensors", "nvidia-modelopt"})],
)
def test_the_ledger_names_what_computed(quantizer: str, libraries: set[str], k2_shaped: Path, tmp_path: Path) -> None:
    out = convert(k2_shaped, tmp_path / "out", quantizer=quantizer, rule="max")
    ledger = json.loads((out / "k2convert.json").read_text())
    assert set(ledger["versions"]) == {"python"} | libraries


def test_what_is_to_be_installed_is_what_the_package_asks_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in get_args(Extra):
        *_, words = install_remedy(extra=extra).partition(" -m pip install ")
        packages = shlex.split(words)
        assert packages
        assert set(packages) <= set(extras[extra])


def test_sources_without_kernels_are_named(tmp_path: Path) -> None:
    """Python finds a clone that it runs in before the installed package."""
    shutil.copytree(ROOT / "k2convert", tmp_path / "k2convert", ignore=shutil.ignore_patterns("_cpu*", "__pycache__"))
    hide = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Scikit' not in type(f).__name__]; "
    done = python(f"{hide}import k2convert; k2convert.convert({str(TINY)!r}, 'out')", cwd=tmp_path)
    assert done.stderr.splitlines()[-1].startswith("k2convert.errors.MissingDependencyError: ")
    assert f"{tmp_path}/k2convert/quantize/kernels: the kernels are not built here." in done.stderr
