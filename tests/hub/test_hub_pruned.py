"""A pruned result on the Hub: read with its whole source there, and compared while it is made."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from command import RunCli
from damaged_files import flip
from loopback import LoopbackHub
from pruned_makers import KEPT, SCORES, convert_pruned, make_whole
from published import ALL_RULES
from statistics_makers import layers_of, random_statistics, rewrite

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.plan.pruning import KeptExperts, keep_experts
from k2convert.records.ledger import read_ledger
from k2convert.records.pruning import PruningRecord


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, whose gate and up lie in different shards, and its pruned result."""
    folder = tmp_path_factory.mktemp("pruned")
    convert_pruned(make_whole(folder / "source", is_split=True), folder / "out")
    shutil.rmtree(folder / "out" / ".k2convert")
    return folder


BOTH = ("validate", "hf://me/out", "--source", "hf://moon/whole", "--json")


@pytest.mark.quick(1)
@pytest.mark.parametrize("layers", [(), ("--layers", "1", "--tokens", "16")], ids=["all", "one layer"])
def test_validate_with_both_on_the_hub(server: LoopbackHub, cli: RunCli, made: Path, layers: tuple[str, ...]) -> None:
    server.store.add_folder("moon/whole", made / "source")
    server.store.add_folder("me/out", made / "out")
    done = cli(*BOTH, *layers, code=0)
    found = json.loads(done.stdout)
    assert found["weights"]["totals"]["experts"]["num_weights"] > 0
    assert "2 of 4 kept" in found["contract"]["rules"][8]["note"]
    if layers:
        assert found["layers"]["layers"][0]["num_experts"] == 2
    else:
        assert found["contract"]["summary"].startswith("19 of 19 rules")


def test_a_wrong_router_row_on_the_hub_fails(server: LoopbackHub, cli: RunCli, made: Path, tmp_path: Path) -> None:
    out = shutil.copytree(made / "out", tmp_path / "out")
    name = "model.layers.1.mlp.gate.weight"
    gate = open_checkpoint(out).tensors[name]
    flip(out / gate.shard, gate.end - 1)
    server.store.add_folder("moon/whole", made / "source")
    server.store.add_folder("me/out", out)
    done = cli(*BOTH, code=3)
    rules = json.loads(done.stdout)["contract"]["rules"]
    assert [(o["name"], o["problem"][:2]) for o in rules[6]["offenders"]] == [(name, "1 ")]


@pytest.fixture
def job(server: LoopbackHub, made: Path, tmp_path: Path) -> tuple[str | Path, ...]:
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"experts": {"1": KEPT[1]}, "chosen_by": SCORES}))
    server.store.add_folder("moon/whole", made / "source")
    return "run", "hf://moon/whole", "hf://me/job", "--yes", "--keep-experts", kept


@pytest.mark.slow
def test_a_job_compares_by_the_list(server: LoopbackHub, cli: RunCli, made: Path, job: tuple[str | Path, ...]) -> None:
    cli(*job, code=0)
    for path in (made / "out").glob("*.safetensors"):
        assert server.store.read("me/job", path.name) == path.read_bytes()
    card, report = (server.store.read("me/job", name).decode() for name in ("README.md", "report.md"))
    assert ALL_RULES in card
    assert "2 of 4 routed experts are kept in each of" in card
    assert "### Pruned experts" in report
    cli("validate", "hf://me/job", "--source", "hf://moon/whole", code=0)
    layers = ("--layers", "1", "--tokens", "8", "--json")
    found = json.loads(cli("validate", "hf://me/job", "--source", "hf://moon/whole", *layers).stdout)["layers"]
    assert found["layers"][0]["pruning"]["num_source_experts"] == 4, "the dropped experts are fetched too"
    assert "keeps 2 of 4 experts per layer" in " ".join(cli("inspect", "hf://me/job").stdout.split())


def wrong_rows(monkeypatch: pytest.MonkeyPatch) -> str:
    """The reader takes the first rows of a router."""

    read = ShardReader.read

    def first(self: ShardReader, tensor: TensorInfo, **span: int) -> Bytes:
        return read(self, tensor._replace(rows=None), **span)

    monkeypatch.setattr(ShardReader, "read", first)
    return r"model\.layers\.1\.mlp\.gate\.\w+: .* bytes are not the source's"


def wrong_view(monkeypatch: pytest.MonkeyPatch) -> str:
    """The view has other experts than the list."""
    monkeypatch.setattr(PruningRecord, "view", lambda _, source: keep_experts(source, KeptExperts({1: (1, 2)})))
    return r"model\.layers\.1\.mlp\.[\w.]+: "


@pytest.mark.parametrize("plant", [wrong_rows, wrong_view])
def test_wrong_bytes_stop_a_job_before_the_upload(
    server: LoopbackHub,
    cli: RunCli,
    job: tuple[str | Path, ...],
    plant: Callable[[pytest.MonkeyPatch], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = plant(monkeypatch)
    done = cli(*job, code=3)
    assert re.search(words, " ".join(done.stderr.split()))
    assert server.store.repos["me/job"].num_commits("main") == 1


@pytest.mark.usefixtures("tiny_hub")
def test_statistics_choose_the_experts_of_a_source_on_the_hub(cli: RunCli, cwd: Path, tiny: Path) -> None:
    """Their norms are fetched and compared before the start."""
    scores = random_statistics(cwd / "stats", tiny)
    keep = ("--keep-experts", scores, "--set", "experts=6")
    for words in ((tiny, "local"), ("hf://moon/tiny", "fetched")):
        cli("run", *words, *keep, code=0)
    ledgers = [read_ledger(cwd / folder).pruning for folder in ("local", "fetched")]
    assert ledgers[0] is not None
    assert ledgers[0].kept.num_experts == 6
    assert ledgers[0] == ledgers[1]
    for path in sorted((cwd / "local").glob("*.safetensors")):
        assert (cwd / "fetched" / path.name).read_bytes() == path.read_bytes(), path.name
    rewrite(scores, [replace(layer, norm_digest="0" * 64) for layer in layers_of(scores)], scores)
    refused = cli("run", "hf://moon/tiny", "other", *keep, "--quiet", code=1)
    assert "was made from a source with other norms: model-00001-of-000005.safetensors: " in refused.stderr
    assert "post_attention_layernorm.weight differs" in refused.stderr
    assert not (cwd / "other").exists()
