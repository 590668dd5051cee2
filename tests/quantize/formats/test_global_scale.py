"""A global scale that the file cannot hold is refused with the reason."""

import pytest

from k2convert.errors import FormatError
from k2convert.quantize.formats.nvfp4 import check_global_scale


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_global_scale_is_positive_and_finite(scale: float) -> None:
    with pytest.raises(FormatError, match=f"must be a positive finite number, not {scale!r}"):
        check_global_scale(scale)


@pytest.mark.parametrize(
    ("scale", "nearest"),
    [(0.00014277867012424394, "0.00014277867740020156"), (1e300, "inf"), (1e-60, "0.0"), (0.1, "0.10000000149011612")],
)
def test_a_global_scale_that_fp32_does_not_have_is_named_with_the_nearest(scale: float, nearest: str) -> None:
    with pytest.raises(FormatError) as raised:
        check_global_scale(scale)
    assert str(raised.value) == (
        f"the global scale {scale!r} is not exactly representable in FP32 (nearest: {nearest}). "
        "Round it: float(numpy.float32(scale))."
    )
    if 0.0 < float(nearest) < float("inf"):
        check_global_scale(float(nearest))
