"""A damaged work file of `run --calibrate` is named, what it held is computed again, and the result is the same."""

import shutil
from pathlib import Path

import pytest
from command import run, run_here
from damaged_files import DAMAGES, damage_file, damaged_weight
from results import contents

from k2convert.calibration.layer_files import Calibration, conversion_work
from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CheckpointError

OPTIONS = ("--set", "calibration={tokens: 128, window: 32}", "--device", "cpu")
EXPERT = "model.layers.1.mlp.experts.0.down_proj"
DONE = ".k2convert/done/layer-000.json"
STREAMS = (DONE, "hidden-001.safetensors", "residual-001.safetensors")
RESULTS = (".k2convert/done/layer-001.json", "codes-001.safetensors")
NAMES = (*STREAMS, *RESULTS, ".k2convert/calibration.json")


@pytest.fixture(scope="module")
def whole(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert run("run", source, folder, "--calibrate", text, *OPTIONS, "--quiet") == 0
    return contents(folder)


@pytest.fixture(scope="module")
def source(cut: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(cut, tmp_path_factory.mktemp("source") / "source"))


@pytest.fixture(scope="module")
def stopped(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the name of a work file: a run that stopped when it was there."""
    folder = tmp_path_factory.mktemp("stopped")
    words = ("--calibrate", text, *OPTIONS, "--quiet")
    with damaged_weight(source, "model.layers.1.self_attn.q_a_proj.weight"):  # stops the layer pass in layer 1
        assert run("run", source, folder / "streams", *words) == 1
    results = Path(shutil.copytree(folder / "streams", folder / "results"))
    shards = {info.shard for name, info in open_checkpoint(source).tensors.items() if ".layers.1." in name}
    for shard in shards:  # stops the run when the layer pass is done: the shard cannot be written
        (results / f"{shard}.tmp").mkdir()
    assert run("run", source, results, *words) == 1
    for shard in shards:
        (results / f"{shard}.tmp").rmdir()
    folders = dict.fromkeys((*STREAMS, ".k2convert/calibration.json"), folder / "streams")
    folders |= dict.fromkeys(RESULTS, results)
    for name, out in folders.items():
        assert (conversion_work(out).folder / name).is_file(), name
    return folders


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "damage"), [(name, damage) for damage in DAMAGES for name in NAMES])
def test_a_damaged_work_file_is_named_and_the_result_is_the_same(
    name: str,
    damage: str,
    stopped: dict[str, Path],
    source: Path,
    cut: Path,
    text: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
) -> None:
    out = Path(shutil.copytree(stopped[name], tmp_path / "out"))
    work = conversion_work(out).folder
    path = work / name
    damage_file(path, damage, foreign=cut / "model-00002-of-000005.safetensors")
    error = run_here("run", source, out, "--calibrate", text, *OPTIONS, code=0).stderr
    if damage == "missing" and "layer-" in name:
        path, fact = work / "hidden-001.safetensors", "missing"  # nothing says that the layer was done
    else:
        fact = "missing" if damage == "missing" and name[0] != "." else "damaged"
    if (name, damage) != (DONE, "missing"):
        assert f"{path}: {fact}: the calibration starts again at the beginning" in error
    assert contents(out) == whole


def test_codes_that_are_damaged_while_the_run_converts_are_refused(stopped: dict[str, Path], tmp_path: Path) -> None:
    name = "codes-001.safetensors"
    work = conversion_work(Path(shutil.copytree(stopped[name], tmp_path / "out")))
    with Calibration(work) as codes:
        assert codes.converted(EXPERT).packed.size > 0
    damage_file(work.path("codes", 1), "zeros", foreign=work.folder)
    says = rf"{name}: damaged\. Repeat the command: what was in the file is computed again\."
    with Calibration(work) as codes, pytest.raises(CheckpointError, match=says):
        codes.converted(EXPERT)
