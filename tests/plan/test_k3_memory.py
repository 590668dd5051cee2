"""The memory of a job of Kimi K3's size: 247,296 projections, 991,812 tensors of the result.

A process of its own reads its own VmHWM, as `ru_maxrss` begins with the peak of the process that started it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from conversions import plan_job
from k2convert.job.assemble import assembled_files
from k2convert.machine import peak_bytes

job = plan_job(Path(sys.argv[1]), Path(sys.argv[3]))
peaks = [peak_bytes()]
index = b""
for path, content in assembled_files(job, {}):
    if path.name == "model.safetensors.index.json":
        index = content
peaks.append(peak_bytes())
print(json.dumps({"peaks": peaks, "entries": index.count(b".safetensors"), "bytes": len(index)}))
"""


@pytest.mark.slow
def test_plan_and_index_stay_below_a_gigabyte(k3_headers: Path, tmp_path: Path) -> None:
    helpers = Path(__file__).resolve().parents[1]
    arguments = [sys.executable, "-c", MEASURE, k3_headers, helpers, tmp_path / "out"]
    found = json.loads(subprocess.run(arguments, capture_output=True, check=True).stdout)
    planned, assembled = found["peaks"]
    assert planned < 0.7e9
    assert assembled < 1.0e9
    assert found["entries"] == 991_812
