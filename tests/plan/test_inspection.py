"""What `inspect` and `recipes` show, and what planning all of K3 takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import RunCli, messages_of

from k2convert.plan.recipe import Recipe, load_recipe, shipped_recipes


def holdings(run_cli: RunCli, folder: Path) -> dict[tuple[str, str], int]:
    document = json.loads(run_cli("inspect", folder, "--json").stdout)
    return {(h["role"], h["form"]): h["num_weights"] for h in document["holdings"]}


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_nvfp4_weights_are_counted_as_weights(layout: str, tiny: Path, tmp_path: Path, run_cli: RunCli) -> None:
    out = tmp_path / "out"
    recipe = "kimi-k2-thinking-nvfp4-mlp"
    assert run_cli("run", tiny, out, "--recipe", recipe, "--layout", layout).returncode == 0
    assert "144 INT4 projections" in run_cli("inspect", tiny).stdout
    before = holdings(run_cli, tiny)
    after = holdings(run_cli, out)
    assert after["experts", "NVFP4"] == before["experts", "INT4"] == 4_718_592
    for role in ("shared_experts", "dense_mlp"):
        assert after[role, "NVFP4"] == before[role, "BF16"]
    assert sum(after.values()) == sum(before.values())
    assert {form for _, form in after} == {"NVFP4", "BF16", "F32"}
    assert after["router", "F32"] == 48
    shown = run_cli("inspect", out)
    assert "156 NVFP4 projections" in shown.stdout
    assert "INT4" not in shown.stdout
    assert "cannot be converted" not in shown.stdout
    assert f"converted by rule mse, layout {layout}, w4a4: NVFP4 weight error 0.00" in shown.stdout
    assert " of that of rule max\n" in shown.stdout
    assert messages_of(shown.stderr) == f"next: k2convert validate {out} --source {tiny}\n"


def test_a_folder_is_shown_as_it_was_given(tiny: Path, tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "link").symlink_to(tiny)
    given = f"{tmp_path}/./link/"
    assert run_cli("inspect", given).stdout.startswith(f"{given}: kimi-k2-thinking (")
    assert json.loads(run_cli("inspect", given, "--json").stdout)["folder"] == given


def test_nvfp4_without_a_ledger_says_that_there_is_nothing_to_do(tiny: Path, tmp_path: Path, run_cli: RunCli) -> None:
    out = tmp_path / "out"
    run_cli("run", tiny, out, "--rule", "max", code=0)
    (out / "k2convert.json").unlink()
    assert "already NVFP4" in run_cli("inspect", out).stdout


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_says_whom_it_serves(name: str) -> None:
    purpose = load_recipe(name).purpose
    assert purpose.startswith("For ")
    assert purpose.endswith(".")
    assert 30 < len(purpose) < 160


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_names_are_whole_and_lines_are_short(columns: str, run_cli: RunCli) -> None:
    done = run_cli("recipes", COLUMNS=columns, code=0)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if not line.startswith(" ")] == shipped_recipes()
    words = " ".join(done.stdout.split())
    assert all(load_recipe(name).purpose in words for name in shipped_recipes())


def test_json_has_the_recipes_and_whom_they_serve(run_cli: RunCli) -> None:
    documents = json.loads(run_cli("recipes", "--json").stdout)
    assert [Recipe.model_validate(document) for document in documents] == [load_recipe(n) for n in shipped_recipes()]


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
    report = json.loads(subprocess.run(arguments, capture_output=True, check=True).stdout)
    planned, assembled = report["peaks"]
    assert planned < 0.7e9
    assert assembled < 1.0e9
    assert report["entries"] == 991_812
