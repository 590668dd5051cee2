"""The tensors that grow with the tokens of a text: files on a CPU, which change no byte and leave nothing behind."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from k2convert.calibration.layer_tokens import Scratch
from k2convert.calibration.memory import Memory, gptq_memory, read_sizes
from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import DiskFullError
from k2convert.forward.layer_pass import PassText
from k2convert.text.windows import Windows
from scripts.fixture_maker import K2Shape, make_k2_shaped

MB = 1 << 20


def resident_bytes() -> int:
    """The memory of this process that is in RAM and belongs to files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssFile:", "RssShmem:")))


def test_a_released_tensor_is_whole_and_takes_no_memory(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, "cpu")
    values = torch.randn(8 * MB // 1024, 1024)
    before = resident_bytes()
    mapped = scratch.copy(values)
    assert resident_bytes() - before < 16 * MB, "pieces of 8 MB are given back"
    assert torch.equal(mapped, values)
    assert resident_bytes() - before > 30 * MB
    scratch.release()
    assert resident_bytes() - before < 4 * MB
    mapped[3:5] += 1
    scratch.release()
    values[3:5] += 1
    assert torch.equal(mapped, values)
    assert not list(tmp_path.iterdir()), "a killed process leaves nothing"


def test_the_bytes_are_on_the_disk_from_the_start_and_go_with_the_tensor(tmp_path: Path) -> None:
    def files() -> list[os.stat_result]:
        paths = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return [path.stat() for path in paths if path.readlink().is_relative_to(tmp_path)]

    scratch = Scratch(tmp_path, "cpu")
    tensor = scratch.empty(MB, 4)
    assert [(file.st_nlink, file.st_blocks * 512 >= 16 * MB) for file in files()] == [(0, True)]
    del tensor
    assert not files()
    assert scratch.empty(0, 4).shape == (0, 4)


def test_a_full_disk_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, count: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFullError, match=r"the disk is full\. Finished work is kept: free space, run the command"):
        Scratch(tmp_path, "cpu").empty(4, 4)
    assert not list(tmp_path.iterdir())
    assert Scratch(tmp_path, "cpu:0").empty(4, 4).shape == (4, 4), "a device uses no disk"


def test_the_memory_of_a_layer_pass_on_a_cpu_does_not_depend_on_its_tokens(tiny: Path) -> None:
    """Once an expert gets a whole piece of tokens, more of them change nothing. A GPU holds all tokens."""
    model = read_sizes(open_checkpoint(tiny))

    def memory(num_windows: int, device: str) -> Memory:
        ids = np.broadcast_to(np.int64(0), (num_windows, 2048))
        return gptq_memory(model, PassText(Windows(ids, (), (), ids.size, 2048, 0), 2, (device,), 2), 4)

    assert memory(64, "cpu") == memory(1024, "cpu")
    assert memory(1024, "cuda:0").gpu - memory(64, "cuda:0").gpu > 960 * 2048 * 4 * 3 * model.hidden


PASS = """
import sys
from pathlib import Path
import numpy as np
from k2convert.machine import BUFFERS, peak_bytes
from k2convert.calibration.layer_files import conversion_work
sys.path.insert(0, sys.argv[4])
from test_gptq_pass import planned, passed

staging = [BUFFERS.empty_pages(16 << 20) for _ in range(12)]  # those of files in work, which are kept for the next ones
for pages in staging:
    pages.fill(1)
del pages, staging
ids = np.random.default_rng(0).integers(0, 1000, (int(sys.argv[3]), 256))
passed(conversion_work(Path(sys.argv[2])), planned(Path(sys.argv[1]), ids, workers=2, chunk=8))
print(peak_bytes())
"""

SHAPE = K2Shape(
    hidden=1024, moe_intermediate=256, dense_intermediate=1024, experts=8, moe_layers=1, dense_layers=1,
    vocabulary=1024, heads=8, q_lora_rank=128, kv_lora_rank=128,
)  # fmt: skip


@pytest.mark.slow
def test_four_times_the_tokens_take_no_more_memory(tmp_path: Path) -> None:
    """The tensors of a layer would be 300 MB larger."""
    source = make_k2_shaped(tmp_path / "k2", shape=SHAPE)
    peaks: list[int] = []
    for windows in (16, 64):
        words = [source, tmp_path / str(windows), windows, Path(__file__).parent]
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}  # what is freed goes back to the system
        environment["PYTHONPATH"] = str(Path(__file__).parents[1])
        done = subprocess.run(
            [sys.executable, "-c", PASS, *map(str, words)], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 40 * MB, peaks
