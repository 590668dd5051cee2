"""The evaluation of calibrated conversions: scaled norms and routers are used, and the rows keep their promises."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from k2convert.forward.moe import Mlp
from k2convert.forward.weights import DenseWeight, LinearLayer
from scripts.evaluation.calibrated import (
    CALIBRATED_SUBJECTS,
    W4A16,
    calibration_tokens,
    calibration_windows,
    chosen_rows,
    evaluate_calibrated,
)
from scripts.evaluation.measure import Variant, compare, compare_in_turn, encode
from scripts.evaluation.models import build_model, scaled_tensors, source_mlps, weight_sqnr_db
from scripts.evaluation.peers import PEERS, mlps_of, peer_weights


def halved(layer: LinearLayer) -> LinearLayer:
    return LinearLayer(DenseWeight(layer.weight.decode() / 2))


def test_scaled_norms_and_routers_are_those_of_the_row(tiny: Path) -> None:
    source, tensors = source_mlps(tiny), scaled_tensors(tiny)
    assert len(tensors) == 6  # a norm and a router in each of the three MoE layers
    scaled = {name: tensor * 2 if "norm" in name else tensor / 2 for name, tensor in tensors.items()}
    mlps = {
        name: Mlp(halved(mlp.gate), halved(mlp.up), mlp.down) if "expert" in name else mlp
        for name, mlp in source.items()
    }
    windows = encode(tiny, (tiny / "eval.txt").read_text(), tokens=256)
    rows = {
        ("both", ""): lambda: Variant(mlps, scaled),
        ("weights alone", ""): lambda: Variant(mlps, {}),
        ("neither", ""): lambda: Variant(source, {}),
    }
    seen: list[tuple[str, str]] = []
    reference, scores = compare_in_turn(
        build_model(tiny), source, rows, windows, batch=1, progress=lambda row, _: seen.append(row)
    )
    assert scores["both", ""].perplexity == reference.perplexity
    assert scores["both", ""].kl_mean == scores["neither", ""].kl_mean == 0
    assert (scores["weights alone", ""].kl_mean or 0) > 0.1
    assert seen == list(rows)
    whole, _ = compare(build_model(tiny), source, {}, windows, batch=1)
    assert whole == reference


def test_chosen_rows_always_hold_the_one_that_the_others_are_shares_of() -> None:
    assert chosen_rows(["gptq*"], with_peers=False)[:2] == ["mse", "gptq"]
    assert chosen_rows(["*GPTQ"], with_peers=False) == ["mse", "llm-compressor GPTQ"]
    everything = chosen_rows(None, with_peers=True)
    assert set(everything) - set(chosen_rows(None, with_peers=False)) == set(PEERS)
    with pytest.raises(ValueError, match="no row matches 'feadback'"):
        chosen_rows(["feadback"], with_peers=False)


def test_gptq_and_peers_see_the_same_windows(tmp_path: Path) -> None:
    subject = CALIBRATED_SUBJECTS["tiny"](tmp_path)
    tokens = calibration_tokens(subject, tmp_path)
    lines = tokens["text"].path.read_text().splitlines()
    assert torch.equal(torch.tensor([json.loads(line) for line in lines]), calibration_windows(subject))
    options = tokens["512"].options(text="--text")
    assert options[:6] == ["--text", tokens["text"].path, "--tokens", 512, "--window", 256]
    assert tokens["64"].options(text="--calibrate")[2:4] == ["--set", "calibration={tokens: 64, window: 64}"]
    assert tokens["foreign"].options(text="--calibrate")[:2] == ["--calibrate", tmp_path / "licence.txt"]


@pytest.mark.slow
def test_rows_of_the_tiny_checkpoint_lose_less_the_more_a_rule_knows(tmp_path: Path) -> None:
    rows = chosen_rows(None, with_peers=False)
    found = evaluate_calibrated(CALIBRATED_SUBJECTS["tiny"](tmp_path), tmp_path, rows=rows)
    share = {(row.weights, row.mode): row.of_mse for row in found.rows}
    assert share["imatrix", W4A16] < 0.92
    assert share["gptq", W4A16] < 0.70
    assert share["max", W4A16] > 1.3
    for row, of_mse in share.items():
        assert of_mse < 1.06 or row[0] == "max", row


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_peers_quantize_only_the_routed_experts_of_the_same_weights(name: str, tiny: Path, tmp_path: Path) -> None:
    windows = calibration_windows(CALIBRATED_SUBJECTS["tiny"](tmp_path))[:2]
    weights = peer_weights(tiny, name, windows)
    source = source_mlps(tiny)
    assert set(weights) == {stem for stem in source if ".experts." in stem}
    for gate, up, down in weights.values():
        for weight in (gate, up, down):
            blocks = weight.unflatten(-1, (-1, 16)).flatten(0, 1)
            assert max(len(torch.unique(block.abs())) for block in blocks[:64]) <= 8  # FP4 has eight magnitudes
    assert 14 < weight_sqnr_db(source, source | mlps_of(weights), tiny) < 22.62
