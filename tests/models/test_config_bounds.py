"""Numbers of config.json that size loops or memory have limits, and every published model is within them."""

import json
import shutil
from pathlib import Path

import pytest
from command import messages_of, run_here

from k2convert.errors import PlanError
from k2convert.models.config import BOUNDS, check_bounds
from scripts.fixture_maker.damage import edit_config

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = sorted((ROOT / "tests/data/published-configs").glob("*_config.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_configs_are_within_the_limits(path: Path) -> None:
    check_bounds(json.loads(path.read_text()), path.name)


@pytest.mark.parametrize("field", BOUNDS)
def test_every_limit_is_named_with_the_field_and_its_value(field: str) -> None:
    check_bounds({field: BOUNDS[field]}, "folder")
    with pytest.raises(PlanError, match=rf"config\.json: {field} is {BOUNDS[field] + 1}, .*{BOUNDS[field]:,}\. Use"):
        check_bounds({field: BOUNDS[field] + 1}, "folder")
    with pytest.raises(PlanError, match=rf"rope_scaling\.{field} is inf, "):
        check_bounds({"text_config": {"rope_scaling": {field: float("inf")}}}, "folder")


@pytest.mark.parametrize("field", ["num_attention_heads", "kv_lora_rank", "n_group", "vocab_size"])
def test_every_verb_refuses_a_config_of_absurd_size(field: str, tiny: Path, tmp_path: Path) -> None:
    source = shutil.copytree(tiny, tmp_path / "source")
    edit_config(source, **{field: 1 << 31})
    (tmp_path / "text.txt").write_text("a text")
    for words in (
        ["fit", source],
        ["inspect", source],
        ["run", source, tmp_path / "out"],
        ["run", source, tmp_path / "out", "--calibrate", tmp_path / "text.txt"],
    ):
        message = messages_of(run_here(*words, code=1).stderr)
        assert message.startswith(f"error: {source}: config.json: {field} is 2147483648, more than any model has.")
        assert message.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "text.txt"]
