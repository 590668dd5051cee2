"""Which devices compute a text, and what is said of the choice. No GPU is here: torch says that there are two."""

import pytest

from k2convert.errors import PlanError
from k2convert.job import resources
from k2convert.job.resources import choose_devices
from k2convert.quantize.gptq import device_kernel


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "has_driver", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")


@pytest.mark.usefixtures("two_gpus")
def test_devices_that_round_as_the_cpu_does_are_taken_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(device_kernel, "check_device", checked.append)
    devices, word = choose_devices("auto", rounds=True)
    assert devices == ("cuda:0", "cuda:1")
    assert checked == ["cuda:0", "cuda:1"]
    assert word is not None
    assert word.startswith("rule gptq runs on NVIDIA H200, which rounds as the CPU does. --device cpu uses ")
    assert choose_devices("auto") == (devices, None), "other calibrations round nothing"
    assert choose_devices("cpu", rounds=True) == (("cpu",), None)


@pytest.mark.usefixtures("two_gpus")
def test_devices_that_cannot_round_leave_it_to_the_cores_or_refuse() -> None:
    """This torch cannot send a tensor to them."""
    devices, word = choose_devices("auto", rounds=True)
    assert devices == ("cpu",)
    assert word is not None
    assert word.startswith("cuda:0: rule gptq cannot round weights there: ")
    assert "So " in word
    assert "--device cpu" not in word
    with pytest.raises(PlanError, match=r"cuda:0: rule gptq cannot round weights there: .* Use --device cpu"):
        choose_devices("cuda", rounds=True)


def test_a_torch_without_cuda_beside_a_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(resources, "has_driver", lambda: True)
    devices, word = choose_devices("auto")
    assert devices == ("cpu",)
    assert word is not None
    assert word.startswith("torch sees no CUDA device, so ")
    monkeypatch.setattr(resources, "has_driver", lambda: False)
    assert choose_devices("auto") == (("cpu",), None)
    with pytest.raises(PlanError, match="torch sees no CUDA device"):
        choose_devices("cuda")
