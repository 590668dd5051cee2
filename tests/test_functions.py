"""The functions of the package: their signatures, what importing it costs, and that they do what the commands do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from command import run
from house import TINY

import k2convert
from k2convert.errors import CheckpointError, InvalidCheckpointError

SOURCE = Path(k2convert.__file__).read_text()
PATH = "str | PathLike[str]"
DEVICE = "Literal['auto', 'cpu', 'cuda'] = 'auto'"
SIGNATURES = {
    "convert": f"(source: {PATH}, destination: {PATH}, *, recipe: {PATH} | None = None, "
    "settings: Mapping[str, object] | None = None, "
    f"statistics: {PATH} | None = None, text: Sequence[{PATH}] = (), device: {DEVICE}, workers: int | None = None, "
    "max_disk: int | None = None, private: bool = True, verify: bool = False, events: Events | None = None) -> Outcome",
    "calibrate": f"(source: {PATH}, statistics: {PATH}, text: Sequence[{PATH}], *, tokens: int | None = None, "
    f"window: int | None = None, seed: int | None = None, device: {DEVICE}, max_disk: int | None = None, "
    "events: Events | None = None) -> StatisticsHeader",
    "validate": f"(result: {PATH}, source: {PATH} | None = None, *, statistics: {PATH} | None = None, "
    f"reference: bool = False, against: {PATH} | None = None, events: Events | None = None) -> ValidationReport",
    "evaluate": f"(reference: {PATH}, checkpoints: Sequence[{PATH}], text: Sequence[{PATH}], *, tokens: int = 32768, "
    "window: int = 2048, seed: int = 0, activations: Literal['w4a4', 'w4a16', 'both'] | None = None, "
    f"kv_cache: Literal['fp8'] | None = None, device: {DEVICE}, max_disk: int | None = None, "
    f"out: {PATH} | None = None, any_text: bool = False, events: Events | None = None) -> Evaluation",
    "inspect": f"(source: {PATH}) -> Inspection",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_frozen(name: str) -> None:
    node = next(n for n in ast.parse(SOURCE).body if isinstance(n, ast.FunctionDef) and n.name == name)
    returned = "" if node.returns is None else ast.unparse(node.returns)
    assert f"({ast.unparse(node.args)}) -> {returned}".replace("=", " = ") == SIGNATURES[name]


def python(code: str, *, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_importing_the_package_loads_no_library(tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); import k2convert; "
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = python(code, folder=tmp_path)
    assert done.stdout.split() == ["k2convert"], done.stderr


def test_convert_gives_the_commands_result_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import k2convert; "
        f"outcome = k2convert.convert({str(TINY)!r}, 'out', settings={{'rule': 'max'}}); print(len(outcome.records))"
    )
    done = python(code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5"]
    assert done.stderr == ""
    assert run("run", TINY, tmp_path / "command", "--rule", "max", "--quiet") == 0
    assert files(tmp_path / "out") == files(tmp_path / "command")
    report = k2convert.validate(tmp_path / "out", TINY)
    assert report.passed
    assert report.weights is not None
    assert k2convert.inspect(tmp_path / "out").nvfp4_projections > 0
    again = k2convert.convert(TINY, tmp_path / "out", settings={"rule": "max"})
    assert again.records == again.finished


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_errors_are_those_of_the_package(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        k2convert.convert(tmp_path, tmp_path / "out")
    with pytest.raises(InvalidCheckpointError, match="below the error budget"):
        k2convert.convert(TINY, tmp_path / "out", settings={"budget": {"tensor_sqnr_db": 60}})
    assert (tmp_path / "out" / "k2convert.json").exists(), "the result stays"


def test_statistics_are_collected_and_used(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Sentence {number} of a text. " for number in range(400)))
    header = k2convert.calibrate(TINY, tmp_path / "tiny.stats", [text], tokens=512, window=64)
    assert header.tokens == 512
    outcome = k2convert.convert(TINY, tmp_path / "out", statistics=tmp_path / "tiny.stats")
    assert outcome.calibrated is not None
    assert outcome.calibrated.imatrix
    assert k2convert.validate(tmp_path / "out", TINY, statistics=tmp_path / "tiny.stats").passed
