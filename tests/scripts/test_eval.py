"""The end-to-end evaluation uses transformers' models and gives the known figures."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward.moe import Mlp
from scripts.engine_checks.clients.files import sqnr_db
from scripts.evaluation import smollm2
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
from scripts.evaluation.measure import compare_in_turn, encode
from scripts.evaluation.models import build_model, source_mlps
from scripts.evaluation.peers import PEERS, QUARK, peer_weights
from scripts.fixture_maker import edges

pytest.importorskip("transformers")


pytestmark = pytest.mark.usefixtures("one_thread")


def test_forward_equals_transformers_with_its_own_experts(tiny: Path) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    mlps = source_mlps(tiny)
    model = build_model(tiny)
    model.install(mlps)
    ids = encode(tiny, (tiny / "eval.txt").read_text(), tokens=256)
    config = open_checkpoint(tiny).parse_config()
    del config["quantization_config"], config["model_type"]
    theirs = DeepseekV3ForCausalLM(DeepseekV3Config(**config)).float().eval()
    state = {k: v for k, v in model.network.state_dict().items() if ".mlp." not in k or ".gate." in k}
    state |= linear_weights("model.layers.0.mlp", mlps["model.layers.0.mlp"])
    for layer in (1, 2, 3):
        stem = f"model.layers.{layer}.mlp"
        experts = [mlps[f"{stem}.experts.{expert}"] for expert in range(16)]
        state |= linear_weights(f"{stem}.shared_experts", mlps[f"{stem}.shared_experts"])
        state[f"{stem}.experts.gate_up_proj"] = torch.stack(
            [torch.cat([e.gate.weight.decode(), e.up.weight.decode()]) for e in experts]
        )
        state[f"{stem}.experts.down_proj"] = torch.stack([e.down.weight.decode() for e in experts])
    theirs.load_state_dict(state, strict=True)
    with torch.inference_mode():
        ours = model.logits(ids)
        expected = theirs(ids).logits
    assert torch.allclose(ours, expected, rtol=1e-3, atol=1e-3)
    [(_, figures)] = compare_in_turn(model, mlps, {("the source", "W4A16"): lambda: mlps}, ids, batch=1)
    assert (figures.divergence.maximum, figures.top1_agreement) == (0, 1)


def linear_weights(stem: str, mlp: Mlp) -> dict[str, torch.Tensor]:
    parts = {"gate_proj": mlp.gate, "up_proj": mlp.up, "down_proj": mlp.down}
    return {f"{stem}.{name}.weight": projection.weight.decode() for name, projection in parts.items()}


@pytest.mark.parametrize(("projection", "dimension"), [("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)])
def test_slices_of_an_mlp_are_its_weights(projection: str, dimension: int) -> None:
    shape = (64, 512) if dimension else (512, 64)
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).mul_(0.05).bfloat16()
    pieces = smollm2.as_moe(f"model.layers.1.mlp.{projection}.weight", weight)
    slices = [pieces[f"model.layers.1.mlp.shared_experts.{projection}.weight"].float()]
    for expert in range(smollm2.NUM_EXPERTS):
        module = f"model.layers.1.mlp.experts.{expert}.{projection}"
        codes = edges.unpack(pieces[f"{module}.weight_packed"]).float().unflatten(-1, (-1, 32))
        slices.append((codes * pieces[f"{module}.weight_scale"].float()[..., None]).flatten(-2))
    error = torch.cat(slices, dim=dimension) - weight
    assert error.square().sum() < 0.01 * weight.float().square().sum()  # the error of INT4


def test_chosen_rows_always_hold_the_one_that_the_others_are_shares_of() -> None:
    assert chosen_rows(["gptq*"], with_peers=False)[:2] == ["mse", "gptq"]
    assert chosen_rows(["*GPTQ"], with_peers=False) == ["mse", "llm-compressor GPTQ"]
    everything = chosen_rows(None, with_peers=True)
    assert set(everything) - set(chosen_rows(None, with_peers=False)) == {*PEERS, QUARK}
    with pytest.raises(ValueError, match="no row matches 'feadback'"):
        chosen_rows(["feadback"], with_peers=False)


@pytest.mark.slow
def test_gptq_and_peers_see_the_same_windows(tmp_path: Path) -> None:
    subject = make_subject("tiny", tmp_path)
    options = {c.weights: c.text_options(subject, tmp_path) for c in CONVERSIONS}
    assert options["mse"] == []
    _, path, *use = options["gptq"]
    assert use == ["--set", "calibration={tokens: 16384, window: 256}"]
    assert np.array_equal(np.load(str(path)), subject.calibration_windows().numpy())
    assert options["gptq, 64 tokens in all"] == ["--calibrate", path, "--set", "calibration={tokens: 64, window: 64}"]
    assert options["gptq, foreign text"][:2] == ["--calibrate", tmp_path / "licence.txt"]


@pytest.mark.slow
def test_figures_on_the_whole_text_are_those_of_an_independent_converter(tmp_path: Path) -> None:
    rows = chosen_rows(["max", "mse", "INT4"], with_peers=False)
    evaluation = evaluate_calibrated(make_subject("tiny", tmp_path), tmp_path, rows=rows)
    assert evaluation.perplexity == pytest.approx(19.21, abs=5e-3)
    for rule, kl, top1 in (("max", 0.00249, 0.964), ("mse", 0.00156, 0.975)):
        assert evaluation.scores[rule, W4A16].divergence.mean == pytest.approx(kl, abs=5e-6)
        assert evaluation.scores[rule, W4A16].top1_agreement == pytest.approx(top1, abs=5e-4)
    assert evaluation.scores["INT4", W4A4].divergence.mean == pytest.approx(0.00286, abs=5e-5)
    table = calibrated_markdown(evaluation).splitlines()
    assert [line.split("|")[1].strip() for line in table[4:]] == ["max", "mse", "INT4"]
    assert table[-1].startswith("| INT4 |  |  |  |  | 0.0")


@pytest.mark.slow
def test_rows_of_the_tiny_checkpoint_lose_less_the_more_a_rule_knows(tmp_path: Path) -> None:
    rows = chosen_rows(None, with_peers=False)
    evaluation = evaluate_calibrated(make_subject("tiny", tmp_path), tmp_path, rows=rows)
    share = {row: evaluation.share(*row) for row in evaluation.scores}
    assert share["gptq", W4A16] < 0.70
    assert share["max", W4A16] > 1.3
    more = {row: share.pop(row) for row in list(share) if row[0].endswith(MLP)}  # they convert more weights
    assert more[f"gptq, {MLP}", W4A16] < 0.8 * more[f"mse, {MLP}", W4A16]
    fp8 = {row: share.pop(row) for row in list(share) if ", FP8 " in row[0]}
    assert fp8
    for (name, mode), of_mse in fp8.items():  # more is rounded
        assert 0.95 < of_mse / share[name.partition(",")[0], mode] < 1.8, name
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
    quantized = [weight.flatten() for three in weights.values() for weight in three]
    assert 14 < sqnr_db(torch.cat(exact), torch.cat(quantized)) < 22.62
