"""Rule gptq with FP8 layers: the layer pass runs the result's, and later layers are fitted to them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import convert, plan_job, text_of

from k2convert.check.results import Verdict
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward.attention import Attention
from k2convert.forward.moe import read_mlp
from k2convert.forward.weights import WeightReader
from k2convert.job.run import execute
from k2convert.models import detect_family
from k2convert.records.ledger import read_ledger
from scripts.fixture_maker.folder import read_small

pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")

ROLES = ("attention", "shared_experts", "dense_mlp")
KEYS: dict[str, Any] = {"layout": "compressed-tensors"}


@pytest.fixture(scope="module")
def mixed(cut: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(cut, tmp_path_factory.mktemp("mixed") / "out", fp8=ROLES, **KEYS)


@torch.inference_mode()
def test_the_pass_computes_the_fp8_layers_that_evaluate_computes(cut: Path, mixed: Path) -> None:
    source = open_checkpoint(cut)
    family = detect_family(source)
    in_pass = WeightReader(source, becomes_fp8=lambda module: family.becomes_fp8(module, ROLES))
    of_result = WeightReader(open_checkpoint(mixed))
    hidden = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    for layer in range(2):
        output, expected, plain = (
            Attention(reader, f"model.layers.{layer}")(hidden) for reader in (in_pass, of_result, WeightReader(source))
        )
        assert torch.equal(output[0], expected[0])
        assert torch.equal(output[1], expected[1])
        assert not torch.equal(output[0], plain[0])
    for module in ("model.layers.0.mlp", "model.layers.1.mlp.shared_experts"):
        assert torch.equal(read_mlp(in_pass, module)(hidden), read_mlp(of_result, module)(hidden))


@pytest.mark.quick(1)
@pytest.mark.parametrize("roles", [("attention",), ROLES], ids=str)
def test_a_calibrated_result_with_fp8_passes(roles: tuple[str, ...], cut: Path, text: Path, tmp_path: Path) -> None:
    texts = text_of(cut, [text])
    execute(plan_job(cut, tmp_path / "out", text=texts, fp8=roles, **KEYS))
    report = validate_checkpoint(folder=tmp_path / "out", source=open_checkpoint(cut))
    assert report.passed, [rule for rule in report.contract.rules if rule.verdict is Verdict.FAIL]
    assert report.weights is not None
    assert report.weights.certificate.mismatches == {}
    assert {*report.weights.roles.values()} == {"experts", *roles}
    record = read_ledger(tmp_path / "out").calibration
    assert record is not None
    assert record.smoothing
    tensors = read_small(tmp_path / "out").tensors()
    assert tensors["model.layers.1.self_attn.o_proj.weight"].dtype is torch.float8_e4m3fn
    execute(plan_job(cut, tmp_path / "plain", text=texts, **KEYS))
    without = read_small(tmp_path / "plain").tensors()
    experts = [name for name in without if ".experts." in name and name.endswith(".weight_packed")]
    assert any(not torch.equal(tensors[name], without[name]) for name in experts), "they are fitted to FP8"
