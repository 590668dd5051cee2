"""Numbers of config.json that size loops or memory have limits, and every published model is within them."""

import json
import shutil
from pathlib import Path

import pytest
from command import run

from k2convert.errors import PlanError
from k2convert.models.config import BOUNDS, check_bounds
from scripts.fixture_maker.damage import edit_config

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = sorted((ROOT / "tests/data/published-configs").glob("*_config.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_configs_are_within_the_limits(path: Path) -> None:
    check_bounds(json.loads(path.read_text()), path.name)


def test_kimi_k3s_numbers_are_within_the_limits() -> None:
    text = {
        "num_hidden_layers": 93,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_attention_heads": 96,
        "intermediate_size": 33792,
        "max_position_embeddings": 1 << 20,
        "linear_attn_config": {"num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4},
    }
    check_bounds({"text_config": text}, "K3")


@pytest.mark.parametrize("field", BOUNDS)
def test_every_limit_is_named_with_the_field_and_its_value(field: str) -> None:
    check_bounds({field: BOUNDS[field]}, "folder")
    with pytest.raises(PlanError, match=rf"config\.json: {field} is {BOUNDS[field] + 1}, .*{BOUNDS[field]:,}\. Use"):
        check_bounds({field: BOUNDS[field] + 1}, "folder")
    with pytest.raises(PlanError, match=rf"rope_scaling\.{field} is inf, "):
        check_bounds({"text_config": {"rope_scaling": {field: float("inf")}}}, "folder")


@pytest.mark.parametrize("field", ["num_attention_heads", "kv_lora_rank", "n_group", "vocab_size"])
def test_every_verb_refuses_a_config_of_absurd_size(
    field: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(tiny, tmp_path / "source")
    edit_config(source, **{field: 1 << 31})
    (tmp_path / "text.txt").write_text("a text")
    for words in (
        ["fit", source],
        ["inspect", source],
        ["run", source, tmp_path / "out"],
        ["calibrate", source, tmp_path / "s.stats", "--text", tmp_path / "text.txt", "--tokens", "8"],
    ):
        code = run(*words)
        message = capsys.readouterr().err
        assert code == 1
        assert message.startswith(f"error: {source}: config.json: {field} is 2147483648, more than any model has.")
        assert message.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "text.txt"]
