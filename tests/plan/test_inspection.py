"""`inspect` counts weights, whatever form they are stored in, and names a checkpoint as the user did."""

import json
from pathlib import Path

import pytest
from command import RunCli, said


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
    assert f"converted by rule mse, layout {layout}, w4a4: weight error 0.00" in shown.stdout
    assert " of that of rule max\n" in shown.stdout
    assert said(shown.stderr) == f"next: k2convert validate {out}\n"


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
