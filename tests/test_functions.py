"""The functions of the package: their signatures, what importing it costs, and that they do what the commands do."""

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
from command import python, run, run_here
from structure import TINY

import k2convert
from k2convert.errors import ArgumentError, CheckpointError, FitError, InvalidCheckpointError

SOURCE = Path(k2convert.__file__).read_text()
PATH = "AnyPath"
PATHS = f"{PATH} | Sequence[{PATH}]"
SIZE = "int | str | None"
DEVICE = "Literal['auto', 'cpu', 'cuda'] = 'auto'"
SIGNATURES = {
    "convert": f"(source: {PATH}, destination: {PATH}, *, recipe: {PATH} | None = None, "
    "settings: Mapping[str, object] | None = None, "
    f"text: {PATHS} = (), device: {DEVICE}, workers: int | None = None, "
    f"max_disk: {SIZE} = None, private: bool = True, verify: bool = False, events: Events | None = None) -> Outcome",
    "validate": f"(result: {PATH}, source: {PATH} | None = None, *, "
    "layers: Sequence[int] | Literal['all'] | None = None, events: Events | None = None) -> ValidationReport",
    "evaluate": f"(reference: {PATH}, checkpoints: {PATHS}, text: {PATHS}, *, tokens: int = 32768, "
    "window: int = 2048, activations: Literal['w4a4', 'w4a16', 'both'] | None = None, "
    f"kv_cache: Literal['fp8'] | None = None, device: {DEVICE}, max_disk: {SIZE} = None, "
    f"out: {PATH} | None = None, any_text: bool = False, "
    "events: Events | None = None) -> Evaluation",
    "inspect": f"(source: {PATH}) -> Inspection",
    "fit": f"(checkpoint: {PATH}, *, gpu: str | None = None, context: int = 8192, requests: int = 1, "
    f"recipe: {PATH} | None = None) -> list[Fit]",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_frozen(name: str) -> None:
    node = next(n for n in ast.parse(SOURCE).body if isinstance(n, ast.FunctionDef) and n.name == name)
    returned = "" if node.returns is None else ast.unparse(node.returns)
    assert f"({ast.unparse(node.args)}) -> {returned}".replace("=", " = ") == SIGNATURES[name], (
        "programs depend on it. If the change is meant, write it in SIGNATURES and in CHANGELOG.md"
    )


def test_importing_the_package_loads_no_library(tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); import k2convert; "
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = python(code, cwd=tmp_path)
    assert done.stdout.split() == ["k2convert"], done.stderr


def test_convert_gives_the_commands_result_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import k2convert; "
        f"outcome = k2convert.convert({str(TINY)!r}, 'out', settings={{'rule': 'max'}}); print(len(outcome.records))"
    )
    done = python(code, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")
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


WRONG: dict[str, dict[str, Any]] = {
    "convert": {
        "workers": (0, -1, "3", 1.5, True),
        "max_disk": (0, -1, 1.5, "many"),
        "device": ("gpu", "CPU", None),
        "settings": ({"none": 1}, {1: 2}, [("rule", "max")], "rule=max", {"rule": None}),
        "recipe": ("a\0", "\ud800", 5, "missing"),
        "text": ("a\0", 5, [5]),
        "events": (print, k2convert.Events, "tqdm", 1),
    },
    "evaluate": {
        "tokens": (0, -1),
        "window": (0, -1),
        "device": ("gpu",),
        "activations": ("w8a8",),
        "kv_cache": ("fp4",),
        "checkpoints": ((), "", "missing", 5),
        "out": ("a\0", "/"),
        "events": (print,),
    },
    "validate": {
        "result": ("/", "a\0", "\ud800", "x" * 300, None, ""),
        "source": ("a\0", "/"),
        "layers": (5, [], "1,2", [1.5], ["1"], [1]),
        "events": (print, list),
    },
    "fit": {
        "checkpoint": ("a\0", 5, None, "", "missing"),
        "gpu": ("h21", "mi300", ""),
        "context": (0, 1.5, "8k"),
        "requests": (0, True),
    },
    "inspect": {"source": ("a\0", "\ud800", 5, None, "", "/", "/dev/null", "x" * 300)},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_errors_of_the_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("A text. " * 400)
    k2convert.convert(TINY, "result")
    right: dict[str, dict[str, Any]] = {
        "convert": {"source": TINY, "destination": "out"},
        "evaluate": {"reference": TINY, "checkpoints": TINY, "text": "text.txt", "out": "figures.json"},
        "validate": {"result": tmp_path / "result"},
        "inspect": {},
        "fit": {"checkpoint": TINY},
    }
    for argument, values in WRONG[name].items():
        for value in values:
            with pytest.raises(k2convert.K2ConvertError) as refused:
                getattr(k2convert, name)(**right[name] | {argument: value})
            assert "--" not in str(refused.value).replace("--local-dir", ""), "a function has no options"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result", "text.txt"]


def test_paths_may_be_entries_of_a_folder_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with os.scandir(tmp_path) as entries:
        entry = next(entries)
    outcome = k2convert.convert(os.fsencode(TINY), entry, settings={"rule": "max"})
    assert outcome.folder == tmp_path / "out"
    assert k2convert.validate(entry, TINY).passed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_an_outcome_has_totals_and_is_read_at_a_glance(tmp_path: Path) -> None:
    outcome = k2convert.convert(TINY, tmp_path / "out", max_disk="1GB")
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert outcome.num_bytes == sum(path.stat().st_size for path in shards)
    assert f"records=PackedRecords({len(shards)} shards), finished=PackedRecords(0 shards)" in repr(outcome)
    stated = json.loads((tmp_path / "out" / "k2convert.json").read_text())["totals"]
    assert {role: total.squared_error for role, total in outcome.totals.items()} == {
        role: figures["squared_error"] for role, figures in stated.items()
    }


def test_layers_are_computed_as_by_the_command(local_result: Path, tiny: Path) -> None:
    report = k2convert.validate(local_result, tiny, layers=[1])
    assert report.layers is not None
    assert [layer.layer for layer in report.layers.layers] == [1]
    with pytest.raises(CheckpointError, match="layer 9 has no MoE block"):
        k2convert.validate(local_result, tiny, layers=[1, 9])


def test_fit_names_the_gpus_of_the_command() -> None:
    fits = json.loads(run_here("fit", TINY, "--gpu", "NVIDIA H200", "--json", code=0).stdout)["fits"]
    holders = k2convert.fit(os.fsencode(TINY), gpu="h200")
    assert [(h.gpu.name, h.layout.num_gpus, h.tokens) for h in holders] == [
        (fit["gpu"], fit["count"], fit["kv_tokens"]) for fit in fits
    ]
    assert len({holder.gpu.name for holder in k2convert.fit(TINY)}) > 5
    [smaller, *_] = k2convert.fit(TINY, gpu="h200", recipe="kimi-k2-thinking-nvfp4-fp8")
    assert smaller.weight_bytes < holders[0].weight_bytes


def test_fit_takes_a_memory_and_nothing_else_than_text() -> None:
    assert {holder.gpu.memory_bytes for holder in k2convert.fit(TINY, gpu="96GB")} == {96 * 10**9}
    for gpu in (3, b"b200", Path("b200"), "96 cows"):
        with pytest.raises(ArgumentError):
            k2convert.fit(TINY, gpu=gpu)  # type: ignore[arg-type]
    with pytest.raises(FitError, match="an unknown GPU"):
        k2convert.fit(TINY, gpu="b100")


def test_events_may_override_what_they_want(tmp_path: Path) -> None:
    finished: list[str] = []

    class Listener(k2convert.Events):
        def shard_finished(self, shard: str) -> None:
            finished.append(shard)

    outcome = k2convert.convert(TINY, tmp_path / "out", events=Listener())
    assert sorted(finished) == sorted(outcome.records)


def test_settings_name_keys_as_the_command_does(text: Path, tmp_path: Path) -> None:
    settings = {"calibration.tokens": 256, "calibration.window": 64, "budget.tensor_sqnr_db": 1}
    outcome = k2convert.convert(TINY, tmp_path / "out", text=text, settings=settings)
    assert outcome.calibrated is not None
    assert outcome.calibrated.window == 64


@pytest.mark.parametrize("kind", ["empty", "without a checkpoint", "the root of all files", "a file", "missing"])
def test_a_validation_of_no_checkpoint_says_so(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("/") if kind == "the root of all files" else tmp_path / "place"
    if kind in ("empty", "without a checkpoint"):
        path.mkdir()
    if kind == "without a checkpoint":
        (path / "notes.txt").write_text("a note")
        (path / "inner").mkdir()
        (path / "inner" / "model.safetensors").write_text("of others")
    if kind == "a file":
        path.write_text("a note")
    words = {"a file": "is a file", "missing": "no such folder"}.get(
        kind, "holds no checkpoint: neither config.json nor"
    )
    with pytest.raises(CheckpointError, match=f"^{path}: {words}.* Pass the folder of a finished conversion"):
        k2convert.validate(path)
    assert run("validate", path) == 1
    assert f"error: {path}: {words}" in capsys.readouterr().err
