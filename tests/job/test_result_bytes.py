"""The bytes of results do not change by accident: shards of the tiny checkpoint have the hashes of version 0.1.

A change on purpose raises records.fingerprint.ARITHMETIC_VERSION, so that no unfinished job mixes both, and then these.
"""

import json
from pathlib import Path

import pytest
from blake3 import blake3
from conversions import plan_job
from results import contents, digest_of_shards, read_json

from k2convert.job import shard
from k2convert.job.run import execute
from k2convert.job.shard import COPY_BYTES

DIGESTS = {
    ("mse", "modelopt", "w4a4"): ("785f2d342193277ee0a363ebcee82d4b", "2621bee4f36ab9e3d0be943fef51165e"),
    ("mse", "modelopt", "w4a16"): ("5a51e3fa7b1c5614e6ec538fe70e9405", "48c58db7867477860cfc057917488e99"),
    ("mse", "compressed-tensors", "w4a4"): ("f27122bb1475b872c7fd5f0105160f49", "08e504125d24d480dea87e09d0f60d36"),
    ("mse", "compressed-tensors", "w4a16"): ("3042d68ecb4eeb83cd1049ebeac55e8b", "81adb1fc76af5f288a04cb2e52405e9d"),
    ("max", "modelopt", "w4a4"): ("db9b6f12e04b5b8dd5b4ae6725fe3d50", "c019dfa318ddb61554eca67010a24a07"),
    ("max", "modelopt", "w4a16"): ("42b04905a3cb33ce0311ac70d119443a", "71bf28417f95357871cd0c0e013a235c"),
    ("max", "compressed-tensors", "w4a4"): ("6f1638f6a3f71a74e960d5a040622ff0", "e6ca13810f4bba51e709f4f8ee168867"),
    ("max", "compressed-tensors", "w4a16"): ("d1b767a9b136351183a676a23c5ee725", "019d0c98c1c2d365ab8cdb476e95f647"),
}
"""Of the shards, and of the ledgers, fingerprints included, without versions and the values of figures."""


def ledger_digest(folder: Path) -> str:
    ledger = read_json(folder, "k2convert.json")
    del ledger["versions"], ledger["k2convert"]
    ledger["totals"] = {role: sorted(figures) for role, figures in ledger["totals"].items()}
    return blake3(json.dumps(ledger).encode()).hexdigest()[:32]


@pytest.mark.parametrize(("rule", "layout", "activations"), DIGESTS)
def test_shards_have_known_bytes(rule: str, layout: str, activations: str, trained: Path, tmp_path: Path) -> None:
    keys = {"rule": rule, "layout": layout, "activations": activations}
    execute(plan_job(trained, tmp_path / "out", "kimi-k2-thinking-nvfp4-mlp", **keys))
    assert (digest_of_shards(tmp_path / "out"), ledger_digest(tmp_path / "out")) == DIGESTS[rule, layout, activations]


def test_shards_with_fp8_have_known_bytes(trained: Path, tmp_path: Path) -> None:
    execute(plan_job(trained, tmp_path / "out", "kimi-k2-thinking-nvfp4-fp8"))
    assert digest_of_shards(tmp_path / "out") == "9f045c05bc8e439e5b7a4e67100b67be"


@pytest.mark.parametrize("source", ["trained", "k3_tiny"])
def test_fp8_in_pieces_of_rows_has_the_bytes_of_whole_weights(
    source: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.getfixturevalue(source)
    recipe = {"trained": "kimi-k2-thinking-nvfp4-fp8", "k3_tiny": "kimi-k3-nvfp4-fp8"}[source]
    results = list[dict[str, bytes]]()
    for name, size in (("whole", COPY_BYTES), ("pieces", 4096)):  # the least piece is a row of blocks
        monkeypatch.setattr(shard, "COPY_BYTES", size)
        execute(plan_job(folder, tmp_path / name, recipe))
        results.append(contents(tmp_path / name))
    assert results[0] == results[1]


EDGES = {
    "minus8": "f99d891919ceb99e7a84034c4357d995",
    "zeros": "89c93fdc6c41a13c87d3ce7aa67b589e",
    "subnormal": "334dd8f233ab3a9717a3ebc9b8b89466",
    "wide": "e1fc8ec7480264cae028e7ea0bbcc139",
    "i64": "de7c5020ee6b01bc592151f5945ac0d8",
}
"""Shards by rule mse of checkpoints with codes and scales that a trained one does not have."""


@pytest.mark.parametrize("name", EDGES)
def test_shards_of_rare_weights_have_known_bytes(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    out = tmp_path / "out"
    execute(plan_job(request.getfixturevalue(name), out, "kimi-k2-thinking-nvfp4", rule="mse"))
    assert digest_of_shards(out) == EDGES[name]
