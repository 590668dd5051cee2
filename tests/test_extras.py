"""What works without the optional libraries, and the one line that names the missing one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from said import said

from k2convert.checkpoint.index import open_checkpoint
from k2convert.job.locations import Destination, Source
from k2convert.job.prepare import choose_recipe, prepare
from k2convert.job.run import execute
from scripts import fixture_maker as fixtures

TINY = fixtures.TINY

WITHOUT = """
import sys
for name in "torch triton compressed_tensors modelopt llmcompressor transformers aiconfigurator_core".split():
    sys.modules[name] = None
from k2convert.cli.app import main
main(sys.argv[1:])
"""


def run_without_extras(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that cannot import any optional library."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *map(str, words)], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, converted without any optional library."""
    destination = tmp_path_factory.mktemp("extras") / "nvfp4"
    done = run_without_extras("run", TINY, destination)
    assert done.returncode == 0, done.stderr
    return destination


def test_the_main_commands_need_no_optional_library(converted: Path) -> None:
    for words in (
        ("inspect", TINY),
        ("status", converted),
        ("validate", converted, "--source", TINY),
        ("report", converted, "--source", TINY, "--out", converted.parent / "report"),
    ):
        done = run_without_extras(*words)
        assert done.returncode == 0, (words, done.stderr)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("run", TINY, "OUT", "--device", "cuda"), "torch"),
        (("run", TINY, "OUT", "--set", "quantizer=reference"), "reference"),
        (("calibrate", TINY, "OUT", "--text", TINY / "eval.txt"), "calibrate"),
        (("validate", "CONVERTED", "--source", TINY, "--layers", "1"), "torch"),
        (("validate", "CONVERTED", "--source", TINY, "--layers", "all"), "torch"),
        (("validate", "CONVERTED", "--source", TINY, "--layers", "1", "--text", TINY / "eval.txt"), "calibrate"),
        (("validate", "CONVERTED", "--source", TINY, "--reference"), "reference"),
        (("fit", TINY, "--gpu", "b200", "--count", "1", "--estimate"), "fit"),
    ],
    ids=["device-cuda", "quantizer-reference", "calibrate", "layer", "all-layers", "text", "reference", "fit"],
)
def test_a_missing_library_is_one_line_that_names_the_extra(
    words: tuple[str | Path, ...], extra: str, converted: Path, tmp_path: Path
) -> None:
    places = {"OUT": tmp_path / "out", "CONVERTED": converted}
    done = run_without_extras(*(places.get(str(word), word) for word in words))
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = [line for line in said(done.stderr).splitlines() if "validate:" not in line]
    assert line.startswith("error: ")
    assert f"pip install 'k2convert[{extra}]'" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("quantizer", "libraries"),
    [("native", {"numpy"}), ("reference", {"numpy", "torch", "compressed-tensors", "nvidia-modelopt"})],
)
def test_the_ledger_names_the_versions_of_what_computed(
    quantizer: str, libraries: set[str], zeros: Path, tmp_path: Path
) -> None:
    source = Source(open_checkpoint(zeros))
    recipe = choose_recipe(source.checkpoint, None, {"quantizer": quantizer, "rule": "max"})
    execute(prepare(source=source, destination=Destination(tmp_path / "out"), recipe=recipe, device="cpu"))
    ledger = json.loads((tmp_path / "out" / "k2convert.json").read_text())
    assert set(ledger["versions"]) == {"python"} | libraries
