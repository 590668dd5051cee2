"""The evaluation of calibrated conversions: each row has the text that its name says, and the known figures."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from scripts.engine_checks.clients.files import sqnr_db
from scripts.evaluation.calibrated import (
    CONVERSIONS,
    MLP,
    W4A4,
    W4A16,
    calibrated_markdown,
    chosen_rows,
    evaluate_calibrated,
    make_subject,
)
from scripts.evaluation.models import source_mlps
from scripts.evaluation.peers import PEERS, QUARK, peer_weights


def test_chosen_rows_always_hold_the_one_that_the_others_are_shares_of() -> None:
    assert chosen_rows(["gptq*"], with_peers=False)[:2] == ["mse", "gptq"]
    assert chosen_rows(["*GPTQ"], with_peers=False) == ["mse", "llm-compressor GPTQ"]
    everything = chosen_rows(None, with_peers=True)
    assert set(everything) - set(chosen_rows(None, with_peers=False)) == {*PEERS, QUARK}
    with pytest.raises(ValueError, match="no row matches 'feadback'"):
        chosen_rows(["feadback"], with_peers=False)


def test_gptq_and_peers_see_the_same_windows(tmp_path: Path) -> None:
    subject = make_subject("tiny", tmp_path)
    options = {c.weights: c.text_options(subject, tmp_path) for c in CONVERSIONS}
    assert options["mse"] == []
    _, path, *use = options["gptq"]
    assert use == ["--set", "calibration={tokens: 16384, window: 256}"]
    lines = Path(str(path)).read_text().splitlines()
    assert torch.equal(torch.tensor([json.loads(line) for line in lines]), subject.calibration_windows())
    assert options["gptq, 64 tokens in all"] == ["--calibrate", path, "--set", "calibration={tokens: 64, window: 64}"]
    assert options["gptq, foreign text"][:2] == ["--calibrate", tmp_path / "licence.txt"]


@pytest.mark.slow
def test_figures_on_the_whole_text_are_those_of_an_independent_converter(tmp_path: Path) -> None:
    rows = chosen_rows(["max", "mse", "INT4"], with_peers=False)
    found = evaluate_calibrated(make_subject("tiny", tmp_path), tmp_path, rows=rows)
    scores = {(row.weights, row.mode): row.score for row in found.rows}
    assert found.source.perplexity == pytest.approx(19.21, abs=5e-3)
    for rule, kl, top1 in (("max", 0.00249, 0.964), ("mse", 0.00156, 0.975)):
        assert scores[rule, W4A16].kl_mean == pytest.approx(kl, abs=5e-6)
        assert scores[rule, W4A16].top1_agreement == pytest.approx(top1, abs=5e-4)
    assert scores["INT4", W4A4].kl_mean == pytest.approx(0.00286, abs=5e-5)
    table = calibrated_markdown(found).splitlines()
    assert [line.split("|")[1].strip() for line in table[4:]] == ["max", "mse", "INT4"]
    assert table[-1].startswith("| INT4 |  |  |  |  | 0.0")


@pytest.mark.slow
def test_rows_of_the_tiny_checkpoint_lose_less_the_more_a_rule_knows(tmp_path: Path) -> None:
    rows = chosen_rows(None, with_peers=False)
    found = evaluate_calibrated(make_subject("tiny", tmp_path), tmp_path, rows=rows)
    share = {(row.weights, row.mode): row.of_mse for row in found.rows}
    assert share["gptq", W4A16] < 0.70
    assert share["max", W4A16] > 1.3
    more = {row: share.pop(row) for row in list(share) if row[0].endswith(MLP)}  # they convert more weights
    assert more[f"gptq, {MLP}", W4A16] < 0.8 * more[f"mse, {MLP}", W4A16]
    for row, of_mse in share.items():
        assert of_mse < 1.06 or row[0] == "max", row


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_peers_quantize_only_the_routed_experts_of_the_same_weights(name: str, tiny: Path, tmp_path: Path) -> None:
    windows = make_subject("tiny", tmp_path).calibration_windows()[:2]
    # llm-compressor moves a tensor to the device `meta`, which torch refuses where shadow_device.py was imported.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        weights = pool.submit(peer_weights, tiny, name, windows).result()
    source = source_mlps(tiny)
    assert set(weights) == {stem for stem in source if ".experts." in stem}
    for gate, up, down in weights.values():
        for weight in (gate, up, down):
            blocks = weight.unflatten(-1, (-1, 16)).flatten(0, 1)
            assert max(len(torch.unique(block.abs())) for block in blocks[:64]) <= 8  # FP4 has eight magnitudes
    exact = [p.weight.decode().flatten() for m in (source[n] for n in weights) for p in (m.gate, m.up, m.down)]
    found = [weight.flatten() for three in weights.values() for weight in three]
    assert 14 < sqnr_db(torch.cat(exact), torch.cat(found)) < 22.62
