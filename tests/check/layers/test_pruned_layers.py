"""`validate --layers` on a pruned result: what pruning costs stands beside what the conversion costs."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run, run_here
from test_text_states import windows_of

from scripts.fixture_maker.damage import edit_config
from scripts.fixture_maker.layouts import reap_survivors

pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pruned(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with 10 of 16 experts, converted."""
    folder = tmp_path_factory.mktemp("pruned")
    experts = {str(layer): list(kept) for layer, kept in reap_survivors().items()}
    (folder / "kept.json").write_text(json.dumps({"experts": experts}))
    assert run("run", tiny, folder / "out", "--keep-experts", folder / "kept.json", "--quiet") == 0
    return folder / "out"


def blocks_of_transformers(folder: Path, ids: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor, float]]:
    """The output of each MoE block, the output without the dropped experts, and their share of the router's weight."""
    from whole_models import whole_model

    model = whole_model(folder)
    network: Any = model.network
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for number in reap_survivors():
        network.model.layers[number].mlp.register_forward_hook(
            lambda _m, args, output, number=number: seen.update({number: (args[0], output)})
        )
    found: dict[int, tuple[torch.Tensor, torch.Tensor, float]] = {}
    with torch.inference_mode():
        model.logits(ids)
        for number, kept in reap_survivors().items():
            x, whole = seen[number]
            mlp = network.model.layers[number].mlp
            dropped = [expert for expert in range(16) if expert not in kept]
            scores = torch.sigmoid(x.flatten(0, 1).float() @ mlp.gate.weight.float().T)
            chosen = torch.topk(scores + mlp.gate.e_score_correction_bias, 4).indices
            weights = scores.gather(1, chosen)
            weights /= weights.sum(1, keepdim=True)
            share = weights[torch.isin(chosen, torch.tensor(dropped))].sum() / weights.sum()
            mlp.gate.e_score_correction_bias[dropped] = -math.inf
            found[number] = (whole.flatten(0, 1).double(), mlp(x).flatten(0, 1).double(), float(share))
    return found


@pytest.mark.slow
def test_pruning_alone_is_the_error_that_transformers_finds(tiny: Path, pruned: Path) -> None:
    text = ("--layers", "all", "--text", tiny / "eval.txt", "--tokens", 64)
    shown = run_here("validate", pruned, "--source", tiny, *text, "--json", code=0)
    assert "computes 110 experts" in shown.stderr
    layers = {layer["layer"]: layer for layer in json.loads(shown.stdout)["layers"]["layers"]}
    expected = blocks_of_transformers(tiny, torch.as_tensor(windows_of(tiny, 64).ids))
    for number, (whole, without, share) in expected.items():
        errors = {error["variant"]: error for error in layers[number]["errors"]}
        alone = errors["pruning-alone"]
        result = errors["pruned-result"]
        signal = float(whole.square().sum())
        noise = float((whole - without).square().sum())
        assert alone["sqnr_db"] == pytest.approx(10 * math.log10(signal / noise), abs=0.01)
        cosine = torch.nn.functional.cosine_similarity(whole, without, dim=-1)
        assert alone["cosine"] == pytest.approx(float(cosine.mean()), abs=1e-4)
        assert layers[number]["pruning"]["num_source_experts"] == 16
        assert layers[number]["pruning"]["router_weight_left_out"] == pytest.approx(share, abs=1e-4)
        assert errors["converted-w4a4"]["cosine"] > 0.99 > 0.95 > alone["cosine"] > result["cosine"] - 0.01


def test_the_table_names_its_rows_and_what_they_are_compared_with(tiny: Path, pruned: Path) -> None:
    shown = run_here("validate", pruned, "--source", tiny, "--layers", "1,2", "--tokens", 16).stdout
    assert "error of the output against the pruned INT4 in FP32" in " ".join(shown.split())
    rows = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("1     │") and " dB" in line]
    assert rows == [
        "this result as served (W4A4)",
        "its weights alone (W4A16)",
        "usual rule, W4A4",
        "usual rule (max)",
        "INT4 weights with FP4 activations",
        "pruning alone, against the whole INT4",
        "this result as served, against the whole INT4",
    ]
    assert "router: renumbered, 10 of 16 rows" in shown
    assert "share of the router's weight that the dropped experts have: " in shown


@pytest.mark.slow
def test_layers_that_are_skipped_say_why(tiny: Path, pruned: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pruned, tmp_path / "out"))
    edit_config(folder, rope_theta=1.0)
    words = ("validate", folder, "--source", tiny, "--layers", "1", "--tokens", 8)
    assert "reference layers: skipped (rule 12 does not hold)\n" in run_here(*words, code=3).stdout
    document = json.loads(run_here(*words, "--json").stdout)
    assert document["layers"] is None
    assert document["layers_skipped"] == "rule 12 does not hold"
    (tmp_path / "found.json").write_text(json.dumps(document))
    assert run("report", folder, "--validation", tmp_path / "found.json", "--out", tmp_path, "--quiet") == 0
    for name in ("report.md", "report.html"):
        assert "Reference layers were skipped: rule 12 does not hold." in (tmp_path / name).read_text()
