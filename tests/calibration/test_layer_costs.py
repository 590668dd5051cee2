"""How much work each layer of a pass is, and how much of it is computed at once."""

from pathlib import Path

import numpy as np
import pytest

from k2convert.calibration.memory import PassSize, layer_costs, read_sizes
from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward.layer_pass import DENSE_TOKENS, PassText
from k2convert.text.windows import Windows


def test_a_layer_with_experts_is_more_work_than_a_dense_one_above_all_by_rule_gptq(tiny: Path) -> None:
    model = read_sizes(open_checkpoint(tiny))
    size = PassSize(16, 256, 16, ("cpu",), 2, 4)
    (dense, *moe), (dense_gptq, *moe_gptq) = (layer_costs(model, size, is_gptq=is_gptq) for is_gptq in (False, True))
    experts = 3 * model.hidden * model.width
    assert (len(set(moe)), len(set(moe_gptq))) == (1, 1)
    assert moe[0] == size.num_tokens * (model.other_weights[1] + model.experts_per_token * experts)
    assert (dense, dense_gptq) == (size.num_tokens * model.other_weights[0], 2 * dense)
    assert moe_gptq[0] - 2 * moe[0] == model.num_experts * experts * (2 * model.hidden + model.width)


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
    found = PassText(Windows(ids, (), (), ids.size, window, 0), chunk, (device,), 2)
    assert found.windows_at_once(dense=True) == windows
    assert found.windows_at_once(dense=False) == chunk
