"""A pruned result on the Hub: read with its whole source there, and compared while it is made."""

import json
import shutil
from pathlib import Path

import pytest
from hub_cli import HubCli
from loopback import LoopbackHub
from pruned_makers import convert_pruned, make_whole

from k2convert.checkpoint.header import read_header


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, whose gate and up lie in different shards, and its pruned result."""
    folder = tmp_path_factory.mktemp("pruned")
    convert_pruned(make_whole(folder / "source", is_split=True), folder / "out")
    shutil.rmtree(folder / "out" / ".k2convert")
    return folder


def on_hub(server: LoopbackHub, made: Path, result: Path) -> None:
    server.store.add_folder("moon/whole", made / "source")
    server.store.add_folder("me/out", result)


BOTH = ("validate", "hf://me/out", "--source", "hf://moon/whole", "--json")


@pytest.mark.parametrize("layers", [(), ("--layers", "1", "--tokens", "16")], ids=["all", "one layer"])
def test_validate_with_both_on_the_hub(
    server: LoopbackHub, hub_cli: HubCli, made: Path, layers: tuple[str, ...]
) -> None:
    on_hub(server, made, made / "out")
    done = hub_cli(*BOTH, *layers)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["weights"]["totals"]["experts"]["num_weights"] > 0
    assert "2 of 4 kept" in found["contract"]["rules"][8]["note"]
    if layers:
        assert found["layers"]["layers"][0]["num_experts"] == 2
    else:
        assert found["contract"]["summary"].startswith("19 of 19 rules")


def test_a_wrong_router_row_on_the_hub_fails(server: LoopbackHub, hub_cli: HubCli, made: Path, tmp_path: Path) -> None:
    out = shutil.copytree(made / "out", tmp_path / "out")
    shard = next(
        path for path in out.glob("*.safetensors") if any(".mlp.gate." in n for n in read_header(path).tensors)
    )
    name = "model.layers.1.mlp.gate.weight"
    data = bytearray(shard.read_bytes())
    data[read_header(shard).tensors[name].end - 1] ^= 1
    shard.write_bytes(data)
    on_hub(server, made, out)
    done = hub_cli(*BOTH)
    assert done.returncode == 3
    rules = json.loads(done.stdout)["contract"]["rules"]
    assert [(o["name"], o["problem"][:2]) for o in rules[6]["offenders"]] == [(name, "1 ")]
