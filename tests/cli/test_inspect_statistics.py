"""`inspect` of a statistics file: a table, a document, and one line for what is not usable."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import run_here, said
from statistics_makers import HEADER, dense_layer, moe_layer, write_small

from k2convert.calibration.statistics import open_statistics, write_statistics


def test_the_table_says_what_was_read_and_what_each_layer_saw(tmp_path: Path) -> None:
    path = write_small(tmp_path / "small file.safetensors")
    captured = run_here("inspect", path, code=0)
    assert "statistics of 8,192 tokens in windows of 2,048, seed 3" in captured.stdout
    assert "text: emma.txt (blake3 cdcdcdcdcdcdcdcd)" in captured.stdout
    assert r"text: 'notes of\u2028a day.jsonl'" in captured.stdout, "no separator of a name breaks a line"
    assert "1 of 4 windows were dropped" in captured.stdout
    rows = {line.split()[0]: line.replace("│", " ").split() for line in captured.stdout.splitlines() if "│" in line}
    layer = moe_layer(2)
    scaled = int((layer.smoothing_exponents != 0).sum())
    least, *_, most = tokens = sorted(layer.tokens.tolist())
    median = tokens[1]  # of two in the middle, the fewer, as `calibrate` prints it
    assert rows["2"][1:6] == [*map(str, (least, median, most, 1, scaled))]
    assert rows["0"][1] == "dense"
    assert "3 layers, 4 experts per MoE layer\n" in captured.stdout
    assert "\nmax x: the largest input of gate and up. max z: the largest input of down\n" in captured.stdout
    assert f"next: k2convert run SOURCE DEST --statistics '{path}'" in captured.stderr


def test_the_document_has_every_experts_tokens(tmp_path: Path) -> None:
    path = write_small(tmp_path / "small")
    found = json.loads(run_here("inspect", path, "--json").stdout)
    assert found["digest"] == open_statistics(path).digest
    assert found["texts"][1] == {"name": HEADER.texts[1][0], "blake3": "ef" * 32}
    assert found["dropped_windows"] == 1
    assert list(found["layers"]) == ["0", "1", "2"]
    layer = moe_layer(1)
    assert found["layers"]["1"]["tokens"] == layer.tokens.tolist()
    assert found["layers"]["1"]["fallback"] == [3]
    assert found["layers"]["1"]["saliency"] == pytest.approx(layer.saliency.tolist())
    assert sum(found["layers"]["1"]["exponents"].values()) == 64
    arrays = {"tokens": [], "gate_up_amax": 0, "down_amax": [], "saliency": [], "router_weight": []}
    assert found["layers"]["0"] | arrays == {
        "dense": True, "tokens": [], "fallback": [], "exponents": {"0": 64}, "gate_up_amax": 0, "down_amax": [],
        "shared_down_amax": None, "saliency": [], "router_weight": [], "kv_cache": None,
        "without_imatrix": [],
    }  # fmt: skip
    assert found["exponents_digest"] is not None


@pytest.mark.parametrize(
    ("amax", "saturated", "says"),
    [
        ((31.5, 7), 0, "An FP8 KV cache with scale 1 saturates nothing: the largest value is 31.5, E4M3 ends at 448."),
        ((600, 7), 0.001, "saturates values of 1 layer (1): the largest is 600, E4M3 ends at 448. Do not declare it."),
    ],
)
def test_it_says_what_an_fp8_cache_does(tmp_path: Path, amax: tuple[float, float], saturated: float, says: str) -> None:
    path = tmp_path / "statistics"
    shares = {"kv_saturated_share": np.array([saturated, 0], np.float32)}
    shares["kv_subnormal_share"] = np.array([0.02, 0.125], np.float32)
    layer = replace(moe_layer(), kv_amax=np.array(amax, np.float32), imatrix=np.array([1, 0], np.uint8), **shares)
    write_statistics(path, [dense_layer(), layer], HEADER)
    shown = run_here("inspect", path, code=0).stdout
    assert says in shown
    assert "values lose precision: at most 12.5 % of a part (layer 1)." in shown
    assert "rule imatrix is not used in 1 layer, at least in part" in shown
    found = json.loads(run_here("inspect", path, "--json", code=0).stdout)["layers"]["1"]
    assert found["without_imatrix"] == ["down"]
    assert found["kv_cache"]["amax"] == list(amax)
    assert found["kv_cache"]["saturated_share"] == pytest.approx([saturated, 0])
    assert found["kv_cache"]["subnormal_share"] == pytest.approx([0.02, 0.125])


def test_a_path_with_a_slash_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("owner").mkdir()
    write_statistics(Path("owner/name"), [dense_layer(), moe_layer()], HEADER)
    assert "owner/name: statistics" in run_here("inspect", "owner/name").stdout


def test_unusable_files_end_with_one_line(tmp_path: Path, tiny: Path) -> None:
    content = write_small(tmp_path / "small").read_bytes()
    (tmp_path / "cut").write_bytes(content[:-9])
    (tmp_path / "changed").write_bytes(content[:-64] + b"\x40" * 64)  # the exponents of the last layer
    for path, complaint in (
        (tmp_path / "cut", "truncated"),
        (tmp_path / "changed", "damaged: its checksum is wrong"),
        (tiny / "config.json", f"To inspect that, pass the folder: {tiny}"),
        (tiny / "model-00001-of-000005.safetensors", "not a statistics file, but a file of a checkpoint. To inspect"),
    ):
        for words in ((path,), (path, "--json")):
            done = run_here("inspect", *words)
            assert (done.returncode, done.stdout) == (1, "")
            assert complaint in done.stderr
            assert len(said(done.stderr).splitlines()) == 1
