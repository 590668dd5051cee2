"""What a conversion takes from statistics: importance by projection, exponents by layer."""

import pickle
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from statistics_makers import HEADER, dense_layer, moe_layer, write_small

from k2convert.calibration.channels import Calibration, digest_of_exponents, drawn_to_even
from k2convert.calibration.statistics import open_statistics, write_statistics
from k2convert.errors import CalibrationError
from k2convert.models.names import ModulePlace, Role


@pytest.fixture
def calibrated(tmp_path: Path) -> Calibration:
    return Calibration(open_statistics(write_small(tmp_path / "small")), weighted=True, smoothing=False)


def scaled(calibration: Calibration) -> Calibration:
    return Calibration(calibration.statistics, weighted=True, smoothing=True)


def importance_of(mean_square: Any) -> list[int]:
    """The definition, in fractions."""
    result: list[int] = []
    for block in np.asarray(mean_square).reshape(-1, 16).tolist():
        most = Fraction(max(block))
        result += [max(1, round(255 * Fraction(m) / most)) if most else 255 for m in block]
    return result


def evened(mean_square: Any, tokens: int) -> Any:
    """The definition, in fractions: eight more tokens that are even in each block of 16."""
    result: list[float] = []
    for block in np.asarray(mean_square).reshape(-1, 16).tolist():
        mean = sum(Fraction(m) for m in block) / 16
        result += [float(np.float32((tokens * Fraction(m) + 8 * mean) / (tokens + 8))) for m in block]
    return result


def place(role: Role, projection: str, *, layer: int = 1, expert: int | None = None) -> ModulePlace:
    return ModulePlace(role, layer, expert, projection)


def test_gate_and_up_share_the_importance_of_their_input(calibrated: Calibration) -> None:
    expected = importance_of(moe_layer(1).gate_up_mean_square)
    for role, expert in ((Role.EXPERTS, 2), (Role.SHARED_EXPERTS, None)):
        for projection in ("gate", "up"):
            found = calibrated.importance(place(role, projection, expert=expert))
            assert found.dtype == np.uint8
            assert found.tolist() == expected


def test_smoothing_changes_the_importance_of_gate_and_up_only(calibrated: Calibration) -> None:
    layer = moe_layer(1)
    norm = scaled(calibrated)
    squares = [Fraction(float(m)) * Fraction(4) ** int(a) for m, a in zip(
        layer.gate_up_mean_square, layer.smoothing_exponents, strict=True
    )]  # fmt: skip
    assert norm.importance(place(Role.EXPERTS, "up", expert=0)).tolist() == importance_of([float(m) for m in squares])
    for role, expert in ((Role.EXPERTS, 0), (Role.SHARED_EXPERTS, None)):
        down = place(role, "down", expert=expert)
        np.testing.assert_array_equal(norm.importance(down), calibrated.importance(down))


def test_down_has_its_own_importance_from_64_tokens_on(calibrated: Calibration) -> None:
    layer = moe_layer(1)
    assert layer.tokens.tolist()[-1] == 63
    for expert in range(3):
        found = calibrated.importance(place(Role.EXPERTS, "down", expert=expert))
        assert found.tolist() == importance_of(layer.down_mean_square[expert])
    few = evened(layer.down_mean_square[3], 63)
    assert calibrated.importance(place(Role.EXPERTS, "down", expert=3)).tolist() == importance_of(few)
    assert calibrated.fallback_experts(1) == (3,)


def test_an_expert_without_tokens_has_an_even_importance() -> None:
    assert set(importance_of(drawn_to_even(np.zeros(32, np.float32), 0, few=1))) == {255}
    seen = moe_layer(1).down_mean_square[0]
    assert set(importance_of(drawn_to_even(seen, 0, few=1))) == {255}
    np.testing.assert_allclose(drawn_to_even(seen, 10**9, few=10**9 + 1), seen, rtol=1e-6)


def test_few_tokens_in_all_draw_every_importance_toward_an_even_one(tmp_path: Path) -> None:
    path = tmp_path / "few"
    write_statistics(path, [dense_layer(), moe_layer(1)], replace(HEADER, tokens=40))
    few = Calibration(open_statistics(path), weighted=True, smoothing=False)
    layer = moe_layer(1)
    for where, seen in (
        (place(Role.EXPERTS, "up", expert=0), layer.gate_up_mean_square),
        (place(Role.SHARED_EXPERTS, "down"), layer.shared_down_mean_square),
        (place(Role.DENSE_MLP, "down", layer=0), dense_layer().down_mean_square[0]),
    ):
        assert few.importance(where).tolist() == importance_of(evened(seen, 40))


def test_shared_and_dense_layers_use_their_own_rows(calibrated: Calibration) -> None:
    shared = calibrated.importance(place(Role.SHARED_EXPERTS, "down"))
    assert shared.tolist() == importance_of(moe_layer(1).shared_down_mean_square)
    dense = calibrated.importance(place(Role.DENSE_MLP, "down", layer=0))
    assert dense.tolist() == importance_of(dense_layer().down_mean_square)
    assert calibrated.fallback_experts(0) == (), "a dense MLP has no other experts, however few its tokens"


def test_exponents_and_importance_are_none_if_unused(calibrated: Calibration) -> None:
    assert calibrated.exponents(1) is None
    assert calibrated.exponents_digest() is None
    norm = scaled(calibrated)
    np.testing.assert_array_equal(norm.exponents(1), moe_layer(1).smoothing_exponents, strict=True)
    assert norm.exponents(0) is None, "all zero"
    sent = pickle.loads(pickle.dumps(norm))
    assert sent.exponents_digest() == norm.exponents_digest()
    without_weights = Calibration(calibrated.statistics, weighted=False, smoothing=True)
    assert without_weights.importance(place(Role.EXPERTS, "up", expert=0)) is None
    assert without_weights.fallback_experts(1) == ()


def test_the_digest_is_of_the_exponents_of_every_scaled_layer(calibrated: Calibration) -> None:
    exponents = {layer: moe_layer(layer).smoothing_exponents for layer in (2, 1)}
    digest = scaled(calibrated).exponents_digest()
    assert digest == digest_of_exponents(exponents | {0: np.zeros(64, np.int8)})
    changed = exponents[1].copy()
    changed[5] += 1 if changed[5] < 4 else -1
    assert digest != digest_of_exponents(exponents | {1: changed})
    assert digest != digest_of_exponents({1: exponents[2], 2: exponents[1]})


@pytest.mark.parametrize(
    "wrong",
    [
        place(Role.EXPERTS, "up", layer=7, expert=0),
        place(Role.EXPERTS, "down", expert=4),
        place(Role.SHARED_EXPERTS, "down", layer=0),
    ],
)
def test_statistics_of_another_model_are_refused(wrong: ModulePlace, calibrated: Calibration) -> None:
    with pytest.raises(CalibrationError, match="different model"):
        calibrated.importance(wrong)


def test_what_gained_nothing_has_an_even_importance(tmp_path: Path) -> None:
    marks = {(1, 1): (), (0, 1): ("gate", "up"), (1, 0): ("down",), (0, 0): ("gate", "up", "down")}
    for gains, even in marks.items():
        path = tmp_path / str(gains)
        layer = replace(moe_layer(1), imatrix=np.array(gains, np.uint8))
        write_statistics(path, [dense_layer(), layer], HEADER)
        for smoothing in (False, True):
            found = Calibration(open_statistics(path), weighted=True, smoothing=smoothing)
            for projection in ("gate", "up", "down"):
                for role, expert in ((Role.EXPERTS, 0), (Role.SHARED_EXPERTS, None)):
                    importance = found.importance(place(role, projection, expert=expert))
                    is_shared_down = (role, projection) == (Role.SHARED_EXPERTS, "down")
                    assert (importance == 255).all() == (projection in even and not is_shared_down)
