"""The guide's command for a job on the Hub's machines is one that the Hub's own command takes."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "k2convert" / "guide" / "cluster.md"


def test_the_hubs_command_takes_the_line_for_its_jobs(tmp_path: Path) -> None:
    line = re.search(r"^    (hf jobs uv run .*)$", PAGE.read_text(), flags=re.MULTILINE)
    assert line is not None
    words = shlex.split(line[1].replace("WHEEL", "https://example.org/k2convert-0.2.0-cp312-cp312-linux_x86_64.whl"))
    done = subprocess.run(
        [Path(sys.executable).with_name("hf"), *words[1:4], "--dry-run", *words[4:]],
        env={"HF_TOKEN": "hf_x", "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_UPDATE_CHECK": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    job = words[words.index("k2convert") + 1 :]
    assert re.search(rf"script\s+k2convert\n\s+args\s+{re.escape(' '.join(job))}\n", done.stdout), done.stdout
    assert job[0] == "run"
    assert job[-1] == "--yes"
