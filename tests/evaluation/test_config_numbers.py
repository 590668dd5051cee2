"""A number in config.json that no engine computes with is one line, in `evaluate` and `fit`."""

import shutil
from pathlib import Path

import pytest
from command import assert_refused, messages_of, run_here

from k2convert.models.config import BOUNDS
from scripts.fixture_maker.damage import edit_config, edit_json

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
            assert messages_of(done.stderr).count("\n") == 1
