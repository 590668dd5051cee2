"""What a calibration will need: said before it starts, and refused when it is not there."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command import peak_of, run_cli, run_here

from scripts.fixture_maker import K2Shape, make_k2_shaped
from scripts.fixture_maker.config import write_sidecars
from scripts.fixture_maker.folder import write_small
from scripts.fixture_maker.k3 import SIDECARS, K3Shape, tiny_checkpoint

SHAPE = K2Shape(
    hidden=1536, moe_intermediate=256, dense_intermediate=4096, experts=8, moe_layers=1, dense_layers=1,
    vocabulary=1024, heads=16, q_lora_rank=256, kv_lora_rank=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_k2_shaped(tmp_path_factory.mktemp("shaped") / "k2", shape=SHAPE)


@pytest.fixture(scope="module")
def shaped_k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of K3's proportions, a dense one and two with experts, in blocks of one."""
    shape = K3Shape(
        hidden=1536, latent=768, inner=256, dense_inner=4096, experts=8, layers=3, mla=(2,), heads=16, q_lora_rank=256,
        kv_lora_rank=128, vocabulary=1024, vision_hidden=32, vision_qkv=48, vision_inner=64, vision_blocks=2,
        vision_positions=8,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("shaped") / "k3"
    checkpoint = tiny_checkpoint(folder / "none", shape)
    checkpoint.config["text_config"]["attn_res_block_size"] = 1
    write_small(checkpoint, folder)
    write_sidecars(folder, SIDECARS)
    return folder


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.random.RandomState(0).randint(0, 1000, 1024))
    return path


def calibrated(source: Path, out: Path, file: Path, *, tokens: int, window: int) -> tuple[object, ...]:
    """The command that converts and calibrates on a file."""
    size = f"calibration={{tokens: {tokens}, window: {window}}}"
    return ("run", source, out, "--calibrate", file, "--set", size, "--device", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cut", "tiny", "shaped"])
def test_a_dry_run_says_the_memory(ids: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    source: Path = request.getfixturevalue(kind)
    window = 512 if kind == "shaped" else 128
    words = calibrated(source, tmp_path / "out", ids, tokens=1024, window=window)
    dry = run_cli(*words, "--dry-run", "--json")  # in processes of their own, which have their own peaks
    assert dry.returncode == 0, dry.stderr
    document = json.loads(dry.stdout)
    estimate = document["memory_needed"]
    peak = peak_of(*words, "--quiet")
    assert estimate == pytest.approx(peak, rel=0.25), (estimate / 1e9, peak / 1e9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cut", "shaped", "shaped_k3"])
def test_the_memory_that_a_dry_run_says_is_enough_for_an_evaluation(
    ids: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(kind)
    run_here("run", source, tmp_path / "out", "--quiet", code=0)
    words = ("evaluate", source, tmp_path / "out", "--text", ids, "--device", "cpu")
    estimate = json.loads(run_cli(*words, "--dry-run", "--json").stdout)["memory_bytes"]
    peak = peak_of(*words, "--quiet")
    assert estimate > 0.75 * peak, (estimate / 1e9, peak / 1e9)
    if kind == "shaped_k3":
        assert estimate < 1.25 * peak, (estimate / 1e9, peak / 1e9)


def test_too_much_memory_is_refused(tiny: Path, ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k2convert.cli.needs.available_memory", lambda: 100 << 20)
    words = calibrated(tiny, tmp_path / "out", ids, tokens=1024, window=128)
    for more in ((), ("--dry-run",)):
        done = run_here(*words, "--quiet", *more)
        error = done.stderr
        assert (done.returncode, error.count("\n")) == (1, 1)
        assert error.startswith(f"error: {tiny}: needs about ")
        assert "B is available. Use fewer tokens, a shorter window, or a machine with more memory." in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["h200", "64-cores", "gpu", "cuda:0"])
def test_a_device_that_is_not_here_is_refused_in_one_line(tiny: Path, ids: Path, tmp_path: Path, name: str) -> None:
    words = ("--device", name, "--dry-run")
    for verb, *more in (
        ("run", tiny, tmp_path / "out", "--calibrate", ids),
        ("run", tiny, tmp_path / "out"),
        ("evaluate", tiny, tiny, "--text", ids, "--out", tmp_path / "out.json"),
    ):
        done = run_here(verb, *more, *words, code=2)
        error = done.stderr.splitlines()[-1]
        assert f"'--device': '{name}' is not auto, cpu or cuda." in error
        assert error.endswith("see `k2convert guide calibrate`.")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["run", "evaluate"])
def test_a_dry_run_with_a_text_computes_nothing_and_names_the_table_of_machines(
    cut: Path, ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def compute(*_: object) -> None:
        raise AssertionError("a product was computed")

    for name in ("matmul", "mm", "bmm", "addmm"):
        monkeypatch.setattr(torch, name, compute)
    words = calibrated(cut, tmp_path / "out", ids, tokens=128, window=64)
    if verb == "evaluate":
        words = ("evaluate", cut, cut, "--text", ids, "--tokens", 128, "--window", 64, "--out", tmp_path / "out")
    shown = run_here(*words, "--dry-run", code=0).stdout
    assert "memory: needs about " in shown
    assert "time: estimated once the first layer is done" in shown
    assert ("k2convert guide calibrate" in shown) == (verb == "run")
    assert not list(tmp_path.iterdir())


def test_yes_is_for_publishing_alone(tiny: Path, ids: Path, tmp_path: Path) -> None:
    done = run_here("evaluate", tiny, tmp_path / "out", "--text", ids, "--yes", code=2)
    assert "--yes" in done.stderr
