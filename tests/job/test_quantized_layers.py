"""Quantized weights of a layer pass go into shards as they are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversions import plan_job, text_of

from k2convert.calibration.layer_files import Calibration
from k2convert.errors import CalibrationError, RecipeError
from k2convert.job.run import execute
from k2convert.plan.recipe import build_recipe, settle_recipe
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight


def test_quantized_weights_of_another_source_are_refused(
    cut: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Calibration.converted

    def doubled(calibration: Calibration, module: str) -> Nvfp4Weight:
        weight = read(calibration, module)
        return replace(weight, global_scale=2 * weight.global_scale)

    monkeypatch.setattr(Calibration, "converted", doubled)
    with pytest.raises(CalibrationError, match=r"the quantized weight is .* start again in a different folder"):
        execute(plan_job(cut, tmp_path / "out", text=text_of(cut, [text])))


def test_a_recipe_with_text_is_settled() -> None:
    unset = build_recipe({"name": "a", "activations": "w4a16"}, where="a")
    settled = settle_recipe(unset, has_text=True)
    assert (settled.rule, settled.smoothing) == ("gptq", False)
    with_fp4 = build_recipe({"name": "a", "activations": "w4a4"}, where="a")
    assert settle_recipe(with_fp4, has_text=True).smoothing
    off = settle_recipe(build_recipe({"name": "a", "rule": "gptq", "smoothing": False}, where="a"), has_text=True)
    assert (off.rule, off.smoothing) == ("gptq", False)
    assert settled.budget.tensor_sqnr_db < unset.budget.tensor_sqnr_db, (
        "codes of a layer pass keep outputs, not weights"
    )
    strict = build_recipe({"name": "a", "budget": {"tensor_sqnr_db": 21.0}}, where="a")
    assert settle_recipe(strict, has_text=True).budget == strict.budget


@pytest.mark.parametrize(
    ("recipe", "has_text", "problem"),
    [
        ({"rule": "gptq"}, False, "rule gptq needs a text. Add --calibrate FILE"),
        ({"smoothing": True}, False, "smoothing is part of rule gptq, which needs a text. Add --calibrate FILE"),
        ({"rule": "mse"}, True, "by rule gptq, not mse"),
        ({"rule": "max", "quantizer": "reference"}, True, "quantizer reference cannot be calibrated"),
        ({"target": "bf16"}, True, "target bf16 cannot be calibrated"),
    ],
)
def test_a_recipe_that_cannot_use_it_is_refused(recipe: dict[str, Any], has_text: bool, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        settle_recipe(build_recipe({"name": "a"} | recipe, where="a"), has_text=has_text)
