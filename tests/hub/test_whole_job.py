"""A job from Hub to Hub with all tensors of K2, each of them small: its memory, to its last line."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from command import cli_environment

from scripts.bench import whole
from scripts.bench.whole_hub import read_sources
from scripts.fixture_maker.headers import make_k2_thinking_headers
from scripts.fixture_maker.inventory import K2_SHAPE

sys.path.insert(0, str(Path(__file__).parents[1] / "job"))
from test_job_memory import cgroup

MANY_SMALL = replace(
    K2_SHAPE, hidden=256, moe_intermediate=128, dense_intermediate=256, vocabulary=512, heads=4, q_lora_rank=64,
    kv_lora_rank=64,
)  # fmt: skip


@pytest.mark.slow
def test_a_whole_job_needs_the_memory_that_the_dry_run_says(tmp_path: Path) -> None:
    sources = read_sources(make_k2_thinking_headers(tmp_path / "source", shape=MANY_SMALL))
    with whole.WholeHub(tmp_path / "hub", whole.SOURCE, sources) as hub:
        environment = cli_environment() | {"HF_ENDPOINT": hub.url, "HF_TOKEN": whole.TOKEN, "HF_HUB_DISABLE_XET": "1"}
        environment["HF_HOME"] = str(tmp_path / "home")
        command = [sys.executable, "-m", "k2convert", "run", f"hf://{whole.SOURCE}", f"hf://{whole.RESULT}", "--yes"]
        planned = subprocess.run(
            [*command, "--dry-run", "--json"], cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE
        )
        with cgroup(memory=640 << 20, cores=2) as enter:
            with (tmp_path / "said").open("w") as log:
                process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=log, preexec_fn=enter)
            peak = 0
            while process.poll() is None:
                with suppress(OSError, IndexError):  # it has just ended
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    peak = 1024 * int(status.partition("VmHWM:")[2].split()[0])
                time.sleep(0.1)
        assert process.returncode == 0, (tmp_path / "said").read_text()[-2000:]
        assert whole.check(hub)
    assert peak < 0.6e9
    assert peak / 1.25 < json.loads(planned.stdout)["memory_needed"] < 1.25 * peak
