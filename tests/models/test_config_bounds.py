"""Numbers of config.json that size loops or memory have limits, and every published model is within them."""

import json
import shutil
from pathlib import Path

import pytest
from command import assert_refused, run_here, said

from k2convert.errors import PlanError
from k2convert.models.config import BOUNDS, check_bounds
from scripts.fixture_maker.damage import edit_config, edit_json

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
        message = said(run_here(*words, code=1).stderr)
        assert message.startswith(f"error: {source}: config.json: {field} is 2147483648, more than any model has.")
        assert message.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "text.txt"]


NUMBERS = (0, -1, 3, 999, 1.5, "x", None)
NOT_COMPUTED = {
    "num_experts_per_tok": (0, 17, 999),
    "n_group": (0, 3, 17),
    "topk_group": (0, 2),
    "rope_theta": (0, -1.0, 1e308),
    "rms_norm_eps": (-1.0, 1e308),
    "hidden_act": ("nope",),
    "num_attention_heads": (0,),
}


@pytest.mark.parametrize("field", NOT_COMPUTED)
def test_evaluate_refuses_before_it_writes(cut: Path, ids: Path, tmp_path: Path, field: str) -> None:
    source = Path(shutil.copytree(cut, tmp_path / "source"))
    for value in NOT_COMPUTED[field]:
        edit_config(source, **{field: value})
        done = run_here("evaluate", cut, source, "--text", ids, "--out", tmp_path / "x.json", "--quiet")
        assert_refused(done, "config.json")
        assert not list(tmp_path.glob("x.json*"))


@pytest.mark.quick(4)
@pytest.mark.parametrize("model", ["tiny", "k3_tiny"])
@pytest.mark.parametrize("field", sorted(BOUNDS))
def test_fit_has_an_answer_or_one_line(model: str, field: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = Path(shutil.copytree(request.getfixturevalue(model), tmp_path / "source"))
    for value in NUMBERS:
        edit_json(
            source / "config.json",
            lambda config, value=value: (config.get("text_config") or config).update({field: value}),
        )
        done = run_here("fit", source, "--gpu", "b200", "--json")
        assert done.returncode in (0, 1, 3)
        assert "Traceback" not in done.stderr
        if done.returncode == 1:
            assert said(done.stderr).count("\n") == 1
