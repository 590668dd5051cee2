"""`--keep-experts` with the source on the Hub: the bytes of a run between folders, and scores of another model."""

from dataclasses import replace
from pathlib import Path

import pytest
from command import RunCli
from statistics_makers import layers_of, random_statistics, rewrite

from k2convert.records.ledger import read_ledger


@pytest.mark.usefixtures("tiny_on_hub")
def test_statistics_choose_the_experts_of_a_source_on_the_hub(hub_cli: RunCli, workplace: Path, tiny: Path) -> None:
    """Their norms are fetched and compared before the start."""
    scores = random_statistics(workplace / "stats", tiny)
    keep = ("--keep-experts", scores, "--set", "experts=6")
    for words in ((tiny, "local"), ("hf://moon/tiny", "fetched")):
        done = hub_cli("run", *words, *keep)
        assert done.returncode == 0, done.stderr
    ledgers = [read_ledger(workplace / folder).pruning for folder in ("local", "fetched")]
    assert ledgers[0] is not None
    assert ledgers[0].kept.num_experts == 6
    assert ledgers[0] == ledgers[1]
    for path in sorted((workplace / "local").glob("*.safetensors")):
        assert (workplace / "fetched" / path.name).read_bytes() == path.read_bytes(), path.name
    rewrite(scores, [replace(layer, norm_digest="0" * 64) for layer in layers_of(scores)], scores)
    refused = hub_cli("run", "hf://moon/tiny", "other", *keep, "--quiet")
    assert refused.returncode == 1
    assert "was made from a different source: model-00001-of-000005.safetensors: " in refused.stderr
    assert "post_attention_layernorm.weight differs" in refused.stderr
    assert not (workplace / "other").exists()
