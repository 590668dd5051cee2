"""Work that an earlier release began, as that release left it, is refused by name; nothing of it changes."""

import json
import shutil
from pathlib import Path

import pytest
from blake3 import blake3
from command import run_here
from results import contents
from structure import TINY

JOB = {
    "fingerprint": {
        "arithmetic": 1,
        "source_revision": None,
        "source_headers": "f81061c6264d18a7a098230cf5e9e38d2fc2997510a3616bdcdfe8f9c98be143",
        "source_config": "74267219ae8523df9e612671f7beb77b1dabaebb1482d9dc9ac677fac28f8fe2",
        "target": "nvfp4",
        "layout": "modelopt",
        "rule": "mse",
        "quantizer": "native",
        "activations": "w4a4",
        "roles": ["experts"],
        "input_scale": {"gate_up": 1.0, "down": 1.0},
        "kv_cache": None,
    },
    "recipe": {"name": "kimi-k2-thinking-nvfp4", "family": "kimi-k2-thinking"},
    "shards": {"model-00001-of-000005.safetensors": 1406272, "model-00002-of-000005.safetensors": 1316608},
    "source": {
        "model-00001-of-000005.safetensors": "1407616 bytes, modified 1795811378429549981 ns, "
        "sample d844b32ad3481af528ae96f9042c2485ee61e6c91d1615de322c58808705958b",
    },
}
"""job.json of release 0.3 for tests/data/k2-tiny, with two of its five shards."""

PASS = {
    "identity": {"arithmetic": 1, "models": "k2-tiny, done w4a4", "layers": 4, "walk": 3, "tokens": 1024},
    "chunk": 16,
    "source": {},
    "files": {"layer-000.safetensors": "a6616574e27235199d52360876d5294ab05fcf036e240bb410d0b593c382908c"},
}
"""The description of an evaluation that release 0.3 did not finish, with a few fields of its identity."""


def earlier(result: Path, folder: Path) -> Path:
    """Copy a result, with a job of release 0.3: one without a version."""
    shutil.copytree(result, folder)
    path = folder / ".k2convert" / "job.json"
    job = json.loads(path.read_text())
    del job["version"]
    path.write_text(json.dumps(job))
    return folder


REFUSED = "holds work that was begun by release 0.3 or earlier. Finish it with that release, or start in a new folder."


@pytest.mark.parametrize("unknown", [{}, {"keep_rows": 3}], ids=["", "a field of that release alone"])
@pytest.mark.parametrize("words", [(), ("--dry-run",), ("--part", "1/2")], ids=" ".join)
def test_an_unfinished_conversion_is_refused(words: tuple[str, ...], unknown: dict[str, int], tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".k2convert" / "shards").mkdir(parents=True)
    (out / ".k2convert" / "job.json").write_text(json.dumps(JOB | unknown, indent=2) + "\n")
    (out / "model-00001-of-000005.safetensors").write_bytes(b"finished")
    before = contents(tmp_path)
    done = run_here("run", TINY, out, *words, "--quiet", code=1)
    assert done.stderr == f"error: {out}: {REFUSED}\n"
    assert contents(tmp_path) == before


def test_the_status_of_an_unfinished_conversion_names_no_command_that_is_refused(
    local_result: Path, tmp_path: Path
) -> None:
    out = earlier(local_result, tmp_path / "out")
    (out / "k2convert.json").unlink()
    done = run_here("status", out, code=0)
    assert "begun by release 0.3 or earlier. Finish it with that release" in done.stderr
    assert "next:" not in done.stderr
    assert json.loads(run_here("status", out, "--json", code=0).stdout)["resume"] is None


def test_a_finished_result_is_said_to_be_one(local_result: Path, tmp_path: Path) -> None:
    out = earlier(local_result, tmp_path / "out")
    before = contents(out)
    done = run_here("run", TINY, out, "--quiet", code=1)
    assert f"{out}: holds a finished result of release 0.3 or earlier" in done.stderr
    command = f"k2convert validate {out}"
    assert f"`{command}`" in done.stderr
    assert contents(out) == before
    run_here(*command.split()[1:], code=0)
    shown = run_here("status", out, code=1)
    assert f"{out}: holds a finished result of release 0.3 or earlier" in shown.stderr
    assert "not finished" not in shown.stderr


def test_an_unfinished_evaluation_is_refused(tmp_path: Path) -> None:
    work = tmp_path / "rows.json.work"
    (work / ".k2convert").mkdir(parents=True)
    content = json.dumps(PASS, separators=(",", ":"))
    sealed = f'{{"checksum":"{blake3(content.encode()).hexdigest()}",{content[1:]}'
    (work / ".k2convert" / "evaluation.json").write_text(sealed)
    (work / "layer-000.safetensors").write_bytes(b"finished")
    before = contents(tmp_path)
    use = ("--tokens", "1024", "--window", "64", "--device", "cpu", "--out", tmp_path / "rows.json", "--quiet")
    done = run_here("evaluate", TINY, TINY, "--text", TINY / "eval.txt", *use, code=1)
    assert done.stderr == f"error: {work}: {REFUSED}\n"
    assert contents(tmp_path) == before
