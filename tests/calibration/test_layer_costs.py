"""How much of a layer is computed at once."""

import numpy as np
import pytest

from k2convert.forward.layer_pass import DENSE_TOKENS, PassText
from k2convert.text.windows import Windows


@pytest.mark.parametrize(
    ("window", "chunk", "device", "windows"),
    [
        (DENSE_TOKENS, 4, "cpu", 1),
        (DENSE_TOKENS // 4, 16, "cpu", 4),
        (4 * DENSE_TOKENS, 1, "cpu", 1),
        (DENSE_TOKENS // 8, 2, "cpu", 2),
        (DENSE_TOKENS, 4, "cuda:0", 4),
    ],
)
def test_a_dense_layer_takes_fewer_windows_at_one_time(window: int, chunk: int, device: str, windows: int) -> None:
    ids = np.zeros((16, window), dtype=np.int64)
    text = PassText(Windows(ids, (), (), ids.size, window, 0), chunk, (device,), 2)
    assert text.windows_at_once(dense=True) == windows
    assert text.windows_at_once(dense=False) == chunk
